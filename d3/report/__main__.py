"""`python -m d3.report FILE ...`: Markdown and one HTML page from a certificate and the boots beside it."""

import argparse
import sys
from pathlib import Path

from d3.errors import command
from d3.report.evidence import read_certificate, shown
from d3.report.files import write_reports
from d3.report.post import post
from d3.store import write_atomic


@command
def main(argv: list[str] | None = None) -> int:
    """Write the reports, or the draft post, and print where they are; 2 where something is missing or damaged."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.report",
        description="Make NAME.md and NAME.html from NAME.json and the folder NAME beside it.",
        epilog="Exit code: 0 written, 2 a file is missing or damaged. Needs no engine, no tracking store, no network.",
    )
    parser.add_argument("file", type=Path, nargs="+", help="certificates, such as results/d3_determinism_2x2.json")
    parser.add_argument("--out", type=Path, help="folder for the reports (default: beside each certificate)")
    parser.add_argument("--post", type=Path, help="write the draft of a public comment on all of them there instead")
    options = parser.parse_args(argv)
    if options.post:
        write_atomic(options.post, post([(read_certificate(f), shown(f)) for f in options.file]))
        made = [options.post]
    else:
        made = [path for f in options.file for path in write_reports(f, options.out)]
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
