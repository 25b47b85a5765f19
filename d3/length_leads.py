"""What the thresholds of prompt lengths suggest, in sentences. Pure.

A threshold is a lead to a mechanism, and no more is said: each sentence hangs on a condition on the counts.
"""

from collections.abc import Iterator, Sequence

from d3.length_table import Point, Remainder, Series, Threshold, remainders, threshold
from d3.record import ENDPOINTS

PIECES = (1024, 512, 256, 128, 64, 32, 16)  # tokens: sizes of tiles, splits and cache blocks that kernels use
TESTS = """\
What would test a lead:

- Another cache block size (`--block-size` in the engine's YAML), the same lengths. A step that belongs to the tokens
  left after the cached blocks moves with it, one that belongs to the length does not.
- Another attention backend (`attention=...`, where the engine's YAML has levels). A step that goes or moves with it
  belongs to attention, one that stays to something else: a matrix product or a norm.
- The suspected kernel alone, on random tensors of the lengths on either side of the step. Only this shows the cause.
"""


def many(n: int, noun: str) -> str:
    """'1 boot', '2 boots'."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def finest(found: Sequence[Series]) -> Iterator[Series]:
    """One series per cell: by log-probabilities, or by tokens, or bytes, where the engine reports no finer thing.

    A token differs only where two candidates nearly tie, so its lengths say more of the prompts than of the engine.
    """
    for place in dict.fromkeys((s.stratum, s.cell) for s in found):
        own = [s for s in found if (s.stratum, s.cell) == place and s.answered]
        yield from sorted(own, key=lambda s: max(map(ENDPOINTS.index, s.endpoints)))[-1:]


def leads(one: Series) -> Iterator[str]:
    """What the thresholds of one cell suggest, in sentences; nothing where nothing differs."""
    t = threshold(one.points)
    if t.first is None:
        return
    if not one.cached:
        yield "with the cache off both requests do the same work, so it is not the cache that differs: see the boots."
        return
    some, never = by_remainder(one.points, t)
    if not some:
        yield from _by_length(one.points)
        return
    answered, parted = sum(g.answered for g in some), sum(g.parted for g in some)
    until = "" if t.always is None else f" and below {t.always}"
    yield (
        f"from {t.first} tokens on{until}, {parted} of {answered} pairs of prompt and boot part with {_numbers(some)} "
        f"left after the cached blocks, and none with {_numbers(never)}. A warm request computes only those, so a "
        "kernel chosen by how many there are would do this."
    )
    left = {g.remainder for g in some}
    rest = [p for p in one.points if p.hit is None or p.tokens - p.hit not in left]
    if threshold(rest).first is not None:
        yield " ".join(["With any other number left:", *_by_length(rest)])


def by_remainder(points: Sequence[Point], t: Threshold) -> tuple[list[Remainder], list[Remainder]]:
    """The remainders with which some pairs differ, and those with which none does; none of both without a clean split.

    `t`: the threshold of these points. Looked at between its two lengths, as every pair parts beyond them whatever is
    left. A remainder that was run at one length only is none to judge by: where one differs, there is no split.
    """
    window = [p for p in points if t.always is None or p.tokens < t.always]
    groups = remainders(window, t.first or 0)
    some = [g for g in groups if g.parted or g.other]
    never = [g for g in groups if not (g.parted or g.other) and g.lengths > 1]
    return (some, never) if some and never and all(g.lengths > 1 for g in some) else ([], [])


def _by_length(points: Sequence[Point]) -> Iterator[str]:
    t = threshold(points)
    yield _step(t)
    beyond = [p for p in points if t.first is not None and p.tokens >= t.first]
    answered, parted = sum(p.answered for p in beyond), sum(p.parted for p in beyond)
    if t.always == t.first:
        yield f"From there on every prompt parts ({many(t.above, 'length')})."
        return
    every = "" if t.always is None else f", and from {t.always} tokens on all do ({many(t.above, 'length')})"
    yield f"From there on {parted} of {answered} pairs of prompt and boot part{every}: length alone does not decide."


def _step(t: Threshold) -> str:
    if t.first is None or t.clean is None:
        return f"parts at the shortest length already, {t.first} tokens: a threshold would lie below."
    if t.first - t.clean > 1:
        return f"a step between {t.clean} and {t.first} tokens; prompts cut to lengths between would place it."
    for edge, place in ((t.clean, "just past"), (t.first, "at")):
        if piece := next((n for n in PIECES if edge % n == 0), None):
            return (
                f"a step from {t.clean} to {t.first} tokens, {place} a multiple of {piece}, as work cut into pieces of "
                f"{piece} tokens (a tile, a split of the keys) would have it; chance could too, in so few prompts."
            )
    return (
        f"a step from {t.clean} to {t.first} tokens, at no multiple of 16, so no piece of a fixed size suggests itself."
    )


def _numbers(groups: Sequence[Remainder]) -> str:
    *others, last = (str(g.remainder) for g in groups)
    return f"{', '.join(others)} or {last} tokens" if others else many(int(last), "token")
