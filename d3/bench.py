"""`python -m d3.bench`: what D3 itself costs, beside a bare loop over the same engine and requests."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from d3.engine import WORKER, worker_environment
from d3.errors import D3Error
from d3.record import BootPlan, BootRecord
from d3.store import PLAN, RECORD, load

CELL = ("apc=on", "invariant=0")


def study(boots: int, runs: Path) -> float:
    """Run one cell of the study through D3 into `runs`; returns seconds, all included. Raises D3Error."""
    command = [sys.executable, "-m", "d3", "-m", *CELL, f"boots={boots}"]
    environ = {**os.environ, "D3_RUNS": str(runs), "MLFLOW_TRACKING_URI": f"sqlite:///{runs / 'mlflow.db'}"}
    began = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise D3Error(f"the study failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}", "run make study")
    return time.monotonic() - began


def bare(plan: BootPlan, log: Path) -> None:
    """One boot with nothing of D3: start the engine's process, send the requests, end it."""
    env = worker_environment(plan)
    with log.open("ab") as errors, subprocess.Popen(
        [plan.launch.python, str(WORKER)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None  # noqa: S101
        asked = [{"op": "start", "args": list(plan.launch.args)}]
        asked += [{"op": "ask", **request.model_dump(mode="json")} for request in plan.requests]
        for message in asked:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
            if json.loads(child.stdout.readline())["op"] == "error":
                raise D3Error("the bare loop's engine failed", f"look at {log}")
        child.terminate()


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; 0 when D3 keeps within its targets, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m d3.bench", description="What D3 itself costs.")
    parser.add_argument("--boots", type=int, default=4, help="boots on either side (default 4)")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(options.boots, Path(folder))
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


def _measure(boots: int, folder: Path) -> int:
    whole = study(boots, folder)
    again = study(boots, folder)
    found = sorted(folder.glob(f"studies/*/boots/*/{RECORD}"))
    records = [load(BootRecord, path) for path in found]
    plans = [load(BootPlan, path.with_name(PLAN)) for path in found]
    began = time.monotonic()
    for plan in plans:
        bare(plan, folder / "bare.log")
    bare_s = time.monotonic() - began
    starts, requests = (sum(getattr(r.timings, k) for r in records) / boots for k in ("boot_s", "requests_s"))
    stops = sum(r.timings.stop_s for r in records) / boots
    own = (whole - again) / boots - starts - requests - stops
    table = Table(title=f"{boots} boots of {' '.join(CELL)}")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for what, seconds in (
        ("engine start, per boot", starts),
        ("requests, per boot", requests),
        ("stop and reap, per boot", stops),
        ("D3's own, per boot (target 0.5)", own),
        ("D3 with nothing left to run, per study", again),
        ("whole study", whole),
        ("bare loop", bare_s),
    ):
        table.add_row(what, f"{seconds:.2f}")
    Console().print(table)
    ratio = whole / bare_s
    print(f"study over bare loop: {ratio:.3f} (target 1.03)")
    return 0 if own <= 0.5 and ratio <= 1.03 else 1


if __name__ == "__main__":
    sys.exit(main())
