"""Where two responses to one request part: the first token, and how close a choice it was."""

import math
from collections.abc import Sequence
from typing import Literal

from d3.record import Frozen, Response

Flip = Literal["tie", "confident", "unknown", "none"]


class Divergence(Frozen):
    """How a later response parts from the first one of its boot.

    `position`: the first token that differs, from 0; None where no token does or the engine reports none.
    `flip`: tie (rounding can do it), confident (points to a logic bug), none (no token differs).
    `max_dlogprob`: the largest difference of log-probabilities over the tokens before `position`.
    """

    position: int | None
    first_token: int | None
    later_token: int | None
    first_gap: float | None
    later_gap: float | None
    flip: Flip
    logprob_position: int | None
    max_dlogprob: float | None
    first_tokens: int
    later_tokens: int


def diverge(first: Response, later: Response, tie_gap: float) -> Divergence:
    """Compare two responses; `tie_gap` is the registered gap up to which a flip counts as a tie."""
    a, b = first.token_ids, later.token_ids
    moved = drift(first, later)
    common = len(moved)
    position = common if common < max(len(a), len(b)) else None
    gaps = (None, None) if position is None else (_known(first.gaps, position), _known(later.gaps, position))
    sizes = [x for x in moved if x is not None]
    return Divergence(
        position=position,
        first_token=a[position] if position is not None and position < len(a) else None,
        later_token=b[position] if position is not None and position < len(b) else None,
        first_gap=gaps[0],
        later_gap=gaps[1],
        flip="none" if position is None else flip(*gaps, tie_gap),
        logprob_position=next((i for i, x in enumerate(moved) if x), None),
        max_dlogprob=max(sizes, default=None),
        first_tokens=len(a),
        later_tokens=len(b),
    )


def drift(first: Response, later: Response) -> list[float | None]:
    """|difference of log-probabilities| per token, up to the first token that differs; None where one is unknown."""
    a, b = first.token_ids, later.token_ids
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return [_moved(first.logprobs, later.logprobs, i) for i in range(common)]


def flip(first_gap: float | None, later_gap: float | None, tie_gap: float) -> Flip:
    """A tie when both sides were within the registered gap; confident when one was not; unknown without the gaps."""
    if any(gap is not None and gap > tie_gap for gap in (first_gap, later_gap)):
        return "confident"
    return "unknown" if first_gap is None or later_gap is None else "tie"


def _known(values: Sequence[float | None], i: int) -> float | None:
    """A finite number at that place, or None: engines report NaN, infinities and gaps in the list."""
    value = values[i] if i < len(values) else None
    return value if value is not None and math.isfinite(value) else None


def _moved(a: Sequence[float | None], b: Sequence[float | None], i: int) -> float | None:
    x, y = _known(a, i), _known(b, i)
    return None if x is None or y is None else abs(x - y)
