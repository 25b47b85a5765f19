"""Measure docs/faults.md: run the test of every row and write how long its call took, in seconds, the slowest case.

`python tests/fault_times.py` measures all rows, `python tests/fault_times.py WORD ...` those with a WORD in the test.
"""

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
ROW = re.compile(
    r"^\| (?P<fault>.+) \| (?P<how>.+) \| (?P<does>.+) \| `(?P<test>tests/\S+::\w+)` \| (?P<s>\S*) \|$", re.MULTILINE
)


class Row(NamedTuple):
    """One fault: what D3 does under it, the test that injects it, and the seconds that it took."""

    fault: str
    how: str
    does: str
    test: str
    seconds: str


def rows() -> list[Row]:
    """The rows of the page's tables."""
    return [Row(*found.groups()) for found in ROW.finditer(PAGE.read_text())]


def measured(tests: Sequence[str]) -> tuple[int, dict[str, float]]:
    """pytest's exit code, and the slowest case of every test that passed whole, by its name in the page."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow", *tests]
        words = [*pytest, f"--junitxml={report}", "-o", "junit_duration_report=call"]
        code = subprocess.run(words, cwd=ROOT, check=False).returncode
        found: dict[str, float] = {}
        bad: set[str] = set()
        for case in ET.parse(report).iter("testcase"):  # noqa: S314
            path = case.attrib["classname"].replace(".", "/")
            name = f"{path}.py::{case.attrib['name'].partition('[')[0]}"
            found[name] = max(found.get(name, 0.0), float(case.attrib["time"]))
            bad |= {name} if len(case.findall("failure") + case.findall("error") + case.findall("skipped")) else set()
        return code, {name: seconds for name, seconds in found.items() if name not in bad}


def places(seconds: float) -> int:
    """How many decimals say something."""
    return 2 if seconds < 1 else 1 if seconds < 10 else 0


def main(words: Sequence[str]) -> int:
    """Measure the rows and write the page; 0 when every test passed, else those that did not keep their figure."""
    tests = [row.test for row in rows() if not words or any(word in row.test for word in words)]
    code, times = measured(sorted(set(tests)))

    def timed(found: re.Match[str]) -> str:
        seconds = times.get(found["test"])
        before = found.string[found.start() : found.start("s")]
        return found[0] if seconds is None else f"{before}{seconds:.{places(seconds)}f} |"

    PAGE.write_text(ROW.sub(timed, PAGE.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
