"""Two certificates side by side: what changed, how sure that is, and what a gate makes of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import AGREE, BOOT, CACHE, CONTEXT, FOUR, SCATTERED, boot, boots, failed, registration, response
from d3.certificate import build
from d3.comparison import Comparison, Row, Side, compare
from d3.record import ENDPOINTS, Boot
from d3.registration import Message, Prompt, Registration, differences
from d3.statistics import Interval

ROOT = Path(__file__).parent.parent


def side(study: Registration, found: list[Boot]) -> Side:
    return Side(certificate=build(study, found, CONTEXT), boots=tuple(found))


def made(scripts: dict[str, list[str]], study: Registration | None = None, **more) -> Side:
    """A side with one prompt; `scripts`: the answers of each boot of a cell; other cells agree."""
    study = study or registration(boots=max(map(len, scripts.values()), default=6), least=1, prompts=("short",))
    rows = [(key, i, script) for key in FOUR for i, script in enumerate(scripts.get(key, [AGREE] * study.boots))]
    return side(study, [boot(study, key, i, {"short": script}, **more) for key, i, script in rows])


def of(k: int, n: int, script: str = CACHE) -> dict[str, list[str]]:
    return {"on/0": [script] * k + [AGREE] * (n - k)}


def row(found: Comparison, cell: str = "on/0", endpoint: str = "text", prompt: str = "short") -> Row:
    (one,) = [r for r in found.rows if (r.cell, r.prompt, r.endpoint) == (cell, prompt, endpoint)]
    return one


# --- what changed, and how sure that is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "change", "p", "words"),
    [
        (of(0, 6), of(0, 6), "same", 1.0, ""),
        (of(6, 6), of(6, 6), "same", 1.0, ""),
        (of(0, 6), of(1, 6), "appeared", 1.0, "not told from chance (p = 1); more boots would tell"),
        (of(0, 6), of(6, 6), "appeared", 0.0021645, "told from chance (p = 0.0022)"),
        (of(0, 3), of(3, 3), "appeared", 0.1, "too few boots: none of 3 against all of 3"),
        (of(5, 6), of(0, 6), "went", 0.0151515, "told from chance (p = 0.015)"),
        (of(3, 6), of(4, 6), "same", 1.0, "not told from chance"),
        (of(1, 6), of(6, 6), "changed", 0.0151515, "told from chance"),
        (of(6, 6), of(6, 6, BOOT), "changed", 1.0, ""),
        (of(0, 6), of(1, 6, SCATTERED), "appeared", 1.0, "not told from chance"),
        (of(6, 6), of(6, 6, SCATTERED), "changed", 1.0, ""),
    ],
)
def test_change_with_its_p_value(old, new, change, p, words):
    found = row(compare(made(old), made(new)))
    assert found.change == change
    assert found.p == pytest.approx(p, rel=1e-4)
    assert found.why.startswith(words) if words else not found.why


def test_causes_at_the_same_rate_are_told_apart_by_the_test():
    old = {"on/0": [CACHE] * 5 + [SCATTERED]}
    found = row(compare(made(old), made({"on/0": [CACHE, *[SCATTERED] * 5]})))
    assert (found.change, found.p, found.why) == ("same", 1.0, "")
    old, new = {"on/0": [CACHE] * 9 + [SCATTERED]}, {"on/0": [CACHE, *[SCATTERED] * 9]}
    assert row(compare(made(old), made(new))).change == "changed"


def test_rows_carry_both_sides_with_their_intervals():
    found = row(compare(made(of(0, 6)), made(of(6, 6))))
    assert found.old.counts is not None
    assert found.new.counts is not None
    assert (found.old.counts.k, found.old.counts.n, found.old.counts.interval) == (0, 6, Interval(low=0, high=0.459258))
    assert (found.new.counts.k, found.new.counts.n, found.new.counts.interval) == (6, 6, Interval(low=0.540742, high=1))


def test_responses_are_compared_whatever_became_of_the_rates():
    other = {"a": response("x"), "b": response("y")}
    assert {r.responses for r in compare(made(of(6, 6)), made(of(6, 6))).rows} == {"same"}
    moved = compare(made(of(6, 6)), made(of(6, 6), letters=other))
    assert (row(moved).change, row(moved).responses) == ("same", "other")
    # The flag moves log-probabilities alone: the same text is the same response at that endpoint.
    shifted = compare(made({}), made({}, letters={"a": response("a", "1")}))
    assert row(shifted).responses == "same"
    assert row(shifted, endpoint="logprobs").responses == "other"


def test_verdicts_and_broken_controls():
    found = compare(made(of(0, 6)), made(of(6, 6)))
    assert [(v.old_reading, v.new_reading, v.old_disposition, v.new_disposition) for v in found.verdicts] == [
        ("none", "closed_by_flag", "NO DIVERGENCE", "KNOWN")
    ] * 3
    study = registration(("on/0",), boots=1, strata=({"temperature": "0.0"}, {"temperature": "0.7"}))
    calm = boots(study, stratum="temperature=0.0")
    good = side(study, calm + boots(study, {"on/0": {"short": "abcdefgh"}}, stratum="temperature=0.7"))
    blind = side(study, calm + boots(study, stratum="temperature=0.7"))
    assert compare(good, good).broken_controls == compare(blind, blind).broken_controls == ()
    (words,) = compare(good, blind).broken_controls
    assert words.startswith("the instrument control (temperature=0.7) fails: sampled responses must differ")
    assert {r.stratum for r in compare(good, good).rows} == {"temperature=0.0"}, "a sampled stratum answers nothing"


# --- what cannot be compared ------------------------------------------------------------------------------------------


def test_void_unavailable_and_absent_places_say_why():
    study = registration(boots=2, prompts=("short",))
    whole = boots(study)
    refused = [b for b in whole if "invariant=0" in b.record.cell] + [
        failed(study, key, i, line="no such flag") for key in ("on/1", "off/1") for i in (0, 1)
    ]
    void = [boot(study, "on/0", i, {"short": AGREE}, void={"short": "C1 16/0"}) for i in (0, 1)]
    void += [b for b in whole if b.record.cell != "apc=on invariant=0"]
    found = compare(side(study, whole), side(study, refused))
    assert row(found, "on/1").change == "not_comparable"
    assert row(found, "on/1").why == "new: unavailable: the engine refused the flag in 2 boots: no such flag"
    assert (row(found).change, row(found, "off/0").change) == ("same", "same")
    gone = row(compare(side(study, void), side(study, whole)))
    assert gone.why.startswith("old: void: 0 valid boots, 2 registered")
    assert (gone.p, gone.responses) == (None, "unknown")
    assert row(compare(side(study, void), side(study, void))).why.startswith("both: void: ")
    three = registration(FOUR[:3], boots=2, prompts=("short", "more"))
    found = compare(side(study, whole), side(three, boots(three)))
    assert row(found, "off/1").why == "new: no cell off/1"
    assert row(found, prompt="more").why == "old: no prompt more"
    assert row(found).change == "same"


def test_strata_match_by_name_or_where_there_is_one_on_each_side():
    one, two = (registration(boots=1, strata=({"dtype": d},)) for d in ("bfloat16", "float32"))
    both = registration(boots=1, strata=({"dtype": "bfloat16"}, {"dtype": "float32"}))
    of_both = side(both, boots(both, stratum="dtype=bfloat16") + boots(both, stratum="dtype=float32"))
    single = compare(side(one, boots(one)), side(two, boots(two)))
    assert {(r.stratum, r.change) for r in single.rows} == {("dtype=bfloat16 -> dtype=float32", "same")}
    assert len(single.verdicts) == 3
    grown = compare(side(two, boots(two)), of_both)
    assert {(r.stratum, r.change, r.why) for r in grown.rows} == {
        ("dtype=float32", "same", ""),
        ("dtype=bfloat16", "not_comparable", "old: no stratum dtype=bfloat16"),
    }
    assert len(grown.rows) == 2 * 4 * 2 * 3


def test_other_messages_or_another_protocol_are_other_questions():
    study = registration(boots=1)
    asked = Prompt(id="long", messages=(Message(role="user", content="Something else."),))
    other = study.model_copy(update={"prompts": (study.prompts[0], asked)})
    found = compare(side(study, boots(study)), side(other, boots(other)))
    assert row(found, prompt="long").why == "other messages under the same prompt id"
    assert (row(found, prompt="long").responses, row(found).responses) == ("unknown", "same")
    seed = registration(boots=1, protocol_name="seed")
    found = compare(side(study, boots(study)), side(seed, boots(seed)))
    assert {r.why for r in found.rows} == {"other request orders: controlled and seed"}


# --- what differs around them -----------------------------------------------------------------------------------------


def test_registrations_differ_in_few_lines():
    one, two = registration(boots=2), registration(boots=3, max_tokens=9)
    found = compare(side(one, boots(one)), side(two, boots(two)))
    assert [(f.name, f.old, f.new) for f in found.registration] == [
        ("boots", "2", "3"),
        ("min_valid_boots", "2", "3"),
        ("max_tokens", "48", "9"),
    ]
    assert len(differences(one, two)) > 3
    moved = one.model_copy(update={"order": one.order[::-1]})
    (fact,) = compare(side(one, boots(one)), side(moved, boots(moved))).registration
    assert fact.name == "order"


def test_environments_differ_by_named_facts():
    study = registration(boots=1)
    found = boots(study)
    moved = boots(study, environment={"cpu": "another", "cores": "2"})
    assert compare(side(study, found), side(study, found)).environment == ()
    facts = compare(side(study, found), side(study, [*found[:2], *moved[2:]])).environment
    assert [(f.name, f.old, f.new) for f in facts] == [("machine.cpu", "a processor", "a processor, another")]
    longer = [f.record.engine.model_copy(update={"command": ("python", "worker.py", "--" + "x" * 60, w)})
              for f, w in zip(found, "uuuu", strict=True)]  # fmt: skip
    commands = [b.model_copy(update={"record": b.record.model_copy(update={"engine": e})})
                for b, e in zip(found, longer, strict=True)]  # fmt: skip
    others = [b.model_copy(update={"record": b.record.model_copy(update={"engine": e.model_copy(
        update={"command": (*e.command[:3], "v")})})}) for b, e in zip(found, longer, strict=True)]  # fmt: skip
    (fact,) = compare(side(study, commands), side(study, others)).environment
    assert (fact.name, fact.old, fact.new) == ("engine.command", "u", "v")


# --- properties -------------------------------------------------------------------------------------------------------

scripts = st.lists(st.sampled_from([AGREE, AGREE, CACHE, BOOT, SCATTERED]), min_size=3, max_size=3)
studies = st.dictionaries(st.sampled_from(FOUR), scripts)


@given(studies)
def test_a_certificate_beside_itself_is_all_the_same(cells):
    one = made(cells, registration(boots=3, prompts=("short",)))
    found = compare(one, one)
    assert {(r.change, r.responses) for r in found.rows} == {("same", "same")}
    assert len(found.rows) == 4 * len(ENDPOINTS)
    assert not any(v.changed for v in found.verdicts)
    assert found.environment == found.registration == found.broken_controls == ()


SWAPPED = {"appeared": "went", "went": "appeared"}


@given(studies, studies)
def test_swapping_the_sides_swaps_appeared_and_went_and_nothing_else(a, b):
    study = registration(boots=3, prompts=("short",))
    one, other = made(a, study), made(b, study)
    there, back = compare(one, other).rows, compare(other, one).rows
    for x, y in zip(there, back, strict=True):
        assert (x.cell, x.endpoint, x.p, x.responses) == (y.cell, y.endpoint, y.p, y.responses)
        assert y.change == SWAPPED.get(x.change, x.change)
        assert (x.old, x.new) == (y.new, y.old)
