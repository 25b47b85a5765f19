"""Studies recorded on the real engine (vLLM 0.32.0 on the CPU), analysed again: the readings stay those of the day."""

from pathlib import Path

import pytest

from build import CONTEXT
from d3.certificate import build
from d3.registration import Registration
from d3.schema import Certificate
from d3.store import load, load_boot

RECORDED = Path(__file__).parent / "data" / "recorded"


def certified(name: str) -> Certificate:
    folder = RECORDED / name
    found = [load_boot(path) for path in sorted((folder / "boots").iterdir())]
    context = CONTEXT.model_copy(update={"registered_at": "2026-11-29T18:00:00+00:00", "runs": {}})
    return build(load(Registration, folder / "registration.json"), found, context)


@pytest.mark.parametrize(
    ("name", "text", "logprobs"),
    [
        ("flag_unavailable", "flag_unavailable", "flag_unavailable"),
        ("demonstration", "unexplained", "unexplained"),  # nothing was varied, so nothing is explained
        ("negative", "none", "unexplained"),  # no cell had the flag on
    ],
)
def test_readings_of_recorded_studies(name: str, text: str, logprobs: str) -> None:
    for stratum in certified(name).strata:
        assert (stratum.verdict("text").reading, stratum.verdict("logprobs").reading) == (text, logprobs)


def test_vllms_own_flag_on_the_cpu_is_unavailable_in_the_engines_words() -> None:
    certificate = certified("flag_unavailable")
    (stratum,) = certificate.strata
    assert stratum.flag.state == "unavailable"
    assert "TypeError: 'function' object is not subscriptable" in stratum.flag.why
    tried = [b for b in certificate.boots if "invariant=1" in b.cell]
    assert sorted(b.status for b in tried) == ["failed", "failed", "skipped", "skipped"]
    assert stratum.cells[0].state("text").state == "diverges"


def test_the_demonstration_shows_the_first_request_alone_differing_in_every_boot() -> None:
    (stratum,) = certified("demonstration").strata
    (prompt,) = stratum.cells[0].prompts
    counts = {c.endpoint: (c.k, c.n, c.unknown, c.distinct_cold, c.distinct_warm) for c in prompt.counts}
    assert counts == dict.fromkeys(("text", "tokens", "logprobs"), (6, 6, 6, 1, 1))
    assert [(p.boots, p.divergence.position, p.divergence.flip) for p in prompt.divergences] == [(6, 37, "tie")]


def test_the_instrument_control_diverges_and_the_negative_one_changes_nothing() -> None:
    (instrument,) = certified("instrument").controls
    (negative,) = certified("negative").controls
    assert (instrument.kind, instrument.held) == ("instrument", True)
    assert (negative.kind, negative.held) == ("negative", True)
