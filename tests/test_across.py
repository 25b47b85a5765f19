"""The strata of one certificate that differ in one key: the same responses, or where not."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build import AGREE, BOOT, CACHE, CONTEXT, FOUR, SCATTERED, boots, failed, registration, response
from d3.across import Across, Pairing, Spot, across
from d3.across_report import conclusion, gate_line, markdown, terminal
from d3.certificate import build, write
from d3.compare import main, read_side
from d3.comparison import Side
from d3.errors import D3Error
from d3.record import ENDPOINTS, Response

ROOT = Path(__file__).parent.parent
H200 = ROOT / "results/h200_vllm_0_24.json"
ONE, TWO = "at_once=1", "at_once=2"
Cells = Mapping[str, Mapping[str, str]]


def made(
    levels: Mapping[str, Cells], key: str = "at_once", *, prompts: tuple[str, ...] = ("short", "long"),
    cells: tuple[str, ...] = FOUR, letters: Mapping[str, Mapping[str, Response]] | None = None,
) -> Side:  # fmt: skip
    """A certificate of two boots per cell; `levels`: the answers of each cell and prompt; the others agree."""
    study = registration(cells, boots=2, prompts=prompts, strata=[{key: level} for level in levels])
    found = [
        b for level, answers in levels.items()
        for b in boots(study, answers, stratum=f"{key}={level}", letters=(letters or {}).get(level))
    ]  # fmt: skip
    return Side(certificate=build(study, found, CONTEXT), boots=tuple(found))


def only(found: Across) -> Pairing:
    (pairing,) = found.pairings
    return pairing


def spot(pairing: Pairing, cell: str, prompt: str, endpoint: str) -> Spot:
    (one,) = [s for s in pairing.spots if (s.cell, s.prompt, s.endpoint) == (cell, prompt, endpoint)]
    return one


def text(found: Across) -> str:
    return "\n".join(part for part in terminal(found) if isinstance(part, str))


CACHED = {"on/0": {"long": CACHE}}


def test_the_same_responses_at_every_level_are_sound_cell_by_cell() -> None:
    found = across(made({"1": CACHED, "2": CACHED, "4": CACHED}), "at_once")
    assert [(p.base, p.level, p.stratum, p.base_boots, p.boots) for p in found.pairings] == [
        ("1", "2", "base", 8, 8),
        ("1", "4", "base", 8, 8),
    ]
    assert found.same()
    assert all(len(p.compared()) == 4 * 2 * 3 for p in found.pairings)
    said = "at_once=4 against 1, base: the same hashes cell by cell, in 24 of 24 places"
    assert conclusion(found.pairings[1]) == f"{said}: 4 at once is sound for this stratum"
    assert gate_line(found) == "gate: passes; no level of at_once changes a response"


def test_a_cold_response_that_moved_is_found_with_its_first_token() -> None:
    moved = {"on/0": {"long": "cbbbbbcb"}}
    pairing = only(across(made({"1": CACHED, "8": moved}), "at_once"))
    assert {(s.cell, s.prompt) for s in pairing.differing()} == {("on/0", "long")}
    (parting,) = spot(pairing, "on/0", "long", "tokens").partings
    assert (parting.expect, parting.base_phase, parting.phase) == ("cold", "C1 of boot 0", "C1 of boot 0")
    assert (parting.divergence.position, parting.divergence.first_token, parting.divergence.later_token) == (3, 97, 99)
    assert parting.character == 14
    assert not spot(pairing, "on/0", "long", "tokens").varies
    said = conclusion(pairing)
    assert (
        said == "at_once=8 against 1, base: other responses in 3 of 24 places; 8 at once is not sound for this stratum"
    )


def test_the_later_boot_that_moved_is_named_and_a_level_that_varies_by_itself_is_said() -> None:
    study = registration(("on/0",), boots=2, prompts=("short",), strata=[{"at_once": n} for n in "12"])
    calm = boots(study, stratum=ONE)
    first, second = boots(study, stratum=TWO)
    moved = boots(study, {"on/0": {"short": SCATTERED}}, stratum=TWO)[1]
    found = [*calm, first, moved]
    pairing = only(across(Side(certificate=build(study, found, CONTEXT), boots=tuple(found)), "at_once"))
    (warm,) = spot(pairing, "on/0", "short", "text").partings
    assert (warm.expect, warm.base_phase, warm.phase) == ("warm", "W1 of boot 0", "W1 of boot 1")
    assert all(s.varies for s in pairing.differing())
    words = "in 3 of these places the boots of one level differ among themselves, so at_once alone may not be why"
    assert words in text(across(Side(certificate=build(study, found, CONTEXT), boots=tuple(found)), "at_once"))
    same = [*calm, first, second]
    assert across(Side(certificate=build(study, same, CONTEXT), boots=tuple(same)), "at_once").same()


def test_a_level_that_lacks_a_response_of_the_baseline_differs_too() -> None:
    pairing = only(across(made({"1": {"on/0": {"long": SCATTERED}}, "2": {}}), "at_once"))
    (warm,) = spot(pairing, "on/0", "long", "text").partings
    assert (warm.expect, warm.base_phase, warm.phase) == ("warm", "W1 of boot 0", "W1 of boot 0")
    assert warm.divergence.first_token == 98


def test_the_batch_effect_is_counted_in_prompts_with_the_mode_off_and_on() -> None:
    six = tuple("abcdef")
    moved = {"on/0": dict.fromkeys("abc", "bbbbbbbb"), "off/0": {"a": "bbbbbbbb"}}
    found = across(made({"0": {}, "31": moved}, "concurrency", prompts=six), "concurrency")
    said = "3 of 6 prompts answer differently with the batch-invariant mode off, 0 of 6 with it on"
    assert f"beside 31 others, text, tokens, logprobs: {said}" in text(found)
    assert "concurrency=31 against 0, base: other responses in 12 of 72 places\n" in text(found)


def test_log_probabilities_that_moved_alone_say_from_which_token() -> None:
    letters = {"2": {"a": response("a", "1")}}
    found = across(made({"1": {}, "2": {}}, cells=("on/0",), prompts=("short",), letters=letters), "at_once")
    pairing = only(found)
    assert [s.endpoint for s in pairing.differing()] == ["logprobs"]
    assert "no token; log-probabilities from token 0, by up to 0.001" in markdown(found, "c.json")
    assert found.only(["text", "tokens"]).same()
    assert not found.only(["logprobs"]).same()


def test_an_engine_without_tokens_is_compared_by_characters() -> None:
    bare = {"token_ids": (), "logprobs": (), "gaps": ()}
    letters = {"1": {"a": response("a", **bare)}, "2": {"a": response("b", **bare)}}
    found = across(made({"1": {}, "2": {}}, cells=("on/0",), prompts=("short",), letters=letters), "at_once")
    assert (
        "| on/0 | short | text | cold: C1 of boot 0, C1 of boot 0 | no token; character 14 of the text |"
        in markdown(found, "c.json")
    )
    assert {s.endpoint: s.responses for s in only(found).spots} == {
        "text": "other", "tokens": "unknown", "logprobs": "unknown",
    }  # fmt: skip


def test_other_swept_keys_stay_apart() -> None:
    strata = [{"at_once": n, "dtype": d} for d in ("bfloat16", "float32") for n in "12"]
    study = registration(("on/0",), boots=1, prompts=("short",), strata=strata)
    found = [
        b for s in strata
        for b in boots(study, {"on/0": {"short": "bbbbbbbb"}} if s == strata[3] else None,
                       stratum=f"at_once={s['at_once']} dtype={s['dtype']}")
    ]  # fmt: skip
    side = Side(certificate=build(study, found, CONTEXT), boots=tuple(found))
    assert [(p.stratum, p.same()) for p in across(side, "at_once").pairings] == [
        ("dtype=bfloat16", True),
        ("dtype=float32", False),
    ]
    assert [(p.stratum, p.same()) for p in across(side, "dtype").pairings] == [
        ("at_once=1", True),
        ("at_once=2", False),
    ]


def test_a_place_measured_at_one_level_alone_is_no_equality() -> None:
    study = registration(boots=1, prompts=("short",), strata=[{"at_once": n} for n in "12"])
    whole = boots(study, stratum=ONE)
    refused = [failed(study, key, 0, stratum=TWO, line="out of memory") for key in FOUR]
    lost = across(Side(certificate=build(study, [*whole, *refused], CONTEXT), boots=(*whole, *refused)), "at_once")
    assert not lost.same()
    assert gate_line(lost) == "gate: fails; not one place could be compared"
    assert conclusion(only(lost)).startswith(
        "at_once=2 against 1, base: nothing to compare, at_once=2: void: 0 valid boots"
    )
    half = [*whole, *boots(study, stratum=TWO)[:3], refused[3]]
    some = across(Side(certificate=build(study, half, CONTEXT), boots=tuple(half)), "at_once")
    assert (
        conclusion(only(some))
        == "at_once=2 against 1, base: the same hashes in 9 places, 3 measured at one level alone"
    )
    assert gate_line(some) == "gate: fails; 0 places with other responses, 3 measured at one level alone"
    both = [*whole[:3], *boots(study, stratum=TWO)[:3]]
    assert across(Side(certificate=build(study, both, CONTEXT), boots=tuple(both)), "at_once").same()


@pytest.mark.parametrize(
    ("key", "message", "remedy"),
    [
        (
            "invariant",
            "invariant makes the cells of a stratum, not strata",
            "their table is the certificate's own report",
        ),
        ("dtype", "dtype was not swept in this study", "name one of: at_once"),
    ],
)
def test_a_key_without_levels_is_refused(key: str, message: str, remedy: str) -> None:
    with pytest.raises(D3Error) as error:
        across(made({"1": {}, "2": {}}), key)
    assert (error.value.message, error.value.remedy, error.value.code) == (message, remedy, 2)


def test_a_sampled_level_answers_nothing() -> None:
    study = registration(("on/0",), boots=1, strata=[{"temperature": t} for t in ("0.0", "0.7")])
    found = [b for t in ("0.0", "0.7") for b in boots(study, stratum=f"temperature={t}")]
    with pytest.raises(D3Error, match="no two levels of temperature have a stratum that can be compared"):
        across(Side(certificate=build(study, found, CONTEXT), boots=tuple(found)), "temperature")


answers = st.dictionaries(
    st.sampled_from(FOUR),
    st.dictionaries(st.sampled_from(["short", "long"]), st.sampled_from([AGREE, CACHE, BOOT, SCATTERED])),
)


def cold_and_warm(script: str) -> tuple[set[str], set[str]]:
    """What a script's letters say of the two cache states: C1, C2 are the cold ones."""
    return {script[0], script[6]}, {*script[1:6], script[7]}


@settings(max_examples=25)
@given(answers, answers)
def test_a_place_is_the_same_when_and_only_when_its_letters_are(a: Cells, b: Cells) -> None:
    side = made({"1": a, "2": b})
    there, back = only(across(side, "at_once")), only(across(made({"1": b, "2": a}), "at_once"))
    for one, other in zip(there.spots, back.spots, strict=True):
        x, y = (cells.get(one.cell, {}).get(one.prompt, AGREE) for cells in (a, b))
        assert one.responses == other.responses == ("same" if cold_and_warm(x) == cold_and_warm(y) else "other")
        assert [p.expect for p in one.partings] == [
            name for name, m, n in zip(("cold", "warm"), cold_and_warm(x), cold_and_warm(y), strict=True) if m != n
        ]
        assert all(p.divergence.position == 3 for p in one.partings)
    assert there.same() is (not there.differing())


# --- the command ------------------------------------------------------------------------------------------------------


def written(folder: Path, side: Side) -> str:
    return str(write(side.certificate, side.boots, folder / "c.json"))


def test_the_committed_gpu_study_across_its_attention_backends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "across.md"
    assert main([str(H200), "--across", "attention", "--gate", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "attention=TRITON_ATTN against default, base: other responses in 68 of 144 places\n" in printed
    assert (
        "text, tokens: 2 of 12 prompts answer differently with the batch-invariant mode off, 3 of 12 with it on"
        in printed
    )
    assert "gate: fails; 68 places with other responses, 0 measured at one level alone\n" in printed
    made = out.read_text()
    assert "| on/1 | 9 of 12 | 9 of 12 | 0 of 12 |" in made
    assert "| on/0 | bees-24 | text, tokens, logprobs | cold: C1 of boot 0, C1 of boot 0 | token 21, tie " in made
    found = across(read_side(H200), "attention")
    assert {s.prompt for s in only(found).differing() if s.endpoint == "text" and s.cell == "on/0"} == {
        "bees-24",
        "bakery-260",
    }


def test_a_gate_passes_where_nothing_moved_and_one_endpoint_may_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "good", made({"1": CACHED, "2": CACHED}))
    assert main([good, "--across", "at_once", "--gate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: python -m d3.report {good}"
    moved = written(
        tmp_path / "moved", made({"1": {}, "2": {}}, cells=("on/0",), letters={"2": {"a": response("a", text="other")}})
    )
    assert main([moved, "--across", "at_once"]) == 0
    assert main([moved, "--across", "at_once", "--gate"]) == 1
    assert main([moved, "--across", "at_once", "--gate", "--endpoint", "tokens", "--endpoint", "logprobs"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--across", "at_once", "--junit", "x.xml"], "--across compares the strata of one certificate; leave out"),
        (["{}", "--across", "at_once"], "--across compares the strata of one certificate; leave out"),
        ([], "one certificate alone cannot be compared; name two, or the swept key of one: --across KEY"),
        (["--across", "colour"], "colour was not swept in this study; name one of: at_once"),
    ],
)
def test_wrong_use_is_one_line(tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, made({"1": {}, "2": {}}))
    assert main([path, *(w.format(path) for w in words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert len(printed.err.splitlines()) == 1


def test_sixteen_boots_at_once_on_one_gpu_give_the_hashes_of_one_alone() -> None:
    """Two committed studies asked the same: one with a boot alone on the GPU, one with sixteen side by side."""

    def heard(name: str, stratum: str, at_once: str) -> dict[tuple[str, str, str], set[str]]:
        found: dict[tuple[str, str, str], set[str]] = {}
        for boot in read_side(ROOT / "results" / name).boots:
            if boot.record.stratum == stratum:
                assert boot.record.environment["boots_at_once"] == at_once
                for r in boot.record.requests:
                    key = boot.record.cell, r.prompt, r.phase
                    found.setdefault(key, set()).add(" ".join(r.endpoint_hash(e) for e in ENDPOINTS))
        return found

    alone = heard("h200_at_once.json", "at_once=1 attention=default", "1")
    beside = heard("h200_batch.json", "attention=default concurrency=0", "16")
    assert len(alone) == 4 * 6 * 4
    assert alone == beside
