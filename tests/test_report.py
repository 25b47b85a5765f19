"""The report: strips, numbers, texts, the page, the draft post, and the command that makes them."""

import html
import re
import shlex
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build import BOOT, CACHE, CONTEXT, boot, boots, failed, registration, response, seed_study
from conftest import composed, grid
from d3 import verify
from d3.certificate import build, load, write
from d3.report import __main__ as command
from d3.report.again import study_command
from d3.report.evidence import Evidence, read
from d3.report.figures import plots
from d3.report.files import write_reports
from d3.report.numbers import drifts, parts
from d3.report.page import page
from d3.report.post import post
from d3.report.strips import letter, prompt_strips, told
from d3.report.texts import MOST, differences, printable
from d3.store import root
from d3.study import Pins, register

RESULTS = root() / "results"
COMMITTED = ("d3_determinism_2x2", "h200_vllm_0_24")
SCRIPT = "<script>document.title = 'ran'</script>"


def evidence(cells=None, study=None, **more):
    study = study or registration(boots=2)
    found = boots(study, cells, **more)
    return of(build(study, found, CONTEXT), found)


def of(certificate, found):
    by_id = {b.record.boot_id: b for b in found}
    return Evidence(certificate=certificate, boots=tuple(by_id[e.boot_id] for e in certificate.boots))


def shown(text):
    """The page's words, without its markup."""
    body = text[text.index("<body>") :]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


# --- strips -----------------------------------------------------------------------------------------------------------


def test_letters_stand_for_the_same_response_in_every_cell():
    study = registration(boots=2, prompts=("short",))
    same = {x: response(x) for x in "ab"}
    found = boots(study, {"on/0": {"short": CACHE}, "off/0": {"short": "bbbbbbbb"}}, letters=same)
    strips = prompt_strips(study, "base", found, "short", "text")
    rows = {s.cell: ["".join(r.letters()) for r in s.rows] for s in strips.cells}
    assert rows == {
        "on/0": ["ABBBBBAB"] * 2, "off/0": ["BBBBBBBB"] * 2, "on/1": ["AAAAAAAA"] * 2, "off/1": ["AAAAAAAA"] * 2,
    }  # fmt: skip
    assert [s.says() for s in strips.cells][:2] == ["2 boots A B B B B B A B", "2 boots B B B B B B B B"]
    assert [s.calm() for s in strips.cells] == [False, True, True, True]


def test_a_void_boot_is_shown_as_void():
    study = registration(("on/0",), boots=2, least=1, prompts=("short", "long"))
    found = [
        boot(study, "on/0", i, {"short": CACHE, "long": CACHE}, void={"short": "hit"} if i else {}) for i in (0, 1)
    ]
    (strip,) = prompt_strips(study, "base", found, "short", "text").cells
    assert [(r.boot, "".join(r.letters()), r.void) for r in strip.rows] == [
        (0, "ABBBBBAB", ""), (1, "", "check cache failed: hit"),
    ]  # fmt: skip
    assert strip.says() == "1 boot A B B B B B A B; 1 boot void (check cache failed: hit)"


def test_log_probabilities_are_shown_only_where_they_tell_another_story():
    study = registration(boots=1)
    quiet = {"b": response("b", text="one two three a", token_ids=(1, 2, 3, 97))}
    found = boots(study, {"on/0": {"short": CACHE}}, letters=quiet)
    assert [p.prompt for p in told(study, "base", found)["logprobs"]] == ["short"]
    # The flag gives other log-probabilities in every cell: no other story, as no request differs from another.
    assert told(study, "base", boots(study, {"on/0": {"short": CACHE}}))["logprobs"] == ()


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_letters_are_distinct(a, b):
    assert (letter(a) == letter(b)) == (a == b)
    assert [letter(n) for n in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


# --- numbers and plots ------------------------------------------------------------------------------------------------


def test_drift_is_the_largest_movement_cold_to_warm_up_to_where_tokens_part():
    made = evidence({"on/0": {"short": CACHE}})
    found = {(d.cell, d.prompt): d for d in drifts(made.certificate.registration, "base", made.boots)}
    moved = found["on/0", "short"]
    assert moved.by_token == pytest.approx((0.0, 0.0, 0.01))
    assert (moved.parts_at, moved.prompt_tokens, moved.boots) == (3, 24, 2)
    assert moved.largest == pytest.approx(0.01)
    calm = found["off/0", "short"]
    assert (calm.by_token, calm.parts_at, calm.largest) == ((0.0,) * 4, None, 0.0)


def test_parts_are_the_certificates_own_pairs():
    made = evidence({"on/0": {"short": CACHE}})
    (part,) = parts(made.certificate.strata[0])
    assert (part.cell, part.prompt, part.boots, part.position, part.gap, part.flip) == (
        "on/0", "short", 2, 3, 0.125, "tie",
    )  # fmt: skip


def figures(made):
    registration = made.certificate.registration
    (stratum,) = made.certificate.strata
    return {p.title: p for p in plots(drifts(registration, "base", made.boots), parts(stratum), registration.tie_gap)}


def test_plots_say_what_they_show_and_are_the_same_every_time():
    made = evidence({"on/0": {"short": CACHE}})
    first = figures(made)
    assert first == figures(made)
    assert [bool(p.svg) for p in first.values()] == [True] * 3
    assert first["Where the answers part"].alt == "short in on/0: token 3, 2 boots"
    for plot in first.values():
        ElementTree.fromstring(plot.svg.replace(" xlink:", " "))  # noqa: S314
        assert "id=" not in plot.svg.split("<defs>")[0]
        assert "http" not in plot.svg


@pytest.mark.filterwarnings("error")
def test_a_long_name_leaves_room_for_its_plot():
    long = "a very long name of a prompt " * 9
    found = figures(evidence({"on/0": {long: CACHE}}, registration(boots=1, prompts=(long,))))
    assert "a very long name of a p…, on/0" in found["Where the answers part"].svg


def test_a_confident_flip_has_its_own_marker_and_colour():
    far = {x: response(x, gaps=(2.0, 1.5, 1.0, 1.75)) for x in "ab"}
    tie, confident = (figures(evidence({"on/0": {"short": CACHE}}, letters=x)) for x in (None, far))
    title = "Was the choice close where the answers part?"
    assert ("confident flip" in confident[title].svg, "confident flip" in tie[title].svg) == (True, False)
    assert ("var(--confident)" in confident[title].svg, "var(--tie)" in tie[title].svg) == (True, True)
    assert "confident flip, gap 1.75" in confident[title].alt


def test_where_nothing_diverges_words_stand_in_place_of_plots():
    found = figures(evidence(study=registration(boots=1, prompts=("short", "long", "other"))))
    assert {p.svg for p in found.values()} == {""}
    assert [p.read for p in found.values()] == [
        "Nothing to draw: from cold to warm every log-probability is the same, bit by bit.",
        "Nothing to draw: no token differs.",
        "Nothing to draw: no token differs.",
        "Nothing to draw: nothing moves at 24, 100, 240 tokens.",
    ]


def test_length_is_plotted_from_three_lengths_on():
    three = registration(boots=1, prompts=("short", "long", "other"))
    assert "Does the length of the prompt matter?" in figures(evidence({"on/0": {"long": CACHE}}, three))
    assert "Does the length of the prompt matter?" not in figures(evidence({"on/0": {"long": CACHE}}))


# --- texts ------------------------------------------------------------------------------------------------------------


def pair(a, b):
    letters = {"a": response("a", text=a), "b": response("b", text=b)}
    made = evidence({"on/0": {"short": CACHE}}, registration(("on/0",), boots=1, prompts=("short",)), letters=letters)
    (found,), more = differences(made.certificate.strata[0], made.boots)
    assert more == 0
    return found


def test_the_first_differing_character_is_marked_with_its_token():
    found = pair("The kettle", "Then a kettle")
    assert [(s.shared, s.mark, s.rest) for s in (found.first, found.later)] == [
        ("The", "␣", "kettle"), ("The", "n", " a kettle"),
    ]  # fmt: skip
    assert found.where == "token 3 (counted from 0): id 97 in the first answer, id 98 later; character 3"


def test_a_text_that_ends_first_is_marked_at_its_end():
    found = pair("one", "one\ntwo")
    assert [(s.shared, s.mark, s.rest) for s in (found.first, found.later)] == [("one", "∎", ""), ("one", "↵\n", "two")]


@settings(max_examples=30)
@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_nothing_is_lost_beside_the_mark(a, b):
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if a != b:
        found = pair(a, b)
        assert found.first.shared == found.later.shared == printable(a[:same])
        assert (found.first.rest, found.later.rest) == (printable(a[same + 1 :]), printable(b[same + 1 :]))
    printable(a).encode()


def test_hundreds_of_pairs_are_cut_and_counted():
    study = registration(("on/0",), boots=4, prompts=("short",))
    letters = {chr(97 + n): response(chr(97 + n)) for n in range(25)}
    scripts = ["abcdefgh", "bcdefghi", "cdefghij", "defghijk"]
    found = [boot(study, "on/0", i, {"short": s}, letters=letters) for i, s in enumerate(scripts)]
    shown_pairs, more = differences(build(study, found, CONTEXT).strata[0], found)
    assert (len(shown_pairs), more) == (MOST, 28 - MOST)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_it_all():
    study, found = seed_study()
    certificate = build(study, found, CONTEXT)
    words = shown(page(of(certificate, found), "r/seed.json"))
    for said in (
        study.question,
        "KNOWN On this engine, the first answer after a cold cache can differ",
        "APC on, invariant 0 6 / 6 [54%, 100%] 0 / 6 [0%, 46%]",
        *certificate.limits,
        "0 A B B B B B",
        "token 3 (counted from 0): id 97 in the first answer, id 98 later",
        "24 × version 1.0 asked and reported",
        "engine.attention_backend CPU_ATTN",
        "Prior art searched 2026-01-01",
        "vLLM issue 40896 : the symptom",
        "python -m d3.verify r/seed.json",
        "closed_by_flag holds : on/0 is diverges, off/0 is agrees, on/1 is agrees",
    ):
        assert said in words, said


def test_the_page_needs_nothing_from_outside_and_runs_nothing():
    text = page(evidence({"on/0": {"short": CACHE}}), "x.json")
    outside = r"<(script|link|img|iframe|object|embed|base|form)\b|\bon\w+=\"|javascript:|@import|url\((?!#)"
    assert not re.search(outside, text)
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert "default-src 'none'" in text
    assert re.findall(r"https?://[^\s\"<]+", text) == []


@pytest.mark.parametrize("where", ["question", "prompt", "text", "evidence", "reason"])
def test_markup_in_a_record_is_shown_as_text(where):
    prompt = f"{SCRIPT}$x" if where == "prompt" else "short"
    study = registration(("on/0",), boots=2, least=1, prompts=(prompt, "long"))
    study = study.model_copy(update={"question": SCRIPT} if where == "question" else {})
    letters = {x: response(x, text=f"{x}{SCRIPT}") for x in "ab"} if where == "text" else None
    void = {"long": SCRIPT} if where == "evidence" else None
    found = [boot(study, "on/0", 0, {prompt: CACHE, "long": CACHE}, letters=letters, void=void)]
    found.append(failed(study, "on/0", 1, line=SCRIPT))
    certificate = build(study, found, CONTEXT)
    text = page(of(certificate, found), "x.json")
    assert "<script" not in text
    assert html.escape(SCRIPT, quote=False) in text.replace("&#39;", "'")


def test_odd_characters_cannot_break_the_page():
    letters = {"a": response("a", text="half \ud83d\x00\u202e\x1b[31m"), "b": response("b", text="half é")}
    text = page(evidence({"on/0": {"short": CACHE}}, letters=letters), "x.json")
    text.encode("utf-8")
    assert r"\x00\u202e\x1b[31m" in text
    assert r"half </span><mark>\ud83d</mark>" in text


def test_every_situation_has_a_page():
    study = registration(boots=1)
    for cells in ({}, {"on/0": {"short": BOOT, "long": "abcabcab"}}, {"off/0": {"short": CACHE}}):
        assert "What this does not prove" in page(evidence(cells, study), "x.json")
    nothing = build(registration(), [], CONTEXT)
    assert "No boot counts, so nothing is shown." in shown(page(Evidence(certificate=nothing, boots=()), "x.json"))
    seed = registration(("on/0",), boots=1, prompts=("short",), protocol_name="seed")
    assert "UNEXPLAINED" in page(evidence({"on/0": {"short": "abbbbb"}}, seed), "x.json")
    many = registration(boots=1, prompts=tuple(f"p{i}" for i in range(6)))
    assert "5 prompts in which all responses of a setting are the same: p0, p2" in page(
        evidence({"on/0": {"p1": CACHE}}, many), "x.json"
    )


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def certified(tmp_path):
    study = registration(boots=1)
    found = boots(study, {"on/0": {"short": CACHE}})
    return write(build(study, found, CONTEXT), found, tmp_path / "c.json")


def test_the_command_writes_both_reports_and_the_certificate_still_holds(certified, tmp_path, capsys):
    assert command.main([str(certified)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "c.html", "c.json", "c.md"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "c.md"), str(tmp_path / "c.html")]
    assert verify.verify(certified) == []
    assert command.main([str(certified), "--out", str(tmp_path / "elsewhere")]) == 0
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["c.html", "c.md"]
    assert (tmp_path / "elsewhere" / "c.html").read_bytes() == (tmp_path / "c.html").read_bytes()
    assert str(tmp_path) not in (tmp_path / "c.html").read_text() + (tmp_path / "c.md").read_text()


BOOT_FOLDER = "c/boots/base__apc-on_invariant-0__b00-a1"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "c.json").unlink(), "does not exist"),
        (lambda f: (f / "c.json").write_text("{"), "the file is damaged or of another version"),
        (lambda f: (f / "c.json").write_text((f / "c.json").read_text().replace("KNOWN", "OPEN")), "its digest"),
        (lambda f: (f / "c").rename(f / "gone"), "belongs beside the certificate"),
        (lambda f: (f / BOOT_FOLDER / "boot.json").unlink(), "boot.json: missing"),
        (lambda f: (f / BOOT_FOLDER / "responses.jsonl").write_text(""), "responses.jsonl was changed"),
    ],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_one_line_and_exit_2(certified, damage, said, capsys):
    damage(certified.parent)
    assert command.main([str(certified)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines()), err[:7]) == ("", 1, "error: ")
    assert said in err
    assert not certified.with_suffix(".html").exists()


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_reports_are_what_the_command_makes(name, tmp_path):
    for made in write_reports(RESULTS / f"{name}.json", tmp_path):
        assert made.read_text() == (RESULTS / made.name).read_text(), "run: python -m d3.report results/*.json"
        assert made.stat().st_size < 2_000_000


def test_the_committed_draft_is_what_the_command_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(root())
    out = tmp_path / "post.md"
    assert command.main([*(f"results/{name}.json" for name in COMMITTED), "--post", str(out)]) == 0
    again = f"run: python -m d3.report {' '.join(f'results/{n}.json' for n in COMMITTED)} --post results/d3_post.md"
    assert (RESULTS / "d3_post.md").read_text() == out.read_text(), again


def test_the_draft_is_marked_and_tells_table_method_pins_limits_and_prior_art():
    study, found = seed_study()
    made = build(study, found, CONTEXT)
    lines = post([(made, "results/seed.json")]).splitlines()
    assert lines[0].startswith("Draft. Owner-gated: a comment on vLLM issue #40896")
    assert "| APC on, invariant 0 | 6 / 6 [54%, 100%] | 0 / 6 [0%, 46%] |" in lines
    assert [x[:2] for x in lines[lines.index("### Method") + 2 :][:6]] == ["1.", "2.", "3.", "4.", "5.", ""]
    assert any(x.startswith("Pins: attention_backend CPU_ATTN") for x in lines)
    assert {f"- {x}" for x in made.limits} <= set(lines)
    assert "python -m d3.verify results/seed.json" in lines
    assert "- vLLM issue 40896: the symptom" in lines


def test_d3_has_no_code_that_posts():
    posts = re.compile(r"api\.github|github\.com|gh (issue|pr|api)")
    assert not [p.name for p in (root() / "d3").rglob("*.py") if posts.search(p.read_text())]


@pytest.mark.usefixtures("home")
def test_the_command_to_run_again_gives_the_same_registration():
    pins = Pins({"fake": "", "other": ""}, {"fake-model": "f" * 64})
    levels = {"dtype": ("float32", "bfloat16"), "apc": ("on", "off")}
    configs = [composed(*(f"{k}={v}" for k, v in zip(levels, x, strict=True)), "max_tokens=7", "boots=2")
               for x in product(*levels.values())]  # fmt: skip
    study = register(configs, tuple(levels), pins)
    _, _, _, _, *words = shlex.split(study_command(study))
    swept = dict(w.split("=") for w in words if "," in w)
    rest = [w for w in words if "," not in w and not w.startswith("engine=")]
    again = [composed(*(f"{k}={v}" for k, v in zip(swept, x, strict=True)), *rest)
             for x in product(*(v.split(",") for v in swept.values()))]  # fmt: skip
    assert list(swept) == list(levels)
    assert register(again, tuple(swept), pins).id() == study.id()
    assert register(grid(), ("apc", "invariant"), pins).id() != study.id()


def test_evidence_reads_the_boots_in_the_certificates_order(certified: Path):
    made = read(certified)
    assert [b.record.boot_id for b in made.boots] == [e.boot_id for e in load(certified).boots]
