"""`python -m d3.compare OLD NEW`: what changed between two certificates; with --gate, exit 1 where it got worse.

`python -m d3.compare FILE --across KEY`: the strata of one certificate that differ in KEY alone.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from d3 import across_report
from d3.across import Across, across
from d3.alike import alike
from d3.ci import annotations, junit
from d3.comparison import Comparison, Side, compare
from d3.comparison_report import gate_line, markdown, terminal
from d3.errors import D3Error, command, printable
from d3.gate import nothing_compared, passes, unsure
from d3.record import ENDPOINTS
from d3.registration import short
from d3.store import write_atomic
from d3.verify import examine

SUMMARY = "GITHUB_STEP_SUMMARY"
PIPE_WIDTH = 160  # characters; without a terminal there is no width to ask for


def read_side(path: Path) -> Side:
    """A certificate with its boots, verified. Raises D3Error where it does not hold or cannot be read."""
    try:
        found = examine(path)
    except D3Error as error:
        raise D3Error(error.message, error.remedy, code=2) from error
    if found.problems:
        raise D3Error(f"{path} does not hold: {found.problems[0]}", f"see all of it: python -m d3.verify {path}")
    return Side(certificate=found.certificate, boots=found.boots)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m d3.compare",
        description="What changed between two certificates, place by place; or, with --across, between the strata of "
        "one. Every certificate is verified first.",
        epilog="Exit code: 0 compared (with --gate: and nothing got worse), 1 the gate says no, 2 nothing to compare. "
        "Worse is: a difference, or a cause, that was not there; one that is more often by the registered test; "
        "evidence lost; a verdict that was NO DIVERGENCE or KNOWN and is no longer. With --across the gate says no "
        "where any response is another one, or a place was measured at one level alone.",
    )
    made.add_argument("old", type=Path, help="the baseline, such as results/d3_determinism_2x2.json")
    made.add_argument("new", type=Path, nargs="?", help="the certificate to judge; none with --across")
    made.add_argument("--across", metavar="KEY", help="compare the strata of one certificate that differ in this swept "
                      "key alone, such as at_once or concurrency, with its first level")  # fmt: skip
    made.add_argument("--gate", action="store_true", help="exit 1 where something got worse")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the comparison as Markdown")
    made.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    made.add_argument("--github", action="store_true",
                      help=f"print annotations for GitHub Actions, and append a summary to ${SUMMARY}")  # fmt: skip
    made.add_argument("--endpoint", action="append", choices=ENDPOINTS,
                      help="look at this endpoint alone; may be given again (default: all)")  # fmt: skip
    return made


@command
def main(argv: list[str] | None = None) -> int:
    """Compare, print what changed; 0 compared, 1 the gate says no, 2 there is nothing to compare."""
    options = parser().parse_args(argv)
    out = getattr(sys.stdout, "reconfigure", None)
    if out:
        out(errors="backslashreplace")
    return _across(options) if options.across else _two(options)


def _two(options: argparse.Namespace) -> int:
    """Two certificates; the exit code."""
    if options.new is None:
        raise D3Error("one certificate alone cannot be compared", "name two, or the swept key of one: --across KEY")
    old, new = read_side(options.old), read_side(options.new)
    sides = alike(old, new)
    endpoints = [e for e in options.endpoint or ENDPOINTS if e in sides.endpoints]
    if not endpoints:
        raise D3Error(f"bytes cannot be compared: {sides.words}", "leave out --endpoint text")
    found = compare(sides.old, sides.new).only(endpoints).model_copy(update={"note": sides.words})
    show(found, options.old, options.new, (old, new))
    text = markdown(found, str(options.old), str(options.new))
    if options.junit:
        write_atomic(options.junit, junit(found))
        print(printable(f"junit: {options.junit}"))
    _write(options.out, text)
    if options.github:
        for line in annotations(found):
            print(line)
        summarise(text)
    print(gate_line(found))
    print(printable(f"next: {next_command(found, options.old, options.new, options.gate)}"))
    return 1 if options.gate and not passes(found) else 0


def _across(options: argparse.Namespace) -> int:
    """The strata of one certificate; the exit code."""
    if options.new or options.junit or options.github:
        raise D3Error(
            "--across compares the strata of one certificate", "leave out the second file, --junit and --github"
        )
    side = read_side(options.old)
    found = across(side, options.across).only(options.endpoint or ENDPOINTS)
    t = side.certificate.totals
    print(printable(f"{options.old}: {t.counted} of {t.boots} boots counted, registration "
                    f"{short(side.certificate.registration_id)}"))  # fmt: skip
    _print(across_report.terminal(found))
    _write(options.out, across_report.markdown(found, str(options.old)))
    print(printable(across_report.gate_line(found)))
    print(printable(f"next: {next_across(found, options.old)}"))
    return 1 if options.gate and not found.same() else 0


def next_across(found: Across, path: Path) -> str:
    """What to do now that the strata are compared."""
    report = path.with_suffix(".md")
    if found.same() or not any(p.differing() for p in found.pairings):
        return f"python -m d3.report {path}"
    return f"read {report if report.exists() else path}: the table of each stratum, and where responses part"


def _write(path: Path | None, text: str) -> None:
    if path:
        write_atomic(path, text)
        print(printable(f"markdown: {path}"))


def _print(parts: Iterable[str | Table]) -> None:
    """Lines and tables, wide enough in a pipe that a row stays readable."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for part in parts:
        if isinstance(part, str):
            print(part)
        else:
            console.print(part)


def show(found: Comparison, old: Path, new: Path, sides: tuple[Side, Side]) -> None:
    """The comparison on the terminal."""
    for name, path, side in zip(("old", "new"), (old, new), sides, strict=True):
        t = side.certificate.totals
        print(printable(f"{name}: {path}, {t.counted} of {t.boots} boots counted, registration "
                        f"{short(side.certificate.registration_id)}"))  # fmt: skip
    if found.old == found.new:
        print("both are the same certificate, so nothing can differ")
    elif sides[0].certificate.registration_id == sides[1].certificate.registration_id:
        print("both are of the same registration")
    _print(terminal(found))


def next_command(found: Comparison, old: Path, new: Path, gated: bool) -> str:
    """What to do now."""
    if nothing_compared(found):
        return f"compare certificates of the same strata and prompts, or make {new} the baseline"
    if unsure(found):
        boots = 2 * max(r.new.n for r in found.rows)
        return f"run the study of {new} again with boots={boots}, certify and compare: these boots may be chance"
    if not passes(found):
        report = new.with_suffix(".md")
        return f"read {report if report.exists() else new}: its readings, and where responses part"
    if not gated:
        return f"python -m d3.compare {old} {new} --gate"
    return f"to make {new} the baseline, commit it with its folder {new.with_suffix('')}"


def summarise(text: str) -> None:
    """Append to the summary of a step in GitHub Actions; elsewhere there is none. Raises D3Error."""
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise D3Error(f"cannot write {path}: {error.strerror}", f"unset {SUMMARY}") from error


if __name__ == "__main__":
    sys.exit(main())
