"""What boots cost, for people: a table in Markdown and a stacked bar as SVG. Pure."""

import io
import re
from collections import Counter
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from d3.record import Frozen
from d3.report.markdown import markdown_table

TARGET_PLAIN, TARGET_STANDBY, TARGET_OWN_S = 1.03, 0.6, 0.5
# Colours of Okabe and Ito; hatched too, so that neighbours differ without colour.
LOOKS = {
    "python_s": ("process start", "#999999", ""),
    "import_s": ("import", "#e69f00", "//"),
    "weights_s": ("weights", "#56b4e9", ""),
    "ready_s": ("engine ready", "#0072b2", ".."),
    "first_s": ("first request", "#f0e442", ""),
    "rest_s": ("other requests", "#009e73", "\\\\"),
    "stop_s": ("stop", "#d55e00", ""),
    "own_s": ("D3 and tracking between boots", "#cc79a7", "xx"),
}


class Parts(Frozen):
    """Where one boot's seconds go, the mean over boots; they follow one another, so they add up to the boot.

    `import_s`: waiting for the import, which a standby did before, wholly or partly. `own_s`: from the end of a boot to
    the start of the next: record, tracking, the next job.
    """

    python_s: float
    import_s: float
    weights_s: float
    ready_s: float
    first_s: float
    rest_s: float
    stop_s: float
    own_s: float

    def total(self) -> float:
        """The whole boot."""
        return float(sum(self.model_dump().values()))


class Run(Frozen):
    """One way to run the same boots. `whole_s`: all of it; `cpu_s`: processor seconds of all its processes.

    `standby`: how many of its boots were started by standby. `left`: what it left on the machine, in words.
    """

    name: str
    boots: int
    whole_s: float
    cpu_s: float
    parts: Parts
    standby: int = 0
    left: tuple[str, ...] = ()

    def outside(self) -> float:
        """Seconds before the first boot and after the last: Python, registration, the closing of the study."""
        return max(0.0, self.whole_s - self.boots * self.parts.total())


class Bench(Frozen):
    """The bare loop, and D3 beside it by plain start and by standby. `load`: load average when it began."""

    what: str
    machine: str
    load: float
    bare: Run
    plain: Run
    standby: Run

    def ratios(self) -> tuple[float, float]:
        """Whole study over bare loop, by plain start and by standby."""
        return self.plain.whole_s / self.bare.whole_s, self.standby.whole_s / self.bare.whole_s

    def holds(self) -> bool:
        """Whether all three targets are met."""
        plain, standby = self.ratios()
        own = self.plain.parts.own_s
        return plain <= TARGET_PLAIN and standby <= TARGET_STANDBY and own <= TARGET_OWN_S


def page(bench: Bench, picture: str) -> str:
    """The page in Markdown. `picture`: the bar's file, beside it."""
    runs = (bench.bare, bench.plain, bench.standby)
    rows = [
        [f"{words}, a boot"] + [f"{getattr(r.parts, key):.2f}" for r in runs] for key, (words, _, _) in LOOKS.items()
    ]
    rows += [
        ["**a whole boot**"] + [f"**{r.parts.total():.2f}**" for r in runs],
        ["before the first boot and after the last"] + [f"{r.outside():.1f}" for r in runs],
        [f"**all {bench.bare.boots} boots**"] + [f"**{r.whole_s:.1f}**" for r in runs],
        ["processor seconds of all processes"] + [f"{r.cpu_s:.0f}" for r in runs],
        ["boots started by standby"] + [str(r.standby) for r in runs],
    ]
    table = "\n".join(markdown_table(("seconds", *(r.name for r in runs)), rows, align="---:"))
    floor = bench.bare.boots * (bench.bare.parts.total() - bench.bare.parts.stop_s)
    left = [word for r in (bench.plain, bench.standby) for word in r.left]
    return f"""# What a boot costs, and how little of it is waste

Written by `python -m d3.bench` (`make bench`). {bench.what}; {bench.machine};
load average when it began: {bench.load:.1f}. Above the number of cores, other programs took their share, seconds of
one column cannot be held against those of another, and processor seconds say more.

The bare loop is the same engine process with the same flags and the same requests, one boot after the other, and
nothing of D3: it keeps no record and checks nothing. The floor, engine start and requests alone, is {floor:.1f} s.

{table}

![Seconds of one boot, by phase]({picture})

{targets(bench)}

New after the two studies, of processes, shared memory and temporary files: {counted(left) or "nothing"}. Shared
memory is the whole machine's, other programs' too. [Leftovers](leftovers.md) counts boot by boot.

The same on [two processor cores](bench.md) and on [one H200](bench_h200.md); on a GPU the command is
`python -m d3.bench engine=vllm engine.python=/path/to/python protocol=brief`.
"""


def counted(left: Sequence[str]) -> str:
    """What was left, names that differ in a random part alone told once with their number."""
    names = Counter(re.sub(r"[0-9a-f]{32}$|(?<=\btmp)\w{8}$", "*", word) for word in left)
    return ", ".join(f"{n} x {name}" for name, n in names.items())


def targets(bench: Bench) -> str:
    """The three targets, and whether each is met, as a list in Markdown."""
    plain, standby = bench.ratios()
    lines = (
        (f"study by plain start over bare loop: {plain:.3f}, target at most {TARGET_PLAIN}", plain <= TARGET_PLAIN),
        (f"study by standby over bare loop: {standby:.3f}, target at most {TARGET_STANDBY}", standby <= TARGET_STANDBY),
        (f"D3's own time: {bench.plain.parts.own_s:.2f} s a boot, target at most {TARGET_OWN_S} s",
         bench.plain.parts.own_s <= TARGET_OWN_S),
    )  # fmt: skip
    return "\n".join(f"- {words}: {'met' if met else '**missed**'}" for words, met in lines)


def chart(bench: Bench) -> bytes:
    """One stacked bar per run, seconds of a boot by phase, as SVG. Equal figures give equal bytes."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "d3", "font.size": 10, "text.parse_math": False})
        figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        runs = (bench.standby, bench.plain, bench.bare)
        begins = [0.0] * len(runs)
        for key, (words, colour, hatch) in LOOKS.items():
            widths = [getattr(r.parts, key) for r in runs]
            axes.barh([r.name for r in runs], widths, left=begins, color=colour, hatch=hatch, label=words,
                      edgecolor="white", lw=0.6, height=0.6)  # fmt: skip
            begins = [b + w for b, w in zip(begins, widths, strict=True)]
        axes.set_xlabel("seconds of one boot (mean)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
