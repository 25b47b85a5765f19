"""From composed configurations to a registration."""

from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conftest import TESTS, Home, composed, grid
from d3.certificate import load
from d3.errors import D3Error, one_line
from d3.record import canonical_json
from d3.registration import Registration, differences
from d3.study import Pins, axes_of, register

PINS = Pins({"fake": "", "other": ""}, {"fake-model": "f" * 64})
FACTORS = ("apc", "invariant")


@pytest.fixture(autouse=True)
def at_home(home: Home) -> None:
    """Compositions name files of a home."""


def test_a_grid_becomes_one_cell_per_combination() -> None:
    study = register(grid(), FACTORS, PINS)
    assert study.axes == {"apc": ("on", "off"), "invariant": ("0", "1")}
    assert [c.cell for c in study.cells] == [f"apc={a} invariant={i}" for a in ("on", "off") for i in "01"]
    assert {c.stratum for c in study.cells} == {"base"}
    assert (study.boots, study.min_valid_boots, len(study.order)) == (6, 6, 24)
    assert [p.id for p in study.prompts] == ["short", "long"]
    assert [p.name for p in study.protocol.phases] == ["C1", "W1", "W2", "W3", "W4", "W5", "C2", "W6"]
    assert [r.name for r in study.readings][:2] == ["void", "boot_state"]


def test_any_other_swept_key_makes_strata() -> None:
    configs = [composed(f"apc={a}", f"dtype={d}") for a in ("on", "off") for d in ("bfloat16", "float32")]
    study = register(configs, ("apc", "dtype"), PINS)
    assert {(c.stratum, c.cell) for c in study.cells} == {
        (f"dtype={d}", f"apc={a} invariant=0") for a in ("on", "off") for d in ("bfloat16", "float32")
    }


def test_a_swept_group_is_named_by_its_own_name_and_a_swept_detail_by_its_value() -> None:
    config = composed("+engine.env.A=x")
    assert axes_of(config, ("engine", "engine.env.A")) == {
        "apc": "on",
        "engine": "fake",
        "engine.env.A": "x",
        "invariant": "0",
    }


WHOLE = ["boots=3", "seed=2", "tie_gap=0.5", "confidence=0.9", "min_valid_boots=5", "max_attempts=3"]
OWN = [
    "max_tokens=4", "dtype=float32", "at_once=1", "start=plain", "threads=1", "warmup=true", "temperature=0.5",
    "engine.env.A=x", "engine.version='2.0'", "engine.boot_timeout_s=9", "prompts.items.0.text=other",
    "protocol.salted=false",
    "protocol.phases.1.expect=cold", "readings.items.0.name=other", "study.question=Why?",
]  # fmt: skip
HERE = ["engine.python=/elsewhere/python", "model.path=/elsewhere", "allow_large=true", "boot=4", "plan_only=true",
        "engine.min_memory_gb=3"]  # fmt: skip


def registered(override: str = "") -> Registration:
    """The registration of one cell, with one value changed."""
    config = composed().copy()
    if override:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return register([config], (), PINS)


@pytest.mark.parametrize("override", WHOLE + OWN)
def test_whatever_can_move_a_result_changes_the_id(override: str) -> None:
    assert registered(override).id() != registered().id()


def test_the_committed_study_still_has_its_id() -> None:
    configs = [composed(f"apc={a}", f"invariant={i}", fake=False) for a in ("on", "off") for i in "01"]
    recorded = load(TESTS.parent / "results" / "d3_determinism_2x2.json").registration
    settings = recorded.cells[0].settings
    pins = Pins(
        {"vllm_cpu": settings["engine"]["lock_sha256"]}, {settings["model"]["name"]: settings["model"]["digest"]}
    )
    found = register(configs, FACTORS, pins)
    assert differences(recorded, found) == []
    assert found.id().startswith("a103b2198b69")


def test_digests_of_model_and_lock_are_part_of_the_id() -> None:
    base = register([composed()], (), PINS)
    assert register([composed()], (), Pins({"fake": ""}, {"fake-model": "e" * 64})).id() != base.id()
    assert register([composed()], (), Pins({"fake": "lock"}, {"fake-model": "f" * 64})).id() != base.id()


@pytest.mark.parametrize("override", HERE)
def test_this_machines_paths_and_room_do_not(override: str) -> None:
    assert registered(override) == registered()
    assert "/elsewhere" not in canonical_json(registered(override))


def test_a_level_named_twice_and_a_swept_whole_are_refused() -> None:
    with pytest.raises(D3Error, match="the sweep names a cell twice: base apc=on invariant=0; name every level once"):
        register([composed(), composed()], FACTORS, PINS)
    with pytest.raises(
        D3Error, match="boots holds for a whole study and cannot be swept in one; run one study per boots"
    ):
        axes_of(composed(), ("boots",))
    with pytest.raises(D3Error, match=r"prompts\.items holds for a whole study"):
        axes_of(composed(), ("prompts.items",))


def test_a_cell_that_cannot_be_run_refuses_the_whole_grid() -> None:
    configs: list[Any] = [*grid(), composed("invariant=7")]
    with pytest.raises(D3Error, match="invariant=7 is not a level"):
        register(configs, FACTORS, PINS)


def test_a_key_that_only_a_plus_sign_let_in_is_refused() -> None:
    with pytest.raises(OmegaConfBaseException) as error:
        register([composed("+engine.speed=3")], (), PINS)
    assert one_line(error.value).startswith("Key 'speed' not in 'EngineConfig'")


def test_the_demonstration_is_one_boot_of_six_identical_unsalted_requests() -> None:
    cfg = composed("study=s53", fake=False)  # its settings came second to the defaults once, and six boots ran
    assert (cfg.boots, cfg.study.name, cfg.protocol.name) == (1, "s53_demo", "seed")
    assert (len(cfg.protocol.phases), cfg.protocol.salted, len(cfg.prompts["items"])) == (6, False, 1)
