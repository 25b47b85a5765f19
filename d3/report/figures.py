"""Plots as inline SVG, by matplotlib's SVG writer. Pure: equal numbers give equal bytes.

Colours are drawn as placeholders and become CSS variables of the page, so that one figure serves light, dark and print.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from d3.record import Frozen
from d3.report.numbers import Drift, Part

SIZE = (5.0, 3.1)  # inches: narrow, so that its text stays readable on a page 400 pixels wide
CROWD = 4  # lines of one cell above which the largest is drawn over them
INK, FAINT = "#010203", "#040506"
# Cell, placeholder, CSS variable, marker, dashes: told apart by colour, marker and line.
CELLS = {
    "on/0": ("#a00001", "o", "-"),
    "on/1": ("#a00002", "s", "--"),
    "off/0": ("#a00003", "^", ":"),
    "off/1": ("#a00004", "D", "-."),
}
NAMES = {
    "on/0": "cache on, mode off",
    "on/1": "cache on, mode on",
    "off/0": "cache off, mode off",
    "off/1": "cache off, mode on",
}
FLIPS = {"tie": ("#a00005", "o"), "confident": ("#a00006", "^"), "unknown": (INK, "s"), "none": (INK, "x")}
VARIABLES = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    "#a00001": "var(--on0)",
    "#a00002": "var(--on1)",
    "#a00003": "var(--off0)",
    "#a00004": "var(--off1)",
    "#a00005": "var(--tie)",
    "#a00006": "var(--confident)",
}


class Plot(Frozen):
    """A figure: `read` says in one line how to read it, `alt` what it shows; `svg` is markup that needs no escaping.

    Where there is nothing to draw, `svg` is empty and `read` says so.
    """

    title: str
    read: str
    alt: str = ""
    svg: str = ""


def plots(drifts: Sequence[Drift], parts: Sequence[Part], tie_gap: float) -> list[Plot]:
    """All figures of one stratum; the one over prompt lengths only where three or more were run."""
    with mpl.rc_context():  # whatever the user's own matplotlibrc says
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "d3", "font.size": 10.5, "text.parse_math": False})
        found = [_drift(drifts), _gap(parts, tie_gap), _position(parts)]
        lengths = {d.prompt_tokens for d in drifts}
        return [*found, _length(drifts)] if len(lengths) > 2 else found


def _drift(drifts: Sequence[Drift]) -> Plot:
    title = "How far the numbers move from cold to warm"
    moved = [d for d in drifts if d.largest > 0]
    if not moved:
        nothing = (
            "no log-probability could be compared" if not drifts else "every log-probability is the same, bit by bit"
        )
        return Plot(title=title, read=f"Nothing to draw: from cold to warm {nothing}.")
    figure, axes = _axes("token position in the answer (from 0)", "max |Δ log-probability| (nats)")
    for cell in dict.fromkeys(d.cell for d in moved):
        colour, marker, line = _cell(cell)
        own = [d for d in moved if d.cell == cell]
        crowd = len(own) > CROWD
        for i, d in enumerate(own):
            label = NAMES.get(cell, cell) if i == 0 and not crowd else None
            axes.plot(range(len(d.by_token)), d.by_token, line, color=colour, lw=0.7 if crowd else 1.2,
                      alpha=0.35 if crowd else 1, label=label)  # fmt: skip
            if d.parts_at is not None and d.by_token:
                axes.plot(len(d.by_token) - 1, d.by_token[-1], marker, color=colour, ms=7)
        if crowd:
            largest = [max(x) for x in zip_longest(*(d.by_token for d in own), fillvalue=0.0)]
            axes.plot(range(len(largest)), largest, line, color=colour, lw=1.8, label=NAMES.get(cell, cell))
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    most = max(moved, key=lambda d: d.largest)
    many = any(n > CROWD for n in Counter(d.cell for d in moved).values())
    lines = "One thin line per prompt, the thick one is the largest of all" if many else "One line per prompt"
    ends = " A large marker ends a line where the texts part." if any(d.parts_at is not None for d in moved) else ""
    return Plot(
        title=title,
        read=f"{lines}: how much the log-probability of the same chosen token differs "
        f"between a cold and a warm request, the largest of all boots; 0 means bit-equal.{ends}",
        alt=f"{len(moved)} lines, cells {_list(d.cell for d in moved)}; the largest is {most.largest:.3g}, "
        f"{most.prompt} in {most.cell}",
        svg=_svg(figure),
    )


def _gap(parts: Sequence[Part], tie_gap: float) -> Plot:
    title = "Was the choice close where the answers part?"
    known = [p for p in parts if p.gap is not None and p.before is not None]
    if not known:
        nothing = "no token differs" if not parts else "the engine reports no gap where tokens differ"
        return Plot(title=title, read=f"Nothing to draw: {nothing}.")
    figure, axes = _axes("max |Δ log-probability| before it (nats)", "gap of the top two (nats)")
    axes.axhline(tie_gap, color=INK, lw=1, ls="--")
    axes.annotate(f"tie up to {tie_gap:g}", (0.01, tie_gap), xycoords=("axes fraction", "data"), color=INK,
                  xytext=(0, 3), textcoords="offset points", fontsize=9)  # fmt: skip
    for flip in dict.fromkeys(p.flip for p in known):
        colour, marker = FLIPS[flip]
        own = [p for p in known if p.flip == flip]
        x, y = [p.before or 0.0 for p in own], [p.gap or 0.0 for p in own]
        axes.plot(x, y, marker, color=colour, ms=9, ls="none", label=f"{flip} flip", clip_on=False)
    top = max([p.gap or 0.0 for p in known] + [tie_gap])
    axes.set_ylim(0, top * 1.25)
    axes.set_xlim(0, max(p.before or 0.0 for p in known) * 1.2 or 1)
    _legend(figure, axes)
    return Plot(
        title=title,
        read="One marker per pair of answers: height is how far apart the two best tokens were where they part, on the "
        "side where they were further apart. Under the dashed line rounding alone can turn the choice (a tie, circle); "
        "above it (confident, triangle) look for a logic bug.",
        alt="; ".join(f"{p.prompt} in {p.cell}: {p.flip} flip, gap {p.gap:.3g}, moved {p.before:.3g}" for p in known),
        svg=_svg(figure),
    )


def _position(parts: Sequence[Part]) -> Plot:
    title = "Where the answers part"
    if not parts:
        return Plot(title=title, read="Nothing to draw: no token differs.")
    places = list(dict.fromkeys((p.cell, p.prompt) for p in parts))[::-1]
    figure, axes = _axes("first token that differs (from 0)", "", height=1.1 + 0.32 * max(len(places), 2))
    for flip in dict.fromkeys(p.flip for p in parts):
        colour, marker = FLIPS[flip]
        own = [p for p in parts if p.flip == flip]
        rows = [places.index((p.cell, p.prompt)) for p in own]
        axes.plot([p.position for p in own], rows, marker, color=colour, ms=9, ls="none", label=f"{flip} flip")
    axes.set_yticks(range(len(places)), [f"{_short(prompt)}, {cell}" for cell, prompt in places])
    axes.set_ylim(-0.7, len(places) - 0.3)
    axes.set_xlim(0, max(p.position for p in parts) * 1.15 + 1)
    _legend(figure, axes)
    return Plot(
        title=title,
        read="One row per cell and prompt: the marker stands at the first token that differs between the first answer "
        "of a boot and a later one; up to there they are the same.",
        alt="; ".join(f"{p.prompt} in {p.cell}: token {p.position}, {p.boots} boots" for p in parts),
        svg=_svg(figure),
    )


def _length(drifts: Sequence[Drift]) -> Plot:
    title = "Does the length of the prompt matter?"
    if not any(d.largest for d in drifts):
        lengths = sorted({d.prompt_tokens for d in drifts})
        return Plot(title=title, read=f"Nothing to draw: nothing moves at {', '.join(map(str, lengths))} tokens.")
    figure, axes = _axes("prompt length (tokens)", "max |Δ log-probability| (nats)", height=SIZE[1] + 0.4)
    for cell in dict.fromkeys(d.cell for d in drifts):
        colour, marker, _ = _cell(cell)
        own = [d for d in drifts if d.cell == cell]
        for parted in (False, True):
            some = [d for d in own if (d.parts_at is not None) == parted]
            axes.plot([d.prompt_tokens for d in some], [d.largest for d in some], marker, color=colour, ms=7, ls="none",
                      fillstyle="full" if parted else "none", clip_on=False)  # fmt: skip
        axes.plot([], [], marker, color=colour, fillstyle="none", ls="none", label=NAMES.get(cell, cell))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(figure, axes)
    least = min((d.prompt_tokens for d in drifts if d.largest), default=0)
    return Plot(
        title=title,
        read="One marker per prompt and cell: height is how far its log-probabilities move from cold to warm; 0 means "
        "bit-equal. A filled marker: its tokens part too.",
        alt=f"{len(drifts)} markers; the shortest prompt that moves has {least} tokens, the shortest of all "
        f"{min(d.prompt_tokens for d in drifts)}, the longest {max(d.prompt_tokens for d in drifts)}",
        svg=_svg(figure),
    )


def _axes(x: str, y: str, height: float = SIZE[1]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.grid(color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    if x.endswith(("(from 0)", "(tokens)")):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(INK)
    return figure, axes


def _cell(cell: str) -> tuple[str, str, str]:
    return CELLS.get(cell, (INK, "x", "-"))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9.5,
                  handletextpad=0.4, columnspacing=1.2)  # fmt: skip


def _short(name: str) -> str:
    """A name that leaves room for the plot beside it."""
    return name if len(name) <= 24 else f"{name[:23]}…"


def _list(cells: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(cells))


def _svg(figure: Figure) -> str:
    """The figure as one SVG element without ids that would meet those of another figure, sized by the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, variable)
    return text
