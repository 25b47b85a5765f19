"""`python -m d3.compare OLD NEW`: what changed between two certificates; with --gate, exit 1 where it got worse."""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from d3.ci import annotations, junit
from d3.comparison import Comparison, Side, compare
from d3.comparison_report import gate_line, markdown, terminal
from d3.errors import D3Error
from d3.gate import nothing_compared, passes, unsure
from d3.record import ENDPOINTS
from d3.registration import short
from d3.store import write_atomic
from d3.verify import examine, printable

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
        description="What changed between two certificates, place by place. Both are verified first.",
        epilog="Exit code: 0 compared (with --gate: and nothing got worse), 1 the gate says no, 2 nothing to compare. "
        "Worse is: a difference, or a cause, that was not there; one that is more often by the registered test; "
        "evidence lost; a verdict that was NO DIVERGENCE or KNOWN and is no longer.",
    )
    made.add_argument("old", type=Path, help="the baseline, such as results/d3_determinism_2x2.json")
    made.add_argument("new", type=Path, help="the certificate to judge")
    made.add_argument("--gate", action="store_true", help="exit 1 where something got worse")
    made.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    made.add_argument("--github", action="store_true",
                      help=f"print annotations for GitHub Actions, and append a summary to ${SUMMARY}")  # fmt: skip
    made.add_argument("--endpoint", action="append", choices=ENDPOINTS,
                      help="look at this endpoint alone; may be given again (default: all)")  # fmt: skip
    return made


def main(argv: list[str] | None = None) -> int:
    """Compare, print what changed; 0 compared, 1 the gate says no, 2 there is nothing to compare."""
    options = parser().parse_args(argv)
    out = getattr(sys.stdout, "reconfigure", None)
    if out:
        out(errors="backslashreplace")
    try:
        old, new = read_side(options.old), read_side(options.new)
        found = compare(old, new).only(options.endpoint or ENDPOINTS)
        show(found, options.old, options.new, (old, new))
        if options.junit:
            write_atomic(options.junit, junit(found))
            print(printable(f"junit: {options.junit}"))
        if options.github:
            for line in annotations(found):
                print(line)
            summarise(markdown(found, str(options.old), str(options.new)))
    except D3Error as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.code
    good = passes(found)
    print(gate_line(found))
    print(printable(f"next: {next_command(found, options.old, options.new, options.gate)}"))
    return 1 if options.gate and not good else 0


def show(found: Comparison, old: Path, new: Path, sides: tuple[Side, Side]) -> None:
    """The comparison on the terminal, wide enough in a pipe that a row stays readable."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for name, path, side in zip(("old", "new"), (old, new), sides, strict=True):
        t = side.certificate.totals
        print(printable(f"{name}: {path}, {t.counted} of {t.boots} boots counted, registration "
                        f"{short(side.certificate.registration_id)}"))  # fmt: skip
    if found.old == found.new:
        print("both are the same certificate, so nothing can differ")
    elif sides[0].certificate.registration_id == sides[1].certificate.registration_id:
        print("both are of the same registration")
    for part in terminal(found):
        if isinstance(part, str):
            print(part)
        else:
            console.print(part)


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
