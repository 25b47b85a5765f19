"""The gate: is the new certificate worse than the old one, and what else may a reader not miss? Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from d3.cells import WORDS
from d3.comparison import DIFFERS, RATES, Comparison, Row, VerdictChange, p_value, told
from d3.record import Frozen
from d3.report.tables import count
from d3.table import Kind
from d3.verdicts import WHAT

Level = Literal["error", "warning", "notice"]

WORSE_KINDS: tuple[Kind, ...] = ("scattered", "boot")
# Readings, better first. Any other reading is worse than these, and none of the others is called worse than another:
# their rows say what moved.
RANKS = ("none", "closed_by_flag")
NOTHING = "not one place could be compared, so nothing is shown"


class Finding(Frozen):
    """A line for people. `error`: something got worse, so the gate fails; `where` names the places."""

    level: Level
    where: str
    message: str


class Group(Frozen):
    """Rows of one stratum that say the same, to be shown as one."""

    rows: tuple[Row, ...]

    @property
    def stratum(self) -> str:
        """Their stratum."""
        return self.rows[0].stratum

    @property
    def where(self) -> str:
        """Their cells, prompts and endpoints, each once; more than three are counted."""
        cells, prompts = (list(dict.fromkeys(x)) for x in zip(*((r.cell, r.prompt) for r in self.rows), strict=True))
        return f"{_some(cells, 'cells')}; {_some(prompts, 'prompts')}; {self.endpoints}"

    @property
    def endpoints(self) -> str:
        """Their endpoints in words."""
        return ", ".join(dict.fromkeys(r.endpoint for r in self.rows))


def worse(row: Row, comparison: Comparison) -> str:
    """Why a place is worse than it was; empty where it is not.

    Worse is: evidence lost (the old side measured the place, the new one is void, unavailable, absent, or asked
    something else); a first difference where there was none, however few boots show it; a boot-state or scattered
    outcome where there was none; a higher rate of boots that differ, or of boot-state or scattered ones, where the
    registered test tells the rates apart. It never becomes better by more boots that differ.
    """
    if row.change == "not_comparable":
        return "" if row.old.missing else "lost its evidence"
    if row.change == "appeared":
        return "differs where it did not"
    new_kinds = [k for k in WORSE_KINDS if row.new.boots([k]) and not row.old.boots([k])]
    if new_kinds:
        return f"a kind of difference that was not there: {', '.join(WORDS[k] for k in new_kinds)}"
    for kinds in RATES:
        higher = row.new.boots(kinds) * row.old.n > row.old.boots(kinds) * row.new.n
        if higher and told(p_value(row.old, row.new, kinds, comparison.test), comparison.level):
            return "more often" if kinds == DIFFERS else f"more often {WORDS[kinds[0]]}"
    return ""


def worse_verdict(verdict: VerdictChange) -> bool:
    """Whether NO DIVERGENCE turned into anything else, or KNOWN into anything but NO DIVERGENCE."""
    return _rank(verdict.new_reading) > _rank(verdict.old_reading)


def nothing_compared(comparison: Comparison) -> bool:
    """Whether no place could be compared at all: then the gate must not pass."""
    return all(r.change == "not_comparable" for r in comparison.rows)


def unsure(comparison: Comparison) -> bool:
    """Whether every place that got worse was measured on both sides, and none of them is told from chance."""
    bad = [r for r in comparison.rows if worse(r, comparison)]
    return bool(bad) and not any(r.p is None or told(r.p, comparison.level) for r in bad)


def passes(comparison: Comparison) -> bool:
    """Whether nothing got worse, and something could be compared."""
    return not any(f.level == "error" for f in findings(comparison))


def findings(comparison: Comparison) -> tuple[Finding, ...]:
    """All that moved, the worst first. Places that neither side measured are a warning: they pass, but not silently."""
    found = [*_general(comparison), *_verdicts(comparison), *_rows(comparison)]
    order: dict[Level, int] = {"error": 0, "warning": 1, "notice": 2}
    return tuple(sorted(found, key=lambda f: order[f.level]))


def groups(comparison: Comparison, rows: Sequence[Row]) -> list[Group]:
    """Rows that say the same in one: of a place over its endpoints, and of all places where nothing is comparable."""

    def key(row: Row) -> tuple[str, ...]:
        if row.change == "not_comparable":
            return row.stratum, "", "", row.change, row.why, worse(row, comparison)
        return row.stratum, row.cell, row.prompt, row.change, row.why, sides(row), worse(row, comparison)

    first = {key(row): i for i, row in reversed(list(enumerate(rows)))}
    return [Group(rows=tuple(g)) for _, g in groupby(sorted(rows, key=lambda r: first[key(r)]), key)]


def sides(row: Row) -> str:
    """`0 / 6 [0%, 46%] -> 6 / 6 [54%, 100%]`, with the causes where they differ."""
    return " -> ".join(count(e.counts) if e.counts else "absent" for e in (row.old, row.new)) + causes(row)


def causes(row: Row) -> str:
    """The kinds of difference on both sides where they are not the same; empty where one side has none."""
    old, new = row.old.causes(), row.new.causes()
    if not old or not new or old == new:
        return ""
    return f" ({' and '.join(WORDS[k] for k in old)} -> {' and '.join(WORDS[k] for k in new)})"


def _rows(comparison: Comparison) -> Iterator[Finding]:
    for group in groups(comparison, [r for r in comparison.rows if r.change != "same"]):
        row = group.rows[0]
        why = worse(row, comparison)
        where = f"{group.stratum}: {group.where}"
        if row.change == "not_comparable":
            level: Level = "error" if why else "warning" if row.new.missing else "notice"
            message = f"{why or 'nothing to compare'}; {row.why}"
        else:
            level = "error" if why else "notice"
            message = "; ".join(x for x in (f"{row.change} {sides(row)}", why, row.why) if x)
        yield Finding(level=level, where=where, message=message)


def _verdicts(comparison: Comparison) -> Iterator[Finding]:
    for v in comparison.verdicts:
        if v.changed or v.new_reading == "void":
            level: Level = "error" if worse_verdict(v) else "notice" if v.changed else "warning"
            message = (
                f"verdict {v.old_disposition} -> {v.new_disposition}" if v.changed else f"still {v.new_disposition}"
            )
            yield Finding(level=level, where=f"{v.stratum}: {WHAT[v.endpoint]}", message=message)


def _general(comparison: Comparison) -> Iterator[Finding]:
    if nothing_compared(comparison):
        yield Finding(level="error", where="gate", message=NOTHING)
    for words in comparison.broken_controls:
        yield Finding(level="error", where="controls", message=words)


def _rank(reading: str) -> int:
    return RANKS.index(reading) if reading in RANKS else len(RANKS)


def _some(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} {what}"
