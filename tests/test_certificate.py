import json
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from build import AGREE, CACHE, CONTEXT, FOUR, SEED_FIRST, boot, boots, failed, registration, response, seed_study
from d3 import schema
from d3.certificate import artifacts, build, load, render, write
from d3.errors import D3Error
from d3.record import plain
from d3.report.markdown import markdown
from d3.report.terminal import terminal
from d3.schema import digest

SHORT = {"short": CACHE}
SCHEMA = Path(schema.__file__).with_name("certificate.schema.json")


def certificate(cells=None, study=None, **more):
    study = study or registration()
    return build(study, boots(study, cells, **more), CONTEXT)


def test_the_schema_file_is_in_step_and_a_certificate_fits_it():
    assert SCHEMA.read_text() == schema.json_schema(), "run: python -m d3.schema > d3/certificate.schema.json"
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))
    jsonschema.validate(plain(certificate({"on/0": SHORT})), json.loads(SCHEMA.read_text()))


def test_build_is_pure_and_order_does_not_matter():
    study, found = seed_study()
    assert render(build(study, found, CONTEXT)) == render(build(study, found[::-1], CONTEXT))


def test_write_and_load_give_the_same_certificate(tmp_path):
    study, found = seed_study()
    made = build(study, found, CONTEXT)
    out = write(made, found, tmp_path / "seed.json")
    assert load(out) == made
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed", "seed.json"]
    files = {p.relative_to(tmp_path / "seed").as_posix() for p in (tmp_path / "seed").rglob("*") if p.is_file()}
    assert files == {"registration.json", *(path for b in found for path in artifacts(b))}
    assert write(made, found, out).read_text() == render(made)


def test_writing_again_leaves_no_boot_of_the_older_certificate(tmp_path):
    study = registration(boots=1)
    found = boots(study)
    out = write(build(study, found, CONTEXT), found, tmp_path / "c.json")
    write(build(study, found[1:], CONTEXT), found[1:], out)
    assert len(list((tmp_path / "c" / "boots").iterdir())) == 3


def test_nan_and_surrogates_survive_the_file(tmp_path):
    study = registration(boots=1, prompts=("short",))
    odd = {"a": response("a", text="half \ud83d\u2028 \x85", logprobs=(-0.1, float("nan"), None, float("-inf")))}
    found = boots(study, letters=odd)
    out = write(build(study, found, CONTEXT), found, tmp_path / "c.json")
    assert load(out).digest == build(study, found, CONTEXT).digest


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({"registered_at": "2026-01-31T13:00:01+00:00"}, "after the first boot"),
        ({"registered_at": "yesterday"}, "not an ISO 8601 time"),
        ({"registered_at": "2026-01-31T12:00:00"}, "with an offset"),
        ({"runs": {"nobody": "run"}}, "nobody, which is not among the boots"),
    ],
)
def test_a_context_that_cannot_be_is_refused(context, words):
    study, found = seed_study()
    with pytest.raises(D3Error, match=words):
        build(study, found, CONTEXT.model_copy(update=context))


def test_time_zones_are_compared_as_times():
    study, found = seed_study()
    made = build(study, found, CONTEXT.model_copy(update={"registered_at": "2026-01-31T14:00:00+02:00"}))
    assert made.first_boot_at == "2026-01-31T13:00:00+00:00"


def test_no_boot_at_all_is_a_certificate_of_nothing():
    made = build(registration(), [], CONTEXT)
    assert made.strata[0].verdict("text").reading == "void"
    assert made.limits == ("No boot counts, so nothing is shown.",)
    assert made.first_boot_at is None


@pytest.mark.parametrize("path", [["answer"], ["totals", "counted"], ["strata", 0, "cells", 0, "boots"]])
def test_digest_covers_everything(path):
    made = certificate()
    value = plain(made)
    *above, last = path
    where = value
    for step in above:
        where = where[step]
    where[last] = "other" if isinstance(where[last], str) else where[last] + 1
    assert digest(type(made).model_validate(value)) != made.digest


def test_contrasts_say_what_they_speak_for():
    made = certificate({"on/0": SHORT})
    found = {(c.prompt, c.a, c.b): c for c in made.strata[0].contrasts if c.endpoint == "text"}
    cache = found["short", "on/0", "off/0"]
    assert (cache.k_a, cache.n_a, cache.k_b, cache.n_b) == (6, 6, 0, 6)
    assert cache.p == pytest.approx(0.00216, abs=1e-5)
    assert cache.supports == ("closed_by_flag", "open_gap")
    assert found["short", "on/0", "on/1"].words == "the batch-invariant mode closes it"
    assert found[None, "on/0", "on/1"].supports == ("closed_by_flag",)
    assert found["long", "on/0", "off/0"].words == "the first request differs on neither side"
    gap = certificate({"on/0": SHORT, "on/1": SHORT}).strata[0].contrasts
    assert {c.supports for c in gap if (c.endpoint, c.prompt, c.a, c.b) == ("text", None, "on/0", "on/1")} == {
        ("open_gap",)
    }


def test_d3s_own_mode_says_nothing_about_the_engines_flag():
    study = registration(boots=1)
    found = boots(study, {"on/0": SHORT})
    for i, one in enumerate(found):
        if one.record.factors["invariant"] == "1":
            engine = one.record.engine
            facts = engine.facts.model_copy(update={"invariant_mode": "D3's CPU mode"})
            record = one.record.model_copy(update={"engine": engine.model_copy(update={"facts": facts})})
            found[i] = one.model_copy(update={"record": record})
    made = build(study, found, CONTEXT)
    assert made.strata[0].implementations == ("D3's CPU mode",)
    assert "the mode measured is D3's CPU mode, which says nothing about vLLM's own flag" in made.answer
    assert "The batch-invariant mode was D3's CPU mode: nothing here is about vLLM's own flag." in made.limits


def test_limits_come_from_what_ran():
    one = certificate(study=registration(boots=2))
    text = " ".join(one.limits)
    assert "One model: tiny-model." in text
    assert (
        "2 boots bound a frequent effect in a cell, not a rare one: 0 of 2 leaves room for a true rate of up to 77.6%"
        in text
    )
    assert "2 prompts of 24 to 240 tokens, answers of at most 48 tokens" in text
    assert "Serialised requests only" in text
    assert "One cold request" not in text
    two = certificate(study=registration(("on/0",), boots=1, prompts=("short",), protocol_name="seed", concurrency=3))
    text = " ".join(two.limits)
    assert "Concurrency only as varied here: 3 neighbours" in text
    assert "1 prompt of 24 tokens" in text
    assert "in force in no counted boot" in text
    assert "One cold request per boot" in text


def test_environment_is_stated_once_and_what_moved_is_named():
    study = registration(boots=1)
    found = boots(study)
    found[0] = boot(study, "on/0", 0, {"short": AGREE, "long": AGREE}, environment={"cpu": "another", "cores": "2"})
    made = build(study, found, CONTEXT)
    assert made.environment.common["machine.cores"] == "2"
    moved = {d.name: d.values for d in made.environment.differing}
    assert moved["machine.cpu"] == {"a processor": 3, "another": 1}
    assert made.neither[0] == "machine.cpu: a processor, another"
    assert made.varied == ("apc: on, off", "invariant: 0, 1")
    assert "dtype=bfloat16" in made.held
    assert made.coldness == {"L1": 4}


def test_checks_are_summed_with_the_evidence_of_failures():
    study = registration(boots=1)
    found = boots(study)
    found[0] = boot(study, "on/0", 0, {"short": AGREE, "long": AGREE}, void={"long": "C1 16/0"})
    made = build(study, found, CONTEXT)
    cache = next(c for c in made.checks if c.name == "cache")
    assert (cache.held, cache.total) == (7, 8)
    assert cache.failures == ("base apc=on invariant=0 boot 0 attempt 1, prompt long: C1 16/0",)


def test_instrument_control_must_differ():
    study = registration(("on/0",), boots=1, strata=({"temperature": "0.0"}, {"temperature": "0.7"}))
    cold, hot = "temperature=0.0", "temperature=0.7"
    calm = boots(study, stratum=cold)
    sampled = boots(study, {"on/0": {"short": "abcdefgh"}}, stratum=hot)
    good = build(study, calm + sampled, CONTEXT)
    assert [(c.kind, c.stratum, c.held) for c in good.controls] == [("instrument", hot, True)]
    assert [s.role for s in good.strata] == ["study", "instrument"]
    assert good.answer == good.strata[0].verdict("text").answer
    blind = build(study, calm + boots(study, stratum=hot), CONTEXT)
    assert blind.controls[0].held is False
    assert blind.answer.endswith(f"The instrument control ({hot}) failed: {blind.controls[0].words}.")
    assert "they did in 0 of 1 boots" in blind.controls[0].words
    assert build(study, calm, CONTEXT).controls[0].held is None


def test_negative_control_must_change_nothing():
    study = registration(boots=1, strata=({"prefix_hash": "sha256"}, {"prefix_hash": "xxhash"}))
    base, other = "prefix_hash=sha256", "prefix_hash=xxhash"
    first = boots(study, {"on/0": SHORT}, stratum=base)
    good = build(study, first + boots(study, {"on/0": SHORT}, stratum=other), CONTEXT)
    assert [(c.kind, c.stratum, c.against, c.held) for c in good.controls] == [("negative", other, base, True)]
    bad = build(study, first + boots(study, stratum=other), CONTEXT).controls[0]
    assert bad.held is False
    assert "the first that changed: apc=on invariant=0 short logprobs warm" in bad.words


def test_a_failed_boot_keeps_its_place_and_reason():
    study = registration(boots=1)
    found = boots(study)
    found[0] = failed(study, "on/0", 0, line="CUDA out of memory")
    entry = next(b for b in build(study, found, CONTEXT).boots if not b.counted)
    assert (entry.status, entry.why_not) == ("failed", "failed: boot: CUDA out of memory")
    assert entry.failure.line == "CUDA out of memory"


@pytest.mark.parametrize("name", ["", "x.txt", "x"])
def test_a_certificate_is_a_json_file(tmp_path, name):
    study = registration(boots=1)
    with pytest.raises(D3Error, match=r"does not end in \.json"):
        write(build(study, [], CONTEXT), [], tmp_path / name)


def test_a_file_that_does_not_fit_names_the_field(tmp_path):
    study = registration(boots=1)
    found = boots(study)
    out = write(build(study, found, CONTEXT), found, tmp_path / "c.json")
    value = json.loads(out.read_text())
    value["totals"]["counted"] = "four"
    out.write_text(json.dumps(value))
    with pytest.raises(D3Error, match=r"c\.json: totals\.counted: "):
        load(out)


# --- the report -------------------------------------------------------------------------------------------------------


def test_markdown_has_the_seeds_own_table():
    study, found = seed_study()
    text = markdown(build(study, found, CONTEXT), "results/seed.json")
    for line in (
        "# Does the first request differ?",
        "| cell | short (24 tokens) | long (240 tokens) |",
        "| APC on, invariant 0 | 6 / 6 [54%, 100%] | 0 / 6 [0%, 46%] |",
        "| APC off, invariant 1 | 0 / 6 [0%, 46%] | 0 / 6 [0%, 46%] |",
        "- on/0 short: 1 distinct cold and 1 distinct warm over 6 boots; the cold response is the one without a cache",
        "- **closed_by_flag**: on/0 is diverges, off/0 is agrees, on/1 is agrees",
        "- vLLM issue 40896: the symptom",
    ):
        assert line in text.splitlines()
    assert "python -m d3.verify results/seed.json" in text


def test_markdown_names_what_was_lost_and_stays_markdown():
    study = registration(boots=1)
    found = boots(study)
    found[0] = failed(study, "on/0", 0, line="a | b\n<script>")
    text = markdown(build(study, found, CONTEXT))
    assert "- base apc=on invariant=0 boot 0 attempt 1: failed: boot: a \\| b &lt;script>" in text.splitlines()


def test_terminal_reads_without_colour():
    console = Console(width=100, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    study, found = seed_study()
    console.print(terminal(build(study, found, CONTEXT)))
    text = console.export_text()
    assert "bytes, base: KNOWN" in text
    assert "6 / 6 [54%, 100%]" in text


def test_every_situation_can_be_told():
    study = registration(boots=1)
    for cells in ({}, dict.fromkeys(FOUR, SHORT), {"on/0": {"short": "abbbbbbb", "long": "abcabcab"}}):
        made = build(study, boots(study, cells), CONTEXT)
        assert made.strata[0].verdict("text").answer in markdown(made) or made.answer in markdown(made)
    one = registration(("on/0",), boots=1, prompts=("short",), protocol_name="seed")
    assert "UNEXPLAINED" in markdown(build(one, boots(one, {"on/0": {"short": SEED_FIRST}}), CONTEXT))
