"""The real engine once through each transport: vLLM on the CPU with the default model, one prompt, eight tokens."""

from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conftest import left_in_shared_memory, logging_to
from d3.boot import run
from d3.callbacks import pins
from d3.config import register_schema
from d3.family import segments
from d3.install import engine_python, model_dir
from d3.plan import Locations, boot_plan
from d3.record import Boot, BootPlan
from d3.store import root
from d3.study import register

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "What is the capital of France, and which river runs through it? Answer in one sentence, and add its length."


def plan(transport: str) -> BootPlan:
    register_schema()
    GlobalHydra.instance().clear()
    words = [
        f"prompts.items=[{{id: short, text: '{PROMPT}'}}]",
        "max_tokens=8",
        "boots=1",
        f"engine.transport={transport}",
    ]
    with initialize_config_dir(str(root() / "conf"), version_base="1.3"):
        cfg = compose("config", words)
    study = register([cfg], (), pins([cfg]))
    where = Locations(
        python=engine_python(cfg.engine.name, cfg.engine.lock, cfg.engine.python),
        model=model_dir(cfg.model.name, cfg.model.package, cfg.model.path),
    )
    return boot_plan(study, study.order[0], 1, where)


@pytest.fixture(scope="module")
def boots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Boot]:
    return {transport: booted(transport, tmp_path_factory.mktemp(transport)) for transport in ("worker", "server")}


def booted(transport: str, folder: Path) -> Boot:
    """One boot, which leaves no process and no shared memory."""
    before, seen = segments(), list[psutil.Process]()
    boot = run(plan(transport), folder, progress=lambda _: seen.extend(logging_to(folder)))
    assert seen
    assert not logging_to(folder)
    assert not left_in_shared_memory(before)
    return boot


@pytest.mark.parametrize("transport", ["worker", "server"])
def test_a_boot_is_valid_and_its_cache_did_as_expected(boots: dict[str, Boot], transport: str) -> None:
    record = boots[transport].record
    assert (record.status, record.reason) == ("valid", "")
    assert all(check.held for check in record.checks)
    assert record.engine.facts.version == record.engine.version_asked
    assert record.engine.facts.block_size == 32
    assert [r.phase for r in record.requests] == ["C1", "W1", "W2", "W3", "W4", "W5", "C2", "W6"]
    hit = (record.requests[0].prompt_tokens - 1) // 32 * 32
    assert hit > 0
    assert [r.cached_tokens for r in record.requests] == [0, *[hit] * 5, 0, hit]
    assert {r.n_tokens for r in record.requests} == {8}
    assert all(len(r.logprobs) == len(r.gaps) == 8 for r in boots[transport].responses.values())


def test_both_transports_give_the_same_bytes(boots: dict[str, Boot]) -> None:
    kept = {
        "phase",
        "prompt_sha256",
        "text_sha256",
        "tokens_sha256",
        "logprobs_sha256",
        "cached_tokens",
        "finish_reason",
    }
    worker, server = ([r.model_dump(include=kept) for r in boots[t].record.requests] for t in ("worker", "server"))
    assert worker == server
