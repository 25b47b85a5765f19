"""Prompt lengths: points, thresholds, remainders, what they suggest, and the command, on boots made up and recorded."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from build import AGREE, BOOT, CACHE, CONTEXT, SCATTERED, registration
from d3 import certificate
from d3.length_leads import finest, leads
from d3.length_plot import plot, state
from d3.length_table import Point, Series, Threshold, remainders, series, threshold
from d3.length_words import always, markdown, named, no_divergence
from d3.lengths import main, read
from d3.store import root

H200 = root() / "results" / "h200_vllm_0_24.json"
FLASH, TRITON = "attention=default", "attention=TRITON_ATTN"
ALL, COARSE, FINE = ("text", "tokens", "logprobs"), ("text", "tokens"), ("logprobs",)


def point(tokens: int, parted: int = 0, answered: int = 4, other: int = 0, block: int = 16, **more) -> Point:
    return Point(
        tokens=tokens,
        hit=(tokens - 1) // block * block,
        prompts=2,
        boots=2,
        answered=answered,
        parted=parted,
        other=other,
        void=4 - answered,
        **{"first_token": None, **more},
    )


def one(points, cell: str = "on/0", endpoints=FINE, stratum: str = "base") -> Series:
    return Series(stratum=stratum, cell=cell, cached=cell.startswith("on"), endpoints=endpoints, points=tuple(points))


@st.composite
def ascending(draw):
    found = []
    for tokens in sorted(draw(st.sets(st.integers(17, 300), max_size=20))):
        answered = draw(st.integers(0, 4))
        parted = draw(st.integers(0, answered))
        found.append(point(tokens, parted, answered, draw(st.integers(0, answered - parted))))
    return found


# --- thresholds -------------------------------------------------------------------------------------------------------


@given(ascending())
def test_nothing_differs_below_the_first_and_something_does_at_it(points: list[Point]) -> None:
    t = threshold(points)
    tried = [p for p in points if p.answered]
    if t.first is None:
        assert (sum(p.differ for p in points), t.clean, t.below) == (0, None, 0)
        return
    below = [p for p in tried if p.tokens < t.first]
    assert sum(p.differ for p in below) == 0
    assert next(p for p in tried if p.tokens == t.first).differ > 0
    assert t.below == len(below)
    assert t.clean == (below[-1].tokens if below else None)


@given(ascending())
def test_from_always_on_every_pair_parts_and_just_before_it_one_does_not(points: list[Point]) -> None:
    t = threshold(points)
    tried = [p for p in points if p.answered]
    above = [p for p in tried if t.always is not None and p.tokens >= t.always]
    assert all(p.parted == p.answered for p in above)
    assert t.above == len(above)
    rest = tried[: len(tried) - len(above)]
    assert not rest or rest[-1].parted < rest[-1].answered
    assert t.first is None or t.always is None or t.first <= t.always


def test_thresholds_of_a_clean_step_a_mixed_one_and_none() -> None:
    clean = [point(n, 4 * (n > 128)) for n in (64, 127, 128, 129, 256)]
    assert threshold(clean) == Threshold(first=129, clean=128, below=3, always=129, above=2)
    mixed = [point(64), point(97, 1), point(128), point(257, 4), point(512, 4)]
    assert threshold(mixed) == Threshold(first=97, clean=64, below=1, always=257, above=2)
    at_once = [point(31, answered=0), point(33, 4), point(64, 3)]
    assert threshold(at_once) == Threshold(first=33, clean=None, below=0, always=None, above=0)
    scattered = [point(33), point(64, other=4)]
    assert threshold(scattered) == Threshold(first=64, clean=33, below=1, always=None, above=0)
    assert threshold([]) == Threshold(first=None, clean=None, below=0, always=None, above=0)


@given(ascending(), st.integers(0, 320))
def test_remainders_share_out_the_answers_from_a_length_on(points: list[Point], least: int) -> None:
    groups = remainders(points, least)
    kept = [p for p in points if p.answered and p.tokens >= least]
    assert sum(g.answered for g in groups) == sum(p.answered for p in kept)
    assert sum(g.parted for g in groups) == sum(p.parted for p in kept)
    assert sum(g.lengths for g in groups) == len(kept)
    assert all(1 <= g.remainder <= 16 for g in groups)
    assert all(a.remainder < b.remainder for a, b in pairwise(groups))


# --- points from boots ------------------------------------------------------------------------------------------------


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, tokens in {"a-40": 40, "b-40": 40, "a-65": 65, "b-65": 65}.items():
        monkeypatch.setitem(build.LENGTHS, prompt, tokens)


def test_points_count_pairs_of_prompt_and_boot_by_what_became_of_them(sizes: None) -> None:
    study = registration(("on/0", "off/0"), boots=2, prompts=("b-65", "a-40", "b-40", "a-65"))
    answers = {"a-65": CACHE, "b-65": BOOT, "a-40": AGREE, "b-40": AGREE}
    calm = dict.fromkeys(answers, AGREE)
    found = [build.boot(study, "on/0", 0, answers, void={"b-40": "too short"})]
    found += [build.boot(study, "on/0", 1, answers | {"b-65": SCATTERED})]
    found += [build.boot(study, "off/0", i, calm) for i in range(2)]
    on, off = series(study, found)
    assert (on.cell, on.cached, on.endpoints, named(on)) == ("on/0", True, ALL, "bytes, tokens and log-probabilities")
    assert (off.cell, off.cached, off.endpoints) == ("off/0", False, ALL)
    short, long = on.points
    assert (short.tokens, short.hit, short.prompts, short.boots) == (40, 32, 2, 2)
    assert (short.answered, short.parted, short.other, short.void) == (3, 0, 0, 1)
    assert (long.tokens, long.hit, long.answered, long.parted, long.other, long.void) == (65, 64, 4, 2, 2, 0)
    assert [p.differ for p in off.points] == [0, 0]


def test_the_first_token_is_compared_where_it_is_the_same_and_the_largest_of_prompts_and_boots_counts(
    sizes: None,
) -> None:
    study = registration(("on/0",), boots=2, prompts=("a-65", "b-65", "a-40"))

    def moved(by: float) -> dict[str, build.Response]:
        warm = build.response("b", logprobs=(-0.1 - by, -0.2, -0.3, -0.4))
        return {"a": build.response("a", logprobs=(-0.1, -0.2, -0.3, -0.4)), "b": warm}

    other = {"a": build.response("a"), "b": build.response("b", token_ids=(9, 2, 3, 98))}
    first = build.boot(study, "on/0", 0, {"a-65": CACHE, "b-65": AGREE, "a-40": AGREE}, letters=moved(0.25))
    second = build.boot(study, "on/0", 1, {"a-65": CACHE, "b-65": AGREE, "a-40": AGREE}, letters=moved(0.5))
    short, long = series(study, [first, second])[0].points
    assert (short.first_token, long.first_token) == (0.0, pytest.approx(0.5))
    parted = build.boot(study, "on/0", 0, {"a-65": CACHE, "b-65": CACHE, "a-40": CACHE}, letters=other)
    assert [p.first_token for p in series(study, [parted])[0].points] == [None, None]


# --- a recorded study -------------------------------------------------------------------------------------------------


def test_thresholds_of_the_study_recorded_on_an_h200() -> None:
    found = {(s.stratum, s.cell, s.endpoints): threshold(s.points) for s in read(H200)[1]}
    none = Threshold(first=None, clean=None, below=0, always=None, above=0)
    assert found == {
        (FLASH, "on/0", COARSE): Threshold(first=259, clean=158, below=5, always=None, above=0),
        (FLASH, "on/0", FINE): Threshold(first=146, clean=24, below=2, always=146, above=8),
        (FLASH, "on/1", COARSE): Threshold(first=263, clean=259, below=6, always=None, above=0),
        (FLASH, "on/1", FINE): Threshold(first=146, clean=24, below=2, always=146, above=8),
        (FLASH, "off/0", ALL): none,
        (FLASH, "off/1", ALL): none,
        (TRITON, "on/0", ALL): none,
        (TRITON, "on/1", COARSE): Threshold(first=263, clean=259, below=6, always=None, above=0),
        (TRITON, "on/1", FINE): Threshold(first=259, clean=158, below=5, always=None, above=0),
        (TRITON, "off/0", ALL): none,
        (TRITON, "off/1", ALL): none,
    }


def test_points_and_remainders_of_the_study_recorded_on_an_h200() -> None:
    found = {(s.stratum, s.cell, s.endpoints): s for s in read(H200)[1]}
    flash = found[FLASH, "on/0", FINE]
    assert [p.tokens for p in flash.points] == [23, 24, 146, 150, 158, 259, 263, 266, 472, 483]
    assert [(p.parted, p.answered) for p in flash.points] == [(0, 12), (0, 6), *[(6, 6)] * 7, (12, 12)]
    assert flash.points[2].first_token == pytest.approx(0.0272, abs=5e-5)
    triton = remainders(found[TRITON, "on/1", FINE].points, 259)
    assert [(g.remainder, g.lengths, g.parted, g.answered) for g in triton] == [
        (3, 2, 6, 18), (7, 1, 6, 6), (8, 1, 6, 6), (10, 1, 6, 6),
    ]  # fmt: skip
    assert no_divergence(flash.points) == "none below 146 tokens (2 lengths) in 1 to 2 prompts per length and 6 boots"
    assert always(flash.points) == "from 146 tokens on (8 lengths)"
    assert (
        no_divergence(found[TRITON, "on/0", ALL].points)
        == "none from 23 to 483 tokens (10 lengths) in 1 to 2 prompts per length and 6 boots"
    )
    assert always(found[TRITON, "on/0", ALL].points) == "at no length"


# --- what it suggests -------------------------------------------------------------------------------------------------

ONLY_THOSE = "A warm request computes only those, so a kernel chosen by how many there are would do this."
FITS = "(a tile, a split of the keys) would have it; chance could too, in so few prompts."


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([point(128), point(129, 4), point(256, 4)],
         f"a step from 128 to 129 tokens, just past a multiple of 128, as work cut into pieces of 128 tokens {FITS} "
         "From there on every prompt parts (2 lengths)."),
        ([point(63), point(64, 4)],
         f"a step from 63 to 64 tokens, at a multiple of 64, as work cut into pieces of 64 tokens {FITS} "
         "From there on every prompt parts (1 length)."),
        ([point(70), point(71, 4)],
         "a step from 70 to 71 tokens, at no multiple of 16, so no piece of a fixed size suggests itself. "
         "From there on every prompt parts (1 length)."),
        ([point(98), point(112, 4)],
         "a step between 98 and 112 tokens; prompts cut to lengths between would place it. "
         "From there on every prompt parts (1 length)."),
        ([point(33, 4), point(34, 4)],
         "parts at the shortest length already, 33 tokens: a threshold would lie below. "
         "From there on every prompt parts (2 lengths)."),
        ([point(98), point(112, 1), point(128), point(144, 4), point(160, 4)],
         "a step between 98 and 112 tokens; prompts cut to lengths between would place it. From there on 9 of 16 pairs "
         "of prompt and boot part, and from 144 tokens on all do (2 lengths): length alone does not decide."),
        ([point(n, 3 * (n in {129, 257})) for n in (66, 129, 130, 257, 258)],
         "from 129 tokens on, 6 of 8 pairs of prompt and boot part with 1 token left after the cached blocks, and none "
         f"with 2 tokens. {ONLY_THOSE}"),
        ([point(n, 4 * (n in {129, 257} or n > 1000)) for n in (66, 129, 130, 257, 258, 512, 1025, 1280)],
         "from 129 tokens on and below 1025, 8 of 8 pairs of prompt and boot part with 1 token left after the cached "
         f"blocks, and none with 2 tokens. {ONLY_THOSE} With any other number left: a step between 512 and 1280 "
         "tokens; prompts cut to lengths between would place it. From there on every prompt parts (1 length)."),
        ([point(n, 4 * (n in {129, 257})) for n in (66, 129, 257, 258)],  # 2 tokens left at one length only
         "a step between 66 and 129 tokens; prompts cut to lengths between would place it. From there on 8 of 12 pairs "
         "of prompt and boot part: length alone does not decide."),
        ([point(n, 4 * (n in {129, 258, 257})) for n in (66, 129, 144, 160, 257, 258, 259)],  # 2 left differs once
         "a step between 66 and 129 tokens; prompts cut to lengths between would place it. From there on 12 of 24 "
         "pairs of prompt and boot part: length alone does not decide."),
        ([point(33), point(34)], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_lead_says_what_the_counts_bear_and_no_more(points: list[Point], said: str) -> None:
    assert " ".join(leads(one(points))) == said


def test_with_the_cache_off_length_is_no_lead() -> None:
    (said,) = leads(one([point(128), point(129, 4)], "off/0"))
    assert (
        said == "with the cache off both requests do the same work, so it is not the cache that differs: see the boots."
    )


def test_leads_are_drawn_from_log_probabilities_where_the_engine_reports_them() -> None:
    points = [point(33), point(64, 4)]
    void = [point(33, answered=0), point(64, answered=0)]
    coarse, fine = one(points, endpoints=COARSE), one(points[:1], endpoints=FINE)
    assert list(finest([fine, coarse])) == [fine]
    assert list(finest([coarse, one(void, endpoints=FINE)])) == [coarse]
    assert list(finest([one(void, endpoints=ALL)])) == []


# --- Markdown, picture, command ---------------------------------------------------------------------------------------


def test_the_markdown_has_thresholds_tables_and_every_reservation() -> None:
    study = registration(("on/0", "off/0"), boots=2)
    coarse = [point(31, answered=0), point(32), point(33, first_token=0.125), point(64, 1, 4, 2)]
    fine = [point(31, answered=0), point(32), point(33, 4, first_token=0.125), point(64, 4)]
    off = one([p.model_copy(update={"parted": 0, "other": 0}) for p in coarse], "off/0", ALL)
    text = markdown(study, [one(coarse, endpoints=COARSE), one(fine), off], "results/x.json", {"base": "x.png"})
    assert "| on/0 | bytes and tokens | none below 64 tokens (2 lengths) in 2 prompts per length and 2 boots |" in text
    assert (
        "| on/0 | log-probabilities | none below 33 tokens (1 length) in 2 prompts per length and 2 boots | from"
        in text
    )
    assert "| off/0 | bytes, tokens and log-probabilities | none from 32 to 64 tokens (3 lengths)" in text
    assert "0 of 2 boots leaves room for a true rate of up to 78% at a prompt (one-sided 95%)" in text
    assert "these prompts' words" in text
    assert "- No answer at 31 tokens" in text
    assert "- A pair that differs otherwise" in text
    assert "| 31 | 16 | 15 | void | void |  |" in text
    assert "| 33 | 32 | 1 | 0 / 4 | 4 / 4 | 0.125 |" in text
    assert "| 64 | 48 | 16 | 1 / 4, 2 otherwise | 4 / 4 |  |" in text
    assert "| 1 | 1 | 0 / 4 | 4 / 4 | none | 33 |" in text
    assert "![For every cell and prompt length, whether cold and warm answers agree or part](x.png)" in text
    assert "What would test a lead:" in text
    assert text.count("\n### ") == 1


def test_where_nothing_differs_nothing_is_suggested() -> None:
    text = markdown(registration(("on/0",)), [one([point(33), point(64)])], "x.json", {"base": "x.png"})
    assert "Nothing differs at any length, so there is no threshold to explain." in text
    assert "What would test a lead" not in text
    assert "these prompts' words" not in text


def test_a_marker_tells_agreement_from_some_and_all_and_no_answer() -> None:
    assert [state(p) for p in (point(40), point(40, 1), point(40, 3, other=1), point(40, 4), point(40, 0, 0))] == [
        "every pair agrees", "some pairs differ", "some pairs differ", "every pair parts", "no answer",
    ]  # fmt: skip


def test_equal_series_give_equal_pictures_and_other_ones_do_not() -> None:
    some = [one([point(40), point(65, 4, first_token=0.5)]), one([point(40), point(65)], "off/0", ALL)]
    drawn = plot(some)
    assert drawn.startswith(b"\x89PNG\r\n")
    assert plot(some) == drawn
    assert plot([one([point(40), point(65, 3, first_token=0.5)]), some[1]]) != drawn


def test_the_command_writes_beside_or_into_a_folder_and_says_the_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(H200), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1] == (
        "attention=default on/0, log-probabilities: none below 146 tokens (2 lengths) in 1 to 2 prompts per length and "
        "6 boots; every prompt parts from 146 tokens on (8 lengths)"
    )
    names = [f"h200_vllm_0_24_lengths{end}" for end in (".md", "_attention-default.png", "_attention-TRITON_ATTN.png")]
    assert out[-3:] == [str(tmp_path / name) for name in names]
    text = (tmp_path / names[0]).read_text()
    assert all(f"({name})" in text for name in names[1:])
    assert (
        "Made from `results/h200_vllm_0_24.json`, registration `6fc0285e7a90`: 10 prompt lengths from 23 to 483" in text
    )
    assert (tmp_path / names[1]).read_bytes().startswith(b"\x89PNG")


def test_one_length_alone_or_a_changed_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = registration(("on/0", "off/0"), boots=1, prompts=("any",))
    path = tmp_path / "one.json"
    found = build.boots(study)
    certificate.write(certificate.build(study, found, CONTEXT), found, path)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path} has answers at 100 tokens alone: nothing to compare; "
        "sweep the length: python -m d3 -m study=lengths apc=on,off invariant=0,1\n"
    )
    path.write_text(path.read_text().replace('"boots"', '"boats"', 1))
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "one.json"]
