"""`python -m d3.speed CERT...`: how long boots took, and how many an hour, by how many ran at once."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from d3.compare import read_side
from d3.errors import command
from d3.record import BootRecord, Frozen
from d3.report.markdown import markdown_table

HEADER = ("study", "at once", "boots", "requests", "whole (s)", "boots an hour", "start (s)", "requests (s)")


class Speed(Frozen):
    """The boots of one study that ran `at_once` side by side.

    `whole_s`: from the first start to the last end. `start_s`, `requests_s`: the median boot's, in seconds.
    """

    study: str
    at_once: int
    boots: int
    requests: int
    whole_s: float
    start_s: float
    requests_s: float

    @property
    def per_hour(self) -> float:
        """Boots an hour at this pace."""
        return 3600 * self.boots / self.whole_s


def speeds(study: str, records: Sequence[BootRecord]) -> list[Speed]:
    """One entry per number at once, the smallest first; boots that never started an engine are left out."""
    groups: dict[int, list[BootRecord]] = defaultdict(list)
    for record in records:
        if record.status != "skipped":
            groups[int(record.environment.get("boots_at_once", "1"))].append(record)
    return [_speed(study, at_once, groups[at_once]) for at_once in sorted(groups)]


def _speed(study: str, at_once: int, records: Sequence[BootRecord]) -> Speed:
    starts = [datetime.fromisoformat(r.started_at).timestamp() for r in records]
    ends = [start + r.timings.total_s for start, r in zip(starts, records, strict=True)]
    return Speed(
        study=study,
        at_once=at_once,
        boots=len(records),
        requests=sum(len(r.requests) for r in records),
        whole_s=max(ends) - min(starts),
        start_s=median(r.timings.boot_s for r in records),
        requests_s=median(r.timings.requests_s for r in records),
    )


def row(speed: Speed) -> list[str]:
    """The cells of one row."""
    return [speed.study, str(speed.at_once), str(speed.boots), str(speed.requests), f"{speed.whole_s:.0f}",
            f"{speed.per_hour:.0f}", f"{speed.start_s:.1f}", f"{speed.requests_s:.1f}"]  # fmt: skip


@command
def main(argv: list[str] | None = None) -> int:
    """Print one table in Markdown; 0 good, 1 a certificate does not hold, 2 none can be read."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.speed",
        description="How long the boots of certificates took, and how many an hour, by how many ran at once.",
    )
    parser.add_argument("certificates", type=Path, nargs="+", help="such as results/d3_determinism_2x2.json")
    options = parser.parse_args(argv)
    sides = [read_side(path) for path in options.certificates]
    found = [s for side in sides
             for s in speeds(side.certificate.registration.study, [b.record for b in side.boots])]  # fmt: skip
    print("\n".join(markdown_table(HEADER, [row(s) for s in found], align="---:")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
