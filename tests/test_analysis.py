"""Every situation of the protocol as constructed boots: the right table, state, reading and words."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build import (
    AGREE,
    BOOT,
    CACHE,
    CONTEXT,
    FOUR,
    SCATTERED,
    SEED_AGREE,
    SEED_FIRST,
    boot,
    boots,
    failed,
    registration,
    response,
    seed_study,
)  # fmt: skip
from d3.analysis import analyse, frame
from d3.certificate import build
from d3.classify import pattern
from d3.errors import D3Error
from d3.limits import environment, neither

SHORT = {"short": CACHE}


def states(table, endpoint="text"):
    return {c.key: c.state(endpoint).state for c in table.cells}


def why(table, key, endpoint="text"):
    return next(c for c in table.cells if c.key == key).state(endpoint).why


def counts(table, key, prompt, endpoint="text"):
    cell = next(c for c in table.cells if c.key == key)
    found = next(p for p in cell.prompts if p.prompt == prompt)
    return next(c for c in found.counts if c.endpoint == endpoint)


def reading(study, found, endpoint="text"):
    return build(study, found, CONTEXT).strata[0].verdict(endpoint)


def one_table(study, found):
    return analyse(study, found).strata[0]


# --- the seed ---------------------------------------------------------------------------------------------------------


def test_seed_table_cell_by_cell():
    study, found = seed_study()
    table = one_table(study, found)
    k_n = {(c.key, p.prompt): (p.counts[0].k, p.counts[0].n) for c in table.cells for p in c.prompts}
    assert k_n == {(key, p): (6 if (key, p) == ("on/0", "short") else 0, 6) for key in FOUR for p in ("short", "long")}
    moved = counts(table, "on/0", "short")
    assert (moved.distinct_cold, moved.distinct_warm, moved.cold_equals_off, moved.unknown) == (1, 1, True, 6)
    assert moved.null_bound is None
    assert counts(table, "on/1", "short").null_bound == pytest.approx(0.393, abs=1e-3)
    verdict = reading(study, found)
    assert (verdict.reading, verdict.disposition) == ("closed_by_flag", "KNOWN")
    assert "6 of 6 in on/0, 0 of 6 in off/0, 0 of 6 in on/1, 0 of 6 in off/1" in verdict.answer
    assert "39.3%" in " ".join(verdict.notes)
    certificate = build(study, found, CONTEXT)
    assert certificate.totals.counted == 24
    assert certificate.totals.requests == 288


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "script", "kind"),
    [
        ("controlled", AGREE, "agree"),
        ("controlled", CACHE, "cache"),
        ("controlled", BOOT, "boot"),
        ("controlled", SCATTERED, "scattered"),
        ("controlled", "abbbbbcb", "scattered"),  # the second cold request equals neither: both causes at work
        ("controlled", "abbbbbac", "scattered"),
        ("controlled", "aaaaaaba", "scattered"),
        ("controlled", "abbcbbab", "scattered"),
        ("controlled", "aabbbbab", "scattered"),
        ("seed", SEED_AGREE, "agree"),
        ("seed", SEED_FIRST, "unknown"),
        ("seed", "aaaaab", "scattered"),
        ("seed", "abcbbb", "scattered"),
    ],
)
def test_pattern(protocol, script, kind):
    study = registration(boots=1, protocol_name=protocol, prompts=("short",))
    assert pattern(boot(study, "on/0", 0, {"short": script}).record.requests, "text") == kind


# --- situations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "expected", "name"),
    [
        ({}, {}, "none"),
        ({"on/0": SHORT}, {"on/0": "diverges"}, "closed_by_flag"),
        ({"on/0": SHORT, "on/1": SHORT}, {"on/0": "diverges", "on/1": "diverges"}, "open_gap"),
        ({"on/0": {"short": BOOT}}, {"on/0": "boot_state"}, "boot_state"),
        (
            {"on/0": {"short": BOOT}, "off/0": {"short": BOOT}},
            {"on/0": "boot_state", "off/0": "boot_state"},
            "boot_state",
        ),
        ({"on/0": SHORT, "off/0": SHORT}, {"on/0": "diverges", "off/0": "diverges"}, "boot_state"),
        ({"on/0": {"short": SCATTERED}}, {"on/0": "scattered"}, "unexplained"),
        ({"on/0": SHORT, "on/1": {"long": SCATTERED}}, {"on/0": "diverges", "on/1": "scattered"}, "unexplained"),
        # Two causes side by side are not rounded to either.
        ({"on/0": {"short": CACHE, "long": BOOT}}, {"on/0": "scattered"}, "unexplained"),
        ({"on/1": SHORT}, {"on/1": "diverges"}, "unexplained"),
    ],
)
def test_situation(cells, expected, name):
    study = registration()
    found = boots(study, cells)
    assert states(one_table(study, found)) == {**dict.fromkeys(FOUR, "agrees"), **expected}
    assert reading(study, found).reading == name


def test_nothing_is_worded_with_its_bound():
    study = registration()
    verdict = reading(study, boots(study))
    assert verdict.disposition == "NO DIVERGENCE"
    assert verdict.notes == ("0 of 6 boots leaves room for a true rate of up to 39.3% (one-sided 95%).",)


def test_flag_inert():
    study = registration()
    same = {"a": response("a"), "b": response("b")}
    found = boots(study, {"on/0": SHORT, "on/1": SHORT}, letters=same)
    assert one_table(study, found).flag.state == "inert"
    verdict = reading(study, found)
    assert verdict.reading == "flag_inert"
    assert "The flag is inert: the flag changed no log-probability in any of 8 comparisons." in verdict.notes


def test_flag_unavailable_quotes_the_engine():
    study = registration()
    ran = [b for b in boots(study, {"on/0": SHORT}) if b.record.factors["invariant"] == "0"]
    line = "TypeError: 'function' object is not subscriptable"
    refused = [failed(study, key, 0, line=line) for key in ("on/1", "off/1")]
    refused += [failed(study, key, i, kind="skipped") for key in ("on/1", "off/1") for i in range(1, 6)]
    table = one_table(study, [*ran, *refused])
    assert states(table) == {"on/0": "diverges", "off/0": "agrees", "on/1": "unavailable", "off/1": "unavailable"}
    verdict = reading(study, [*ran, *refused])
    assert verdict.reading == "flag_unavailable"
    assert line in " ".join(verdict.notes)


@pytest.mark.parametrize("kind", ["timeout", "environment", "bad_answer"])
def test_a_cell_that_failed_otherwise_is_void_not_unavailable(kind):
    study = registration(boots=2)
    ran = [b for b in boots(study) if b.record.cell != "apc=on invariant=1"]
    table = one_table(study, [*ran, failed(study, "on/1", 0), failed(study, "on/1", 1, kind=kind)])
    assert states(table)["on/1"] == "void"
    assert why(table, "on/1") == "0 valid boots, 2 registered"


def test_a_boot_stopped_by_the_user_does_not_hide_that_the_flag_is_unavailable():
    study = registration(boots=1)
    ran = [b for b in boots(study) if b.record.factors["invariant"] == "0"]
    refused = [
        failed(study, "on/1", 0, kind="interrupted"),
        failed(study, "on/1", 0, attempt=2),
        failed(study, "off/1", 0),
    ]
    assert states(one_table(study, [*ran, *refused]))["on/1"] == "unavailable"


def test_unavailable_needs_a_twin_that_ran():
    study = registration(boots=1)
    assert set(states(one_table(study, [failed(study, key, 0) for key in FOUR])).values()) == {"void"}


def test_cache_silently_off_voids_the_cell():
    study = registration(boots=1)
    evidence = "240 prompt tokens; cached/expected: C1 0/0, W1 0/224"
    silent = boot(study, "on/1", 0, {"short": AGREE, "long": AGREE}, void={"short": evidence, "long": evidence})
    found = [b for b in boots(study, {"on/0": SHORT}) if b.record.boot_id != silent.record.boot_id]
    result = analyse(study, [*found, silent])
    assert states(result.strata[0])["on/1"] == "void"
    assert next(s.why for s in result.selected if s.boot == silent) == "every prompt of the boot is void"
    assert reading(study, [*found, silent]).disposition == "INCONCLUSIVE"


def test_cold_request_that_hit_a_shared_template_is_left_out_by_name():
    study = registration(boots=1)
    evidence = "cached/expected: C1 16/0"
    found = [
        boot(study, key, 0, {"short": CACHE if key == "on/0" else AGREE, "long": AGREE}, void=void)
        for key in FOUR
        for void in [{"long": evidence} if key.startswith("on") else {}]
    ]
    table = one_table(study, found)
    assert {(e.prompt, e.why) for e in table.excluded} == {("long", f"check cache failed: {evidence}")}
    assert states(table) == {"on/0": "diverges", "off/0": "agrees", "on/1": "agrees", "off/1": "agrees"}
    assert counts(table, "on/0", "long").void == 1
    assert f"Prompt long is left out: check cache failed: {evidence}." in reading(study, found).notes


def test_prompt_under_one_block_is_void_everywhere_and_left_out():
    study = registration(boots=1)
    void = {"short": "9 prompt tokens; the prompt is too short to hit a block"}
    found = [boot(study, key, 0, {"short": CACHE, "long": AGREE}, void=void) for key in FOUR]
    table = one_table(study, found)
    assert set(states(table).values()) == {"agrees"}
    assert {e.prompt for e in table.excluded} == {"short"}
    assert counts(table, "on/0", "short").model_dump(include={"n", "k", "void"}) == {"n": 0, "k": 0, "void": 1}


def test_a_cell_may_not_look_clean_for_want_of_the_prompt_that_differs():
    study = registration(boots=1)
    found = boots(study, {"on/0": SHORT})
    found[2] = boot(study, "on/1", 0, {"short": AGREE, "long": AGREE}, void={"short": "C1 16/0"})
    table = one_table(study, found)
    assert states(table)["on/1"] == "void"
    assert why(table, "on/1") == "prompt short has no valid boot here and differs in on/0"
    assert reading(study, found).reading == "void"


def test_a_prompt_with_too_few_valid_boots_voids_its_cell():
    study = registration(boots=2)
    found = boots(study)
    found[2] = boot(study, "on/1", 0, {"short": AGREE, "long": AGREE}, void={"short": "C1 16/0"})
    assert why(one_table(study, found), "on/1") == "prompt short has 1 valid boot, 2 registered"


def test_logprob_only_drift_reads_apart_from_bytes():
    study = registration()
    drift = {"b": response("a", logprobs=(-0.1, -0.2, -0.30001, -0.4))}
    found = [b for b in boots(study) if b.record.cell != "apc=on invariant=0"]
    found += [boot(study, "on/0", i, {"short": CACHE, "long": AGREE}, letters=drift) for i in range(6)]
    certificate = build(study, found, CONTEXT)
    assert [v.reading for v in certificate.strata[0].verdicts] == ["none", "none", "closed_by_flag"]
    assert certificate.answer.endswith("For log-probabilities: KNOWN.")
    pair = certificate.strata[0].cells[0].prompts[0].divergences[0]
    assert (pair.boots, pair.divergence.flip, pair.divergence.logprob_position) == (6, "none", 2)
    assert pair.divergence.max_dlogprob == pytest.approx(1e-5)


@pytest.mark.parametrize(("gap", "flip"), [(0.125, "tie"), (4.0, "confident")])
def test_tie_and_confident_flips(gap, flip):
    study = registration(prompts=("short",))
    letters = {x: response(x, gaps=(2.0, 1.5, 1.0, gap)) for x in "ab"}
    found = boots(study, {"on/0": SHORT}, letters=letters)
    pairs = one_table(study, found).cells[0].prompts[0].divergences
    assert [(p.boots, p.divergence.position, p.divergence.flip) for p in pairs] == [(6, 3, flip)]


def test_a_failed_boot_among_six_voids_where_six_were_registered_and_a_second_attempt_mends_it():
    study = registration()
    found = boots(study, {"on/0": SHORT})
    found[0] = failed(study, "on/0", 0, kind="timeout", line="no answer within 60 s")
    result = analyse(study, found)
    assert why(result.strata[0], "on/0") == "5 valid boots, 6 registered"
    assert [s.why for s in result.selected if not s.counted] == ["failed: boot: no answer within 60 s"]
    again = [*found, boot(study, "on/0", 0, {"short": CACHE, "long": AGREE}, attempt=2)]
    assert states(one_table(study, again))["on/0"] == "diverges"
    assert reading(study, again).reading == "closed_by_flag"


def test_only_the_first_valid_attempt_counts():
    study = registration(boots=1)
    found = [*boots(study), boot(study, "on/0", 0, {"short": CACHE, "long": AGREE}, attempt=2)]
    result = analyse(study, found)
    assert states(result.strata[0])["on/0"] == "agrees"
    assert [s.why for s in result.selected if not s.counted] == ["attempt 1 counts already"]


def test_one_boot_only():
    study = registration(boots=1)
    verdict = reading(study, boots(study, {"on/0": SHORT}))
    assert verdict.reading == "closed_by_flag"
    notes = " ".join(verdict.notes)
    assert "true rate of up to 95.0%" in notes
    assert "on/0 against off/0: too few boots to tell (p = 1)." in notes


def test_a_study_of_one_cell_is_not_explained():
    study = registration(("on/0",), boots=1, prompts=("short",), protocol_name="seed")
    verdict = reading(study, boots(study, {"on/0": {"short": SEED_FIRST}}))
    assert verdict.reading == "unexplained"
    assert "on/0 is diverges: 1 first differs." in verdict.notes
    assert reading(study, boots(study)).reading == "none"


def test_responses_cut_at_different_lengths():
    study = registration(boots=1, prompts=("short",))
    cut = {"b": response("b", text="one two", token_ids=(1, 2), logprobs=(-0.1, -0.2), gaps=(2.0, 1.5))}
    table = one_table(study, boots(study, {"on/0": SHORT}, letters=cut))
    assert states(table)["on/0"] == "diverges"
    d = table.cells[0].prompts[0].divergences[0].divergence
    assert (d.position, d.first_token, d.later_token) == (2, 3, None)


@pytest.mark.parametrize(
    ("changed", "endpoint", "reason"),
    [
        (
            {"logprobs": (-0.1, math.nan, -0.3, -0.4)},
            "logprobs",
            "a missing, NaN or infinite log-probability at token 1",
        ),
        ({"logprobs": (-0.1, -0.2, None, -0.4)}, "logprobs", "a missing, NaN or infinite log-probability at token 2"),
        ({"logprobs": ()}, "logprobs", "the engine reports no log-probabilities"),
        ({"logprobs": (-0.1,)}, "logprobs", "log-probabilities for 1 of 4 tokens"),
        ({"token_ids": ()}, "tokens", "the engine reports no token ids"),
    ],
)
def test_what_an_engine_does_not_report_voids_only_its_endpoint(changed, endpoint, reason):
    study = registration(boots=1, prompts=("short",))
    letters = {x: response(x, **changed) for x in "ab"}
    table = one_table(study, boots(study, {"on/0": SHORT}, letters=letters))
    assert states(table)["on/0"] == "diverges"
    assert states(table, endpoint)["on/0"] == "void"
    assert counts(table, "on/0", "short", endpoint).void_reasons == (reason,)
    assert reading(study, boots(study, {"on/0": SHORT}, letters=letters)).reading in {"closed_by_flag", "flag_inert"}


def test_text_equal_but_tokens_different():
    study = registration(prompts=("short",))
    letters = {"b": response("a", token_ids=(1, 2, 4, 97))}
    found = [b for b in boots(study) if b.record.cell != "apc=on invariant=0"]
    found += [boot(study, "on/0", i, SHORT, letters=letters) for i in range(6)]
    table = one_table(study, found)
    assert states(table)["on/0"] == "agrees"
    assert states(table, "tokens")["on/0"] == "diverges"
    assert build(study, found, CONTEXT).answer.endswith("For tokens: KNOWN.")


def test_a_request_that_did_not_run_voids_the_prompt():
    study = registration(boots=1)
    table = one_table(study, [boot(study, "on/0", 0, {"short": CACHE[:5], "long": AGREE})])
    assert counts(table, "on/0", "short").void_reasons == (
        "5 of 8 registered requests ran, or out of order: C1 W1 W2 W3 W4",
    )


def test_boots_that_agree_inside_but_not_with_each_other_are_named():
    study = registration(boots=2, prompts=("short",))
    found = boots(study)
    found[0] = boot(study, "on/0", 0, {"short": "b" * 8})
    assert counts(one_table(study, found), "on/0", "short").cold_equals_off is False
    notes = reading(study, found).notes
    assert any(n.startswith("on/0 short: 2 distinct cold and 2 distinct warm responses") for n in notes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"coldness": "L3"}, "a restored snapshot is never evidence"),
        (
            {"coldness": "L2", "start": "fork"},
            "a fork of a process that had imported (coldness L2) counts only where start=fork is registered",
        ),
        ({"coldness": "L1", "start": "fork"}, "coldness L1 is not that of a start by fork"),
        ({"coldness": "L2"}, "coldness L2 is not that of a start by plain"),
        ({"status": "void", "reason": "pin: version 2"}, "void: pin: version 2"),
        ({"status": "stopped", "reason": ""}, "stopped"),
    ],
)
def test_boots_that_never_count(changed, words):
    study = registration(boots=1)
    found = boots(study)
    found[0] = boot(study, "on/0", 0, {"short": CACHE, "long": AGREE}, **changed)
    result = analyse(study, found)
    assert [s.why for s in result.selected if not s.counted] == [words]
    assert states(result.strata[0])["on/0"] == "void"


def test_a_fork_counts_where_it_is_registered():
    study = registration(boots=1)
    forked = [c.model_copy(update={"settings": {**c.settings, "start": "fork"}}) for c in study.cells]
    study = study.model_copy(update={"cells": tuple(forked)})
    key, answers = "on/0", {"short": CACHE, "long": AGREE}
    result = analyse(study, [boot(study, key, 0, answers, coldness="L2", start="fork")])
    assert [s.counted for s in result.selected] == [True]


def test_how_boots_started_is_stated_where_not_all_started_plainly():
    study = registration(boots=1)
    found = boots(study)
    assert "start" not in environment(found).common
    other = found[0].model_copy(update={"record": found[0].record.model_copy(update={"start": "standby"})})
    stated = environment([other, *found[1:]])
    assert [(d.name, d.values) for d in stated.differing if d.name == "start"] == [
        ("start", {"plain": len(found) - 1, "standby": 1})
    ]
    assert "start: plain, standby" in neither(study, stated)


def test_a_failed_check_of_the_whole_boot_voids_it_whatever_its_status_says():
    study = registration(boots=1)
    found = boots(study)
    bad = found[0].record.checks[0].model_copy(update={"held": False, "evidence": "version 2 reported"})
    record = found[0].record.model_copy(update={"checks": (bad, *found[0].record.checks[1:])})
    found[0] = found[0].model_copy(update={"record": record})
    assert analyse(study, found).selected[2].why == "check pin failed: version 2 reported"


@pytest.mark.parametrize(("field", "name"), [("version", "engine version"), ("attention_backend", "attention backend"),
                                             ("dtype", "dtype")])  # fmt: skip
def test_boots_of_two_engines_inside_a_stratum_say_nothing(field, name):
    study = registration(boots=1)
    found = boots(study, {"on/0": SHORT})
    engine = found[1].record.engine
    facts = engine.facts.model_copy(update={field: "another"})
    record = found[1].record.model_copy(update={"engine": engine.model_copy(update={"facts": facts})})
    found[1] = found[1].model_copy(update={"record": record})
    table = one_table(study, found)
    assert set(states(table).values()) == {"void"}
    assert why(table, "on/0").startswith(f"{name} differs between boots: ")


def test_strata_have_tables_of_their_own():
    study = registration(strata=({"dtype": "bfloat16"}, {"dtype": "float32"}), boots=6)
    found = boots(study, {"on/0": SHORT}, stratum="dtype=bfloat16") + boots(study, stratum="dtype=float32")
    certificate = build(study, found, CONTEXT)
    assert [s.verdict("text").reading for s in certificate.strata] == ["closed_by_flag", "none"]
    assert "[dtype=bfloat16] Bytes: KNOWN." in certificate.answer
    assert "[dtype=float32] Bytes: NO DIVERGENCE." in certificate.answer


# --- boots that do not belong together --------------------------------------------------------------------------------


def test_mixed_registrations_are_refused_and_named():
    one, other = registration(boots=1), registration(boots=1, least=1, prompts=("short",))
    mixed = [*boots(one), *boots(other)]
    with pytest.raises(
        D3Error, match=f"boots of other registrations than {one.id()[:12]}: {other.id()[:12]} \\(4 boots"
    ):
        analyse(one, mixed)
    with pytest.raises(D3Error, match="differs in prompts"):
        analyse(one, mixed, {other.id(): other})


def test_the_same_boot_twice_counts_once_and_a_changed_copy_is_an_error():
    study = registration(boots=1)
    found = boots(study)
    assert analyse(study, [*found, *found]) == analyse(study, found)
    changed = boot(study, "on/0", 0, {"short": CACHE, "long": AGREE})
    with pytest.raises(D3Error, match="two different boots have the id"):
        analyse(study, [*found, changed])
    with pytest.raises(D3Error, match="two boots are attempt 1"):
        analyse(study, [*found, boot(study, "on/0", 0, {"short": CACHE, "long": AGREE}, boot_id="another")])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cell": "apc=on invariant=7"}, "is not registered"),
        ({"factors": {"apc": "off", "invariant": "0"}}, "factors"),
        ({"boot": 9}, "boot 9 is not one of the 1 registered"),
        ({"protocol": "seed"}, "protocol seed, registered is controlled"),
    ],
)
def test_a_boot_that_was_not_registered_is_refused(changed, words):
    study = registration(boots=1)
    with pytest.raises(D3Error, match=words):
        analyse(study, [boot(study, "on/0", 0, {"short": AGREE}, **changed)])


def test_a_response_that_is_not_what_the_record_says_is_refused():
    study = registration(boots=1)
    found = boot(study, "on/0", 0, {"short": AGREE})
    key = next(iter(found.responses))
    stray = response("z")
    for responses, words in [
        ({}, "is missing"),
        ({key: stray}, "other content"),
        ({**found.responses, stray.key(): stray}, "belongs to no request"),
    ]:
        with pytest.raises(D3Error, match=words):
            analyse(study, [found.model_copy(update={"responses": responses})])
    lie = found.record.requests[0].model_copy(update={"text_sha256": "0" * 64})
    record = found.record.model_copy(update={"requests": (lie, *found.record.requests[1:])})
    with pytest.raises(D3Error, match="recorded text hash is not that of its response"):
        analyse(study, [found.model_copy(update={"record": record})])


# --- properties -------------------------------------------------------------------------------------------------------

scripts = st.sampled_from([AGREE, CACHE, BOOT, SCATTERED, "abbbbbac", AGREE[:3]])
STUDY = registration(boots=3, least=1)


@st.composite
def studies(draw):
    return [
        boot(STUDY, key, i, {p.id: draw(scripts) for p in STUDY.prompts})
        for key in FOUR
        for i in range(draw(st.integers(0, 3)))
    ]


@settings(max_examples=40, deadline=None)
@given(studies(), st.randoms(use_true_random=False))
def test_the_order_of_boots_changes_nothing(found, rng: random.Random):
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert analyse(STUDY, shuffled) == analyse(STUDY, found)


@settings(max_examples=40, deadline=None)
@given(studies(), st.sampled_from(FOUR), st.integers(0, 2), st.sampled_from(["void", "failed", "skipped"]))
def test_a_void_boot_never_changes_a_count(found, key, index, status):
    extra = boot(STUDY, key, index, {"short": CACHE, "long": SCATTERED}, attempt=7, status=status, reason="x")
    before, after = analyse(STUDY, found), analyse(STUDY, [*found, extra])
    assert before.outcomes == after.outcomes
    for a, b in zip(before.strata[0].cells, after.strata[0].cells, strict=True):
        assert a.prompts == b.prompts


@settings(max_examples=40, deadline=None)
@given(studies(), st.permutations("abc"))
def test_renaming_responses_changes_no_verdict(found, order):
    renamed = dict(zip("abc", order, strict=True))
    other = []
    for one in found:
        by_key = {response(x, one.record.factors["invariant"]).key(): x for x in "abc"}
        answers = {
            p.id: "".join(renamed[by_key[r.response]] for r in one.record.requests if r.prompt == p.id)
            for p in STUDY.prompts
        }
        key = f"{one.record.factors['apc']}/{one.record.factors['invariant']}"
        other.append(boot(STUDY, key, one.record.boot, answers))
    before, after = analyse(STUDY, found), analyse(STUDY, other)
    assert [(c.states, [p.counts for p in c.prompts]) for c in before.strata[0].cells] == [
        (c.states, [p.counts for p in c.prompts]) for c in after.strata[0].cells
    ]


@settings(max_examples=40, deadline=None)
@given(studies())
def test_counts_add_up_and_the_interval_holds_the_rate(found):
    result = analyse(STUDY, found)
    assert len(frame(result.outcomes)) == len(result.outcomes)
    for cell in result.strata[0].cells:
        for count in (c for p in cell.prompts for c in p.counts):
            assert count.n == count.agree + count.k + count.scattered
            assert count.k == count.cache + count.boot + count.unknown
            assert count.n + count.void == cell.boots
            assert (count.null_bound is None) == (count.k > 0)
            if count.n:
                assert count.interval.low <= count.k / count.n <= count.interval.high
        for state in cell.states:
            kinds = {o.kind for o in result.outcomes if o.cell == cell.cell and o.endpoint == state.endpoint}
            if state.state == "agrees":
                assert kinds <= {"agree", "void"}
            if state.state == "diverges":
                assert kinds <= {"agree", "void", "cache", "unknown"}


def test_a_lone_surrogate_in_an_engines_words_breaks_no_table():
    study = registration()
    found = boots(study, {"on/0": {"short": CACHE}})
    found[0] = boot(study, "on/0", 0, {"short": CACHE, "long": AGREE}, void={"short": "the engine said \ud800"})
    table = one_table(study, found)
    assert counts(table, "on/0", "short").void == 1
    assert "\ud800" in counts(table, "on/0", "short").void_reasons[0]
