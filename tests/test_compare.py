"""Two certificates side by side: what changed, how sure that is, and what a gate makes of it."""

import importlib
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from build import AGREE, BOOT, CACHE, CONTEXT, FOUR, SCATTERED, boot, boots, failed, registration, response
from conftest import composed
from d3.certificate import build, write
from d3.ci import annotations, junit
from d3.compare import main
from d3.comparison import Comparison, Row, Side, VerdictChange, compare, told
from d3.comparison_report import markdown
from d3.errors import D3Error
from d3.gate import findings, passes, worse, worse_verdict
from d3.record import ENDPOINTS, Boot
from d3.registration import Message, Prompt, Registration, differences
from d3.statistics import Interval, compare_rates
from d3.store import load, load_boot
from d3.upgrade import cell_changes

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
        (of(0, 3), of(3, 3), "appeared", 0.1, "too few boots: not even 0 of 3 against 3 of 3 is told from chance"),
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


@settings(max_examples=15)
@given(studies)
def test_a_certificate_beside_itself_is_all_the_same(cells):
    one = made(cells, registration(boots=3, prompts=("short",)))
    found = compare(one, one)
    assert {(r.change, r.responses) for r in found.rows} == {("same", "same")}
    assert len(found.rows) == 4 * len(ENDPOINTS)
    assert not any(v.changed for v in found.verdicts)
    assert found.environment == found.registration == found.broken_controls == ()


SWAPPED = {"appeared": "went", "went": "appeared"}


@settings(max_examples=15)
@given(studies, studies)
def test_swapping_the_sides_swaps_appeared_and_went_and_nothing_else(a, b):
    study = registration(boots=3, prompts=("short",))
    one, other = made(a, study), made(b, study)
    there, back = compare(one, other).rows, compare(other, one).rows
    for x, y in zip(there, back, strict=True):
        assert (x.cell, x.endpoint, x.p, x.responses) == (y.cell, y.endpoint, y.p, y.responses)
        assert y.change == SWAPPED.get(x.change, x.change)
        assert (x.old, x.new) == (y.new, y.old)


def test_what_an_upgrade_changed_is_counted_cell_by_cell_and_stratum_by_stratum():
    strata = [{"attention": "A"}, {"attention": "B"}]
    study = registration(("on/0", "off/0"), boots=2, prompts=("short", "long"), strata=strata)

    def of_both(a, b, **letters):
        parts = boots(study, a, stratum="attention=A"), boots(study, b, stratum="attention=B", **letters)
        return side(study, [*parts[0], *parts[1]])

    cached = {"on/0": {"long": CACHE}}
    other = {"a": response("a", logprobs=(-0.1, -0.2, -0.3, -0.5))}
    found = compare(of_both(cached, {}), of_both({"on/0": {"long": CACHE, "short": CACHE}}, {}, letters=other))
    counted = [(c.stratum, c.cell, [(d.old, d.new, d.prompts) for d in c.differs], c.identical, c.known)
               for c in cell_changes(found)]  # fmt: skip
    assert counted == [
        ("attention=A", "on/0", [(1, 2, 2)] * 3, 3, 6),
        ("attention=A", "off/0", [(0, 0, 2)] * 3, 6, 6),
        ("attention=B", "on/0", [(0, 0, 2)] * 3, 4, 6),
        ("attention=B", "off/0", [(0, 0, 2)] * 3, 4, 6),
    ]
    text = markdown(found, "old.json", "new.json")
    assert "| attention=A | on/0 | 1 -> 2 of 2 | 1 -> 2 of 2 | 1 -> 2 of 2 | 3 of 6 |" in text
    assert "| attention=B | off/0 | 0 -> 0 of 2 | 0 -> 0 of 2 | 0 -> 0 of 2 | 4 of 6 |  |" in text
    only = cell_changes(found.only(["tokens"]))
    assert [(len(c.differs), c.identical, c.known) for c in only] == [(1, 1, 2), (1, 2, 2), (1, 2, 2), (1, 2, 2)]


@settings(max_examples=15)
@given(studies, studies)
def test_cells_of_an_upgrade_add_up_to_the_places(a, b):
    study = registration(boots=3, prompts=("short",))
    found = compare(made(a, study), made(b, study))
    changes = cell_changes(found)
    assert [c.cell for c in changes] == list(FOUR)
    assert sum(c.identical for c in changes) == sum(r.responses == "same" for r in found.rows)
    assert sum(d.new for c in changes for d in c.differs) == sum(r.new.boots() > 0 for r in found.rows)


# --- the gate ---------------------------------------------------------------------------------------------------------


def errors(found: Comparison) -> list[str]:
    return [f.message for f in findings(found) if f.level == "error"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (of(0, 6), of(1, 6), "differs where it did not"),
        (of(1, 6), of(6, 6), "more often"),
        (of(6, 6), [*[CACHE] * 5, BOOT], "a kind of difference that was not there: only the first after boot differs"),
        (of(6, 6), [*[CACHE] * 5, SCATTERED], "a kind of difference that was not there: scattered"),
        ([*[CACHE] * 9, SCATTERED], [CACHE, *[SCATTERED] * 9], "more often scattered"),
        ([*[CACHE] * 9, BOOT], [CACHE, *[BOOT] * 9], "more often only the first after boot differs"),
        (of(1, 6), of(4, 6), ""),
        (of(6, 6), of(0, 6), ""),
        (of(6, 6, SCATTERED), of(6, 6), ""),
        (of(6, 6), of(1, 6), ""),
    ],
)
def test_worse(old, new, words):
    old, new = (x if isinstance(x, dict) else {"on/0": x} for x in (old, new))
    found = compare(made(old), made(new))
    assert worse(row(found), found) == words
    assert passes(found) is (not words), errors(found)


def test_lost_evidence_is_worse_and_new_evidence_is_not():
    study = registration(boots=2, prompts=("short",))
    whole = side(study, boots(study))
    void = side(study, [boot(study, k, i, {"short": AGREE}, void={"short": "C1 16/0"}) for k in FOUR for i in (0, 1)])
    lost, gained = compare(whole, void), compare(void, whole)
    assert worse(row(lost), lost) == "lost its evidence"
    assert not passes(lost)
    assert worse(row(gained), gained) == ""
    assert errors(gained) == ["not one place could be compared, so nothing is shown"]


def test_two_void_sides_do_not_pass_silently():
    study = registration(boots=2, prompts=("short", "long"))
    whole = boots(study)
    half = [boot(study, f"{b.record.factors['apc']}/{b.record.factors['invariant']}", b.record.boot,
                 {"short": AGREE, "long": AGREE}, void={"short": "too short"}) for b in whole]  # fmt: skip
    found = compare(side(study, half), side(study, half))
    assert passes(found)
    words = "nothing to compare; both: void: check cache failed: too short"
    assert [(f.level, f.message) for f in findings(found)] == [("warning", words)]
    nothing = compare(side(study, []), side(study, []))
    assert not passes(nothing)
    assert {f.message for f in findings(nothing) if f.level == "warning"} == {
        "nothing to compare; both: void: 0 valid boots, 2 registered",
        "still INCONCLUSIVE",
    }


@pytest.mark.parametrize(
    ("old", "new", "bad"),
    [
        ("none", "closed_by_flag", True),
        ("none", "unexplained", True),
        ("closed_by_flag", "open_gap", True),
        ("closed_by_flag", "void", True),
        ("closed_by_flag", "none", False),
        ("none", "none", False),
        ("open_gap", "boot_state", False),
        ("void", "open_gap", False),
    ],
)
def test_worse_verdicts(old, new, bad):
    change = VerdictChange(stratum="base", endpoint="text", old_reading=old, new_reading=new,
                           old_disposition=old, new_disposition=new)  # fmt: skip
    assert worse_verdict(change) is bad


def test_a_broken_control_fails_the_gate():
    found = compare(made({}), made({}))
    broken = found.model_copy(update={"broken_controls": ("the instrument control (hot) fails: 0 of 1",)})
    assert (passes(found), passes(broken)) == (True, False)


@settings(max_examples=15)
@given(studies, studies, st.sampled_from(FOUR), st.integers(0, 2), st.sampled_from([CACHE, BOOT]))
def test_more_boots_that_differ_never_open_a_gate_that_was_shut(a, b, cell, index, script):
    study = registration(boots=3, prompts=("short",))
    raised = list(b.get(cell, [AGREE] * 3))
    if raised[index] == AGREE:
        raised[index] = script
    old, new, more = made(a, study), made(b, study), made({**b, cell: raised}, study)
    before, after = compare(old, new), compare(old, more)
    for x, y in zip(before.rows, after.rows, strict=True):
        assert not worse(x, before) or worse(y, after)
    if not any(worse_verdict(v) for v in before.verdicts):  # a verdict may well become a better known one
        assert passes(before) or not passes(after)


@pytest.mark.parametrize(("a", "b"), list(product((2, 6, 12, 25), repeat=2)))
def test_a_place_that_is_worse_stays_worse_as_k_rises(a, b):
    """Over all counts: the two-sided p-value alone could fall and rise again."""
    for k in range(1, a + 1):
        bad = [k_b * a > k * b and told(compare_rates(k, a, k_b, b), 0.05) for k_b in range(b + 1)]
        assert bad == sorted(bad)


# --- the command ------------------------------------------------------------------------------------------------------


CPU, H200 = ROOT / "results/d3_determinism_2x2.json", ROOT / "results/h200_vllm_0_24.json"


def written(folder: Path, name: str, one: Side) -> str:
    return str(write(one.certificate, one.boots, folder / f"{name}.json"))


def recorded(name: str) -> Side:
    folder = ROOT / "tests/data/recorded" / name
    found = [load_boot(path) for path in sorted((folder / "boots").iterdir())]
    context = CONTEXT.model_copy(update={"registered_at": "2026-11-29T18:00:00+00:00"})
    return Side(certificate=build(load(Registration, folder / "registration.json"), found, context), boots=tuple(found))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    written(folder, "old", made(of(0, 6)))
    written(folder, "new", made({"on/0": [CACHE] * 6, "on/1": [CACHE]}))
    return folder


@pytest.fixture
def pair(originals, tmp_path):
    """Two files that a test may spoil."""
    folder = shutil.copytree(originals, tmp_path / "pair")
    return str(folder / "old.json"), str(folder / "new.json")


def test_a_committed_certificate_against_itself_passes(capsys):
    assert main([str(CPU), str(CPU), "--gate"]) == 0
    printed = capsys.readouterr().out
    assert "both are the same certificate" in printed
    assert "24 places (cell x prompt x endpoint): 24 the same\n" in printed
    assert "gate: passes; nothing got worse" in printed


def test_two_studies_with_nothing_in_common_say_so(capsys):
    assert main([str(CPU), str(H200), "--gate"]) == 1
    printed = capsys.readouterr().out
    assert "208 places (cell x prompt x endpoint): 208 not comparable" in printed
    assert "new: no stratum base" in printed
    assert "gate: fails; not one place could be compared" in printed
    assert "NVIDIA H200" in printed
    assert len(printed.splitlines()) < 110, "differences are grouped"


def test_what_changed_is_shown_with_its_place_and_the_next_command(pair, capsys):
    assert main([*pair]) == 0
    assert main([*pair, "--gate"]) == 1
    printed = capsys.readouterr().out
    assert "both are of the same registration" in printed
    assert "6 / 6 [54%, 100%]" in printed
    assert "told from chance (p = 0.0022)" in printed
    assert "appeared; WORSE" in printed
    assert "error: base: bytes: verdict NO DIVERGENCE -> KNOWN" not in printed
    assert "error: base: bytes: verdict NO DIVERGENCE -> OPEN GAP" in printed
    assert "gate: fails; worse: 6 places, 3 verdicts, 0 controls" in printed
    assert f"next: read {pair[1]}: its readings" in printed
    assert main([*pair[::-1], "--gate"]) == 0
    assert "next: to make" in capsys.readouterr().out


def test_the_comparison_is_written_as_markdown(pair, tmp_path, capsys):
    out = tmp_path / "a b" / "compare.md"
    assert main([*pair, "--out", str(out)]) == 0
    assert f"markdown: {out}\n" in capsys.readouterr().out
    text = out.read_text()
    assert "| base | on/0 | 0 -> 1 of 1 | 0 -> 1 of 1 | 0 -> 1 of 1 | 0 of 3 | NO DIVERGENCE -> OPEN GAP |" in text
    assert main([*pair, "--out", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_change_that_may_be_chance_asks_for_more_boots(tmp_path, capsys):
    files = [written(tmp_path, name, made(of(k, 6))) for name, k in (("old", 0), ("new", 1))]
    main(files)
    assert f"next: run the study of {files[1]} again with boots=12" in capsys.readouterr().out


def test_one_endpoint_alone(tmp_path, capsys):
    only_text = made({"on/0": [CACHE] * 6}, letters={"b": response("a", text="other")})
    old, new = written(tmp_path, "old", made({})), written(tmp_path, "new", only_text)
    assert main([old, new, "--gate"]) == 1
    capsys.readouterr()
    assert main([old, new, "--gate", "--endpoint", "tokens", "--endpoint", "logprobs"]) == 0
    assert "8 places" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([old, new, "--endpoint", "bytes"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("place", "spoil", "words"),
    [
        (0, lambda p: p.unlink(), "does not exist"),
        (1, lambda p: p.write_text("{"), "not JSON"),
        (0, lambda p: (p.unlink(), p.mkdir()), "cannot read"),
        (1, lambda p: p.write_text(p.read_text().replace("NO DIVERGENCE", "KNOWN")), "does not hold: digest: recorded"),
        (0, lambda p: next(p.with_suffix("").glob("boots/*/boot.json")).unlink(), "boot.json: missing"),
        (1, lambda p: shutil.rmtree(p.with_suffix("")), "does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(pair, place, spoil, words, capsys):
    junit_file = Path(pair[place]).with_name("j.xml")
    spoil(Path(pair[place]))
    assert main([*pair, "--gate", "--junit", str(junit_file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) == 1
    assert words in printed.err
    assert not junit_file.exists()
    if "hold" in words or "missing" in words:
        assert f"python -m d3.verify {pair[place]}" in printed.err


def test_the_readme_shows_what_the_command_prints(capsys):
    assert main([str(CPU), str(CPU.with_name("vllm_cpu_flag.json")), "--gate"]) == 1
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    shown = (
        (ROOT / "README.md").read_text().split("<!-- compare -->")[1].split("```")[1].splitlines()[2:]
    )  # after the command
    assert len(shown) >= 6
    assert [line for line in shown if line not in printed and line != "..."] == []


# --- for machines -----------------------------------------------------------------------------------------------------


def cases(text: str) -> dict[tuple[str, str], ET.Element]:
    """Test cases by name, with the form checked by the rules of the schemas that consumers publish."""
    top = ET.fromstring(text)  # noqa: S314  # our own words
    assert top.tag == "testsuites"
    assert set(top.attrib) == {"name", "tests", "failures", "errors", "time"}
    for suite in top:
        assert suite.tag == "testsuite"
        assert set(suite.attrib) == {"name", "tests", "failures", "errors", "skipped", "time"}
        for tag in ("failure", "skipped"):
            counted = suite.get({"failure": "failures"}.get(tag, tag))
            assert int(counted or -1) == len(suite.findall(f"testcase/{tag}"))
        assert int(suite.get("tests") or -1) == len(suite.findall("testcase")) == len(suite)
        assert (suite.get("errors"), float(suite.get("time") or -1)) == ("0", 0.0)
        for case in suite:
            assert set(case.attrib) == {"classname", "name", "time"}
            assert len(case) <= 1
            assert all(set(x.attrib) <= {"message", "type"} for x in case)
    found = [(c.get("classname") or "", c.get("name") or "") for c in top.iter("testcase")]
    assert len(set(found)) == len(found)
    for name in ("tests", "failures"):
        assert int(top.get(name) or -1) == sum(int(s.get(name) or -1) for s in top)
    return dict(zip(found, top.iter("testcase"), strict=True))


def test_junit_has_a_case_per_place_and_fails_where_it_got_worse(tmp_path, pair):
    out = tmp_path / "a b" / "junit.xml"
    assert main([*pair, "--junit", str(out)]) == 0
    found = cases(out.read_text())
    assert len(found) == 4 * 3 + 3 + 2
    failed_ = {name for name, case in found.items() if case.find("failure") is not None}
    places = {(f"base.on/{i}", f"short {e}") for i in (0, 1) for e in ENDPOINTS}
    assert failed_ == places | {("base.verdict", e) for e in ("bytes", "tokens", "log-probabilities")}
    message = found["base.on/0", "short text"].find("failure").get("message")
    assert message == "differs where it did not; 0 / 6 [0%, 46%] -> 6 / 6 [54%, 100%]; told from chance (p = 0.0022)"


def test_junit_skips_what_was_never_measured_and_survives_odd_characters():
    study = registration(boots=1)
    void = {"short": 'bell \a null \0 <&"> ]]>\n'}
    odd = side(study, [boot(study, k, 0, {"short": AGREE, "long": AGREE}, void=void) for k in FOUR])
    same = compare(odd, odd)
    rows = tuple(r.model_copy(update={"why": r.why + " \ud83d"}) for r in same.rows)
    found = cases(junit(same.model_copy(update={"rows": rows})))
    skipped = found["base.on/0", "short text"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == ('both: void: check cache failed: bell \\x07 null \\x00 <&"> ]]>\\n \\ud83d')
    assert found["base.on/0", "long text"].find("skipped") is None
    nothing = cases(junit(compare(side(study, []), side(study, []))))
    assert nothing["gate", "something could be compared"].find("failure") is not None


@settings(max_examples=15)
@given(studies, studies)
def test_junit_fails_when_the_gate_does(a, b):
    study = registration(boots=3, prompts=("short",))
    found = compare(made(a, study), made(b, study))
    assert passes(found) is (not any(c.find("failure") is not None for c in cases(junit(found)).values()))


def test_workflow_commands_are_escaped_and_counted():
    found = compare(made({}), made({})).model_copy(
        update={"broken_controls": tuple(f"control {i}: 100%\r\n::set-env name=x::y, \ud83d" for i in range(12))}
    )
    lines = annotations(found)
    assert lines[0] == "::error title=D3 controls::control 0: 100%25%0D%0A::set-env name=x::y, \\ud83d"
    assert len(lines) == 10
    assert lines[-1] == "::error title=D3 more::3 more of this level; the step's log has all"
    moved = annotations(compare(made(of(0, 6)), made(of(1, 6))))
    assert moved[0].startswith("::error title=D3 base%3A bytes::verdict NO DIVERGENCE")
    assert "::error title=D3 base%3A on/0; short; text%2C tokens%2C logprobs::appeared 0 / 6" in "\n".join(moved)


def test_github_appends_to_the_summary(pair, tmp_path, monkeypatch, capsys):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main([*pair, "--github", "--gate"]) == 1
    text = summary.read_text()
    assert text.startswith("before\n# D3: ")
    assert "**gate: fails; worse: 6 places, 3 verdicts, 0 controls**" in text
    assert "| on/0 | short | text, tokens, logprobs | 0 / 6 [0%, 46%] | 6 / 6 [54%, 100%] | appeared; WORSE" in text
    assert "\n::error title=" in capsys.readouterr().out
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert main([*pair, "--github"]) == 2
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert main([*pair, "--github"]) == 0


def test_no_text_from_a_file_begins_a_line(tmp_path, capsys):
    study = registration(boots=1)
    evil = {"short": "x " * 70 + "::set-output name=a::b\n::error::no"}
    both = {"short": AGREE, "long": AGREE}
    void = side(study, [boot(study, k, 0, both, void=evil if k == "on/0" else None) for k in FOUR])
    old = written(tmp_path, "old", side(study, boots(study)))
    assert main([old, written(tmp_path, "new", void)]) == 0
    printed = capsys.readouterr().out
    assert "::set-output" in printed
    assert not [line for line in printed.splitlines() if line.lstrip().startswith("::")]


# --- the workflow -----------------------------------------------------------------------------------------------------


WORKFLOW = yaml.safe_load((ROOT / "docs/ci_gate.yml").read_text())
STEPS = WORKFLOW["jobs"]["gate"]["steps"]


def commands() -> list[list[str]]:
    """Every `python -m d3...` of the workflow in words, the module first."""
    text = "\n".join(step.get("run", "") for step in STEPS).replace("\\\n", " ")
    lines = [shlex.split(line.partition("||")[0]) for line in text.splitlines() if " -m d3" in line]
    return [words[words.index("-m") + 1 :] for words in lines]


def test_the_workflow_has_the_least_rights_and_pinned_actions():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert set(WORKFLOW[True]) == {"schedule", "workflow_dispatch"}, "YAML 1.1 reads `on` as true"
    uses = [step["uses"] for step in STEPS if "uses" in step]
    assert [u for u in uses if not re.fullmatch(r"actions/[a-z-]+@v[0-9]+", u)] == []
    checkouts = [s["with"] for s in STEPS if s.get("uses", "").startswith("actions/checkout")]
    assert [c["persist-credentials"] for c in checkouts] == [False, False]
    assert not any("${{" in step.get("run", "") for step in STEPS), "an expression in a script is an injection"


def test_the_scripts_of_the_workflow_are_bash():
    for step in (s for s in STEPS if "run" in s):
        done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), step["name"]


def one_job(words: list[str]) -> list[str]:
    """The overrides of the first job of a sweep."""
    found = OverridesParser.create().parse_overrides(words)
    values = [next(o.sweep_string_iterator()) if o.is_sweep_override() else o.value() for o in found]
    return [f"{o.key_or_group}={value}" for o, value in zip(found, values, strict=True)]


def test_every_command_of_the_workflow_is_accepted(monkeypatch, capsys):
    found = commands()
    assert [words[0] for words in found] == ["d3", "d3.certify", "d3.verify", "d3.compare"]
    (_, sweep, *overrides), *others = found
    assert sweep == "-m"
    assert composed(*one_job(overrides), fake=False).engine.version == "$ENGINE_VERSION"

    def stop(*_: object) -> None:
        raise D3Error("stopped after the command line was read")

    for module, *words in others:
        command = importlib.import_module(module)
        monkeypatch.setattr(command, "certify" if module == "d3.certify" else "examine", stop)
        assert command.main(words) == 2
        assert "stopped after the command line was read" in capsys.readouterr().err
