"""One cold boot: `BootPlan -> Boot`. It always returns a record; a failed boot is data, not an exception.

Runs anywhere a plan can be read: `python -m d3.boot plan.json OUT_FOLDER`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from d3 import checks
from d3.caches import CellCache
from d3.engine import Engine, EngineFailure
from d3.errors import command
from d3.machine import machine
from d3.record import (
    BODY,
    Answer,
    Boot,
    BootPlan,
    BootRecord,
    Check,
    EngineFacts,
    EngineRecord,
    Failure,
    Launch,
    Phases,
    Place,
    RequestPlan,
    RequestRecord,
    Response,
    Start,
    Status,
    Timings,
)
from d3.redact import secret_values, strike_file, struck
from d3.signals import deferred, shielded
from d3.starter import COLDNESS, Starter
from d3.store import LOG, load, save_boot

Progress = Callable[[str], None]


class _Seen:
    """What has been observed of a boot so far; kept when the boot ends early."""

    def __init__(self) -> None:
        self.restart()
        self.start: Start = "plain"
        self.cache: CellCache | None = None
        self.facts = EngineFacts()
        self.phases = Phases()
        self.boot_s = self.requests_s = self.stop_s = 0.0
        self.requests: list[RequestRecord] = []
        self.responses: dict[str, Response] = {}
        self.failure: Failure | None = None
        self.leftovers: tuple[str, ...] = ()

    def restart(self) -> None:
        """Let the boot begin now."""
        self.began = time.monotonic()
        self.started_at = datetime.now(UTC)


def run(plan: BootPlan, folder: Path, progress: Progress = lambda _phase: None, starter: Starter | None = None) -> Boot:
    """Start the engine, send the plan's requests one at a time, stop it, and say what was seen.

    The engine's log goes to `folder`. `starter`: whose standbys and fork servers outlive the boot. Ctrl-C ends the
    engine and gives a record of status `stopped`. Raises D3Error where nothing can be written there.
    """
    if plan.unavailable:
        return skipped(plan, f"the flag is unavailable: {plan.unavailable}")
    if starter is None:
        with Starter() as own:
            return run(plan, folder, progress, own)
    seen = _Seen()
    engine: Engine | None = None
    try:
        if plan.launch.compile_cache:
            progress("compile cache warming")
            seen.cache = CellCache(plan)
            seen.restart()
        progress("engine starting")
        with deferred():
            engine, seen.start = starter.start(plan, folder / LOG)
        starter.prepare(engine)
        seen.facts = engine.start()
        seen.boot_s = time.monotonic() - seen.began
        seen.phases = engine.phases
        _ask_all(engine, plan, seen, progress)
    except EngineFailure as error:
        seen.failure = error.failure
    except KeyboardInterrupt:
        stage: Literal["boot", "request"] = "request" if seen.boot_s else "boot"
        seen.failure = Failure(stage=stage, kind="interrupted", line="stopped by the user")
    finally:
        with shielded():
            stopping = time.monotonic()
            if engine is not None:
                try:
                    progress("engine stopping")
                finally:  # whoever follows the boot may be gone; the engine must not stay for that
                    seen.leftovers = engine.stop()
            seen.stop_s = time.monotonic() - stopping
            _strike(seen, folder / LOG, (*secret_values(os.environ), *(engine.hidden if engine else ())))
    return Boot(record=_record(plan, seen), responses=seen.responses)


def _strike(seen: _Seen, log: Path, hidden: tuple[str, ...]) -> None:
    """Strike secrets out of what the engine printed, before anything of it is stored or shown."""
    strike_file(log, hidden)
    if seen.failure is not None:
        seen.failure = seen.failure.model_copy(update={"line": struck(seen.failure.line, hidden)})


def skipped(plan: BootPlan, why: str) -> Boot:
    """The record of a boot that was not tried, because its cell cannot run."""
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
            answer = _usable(engine.ask(request), request)
            seen.requests.append(_request_record(request, answer, seen.facts, time.monotonic() - sent))
            seen.responses[answer.response.key()] = answer.response
    finally:
        seen.requests_s = time.monotonic() - began


def _usable(answer: Answer, request: RequestPlan) -> Answer:
    """The answer, if it is one to this request. Raises EngineFailure: nothing every time would read as agreement."""
    wrong, n = "", len(answer.response.token_ids)
    if not answer.response.text and not n:
        wrong = "the answer is empty: no text and no tokens"
    if n > request.max_tokens:
        wrong = f"the answer has {n} tokens, asked for at most {request.max_tokens}"
    if wrong:
        line = f"{request.prompt} {request.phase}: {wrong}"
        raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line))
    return answer


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
    complete = seen.requests and not seen.failure
    cache = seen.cache.seen() if seen.cache else None
    found: tuple[Check, ...] = ()
    if complete:
        evaluated = checks.evaluate(plan, seen.facts, seen.requests, machine(), seen.start)
        found = (*evaluated, *checks.warmed(plan, cache))
    status, reason = _status(found, seen.failure)
    launch = plan.launch
    attached = launch.transport == "attach"
    command = ("attached to", launch.url or "") if attached else (_program(launch), *_words(launch))
    return BootRecord(
        **{name: getattr(plan, name) for name in Place.model_fields},
        coldness="none" if attached else COLDNESS[seen.start],
        start=seen.start,
        compile_cache=cache,
        engine=EngineRecord(
            name=plan.engine,
            transport=launch.transport,
            version_asked=plan.version_asked,
            facts=seen.facts,
            command=command,
            env=launch.env,
            body={} if launch.body == BODY else {k: _placed(v, launch) for k, v in launch.body.items()},
        ),
        environment=machine(),
        started_at=seen.started_at.isoformat(timespec="milliseconds"),
        timings=Timings(
            boot_s=round(seen.boot_s, 3),
            requests_s=round(seen.requests_s, 3),
            stop_s=round(seen.stop_s, 3),
            total_s=round(time.monotonic() - seen.began, 3),
            **dict(seen.phases),
        ),
        requests=tuple(seen.requests),
        checks=found,
        status=status,
        reason=reason,
        failure=seen.failure,
        leftovers=seen.leftovers,
    )


def _program(launch: Launch) -> str:
    """The program's name without its folder; every Python is `python`."""
    name = Path(launch.python).name
    return "python" if launch.transport == "worker" or name.startswith("python") else name


def _words(launch: Launch) -> Iterator[str]:
    yield from launch.server if launch.transport == "server" else ("worker.py",)
    yield from (_placed(word, launch) for word in launch.args)


def _placed(word: Any, launch: Launch) -> Any:
    return word.replace(launch.model_path, "MODEL") if isinstance(word, str) else word


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


@command
def main(argv: list[str] | None = None) -> int:
    """Run one plan file and write its record; 0 valid, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m d3.boot", description="Run one boot from its plan file.")
    parser.add_argument("plan", type=Path, help="a BootPlan as JSON, as written beside every record")
    parser.add_argument("out", type=Path, help="folder for boot.json, responses.jsonl and engine.log")
    options = parser.parse_args(argv)
    boot = run(load(BootPlan, options.plan), options.out, progress=lambda phase: print(phase, file=sys.stderr))
    save_boot(boot, options.out)
    print(f"{boot.record.status} {boot.record.reason}".strip())
    return 0 if boot.record.status in {"valid", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
