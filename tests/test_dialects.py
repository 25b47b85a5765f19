"""Engines other than vLLM: their YAMLs make the command line and the requests, and their dialects are understood."""

from pathlib import Path

import pytest

from conftest import TESTS, Home, composed
from d3 import boot as booting
from d3.errors import D3Error
from d3.plan import Locations, boot_plan, check_levels
from d3.record import Boot, BootPlan
from d3.registration import Registration, Slot
from d3.server import pick
from d3.study import Pins, register
from planned import speaker

pytestmark = pytest.mark.usefixtures("nothing_left")


def study(engine: str, *overrides: str) -> Registration:
    """The registration of {apc} x {invariant} on an engine of conf/engine, with the tests' prompts."""
    words = (f"hydra.searchpath=[file://{TESTS}/conf]", "prompts=fake", f"engine={engine}", *overrides)
    configs = [composed(*words, f"apc={a}", f"invariant={i}", fake=False) for a in ("on", "off") for i in "01"]
    models = {c.model.name: "f" * 64 for c in configs}
    return register(configs, ("apc", "invariant"), Pins({engine: ""}, models))


def plan(registration: Registration, apc: str, invariant: str, python: str = "/env/program") -> BootPlan:
    slot = Slot(boot=0, stratum="base", cell=f"apc={apc} invariant={invariant}")
    return boot_plan(registration, slot, 1, Locations(python=python, model="/models/m"))


@pytest.fixture
def run(home: Home, tmp_path: Path):
    """Boot the pretend engine in the dialect of an engine of conf/engine, from that engine's own plan."""

    def one(engine: str, apc: str, invariant: str = "0", do: str = "", *overrides: str) -> Boot:
        program = speaker(tmp_path, engine.removesuffix("_serve"), do)
        asked = plan(study(engine, "engine.version='1.0'", *overrides), apc, invariant, program)
        return booting.run(asked, tmp_path / "boot")

    return one


def hits(boot: Boot) -> list[tuple[str, int | None]]:
    return [(r.phase, r.cached_tokens) for r in boot.record.requests if r.prompt == "long"]


def test_llama_cpp_takes_the_cache_as_a_field_of_the_request_and_has_no_mode_to_ask_for(home: Home) -> None:
    found = study("llama_cpp")
    on, off, flagged = plan(found, "on", "0"), plan(found, "off", "0"), plan(found, "on", "1")
    assert on.launch.server == ("--host", "{host}", "--port", "{port}")
    assert on.launch.args == off.launch.args
    words = " ".join(on.launch.args)
    assert words.startswith("--model /models/m --threads 2 --parallel 1 --ctx-size 2048 --cache-ram 0 ")
    assert on.launch.body == {"model": "model", "logprobs": True, "top_logprobs": 2, "cache_prompt": True}
    assert off.launch.body == {**on.launch.body, "cache_prompt": False}
    assert (on.unavailable, flagged.unavailable) == (None, "llama.cpp has no batch-invariant mode")
    assert {c.settings["engine"]["reset_path"] for c in found.cells} == {"/slots/0?action=erase"}


def test_sglang_gets_its_flags(home: Home) -> None:
    found = study("sglang", "attention=triton")
    words = plan(found, "off", "1").launch.args
    assert {"--disable-radix-cache", "--enable-deterministic-inference", "--enable-cache-report"} <= set(words)
    assert "--attention-backend=triton" in words
    assert not {"--disable-radix-cache", "--enable-deterministic-inference"} & set(plan(found, "on", "0").launch.args)


def test_a_switch_that_an_engine_has_not_is_refused_before_the_first_boot(home: Home) -> None:
    with pytest.raises(D3Error, match="engine transformers_serve has no apc=off: transformers serve has no switch"):
        check_levels(study("transformers_serve"))


def test_an_engine_without_a_salt_is_emptied_before_each_cold_request(run) -> None:
    boot = run("llama_cpp", "on")
    record = boot.record
    n = next(r.prompt_tokens for r in record.requests if r.prompt == "long")
    assert (record.status, record.reason) == ("valid", "")
    assert hits(boot) == [("C1", 0), *[(f"W{i}", n - 1) for i in range(1, 6)], ("C2", 0), ("W6", n - 1)]
    assert {r.n_tokens for r in record.requests} == {4}
    assert record.engine.command[:2] == ("fake-llama_cpp", "--host")
    assert record.engine.body["cache_prompt"] is True
    assert hits(run("llama_cpp", "off")) == [(phase, 0) for phase, _ in hits(boot)]


def test_a_reset_that_empties_nothing_voids_the_boot(run) -> None:
    record = run("llama_cpp", "on", "0", "ignore_reset").record
    assert record.status == "void"
    assert "C2" in record.reason


def test_a_mode_that_an_engine_has_not_is_never_booted(run, tmp_path: Path) -> None:
    record = run("llama_cpp", "on", "1").record
    assert (record.status, record.requests, record.engine.facts.version) == ("skipped", (), None)
    assert record.reason == "launch: the flag is unavailable: llama.cpp has no batch-invariant mode"
    assert not (tmp_path / "boot").exists()


def test_sglang_answers_are_read_and_a_cache_that_its_flag_drops_voids_the_boot(run) -> None:
    boot = run("sglang", "on", "1")
    assert (boot.record.status, boot.record.engine.facts.block_size) == ("valid", 16)
    assert {r.n_tokens for r in boot.record.requests} == {4}
    assert len({r.prompt_sha256 for r in boot.record.requests}) == 2
    record = run("sglang", "on", "1", "flag_drops_cache").record
    assert record.status == "void"
    assert "W1 0/" in record.reason


def test_transformers_serve_says_too_little_to_be_counted(run) -> None:
    record = run("transformers_serve", "on", "0", "", "apc=on").record
    assert record.status == "void"
    assert [c.name for c in record.checks if not c.held] == ["pin", "cache", "cache"]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a.0.b", 1),
        ("a.*.b", [1, 2]),
        ("a.*.c", None),
        ("a.2.b", None),
        ("a.b", None),
        ("x.y", None),
        ("a.*", [{"b": 1}, {"b": 2}]),
        (None, None),
    ],
)
def test_a_path_leads_to_a_value_or_to_none(path: str | None, found: object) -> None:
    assert pick({"a": [{"b": 1}, {"b": 2}]}, path) == found
