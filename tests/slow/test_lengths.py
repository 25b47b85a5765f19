"""study=lengths on the real engine, four of its prompts in one boot: exact lengths, and thresholds out of the boot."""

from pathlib import Path

import pytest

from conftest import composed
from d3.boot import run
from d3.callbacks import pins
from d3.install import engine_python, model_dir
from d3.length_table import series, threshold
from d3.plan import Locations, boot_plan
from d3.record import Boot
from d3.study import register

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = ("a-31", "b-66", "a-129", "b-257")


def test_prompts_have_their_lengths_and_cold_and_warm_part_where_the_boot_says(tmp_path: Path) -> None:
    """Where they part depends on the processor: what the table says is held against the boot's own hashes."""
    cfg = composed("study=lengths", "boots=1", fake=False)
    cfg.prompts["items"] = [p for p in cfg.prompts["items"] if p.id in PROMPTS]
    study = register([cfg], (), pins([cfg]))
    where = Locations(
        python=engine_python(cfg.engine.name, cfg.engine.lock, cfg.engine.python),
        model=model_dir(cfg.model.name, cfg.model.package, cfg.model.path),
    )
    boot = run(boot_plan(study, study.order[0], 1, where), tmp_path)
    assert boot.record.status == "valid"
    assert {(r.prompt.partition("-")[2], r.prompt_tokens) for r in boot.record.requests} == {
        (p.partition("-")[2], int(p.partition("-")[2])) for p in PROMPTS
    }
    parted = {n: parts(boot, n) for n in (66, 129, 257)}
    (fine,) = [s for s in series(study, [boot]) if "logprobs" in s.endpoints]
    assert [(p.tokens, p.answered, p.parted) for p in fine.points] == [
        (31, 0, 0), *((n, 1, int(parted[n])) for n in parted),  # 31 is under a block of 32, so it can never be warm
    ]  # fmt: skip
    assert any(parted.values())
    assert threshold(fine.points).first == min(n for n in parted if parted[n])


def parts(boot: Boot, tokens: int) -> bool:
    """Whether the cold and the warm answers to the prompt of this length have other log-probabilities."""
    asked = [r for r in boot.record.requests if r.prompt_tokens == tokens]
    cold, warm = ({r.logprobs_sha256 for r in asked if r.expect == e} for e in ("cold", "warm"))
    assert len(cold) == len(warm) == 1
    return cold != warm
