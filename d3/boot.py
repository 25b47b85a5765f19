"""One cold boot: `BootPlan -> Boot`. It always returns a record; a failed boot is data, not an exception.

Runs anywhere a plan can be read: `python -m d3.boot plan.json OUT_FOLDER`.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from d3 import checks
from d3.engine import Engine, EngineFailure, WorkerEngine
from d3.errors import D3Error
from d3.machine import machine
from d3.record import (
    Answer,
    Boot,
    BootPlan,
    BootRecord,
    Check,
    EngineFacts,
    EngineRecord,
    Failure,
    Place,
    RequestPlan,
    RequestRecord,
    Response,
    Status,
    Timings,
)
from d3.server import ServerEngine
from d3.store import LOG, load, save_boot

Progress = Callable[[str], None]


class _Seen:
    """What has been observed of a boot so far; kept when the boot ends early."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.started_at = datetime.now(UTC)
        self.facts = EngineFacts()
        self.boot_s = self.requests_s = self.stop_s = 0.0
        self.requests: list[RequestRecord] = []
        self.responses: dict[str, Response] = {}
        self.failure: Failure | None = None
        self.leftovers: tuple[str, ...] = ()


def run(plan: BootPlan, folder: Path, progress: Progress = lambda _phase: None) -> Boot:
    """Start the engine, send the plan's requests one at a time, stop it, and say what was seen.

    The engine's log goes to `folder`. Ctrl-C ends the engine and gives a record of status `stopped`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    seen = _Seen()
    engine: Engine | None = None
    try:
        progress("engine starting")
        transport = ServerEngine if plan.launch.transport == "server" else WorkerEngine
        with _deferred():
            engine = transport(plan, folder / LOG)
        seen.facts = engine.start()
        seen.boot_s = time.monotonic() - seen.began
        _ask_all(engine, plan, seen, progress)
    except EngineFailure as error:
        seen.failure = error.failure
    except KeyboardInterrupt:
        seen.failure = Failure(stage="request", kind="interrupted", line="stopped by the user")
    finally:
        with _shielded():
            stopping = time.monotonic()
            if engine is not None:
                progress("engine stopping")
                seen.leftovers = engine.stop()
            seen.stop_s = time.monotonic() - stopping
    return Boot(record=_record(plan, seen), responses=seen.responses)


def skipped(plan: BootPlan, why: str) -> Boot:
    """The record of a boot that was not tried, because an earlier one showed that its cell cannot run."""
    seen = _Seen()
    seen.failure = Failure(stage="launch", kind="skipped", line=why)
    return Boot(record=_record(plan, seen), responses={})


def _ask_all(engine: Engine, plan: BootPlan, seen: _Seen, progress: Progress) -> None:
    began = time.monotonic()
    try:
        if plan.warmup:
            engine.ask(plan.warmup)
        for request in plan.requests:
            progress(f"{request.prompt} {request.phase}")
            sent = time.monotonic()
            answer = engine.ask(request)
            seen.requests.append(_request_record(request, answer, seen.facts, time.monotonic() - sent))
            seen.responses[answer.response.key()] = answer.response
    finally:
        seen.requests_s = time.monotonic() - began


def _request_record(request: RequestPlan, answer: Answer, facts: EngineFacts, latency_s: float) -> RequestRecord:
    hashes = answer.response.hashes()
    return RequestRecord(
        index=request.index,
        prompt=request.prompt,
        phase=request.phase,
        expect=request.expect,
        salt=request.salt,
        prompt_tokens=answer.prompt_tokens,
        prompt_sha256=answer.prompt_sha256,
        cached_tokens=answer.cached_tokens,
        expected_cached=checks.expected_hit(answer.prompt_tokens, facts.block_size),
        finish_reason=answer.finish_reason,
        n_tokens=len(answer.response.token_ids),
        text_sha256=hashes["text"],
        tokens_sha256=hashes["tokens"],
        logprobs_sha256=hashes["logprobs"],
        response=answer.response.key(),
        latency_s=round(latency_s, 4),
        running=answer.running,
    )


def _record(plan: BootPlan, seen: _Seen) -> BootRecord:
    found = checks.evaluate(plan, seen.facts, seen.requests) if seen.requests and not seen.failure else ()
    status, reason = _status(found, seen.failure)
    launch = plan.launch
    words = launch.server if launch.transport == "server" else ("worker.py",)
    return BootRecord(
        **{name: getattr(plan, name) for name in Place.model_fields},
        coldness="L1",
        engine=EngineRecord(
            name=plan.engine,
            transport=launch.transport,
            version_asked=plan.version_asked,
            facts=seen.facts,
            command=("python", *words, *(a.replace(launch.model_path, "MODEL") for a in launch.args)),
            env=launch.env,
        ),
        environment=machine(),
        started_at=seen.started_at.isoformat(timespec="milliseconds"),
        timings=Timings(
            boot_s=round(seen.boot_s, 3),
            requests_s=round(seen.requests_s, 3),
            stop_s=round(seen.stop_s, 3),
            total_s=round(time.monotonic() - seen.began, 3),
        ),
        requests=tuple(seen.requests),
        checks=found,
        status=status,
        reason=reason,
        failure=seen.failure,
        leftovers=seen.leftovers,
    )


def _status(found: tuple[Check, ...], failure: Failure | None) -> tuple[Status, str]:
    if failure is not None:
        status: dict[str, Status] = {"interrupted": "stopped", "skipped": "skipped"}
        return status.get(failure.kind, "failed"), f"{failure.stage}: {failure.line}"
    broken = [c for c in found if c.prompt is None and not c.held]
    if broken:
        return "void", f"{broken[0].name}: {broken[0].evidence}"
    prompts = [c for c in found if c.prompt is not None]
    if prompts and not any(c.held for c in prompts):
        return "void", f"cache, every prompt: {prompts[0].evidence}"
    return "valid", ""


@contextmanager
def _shielded() -> Iterator[list[int]]:
    """Hold Ctrl-C off inside, so that an engine is stopped to the end; gives the signals that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signal handlers belong to the main thread
        yield came
        return
    old = {
        number: signal.signal(number, lambda n, _frame: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _deferred() -> Iterator[None]:
    """Let Ctrl-C wait until a process that was just started has an owner who can end it."""
    with _shielded() as came:
        yield
    if came:
        raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run one plan file and write its record; 0 valid, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m d3.boot", description="Run one boot from its plan file.")
    parser.add_argument("plan", type=Path, help="a BootPlan as JSON, as written beside every record")
    parser.add_argument("out", type=Path, help="folder for boot.json, responses.jsonl and engine.log")
    options = parser.parse_args(argv)
    try:
        boot = run(load(BootPlan, options.plan), options.out, progress=lambda phase: print(phase, file=sys.stderr))
        save_boot(boot, options.out)
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(f"{boot.record.status} {boot.record.reason}".strip())
    return 0 if boot.record.status == "valid" else 1


if __name__ == "__main__":
    sys.exit(main())
