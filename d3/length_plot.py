"""Prompt lengths as a picture: a row of markers per cell and endpoint, and how far the first token moves. Pure."""

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from d3.length_table import Point, Series
from d3.length_words import named

INK, FAINT = "#333333", "#d9d9d9"
COLUMN = 0.16  # inches per length
# Colours of Okabe and Ito, told apart by shape and filling too.
STATES = {
    "every pair agrees": ("#0072b2", "o", "none"),
    "some pairs differ": ("#e69f00", "^", "full"),
    "every pair parts": ("#d55e00", "s", "full"),
    "no answer": ("#777777", "x", "full"),
}
CELLS = {"on/0": ("#d55e00", "s"), "on/1": ("#0072b2", "o"), "off/0": ("#009e73", "^"), "off/1": ("#cc79a7", "D")}


def state(point: Point) -> str:
    """One of STATES."""
    if not point.answered:
        return "no answer"
    if not point.differ:
        return "every pair agrees"
    return "every pair parts" if point.parted == point.answered else "some pairs differ"


def plot(found: Sequence[Series]) -> bytes:
    """The series of one stratum as PNG. Equal series give equal bytes."""
    with mpl.rc_context():  # whatever the user's own matplotlibrc says
        mpl.rcdefaults()
        mpl.rcParams.update({"font.size": 10, "text.parse_math": False})
        lengths = sorted({p.tokens for s in found for p in s.points})
        size = (4.5 + max(COLUMN * len(lengths), 4.0), 3.6 + 0.36 * len(found))
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        rows, moves = figure.subplots(2, 1, sharex=True, height_ratios=(1 + 0.36 * len(found), 2.0))
        place = {n: i for i, n in enumerate(lengths)}
        _rows(rows, found, place)
        _moves(moves, found, place)
        _lengths(moves, lengths)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def _rows(axes: Axes, found: Sequence[Series], place: Mapping[int, int]) -> None:
    for name, (colour, marker, filling) in STATES.items():
        places = [(place[p.tokens], i) for i, s in enumerate(found) for p in s.points if state(p) == name]
        if not places:
            continue
        axes.plot([x for x, _ in places], [y for _, y in places], marker, color=colour, ls="none", ms=6.5,
                  fillstyle="none" if filling == "none" else "full", label=name)  # fmt: skip
    axes.set_yticks(range(len(found)), [f"{s.cell}, {named(s)}" for s in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(STATES), frameon=False, handletextpad=0.3)
    _bare(axes)


def _moves(axes: Axes, found: Sequence[Series], place: Mapping[int, int]) -> None:
    for cell in dict.fromkeys(s.cell for s in found):
        points = next(s.points for s in found if s.cell == cell)
        known = [(place[p.tokens], p.first_token) for p in points if p.first_token is not None]
        colour, marker = CELLS.get(cell, (INK, "v"))
        axes.plot([x for x, _ in known], [y for _, y in known], marker, color=colour, ls="none", ms=5, fillstyle="none",
                  label=cell, clip_on=False)  # fmt: skip
    axes.set_ylabel("max |Δ log-probability|\nof the first token (nats)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(CELLS), frameon=False, handletextpad=0.3)
    _bare(axes)


def _lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """A column per length, evenly: on any scale 255 to 258 would lie on one another, and the steps are between them."""
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=90, fontsize=8)
    axes.set_xlim(-1, len(lengths))
    axes.set_xlabel("prompt length (tokens), a column for each that was run")


def _bare(axes: Axes) -> None:
    axes.grid(axis="x", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
