"""A comparison for people: tables for the terminal, and Markdown. Pure; nothing is said by colour alone."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from d3.comparison import Change, Comparison, Row
from d3.errors import printable
from d3.gate import Finding, Group, causes, findings, groups, nothing_compared, worse, worse_verdict
from d3.registration import short
from d3.report.markdown import escape, markdown_table
from d3.report.tables import count
from d3.upgrade import cell_changes
from d3.verdicts import WHAT

HEADER = ("cell", "prompt", "endpoints", "old", "new", "change", "how sure")
FACTS = ("fact", "old", "new")
WORDS: dict[Change, str] = {
    "same": "the same",
    "appeared": "appeared",
    "went": "went",
    "changed": "changed",
    "not_comparable": "not comparable",
}
BY_CELL = "Prompts whose first request differs, old -> new, and places (prompt x endpoint) with identical responses"
LEGEND = "Boots where the first request differs and the rest agree, of valid boots, with the interval."


def terminal(comparison: Comparison) -> Iterator[str | Table]:
    """What changed, what could not be compared, the verdicts, and what differs around the two.

    Only what stands inside a table is wrapped: a CI runner takes a line that begins with `::` for a command, and names
    and reasons come from a file.
    """
    if comparison.note:
        yield comparison.note
    for stratum, rows in _changed(comparison):
        yield printable(f"changed in {stratum}:")
        yield terminal_table(HEADER, rows)
        yield LEGEND
    yield from map(printable, _lines(comparison))
    yield f"{BY_CELL}:"
    yield terminal_table(*_by_cell(comparison))
    for title, facts in _facts(comparison):
        yield f"{title}:"
        yield terminal_table(FACTS, facts)


def markdown(comparison: Comparison, old: str, new: str) -> str:
    """The same as Markdown. `old`, `new`: the names of the two files."""
    return "\n".join(_markdown(comparison, old, new)) + "\n"


def gate_line(comparison: Comparison) -> str:
    """The gate's answer in one line."""
    if nothing_compared(comparison):
        return "gate: fails; not one place could be compared"
    errors = [f for f in findings(comparison) if f.level == "error"]
    if not errors:
        return "gate: passes; nothing got worse"
    places = many(sum(bool(worse(r, comparison)) for r in comparison.rows), "place")
    verdicts = many(sum(map(worse_verdict, comparison.verdicts)), "verdict")
    return f"gate: fails; worse: {places}, {verdicts}, {many(len(comparison.broken_controls), 'control')}"


def _changed(comparison: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    moved = [r for r in comparison.rows if r.change not in {"same", "not_comparable"}]
    for stratum in dict.fromkeys(r.stratum for r in moved):
        found = groups(comparison, [r for r in moved if r.stratum == stratum])
        yield stratum, [_cells(comparison, group) for group in found]


def _cells(comparison: Comparison, group: Group) -> list[str]:
    row = group.rows[0]
    old, new = (count(e.counts) if e.counts else "absent" for e in (row.old, row.new))
    why = worse(row, comparison)
    reason = "" if row.change == "appeared" else f": {why}"
    change = f"{WORDS[row.change]}{causes(row)}" + (f"; WORSE{reason}" if why else "")
    return [row.cell, row.prompt, group.endpoints, old, new, change, row.why or "the rate is the same"]


def _lines(comparison: Comparison) -> Iterator[str]:
    yield _summary(comparison.rows)
    yield from _responses(comparison.rows)
    for finding in findings(comparison):
        if not _in_table(finding):
            yield f"{finding.level}: {finding.where}: {finding.message}"
    settled = [v for v in comparison.verdicts if not v.changed]
    if settled:
        what = [f"{v.stratum} {WHAT[v.endpoint]} {v.new_disposition}" for v in settled]
        yield f"verdicts that stay: {'; '.join(what)}"


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter(r.change for r in rows)
    words = ", ".join(f"{counts[c]} {WORDS[c]}" for c in WORDS if counts[c])
    return f"{many(len(rows), 'place')} (cell x prompt x endpoint): {words}"


def _responses(rows: Sequence[Row]) -> Iterator[str]:
    """Rates can stay while the answers themselves became others."""
    known = [r for r in rows if r.responses != "unknown"]
    other = Counter(r.endpoint for r in known if r.responses == "other")
    if known:
        words = f": {', '.join(f'{n} of {e}' for e, n in other.items())}" if other else ""
        yield f"responses: other ones in {sum(other.values())} of {many(len(known), 'place')}{words}"


def _by_cell(comparison: Comparison) -> tuple[tuple[str, ...], list[list[str]]]:
    """Header and rows: what became of every cell; the verdicts stand in each stratum's first row."""
    endpoints = dict.fromkeys(r.endpoint for r in comparison.rows)
    rows, named = [], set[str]()
    for change in cell_changes(comparison):
        counts = [f"{d.old} -> {d.new} of {d.prompts}" if d.prompts else "not comparable" for d in change.differs]
        identical = f"{change.identical} of {change.known}" if change.known else "not comparable"
        first = change.stratum not in named
        named.add(change.stratum)
        verdicts = _verdicts(comparison, change.stratum) if first else ""
        rows.append([change.stratum, change.cell, *counts, identical, verdicts])
    return ("stratum", "cell", *endpoints, "responses identical", "verdict"), rows


def _verdicts(comparison: Comparison, stratum: str) -> str:
    """`KNOWN -> OPEN GAP`, once where all endpoints agree."""
    said: dict[str, list[str]] = {}
    for v in (v for v in comparison.verdicts if v.stratum == stratum):
        words = f"{v.old_disposition} -> {v.new_disposition}"
        said.setdefault(words, []).append(v.endpoint)
    return next(iter(said)) if len(said) == 1 else "; ".join(f"{', '.join(e)}: {words}" for words, e in said.items())


def _in_table(finding: Finding) -> bool:
    return finding.message.split(" ")[0] in {"appeared", "went", "changed"}


def _facts(comparison: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    for title, facts in (
        ("registered otherwise", comparison.registration),
        ("engine and machine", comparison.environment),
    ):
        if facts:
            yield title, [[f.name, _digest(f.old), _digest(f.new)] for f in facts]


def _digest(text: str) -> str:
    """The first digits of a SHA-256 name it well enough; other text stays."""
    return short(text) if re.fullmatch("[0-9a-f]{64}", text) else text


def terminal_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column keeps its words whole."""
    shown = Table()
    for i, name in enumerate(header):
        shown.add_column(Text(name), overflow="fold", no_wrap=not i)
    for row in rows:
        shown.add_row(*(Text(printable(x)) for x in row))
    return shown


def _markdown(comparison: Comparison, old: str, new: str) -> Iterator[str]:
    yield f"# D3: {escape(printable(new))} against {escape(printable(old))}"
    yield from ("", f"**{gate_line(comparison)}**", "")
    if comparison.note:
        yield from (f"{comparison.note[0].upper()}{comparison.note[1:]}.", "")
    for stratum, rows in _changed(comparison):
        yield from markdown_section(f"Changed in {stratum}", HEADER, rows)
        yield from (LEGEND, "")
    yield from (f"- {escape(printable(line))}" for line in _lines(comparison))
    yield ""
    yield from markdown_section(BY_CELL, *_by_cell(comparison))
    for title, facts in _facts(comparison):
        yield ""
        yield from markdown_section(title.capitalize(), FACTS, facts)


def markdown_section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A heading and a table below it."""
    yield from (f"## {escape(printable(title))}", "")
    yield from (*markdown_table(header, [[printable(x) for x in row] for row in rows], align="---"), "")


def many(n: int, what: str) -> str:
    """`1 place`, `2 places`."""
    return f"{n} {what}{'s' * (n != 1)}"
