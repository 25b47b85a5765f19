"""Two certificates of one study at two versions, cell by cell and stratum by stratum, from their comparison. Pure."""

from collections.abc import Iterator

from d3.comparison import Comparison, Row
from d3.record import Endpoint, Frozen


class Differs(Frozen):
    """Of `prompts` that both sides measured: how many have a first request that differs in some boot, old and new."""

    endpoint: Endpoint
    old: int
    new: int
    prompts: int


class CellChange(Frozen):
    """One cell of one stratum on both sides.

    `identical` of `known` places (prompt, endpoint) have the same set of cold and the same set of warm responses.
    """

    stratum: str
    cell: str
    differs: tuple[Differs, ...]
    identical: int
    known: int


def cell_changes(comparison: Comparison) -> tuple[CellChange, ...]:
    """Every cell that either side has, in the comparison's order."""
    return tuple(_cells(comparison))


def _cells(comparison: Comparison) -> Iterator[CellChange]:
    endpoints = dict.fromkeys(r.endpoint for r in comparison.rows)
    for stratum, cell in dict.fromkeys((r.stratum, r.cell) for r in comparison.rows):
        rows = [r for r in comparison.rows if (r.stratum, r.cell) == (stratum, cell)]
        known = [r for r in rows if r.responses != "unknown"]
        yield CellChange(
            stratum=stratum,
            cell=cell,
            differs=tuple(_differs(e, [r for r in rows if r.endpoint == e]) for e in endpoints),
            identical=sum(r.responses == "same" for r in known),
            known=len(known),
        )


def _differs(endpoint: Endpoint, rows: list[Row]) -> Differs:
    both = [r for r in rows if r.change != "not_comparable"]
    return Differs(
        endpoint=endpoint,
        old=sum(r.old.boots() > 0 for r in both),
        new=sum(r.new.boots() > 0 for r in both),
        prompts=len(both),
    )
