"""The plain-words answer for every registered reading, and for the studies recorded on the real engine."""

import pytest

from build import AGREE, BOOT, CACHE, CONTEXT, READINGS, SCATTERED, boots, failed, registration, response
from d3.certificate import build
from d3.report.answer import READINGS as WORDS
from d3.report.answer import answers, cautions
from test_recorded import certified


def study(cells=None, **more):
    return build(registration(), boots(registration(), cells, **more), CONTEXT)


def lost(key):
    """Every boot of one cell failed."""
    plan = registration()
    kept = [b for b in boots(plan) if f"{b.record.factors['apc']}/{b.record.factors['invariant']}" != key]
    return build(plan, [*kept, *(failed(plan, key, i, kind="timeout", line="no answer") for i in range(6))], CONTEXT)


def refused():
    plan = registration()
    kept = [b for b in boots(plan, {"on/0": {"short": CACHE}}) if b.record.factors["invariant"] == "0"]
    none = [failed(plan, key, i) for key in ("on/1", "off/1") for i in range(6)]
    return build(plan, [*kept, *none], CONTEXT)


def inert():
    """The flag changes no number: both settings of it give the same responses."""
    letters = {x: response(x) for x in "ab"}
    return study({"on/0": {"short": CACHE}, "on/1": {"short": CACHE}}, letters=letters)


COLD = "On this engine, the first answer after a cold cache can differ from later ones"
SHORT = "for 1 of 2 prompts in 6 of 6 boots"
SAID = {
    "closed_by_flag": (
        lambda: study({"on/0": {"short": CACHE}}),
        f"{COLD}; switching on the batch-invariant mode stops it. Seen without the mode {SHORT},"
        " with it in 0 of 6 boots.",
    ),
    "open_gap": (
        lambda: study({"on/0": {"short": CACHE}, "on/1": {"short": CACHE, "long": CACHE}}),
        f"{COLD}; switching on the batch-invariant mode does not stop it. Seen without the mode {SHORT}, with it"
        " for 2 of 2 prompts in 6 of 6 boots.",
    ),
    "none": (
        study,
        "On this engine, repeats of a prompt always gave the same answers within a boot, in every setting that was run."
        " With 6 boots per setting, a true rate of up to 39% could still go unseen.",
    ),
    "boot_state": (
        lambda: study({"on/0": {"short": BOOT}}),
        "On this engine, only the first answer after a start can differ, and a later one with a cold cache does not, so"
        " the start of the engine is the cause and not the cache. Seen with the cache on and the batch-invariant mode"
        f" off {SHORT}.",
    ),
    "void": (
        lambda: lost("on/1"),
        "On this engine, there is no answer yet: too little of what was planned could be measured (on/1: 0 valid boots,"
        " 6 registered).",
    ),
    "flag_unavailable": (
        refused,
        f"{COLD} (seen {SHORT}); whether the batch-invariant mode stops it is open: the engine does not run"
        " with it here.",
    ),
    "flag_inert": (
        inert,
        f"{COLD} (seen {SHORT}); whether the batch-invariant mode stops it is open: switched on, it changed no"
        " number at all, so it was not tested.",
    ),
    "unexplained": (
        lambda: study({"on/1": {"short": CACHE}}),
        "On this engine, what was seen fits none of the explanations written down beforehand: the first answer differed"
        f" from later ones with the cache and the batch-invariant mode on ({SHORT}), and nothing differed in the other"
        " settings.",
    ),
}


def test_every_registered_reading_has_plain_words():
    assert set(WORDS) == set(SAID) == {r.name for r in READINGS} | {"unexplained"}


@pytest.mark.parametrize("reading", SAID)
def test_answer(reading):
    make, words = SAID[reading]
    certificate = make()
    assert certificate.strata[0].verdict("text").reading == reading
    (answer,) = answers(certificate)
    assert (answer.words, answer.disposition) == (words, certificate.strata[0].verdict("text").disposition)


@pytest.mark.parametrize("moved", ["off/0", "off/1"])
@pytest.mark.parametrize("script", [CACHE, BOOT, SCATTERED])
def test_what_differs_without_a_cache_is_never_blamed_on_it(moved, script):
    (answer,) = answers(study({moved: {"short": script}}))
    assert "without the prefix cache too, so the cache is not the cause" in answer.words
    assert "cold cache" not in answer.words


def test_scattered_answers_are_told_as_such():
    (answer,) = answers(study({"on/0": {"long": SCATTERED}}))
    assert "answers differed in no regular way with the cache on and the batch-invariant mode off" in answer.words


def test_a_mode_of_our_own_is_not_taken_for_the_engines_flag():
    made = study({"on/0": {"short": CACHE}})
    (stratum,) = made.strata
    own = made.model_copy(update={"strata": (stratum.model_copy(update={"implementations": ("D3's CPU mode",)}),)})
    (answer,) = answers(own)
    assert "switching on the batch-invariant mode (here D3's CPU mode, not vLLM's own flag) stops it" in answer.words


def test_a_reading_of_another_study_keeps_its_registered_words():
    made = study()
    (stratum,) = made.strata
    other = tuple(v.model_copy(update={"reading": "mine"}) for v in stratum.verdicts)
    (answer,) = answers(made.model_copy(update={"strata": (stratum.model_copy(update={"verdicts": other}),)}))
    assert answer.words == f"On this engine, by the registered reading: {stratum.verdict('text').answer}"


def test_numbers_that_read_otherwise_are_told():
    quiet = {"b": response("b", text="one two three a", token_ids=(1, 2, 3, 97))}
    (answer,) = answers(study({"on/0": {"short": CACHE}}, letters=quiet))
    assert answer.words.startswith("On this engine, repeats of a prompt always gave the same answers")
    assert (
        "The numbers behind the answers read otherwise: the log-probabilities of the first answer after" in answer.words
    )


def test_sampled_strata_answer_nothing():
    plan = registration(boots=1, strata=({"temperature": "0.0"}, {"temperature": "0.7"}))
    found = [b for c in ("temperature=0.0", "temperature=0.7") for b in boots(plan, stratum=c)]
    certificate = build(plan, found, CONTEXT)
    assert [a.stratum for a in answers(certificate)] == ["temperature=0.0"]
    assert cautions(certificate) == [
        "The instrument control (temperature=0.7) failed, so do not rely on this: sampled responses must differ inside"
        " a boot: they did in 0 of 4 boots.",
        "A quick look: with fewer than 4 boots per cell no contrast can be told from chance.",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flag_unavailable", "the first answer after a cold cache can differ from later ones (seen in 2 of 2 boots); "
         "whether the batch-invariant mode stops it is open"),
        ("demonstration", "fits none of the explanations written down beforehand: the first answer differed from later "
         "ones with the cache on and the batch-invariant mode off (in 6 of 6 boots); no other setting was run."),
        ("negative", "With prefix_hash=sha256, repeats of a prompt always gave the same answers within a boot"),
        ("instrument", "The numbers behind the answers read otherwise: what was seen fits none of the explanations"),
    ],
)  # fmt: skip
def test_answers_of_recorded_studies(name, words):
    assert words in answers(certified(name))[0].words


def test_calm_study_is_calm_whatever_the_letters():
    assert answers(study({key: {"short": AGREE} for key in ("on/0", "on/1")})) == answers(study())
