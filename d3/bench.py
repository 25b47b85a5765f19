"""`python -m d3.bench`: what boots cost, phase by phase, beside a bare loop over the same engine and requests."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import IO, Any

from rich.console import Console
from rich.markdown import Markdown

from d3.bench_report import Bench, Parts, Run, chart, page, targets
from d3.engine import worker_command, worker_environment
from d3.errors import D3Error, command
from d3.leftovers import Before
from d3.machine import machine
from d3.record import BootPlan, BootRecord, Frozen
from d3.store import PLAN, RECORD, load, root, write_atomic

GRID = ("apc=on,off", "invariant=0,1")


class Cost(Frozen):
    """Seconds, and processor seconds of all processes that were waited for."""

    whole_s: float
    cpu_s: float


def measured(work: Callable[[], None]) -> Cost:
    """What a piece of work costs."""
    began, used = time.monotonic(), _used()
    work()
    return Cost(whole_s=time.monotonic() - began, cpu_s=_used() - used)


def study(words: Sequence[str], runs: Path) -> None:
    """Run a study through D3 into `runs`, all included. Raises D3Error."""
    command = [sys.executable, "-m", "d3", "-m", *words]
    (runs / "tmp").mkdir(parents=True)
    environ = {**os.environ, "D3_RUNS": str(runs), "TMPDIR": str(runs / "tmp"),
               "MLFLOW_TRACKING_URI": f"sqlite:///{runs / 'mlflow.db'}"}  # fmt: skip
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise D3Error(f"the study failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}", "run make study")


def bare(plan: BootPlan, log: Path) -> Parts:
    """One boot with nothing of D3: start the engine's process, send the requests, end it."""
    began = time.monotonic()
    with log.open("ab") as errors, subprocess.Popen(
        worker_command(plan), env=worker_environment(plan), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None  # noqa: S101
        pipes = child.stdin, child.stdout
        imported = _asked(*pipes, {"op": "import"}, log)
        building = time.monotonic()
        built = _asked(*pipes, {"op": "start", "args": list(plan.launch.args)}, log)
        ready = time.monotonic()
        answered = []
        for request in plan.requests:
            _asked(*pipes, {"op": "ask", **request.model_dump(mode="json")}, log)
            answered.append(time.monotonic())
        child.terminate()
        child.wait()
    return Parts(
        python_s=imported["began"] - began,
        import_s=building - imported["began"],
        weights_s=built["weights_s"],
        ready_s=ready - building - built["weights_s"],
        first_s=answered[0] - ready,
        rest_s=answered[-1] - answered[0],
        stop_s=time.monotonic() - answered[-1],
        own_s=0.0,
    )


def parts(records: Sequence[BootRecord]) -> list[Parts]:
    """The phases of boots that ran one after the other. Raises D3Error where one was not valid, or says no phases."""
    ordered = sorted(records, key=lambda r: r.started_at)
    begins = [datetime.fromisoformat(r.started_at).timestamp() for r in ordered]
    ends = [b + r.timings.total_s for b, r in zip(begins, ordered, strict=True)]
    gaps = [b - e for b, e in zip(begins[1:], ends, strict=False)]
    return [_parts(r, gap) for r, gap in zip(ordered, [*gaps, mean(gaps) if gaps else 0.0], strict=True)]


def _parts(record: BootRecord, own_s: float) -> Parts:
    t = record.timings
    if record.status != "valid" or t.python_s is None or t.ready_s is None:
        raise D3Error(f"{record.boot_id} was {record.status} {record.reason}, or its engine counts no phases",
                      "benchmark an engine of transport worker")  # fmt: skip
    python = t.python_s if record.start == "plain" else 0.0
    weights, first = t.weights_s or 0.0, record.requests[0].latency_s
    return Parts(
        python_s=python,
        import_s=max(0.0, t.boot_s - python - weights - t.ready_s),
        weights_s=weights,
        ready_s=t.ready_s,
        first_s=first,
        rest_s=t.requests_s - first,
        stop_s=t.total_s - t.boot_s - t.requests_s,
        own_s=max(0.0, own_s),
    )


def run(name: str, cost: Cost, each: Sequence[Parts], standby: int = 0, left: tuple[str, ...] = ()) -> Run:
    """A run out of its cost and its boots' phases."""
    means = {key: mean(getattr(p, key) for p in each) for key in Parts.model_fields}
    return Run(name=name, boots=len(each), whole_s=cost.whole_s, cpu_s=cost.cpu_s, parts=Parts(**means),
               standby=standby, left=left)  # fmt: skip


def _asked(to: IO[bytes], back: IO[bytes], message: dict[str, Any], log: Path) -> dict[str, Any]:
    to.write(json.dumps(message).encode() + b"\n")
    to.flush()
    said: dict[str, Any] = json.loads(back.readline() or b'{"op": "error"}')
    if said["op"] == "error":
        raise D3Error(f"the bare loop's engine failed: {said.get('line')}", f"look at {log}")
    return said


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _through_d3(name: str, words: Sequence[str], runs: Path) -> Run:
    before = Before(runs / "tmp")
    cost = measured(lambda: study(words, runs))
    records = [load(BootRecord, path) for path in runs.glob(f"studies/*/boots/*/{RECORD}")]
    return run(name, cost, parts(records), sum(r.start == "standby" for r in records), before.left())


def bench(words: Sequence[str], folder: Path) -> Bench:
    """The same boots through D3 by plain start, in a bare loop, and through D3 by standby, in this order."""
    load_average = os.getloadavg()[0]
    plain = _through_d3("D3, plain start", [*words, "start=plain"], folder / "plain")
    found = [load(BootPlan, path) for path in (folder / "plain").glob(f"studies/*/boots/*/{PLAN}")]
    plans = sorted(found, key=lambda p: p.position)
    each: list[Parts] = []
    cost = measured(lambda: each.extend(bare(plan, folder / "bare.log") for plan in plans))
    standby = _through_d3("D3, standby", [*words, "start=standby"], folder / "standby")
    asked = f"{len(plans)} boots of {len(plans[0].requests)} requests on {plans[0].engine} {plans[0].version_asked}"
    told = [word for word in words if "/" not in word]  # this machine's paths are nobody's business
    facts = machine()
    where = ", ".join(facts[k] for k in ("gpu", "cpu") if k in facts)
    return Bench(
        what=f"{asked} ({' '.join(told)})",
        machine=f"{facts['cores']} cores, {where}, {facts['memory_gib']} GiB",
        load=load_average,
        bare=run("bare loop", cost, each),
        plain=plain,
        standby=standby,
    )


@command
def main(argv: list[str] | None = None) -> int:
    """Measure and print the page; 0 when D3 keeps within its targets, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.bench", description="What boots cost, phase by phase, beside a bare loop without D3."
    )
    parser.add_argument("overrides", nargs="*", help="keys of the study, such as protocol=brief or apc=on")
    parser.add_argument("--boots", type=int, default=1, help="boots per cell (default 1)")
    parser.add_argument("--out", type=Path, help="write the page there, the bar beside it as SVG (default: print it)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="d3-bench-") as folder:
        named = {word.partition("=")[0] for word in options.overrides}
        grid = [word for word in GRID if word.partition("=")[0] not in named]
        found = bench([*grid, f"boots={options.boots}", *options.overrides], Path(folder))
    picture = f"img/{options.out.stem}.svg" if options.out else "bench.svg"
    if options.out:
        write_atomic(options.out, page(found, picture))
        write_atomic(options.out.parent / picture, chart(found))
        print(f"page {os.path.relpath(options.out, root())}")
    Console().print(Markdown(targets(found) if options.out else page(found, picture)))
    return 0 if found.holds() else 1


if __name__ == "__main__":
    sys.exit(main())
