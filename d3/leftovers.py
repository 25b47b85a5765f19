"""`python -m d3.leftovers PLAN`: what boots leave behind, boot by boot, and whether D3 grows as it records them."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import cast, get_args

import psutil

from d3 import boot as booting
from d3.errors import command
from d3.family import SHARED, segments, shared_memory
from d3.process import adopt_orphans
from d3.record import BootPlan, Frozen, Start
from d3.report.markdown import markdown_table
from d3.starter import Starter
from d3.store import LOG, load, write_atomic

EVERY = 50  # boots between two looks at memory
WARM_UP = 100  # boots after which caches are full


class Before:
    """What is on the machine before boots run; orphans come to this process, so that they can be seen afterwards."""

    def __init__(self, temporary: Path) -> None:
        """`temporary`: the folder for temporary files that the boots are given, theirs alone."""
        adopt_orphans()
        self._temporary = temporary
        self._segments = segments()
        self._processes = {p.pid for p in psutil.Process().children(recursive=True)}

    def left(self, kept: Iterable[int] = ()) -> tuple[str, ...]:
        """What is new, in words: processes but those `kept`, ports, shared memory, temporary files."""
        spared = self._processes | set(kept)
        words = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words.append(f"process {process.name()}")
                ports = [c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
                words += [f"port {port}" for port in ports]
        new = segments() - self._segments
        mapped = {path for pid in psutil.pids() for path in shared_memory(pid)} if new else set()
        words += [f"shared memory {p.relative_to(SHARED)}" for p in sorted(new - mapped)]
        words += [f"temporary file {p.name}" for p in sorted(self._temporary.glob("*"))]
        return tuple(words)


class Repeated(Frozen):
    """What so many boots left, by how they started; `unlike`: those not valid. D3's memory (MiB) and open files."""

    engine: str
    boots: dict[Start, int]
    left: tuple[str, ...]
    unlike: tuple[str, ...]
    first_mib: float
    last_mib: float
    first_files: int
    last_files: int


class Growth(Frozen):
    """D3's own memory (MiB) after every EVERY boots that it recorded and logged."""

    boots: int
    mib: tuple[float, ...]

    def per_boot(self) -> float:
        """KiB a boot, from the WARM_UPth boot to the last."""
        first = WARM_UP // EVERY - 1
        return (self.mib[-1] - self.mib[first]) * 1024 / (self.boots - WARM_UP)


def repeat(plan: BootPlan, boots: int, starts: Sequence[Start], folder: Path) -> Repeated:
    """Run one plan `boots` times, by each way to start in turn, looking after every boot for what it left."""
    left: list[str] = []
    unlike: list[str] = []
    memory: list[tuple[float, int]] = []
    plans = [
        plan.model_copy(update={"start": start, "boot": n}) for n, start in enumerate(islice(cycle(starts), boots))
    ]
    with _own_temporary(folder / "tmp") as temporary:
        before = Before(temporary)
        with Starter() as starter:
            for number, one in enumerate(plans):
                following = plans[number + 1] if number + 1 < boots else None
                starter.expect(following, folder / f"b{number + 1}" / LOG, 0.0)
                record = booting.run(one, folder / f"b{number}", starter=starter).record
                left += [
                    f"boot {number} ({one.start}): {word}" for word in (*record.leftovers, *_seen(before, starter))
                ]
                unlike += [f"boot {number}: {record.status} {record.reason}"] * (record.status != "valid")
                memory.append(_memory())
        left += [f"after the last: {word}" for word in before.left()]
    return Repeated(
        engine=f"{plan.engine} {plan.version_asked}",
        boots={s: sum(p.start == s for p in plans) for s in starts},
        left=tuple(left),
        unlike=tuple(unlike),
        first_mib=memory[0][0],
        last_mib=memory[-1][0],
        first_files=memory[0][1],
        last_files=memory[-1][1],
    )


def recorded(boots: int) -> Growth:
    """Record and log made-up boots one at a time as a study's jobs do, under $D3_RUNS; D3's memory as it goes."""
    from d3.attempts import Attempts
    from d3.bench_scale import HERE, made_up, synthetic
    from d3.plan import boot_plan
    from d3.spool import BOOT_S, Spool
    from d3.store import boot_dir, save_boot, save_plan, save_registration

    registration = synthetic(boots)
    save_registration(registration)
    Spool(registration).reopen()
    began, mib = datetime.now(UTC), []
    for number, slot in enumerate(registration.order):
        attempts = Attempts(registration)
        spool = Spool(registration)
        spool.open()
        plan = boot_plan(registration, slot, attempts.next(slot), HERE)
        save_plan(plan)
        save_boot(made_up(plan, began + timedelta(seconds=number)), boot_dir(plan))
        spool.send(BOOT_S)
        if (number + 1) % EVERY == 0:
            mib.append(_memory()[0])
            print(f"{number + 1} boots recorded, {mib[-1]:.0f} MiB", file=sys.stderr, flush=True)
    return Growth(boots=len(registration.order), mib=tuple(mib))


def page(found: Repeated | None, growth: Growth | None) -> str:
    """What was measured, in Markdown."""
    parts = ["# What boots leave behind", "Written by `python -m d3.leftovers`."]
    if found:
        by = ", ".join(f"{n} by {start}" for start, n in found.boots.items())
        parts += [
            f"## {sum(found.boots.values())} boots of {found.engine}",
            f"{by}, in turn. After each boot, what was there and had not been before the first: processes of ours\n"
            "(but a standby and a fork server that wait for later boots), ports, shared memory, temporary files; and\n"
            "what the boot itself had to end or remove.",
            f"- left: {'; '.join(found.left) or 'nothing, after any boot'}\n"
            f"- boots that were not valid: {'; '.join(found.unlike) or 'none'}\n"
            f"- D3's own memory: {found.first_mib:.0f} MiB after the first boot, {found.last_mib:.0f} after the last\n"
            f"- files that it held open: {found.first_files}, then {found.last_files}",
        ]
    if growth:
        steps = {(i + 1) * EVERY: m for i, m in enumerate(growth.mib)}
        shown = [n for n in steps if n in {WARM_UP, growth.boots} or n % (growth.boots // 5 or 1) == 0]
        rows = [[f"{n:,}", f"{steps[n]:.0f}"] for n in shown]
        parts += [
            f"## {growth.boots:,} recorded boots",
            "Made-up boots, recorded and logged to SQLite one at a time by one process, as a study's jobs do. From\n"
            f"boot {WARM_UP} on the process grew by {growth.per_boot():.1f} KiB a boot.",
            "\n".join(markdown_table(("boots", "D3's memory (MiB)"), rows, align="---:")),
        ]
    return "\n\n".join(parts) + "\n"


def _seen(before: Before, starter: Starter) -> tuple[str, ...]:
    names = {p.name for p in starter.folders()}
    return tuple(w for w in before.left(starter.pids()) if w.removeprefix("temporary file ") not in names)


@contextmanager
def _own_temporary(folder: Path) -> Iterator[Path]:
    """A folder for temporary files that this process and the engines use while inside."""
    folder.mkdir(parents=True)
    old, tempfile.tempdir = tempfile.tempdir, str(folder)
    was = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = old
        if was is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = was


def _memory() -> tuple[float, int]:
    process = psutil.Process()
    return process.memory_info().rss / 2**20, process.num_fds()


@command
def main(argv: list[str] | None = None) -> int:
    """Measure and print or write the page; 0 nothing was left, 1 something was."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.leftovers",
        description="What boots leave behind: processes, ports, shared memory, temporary files; and D3's own memory.",
    )
    parser.add_argument("plan", type=Path, nargs="?", help="a plan.json, as it lies beside every record")
    parser.add_argument("--boots", type=int, default=50, help="how often (default 50)")
    parser.add_argument("--start", nargs="+", choices=get_args(Start), default=["plain"],
                        help="how they start, in turn (default plain)")  # fmt: skip
    parser.add_argument("--recorded", type=int, metavar="N", help="record N made-up boots, and see whether D3 grows")
    parser.add_argument("--out", type=Path, help="write the page there (default: print it)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="d3-leftovers-") as name:
        folder = Path(name)
        starts = cast(list[Start], options.start)
        found = repeat(load(BootPlan, options.plan), options.boots, starts, folder) if options.plan else None
        os.environ |= {"D3_RUNS": name, "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
        text = page(found, recorded(options.recorded) if options.recorded else None)
    if options.out:
        write_atomic(options.out, text)
    else:
        print(text)
    return 1 if found and (found.left or found.unlike) else 0


if __name__ == "__main__":
    sys.exit(main())
