"""Differing texts side by side, cut where they part. Pure.

Only token ids and the whole text are recorded, no text per token: the first differing character is marked, and the
token is named by its position and ids.
"""

from collections.abc import Sequence

from d3 import errors
from d3.record import Boot, Frozen, Response
from d3.schema import Stratum
from d3.table import Pair

MOST = 12  # pairs that one stratum shows; a sampled one can have hundreds
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", " ": "␣", "\r": "␍"}


class Side(Frozen):
    """One text: what both share, the first differing character made visible, and the rest."""

    title: str
    shared: str
    mark: str
    rest: str


class Difference(Frozen):
    """Two responses of one boot that differ in their bytes."""

    cell: str
    prompt: str
    boots: int
    where: str
    first: Side
    later: Side


def differences(stratum: Stratum, boots: Sequence[Boot]) -> tuple[list[Difference], int]:
    """The pairs of a stratum whose texts differ, at most `MOST`, and how many more there are."""
    responses = {key: response for boot in boots for key, response in boot.responses.items()}
    found = [
        _difference(cell.key, prompt.prompt, pair, responses[pair.first], responses[pair.later])
        for cell in stratum.cells
        for prompt in cell.prompts
        for pair in prompt.divergences
        if responses[pair.first].text != responses[pair.later].text
    ]
    return found[:MOST], len(found) - len(found[:MOST])


def _difference(cell: str, prompt: str, pair: Pair, first: Response, later: Response) -> Difference:
    a, b = first.text, later.text
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    d = pair.divergence
    if d.position is None:
        where = "no token differs" if d.first_tokens else "the engine reports no token ids"
    else:
        ids = ["the end" if t is None else f"id {t}" for t in (d.first_token, d.later_token)]
        where = f"token {d.position} (counted from 0): {ids[0]} in the first answer, {ids[1]} later"
    return Difference(
        cell=cell,
        prompt=prompt,
        boots=pair.boots,
        where=f"{where}; character {same}",
        first=_side("First answer", a, same),
        later=_side("Later answer", b, same),
    )


def _side(title: str, text: str, same: int) -> Side:
    mark = text[same : same + 1]
    return Side(
        title=title,
        shared=printable(text[:same]),
        mark=VISIBLE.get(mark) or printable(mark) or "∎",
        rest=printable(text[same + 1 :]),
    )


def printable(text: str) -> str:
    """Text that a browser shows as it is: control characters and lone surrogates as escapes, line ends stay."""
    return errors.printable(text, keep="\n\t")
