"""`python -m d3.lengths CERTIFICATE`: at which prompt lengths cold and warm answers part, as Markdown and plots."""

import argparse
import sys
from pathlib import Path

from d3.compare import read_side
from d3.errors import D3Error, command, printable
from d3.length_plot import plot
from d3.length_table import Series, series, threshold
from d3.length_words import always, markdown, named, no_divergence
from d3.registration import Registration
from d3.report.evidence import shown
from d3.store import slug, write_atomic


def read(path: Path) -> tuple[Registration, tuple[Series, ...]]:
    """A certificate's registration, and every cell and endpoint by length; verified first.

    Raises D3Error where it does not hold, and where there are no two lengths to set side by side.
    """
    side = read_side(path)
    counted = [b for entry, b in zip(side.certificate.boots, side.boots, strict=True) if entry.counted]
    found = series(side.certificate.registration, counted)
    lengths = {p.tokens for s in found for p in s.answered}
    if len(lengths) < 2:
        ran = f"{lengths.pop()} tokens alone" if lengths else "no length"
        raise D3Error(f"{path} has answers at {ran}: nothing to compare",
                      "sweep the length: python -m d3 -m study=lengths apc=on,off invariant=0,1")  # fmt: skip
    return side.certificate.registration, found


def write(path: Path, folder: Path) -> tuple[tuple[Series, ...], list[Path]]:
    """Write NAME_lengths.md and a plot per stratum into `folder`; returns what they show, and the files."""
    registration, found = read(path)
    strata = list(dict.fromkeys(s.stratum for s in found))
    name = f"{path.stem}_lengths"
    plots = {s: f"{name}.png" if len(strata) == 1 else f"{name}_{slug(s)}.png" for s in strata}
    for stratum, file in plots.items():
        write_atomic(folder / file, plot([s for s in found if s.stratum == stratum]))
    write_atomic(folder / f"{name}.md", markdown(registration, found, shown(path), plots))
    return found, [folder / f"{name}.md", *(folder / file for file in plots.values())]


@command
def main(argv: list[str] | None = None) -> int:
    """The command line; 0 written, 2 there is nothing to write."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.lengths",
        description="At which prompt lengths cold and warm answers part: thresholds, tables and plots.",
        epilog="Exit code: 0 written, 2 the certificate does not hold, or has prompts of one length only. "
        "Needs no engine and no tracking store.",
    )
    parser.add_argument("file", type=Path, help="the certificate, such as results/h200_vllm_0_24.json")
    parser.add_argument("--out", type=Path, help="folder for the files (default: beside the certificate)")
    options = parser.parse_args(argv)
    found, files = write(options.file, options.out or options.file.parent)
    for one in found:
        where = one.cell if one.stratum == "base" else f"{one.stratum} {one.cell}"
        every = f"; every prompt parts {always(one.points)}" if threshold(one.points).first is not None else ""
        print(printable(f"{where}, {named(one)}: {no_divergence(one.points)}{every}"))
    for file in files:
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
