"""A comparison of strata for people: on the terminal, and as Markdown. Pure; nothing is said by colour alone."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from d3.across import Across, Pairing, Parting, Spot
from d3.comparison_report import many, markdown_section, terminal_table
from d3.errors import printable
from d3.record import Endpoint, Frozen
from d3.report.markdown import escape

SHOWN = 10  # places that differ; the rest is counted
PARTS = ("cell", "prompt", "endpoints", "requests", "where they part")


class Shown(Frozen):
    """A table with its title."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def terminal(found: Across) -> Iterator[str | Table]:
    """Per pair of levels what is the same, by cell, and the first places that are not."""
    for block in _blocks(found):
        if isinstance(block, Shown):
            yield f"{printable(block.title)}:"
            yield terminal_table(block.header, block.rows)
        else:
            yield printable(block)


def markdown(found: Across, file: str) -> str:
    """The same as Markdown. `file`: the certificate's name."""
    lines = [f"# D3: {escape(printable(file))} across {escape(printable(found.key))}", ""]
    for block in _blocks(found):
        if isinstance(block, Shown):
            lines += ["", *markdown_section(block.title, block.header, block.rows)]
        else:
            lines.append(f"- {escape(printable(block))}")
    return "\n".join(lines) + "\n"


def gate_line(found: Across) -> str:
    """The gate's answer in one line."""
    places = sum(len(p.differing()) for p in found.pairings)
    lost = sum(s.lost for p in found.pairings for s in p.spots)
    if not any(p.compared() for p in found.pairings):
        return "gate: fails; not one place could be compared"
    if found.same():
        return f"gate: passes; no level of {found.key} changes a response"
    return f"gate: fails; {many(places, 'place')} with other responses, {lost} measured at one level alone"


def conclusion(pairing: Pairing) -> str:
    """Whether two levels give the same responses, and what follows from it."""
    compared, differing = len(pairing.compared()), len(pairing.differing())
    pair = f"{pairing.key}={pairing.level} against {pairing.base}, {pairing.stratum}"
    if not compared:
        return f"{pair}: nothing to compare, {pairing.spots[0].why}" if pairing.spots else f"{pair}: nothing to compare"
    if differing:
        sound = f"; {pairing.level} at once is not sound for this stratum" if pairing.key == "at_once" else ""
        return f"{pair}: other responses in {differing} of {many(compared, 'place')}{sound}"
    if lost := sum(s.lost for s in pairing.spots):
        return f"{pair}: the same hashes in {many(compared, 'place')}, {lost} measured at one level alone"
    sound = f": {pairing.level} at once is sound for this stratum" if pairing.key == "at_once" else ""
    return f"{pair}: the same hashes cell by cell, in {compared} of {many(compared, 'place')}{sound}"


def _blocks(found: Across) -> Iterator[str | Shown]:
    for pairing in found.pairings:
        yield conclusion(pairing)
        yield from _modes(pairing)
        yield f"{many(pairing.base_boots, 'boot')} at {pairing.base}, {pairing.boots} at {pairing.level}"
        if varying := [s for s in pairing.differing() if s.varies]:
            words = f"the boots of one level differ among themselves, so {pairing.key} alone may not be why"
            yield f"in {len(varying)} of these places {words}"
        for why, spots in groupby(sorted(pairing.spots, key=lambda s: s.why), key=lambda s: s.why):
            if why:
                yield f"not comparable: {many(len(list(spots)), 'place')}: {why}"
        if pairing.compared():
            yield _by_cell(pairing)
        if pairing.differing():
            yield _parts(pairing)


def _modes(pairing: Pairing) -> Iterator[str]:
    """What the batch-invariant mode does to it, where the study has cells with and without the mode."""
    spots = pairing.compared()
    if len({_mode(s) for s in spots}) < 2 or not pairing.differing():
        return
    said: dict[str, list[Endpoint]] = {}
    for endpoint in dict.fromkeys(s.endpoint for s in spots):
        each = [_prompts([s for s in spots if s.endpoint == endpoint and _mode(s) == mode]) for mode in ("off", "on")]
        words = f"{each[0]} prompts answer differently with the batch-invariant mode off, {each[1]} with it on"
        said.setdefault(words, []).append(endpoint)
    beside = f"beside {pairing.level} others" if pairing.key == "concurrency" else f"at {pairing.key}={pairing.level}"
    for words, endpoints in said.items():
        yield f"{beside}, {', '.join(endpoints)}: {words}"


def _mode(spot: Spot) -> str:
    return "off" if spot.cell.rpartition("/")[2] == "0" else "on"


def _prompts(spots: Sequence[Spot]) -> str:
    """`3 of 6`: the prompts with a place that differs, of those with a place."""
    return f"{len({s.prompt for s in spots if s.responses == 'other'})} of {len({s.prompt for s in spots})}"


def _by_cell(pairing: Pairing) -> Shown:
    endpoints = tuple(dict.fromkeys(s.endpoint for s in pairing.spots))
    rows = []
    for cell in dict.fromkeys(s.cell for s in pairing.spots):
        mine = [s for s in pairing.compared() if s.cell == cell]
        rows.append((cell, *(_same([s for s in mine if s.endpoint == e]) for e in endpoints)))
    title = f"prompts with the same responses, {pairing.key}={pairing.level} against {pairing.base}, {pairing.stratum}"
    return Shown(title=title, header=("cell", *endpoints), rows=tuple(rows))


def _same(spots: Sequence[Spot]) -> str:
    return f"{sum(s.responses == 'same' for s in spots)} of {len(spots)}" if spots else "not comparable"


def _parts(pairing: Pairing) -> Shown:
    """The first places that differ, those with another token before the rest; endpoints that part alike in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for spot in pairing.differing():
        for parting in spot.partings:
            requests = f"{parting.expect}: {parting.base_phase}, {parting.phase}"
            rows.setdefault((spot.cell, spot.prompt, requests, where(parting, spot.endpoint)), []).append(spot.endpoint)
    first = sorted(rows.items(), key=lambda row: not row[0][3].startswith("token"))[:SHOWN]
    shown = [(c, p, ", ".join(endpoints), r, w) for (c, p, r, w), endpoints in first]
    title = f"the first {SHOWN} of {len(rows)} that differ" if len(rows) > SHOWN else "where they differ"
    return Shown(title=title, header=PARTS, rows=tuple(shown))


def where(parting: Parting, endpoint: Endpoint) -> str:
    """The position of the first token that differs, with how close a choice it was; without one, what moved."""
    found = parting.divergence
    if found.position is not None:
        gaps = [f"{gap:.3g}" if gap is not None else "unknown" for gap in (found.first_gap, found.later_gap)]
        return f"token {found.position}, {found.flip} (top two {gaps[0]} and {gaps[1]} apart)"
    if endpoint != "text" and found.logprob_position is not None:
        return f"no token; log-probabilities from token {found.logprob_position}, by up to {found.max_dlogprob:.2g}"
    if parting.character is not None:
        return f"no token; character {parting.character} of the text"
    return "no token and no known log-probability"
