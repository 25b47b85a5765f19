"""The certificate's tables and their words, the same for Markdown, terminal, page and draft post. Pure."""

from collections.abc import Iterable, Sequence

from d3.divergence import Divergence
from d3.record import ENDPOINTS, Endpoint, Frozen
from d3.schema import Stratum
from d3.table import CellResult, Counts, PromptResult
from d3.verdicts import WHAT

WIDE = 4  # prompts that a table still shows as columns

COLD = {
    "L0": "new container",
    "L1": "fresh process, warm disk caches",
    "none": "not booted: an endpoint that was running already",
    "L2": "fork of a process that had only imported",
    "L3": "restored snapshot, never evidence",
}


class Row(Frozen):
    """One row of a table: its name, a note on it, and the counts of every column."""

    name: str
    note: str
    counts: tuple[Counts, ...]


class Grid(Frozen):
    """The seed's own table: one row per cell and one column per prompt.

    With more prompts than a screen is wide, the rows are the prompts and the columns the cells. A column is its name
    and a note on it.
    """

    corner: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def grid(stratum: Stratum, endpoint: Endpoint) -> Grid:
    """The counts of one stratum at one endpoint, as they are shown."""
    lengths = {p.prompt: p.prompt_tokens for cell in stratum.cells for p in cell.prompts if p.prompt_tokens}
    prompts = tuple((p.prompt, f"({lengths.get(p.prompt, '?')} tokens)") for p in stratum.cells[0].prompts)
    cells = tuple((cell_name(c), "") for c in stratum.cells)
    counts = [[counts_of(p, endpoint) for p in cell.prompts] for cell in stratum.cells]
    if len(prompts) <= WIDE:
        return Grid(corner="cell", columns=prompts, rows=_rows(cells, counts))
    return Grid(corner="prompt", columns=cells, rows=_rows(prompts, zip(*counts, strict=True)))


def _rows(names: Sequence[tuple[str, str]], counts: Iterable[Iterable[Counts]]) -> tuple[Row, ...]:
    return tuple(Row(name=n, note=note, counts=tuple(c)) for (n, note), c in zip(names, counts, strict=True))


def table(stratum: Stratum, endpoint: Endpoint) -> tuple[list[str], list[list[str]]]:
    """The same as text: a header, and the rows."""
    found = grid(stratum, endpoint)
    header = [found.corner, *(f"{name} {note}".strip() for name, note in found.columns)]
    return header, [[f"{r.name} {r.note}".strip(), *(count(k) for k in r.counts)] for r in found.rows]


def counts_of(prompt: PromptResult, endpoint: Endpoint) -> Counts:
    """The counts of one cell and prompt at one endpoint."""
    return next(k for k in prompt.counts if k.endpoint == endpoint)


def cell_name(cell: CellResult) -> str:
    """A cell as a reader of a table sees it."""
    return f"APC {cell.factors['apc']}, invariant {cell.factors['invariant']}"


def count(counts: Counts) -> str:
    """k of n boots with the interval, and what else there was."""
    if not counts.n:
        return "void" if counts.void else "no boot"
    scattered = f", {counts.scattered} scattered" if counts.scattered else ""
    return f"{counts.k} / {counts.n} {interval(counts)}{scattered}"


def interval(counts: Counts) -> str:
    """The interval on k of n."""
    return f"[{counts.interval.low:.0%}, {counts.interval.high:.0%}]"


def gaps(divergence: Divergence) -> str:
    """The gap of the top two on both sides, where tokens part."""
    return " and ".join("unknown" if g is None else f"{g:.3g}" for g in (divergence.first_gap, divergence.later_gap))


def same(stratum: Stratum, one: Endpoint, other: Endpoint) -> bool:
    """Whether two endpoints tell the same story, so that one section shows both."""
    readings = stratum.verdict(one).readings == stratum.verdict(other).readings
    return readings and table(stratum, one) == table(stratum, other)


def stories(stratum: Stratum) -> list[tuple[Endpoint, str]]:
    """The endpoints that are shown, each with the name of those that tell the same story."""
    groups: list[list[Endpoint]] = []
    for endpoint in ENDPOINTS:
        like = next((g for g in groups if same(stratum, g[0], endpoint)), None)
        if like:
            like.append(endpoint)
        else:
            groups.append([endpoint])
    return [(g[0], _together([WHAT[e] for e in g])) for g in groups]


def _together(names: list[str]) -> str:
    *most, last = names
    return (f"{', '.join(most)} and {last} alike" if most else last).capitalize()
