"""A running engine: start, facts, ask, stop; and the `worker` transport, vLLM inside one child, over its pipes."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from d3.errors import printable
from d3.machine import boots_at_once, machine
from d3.process import Child, ChildDied, ChildTimeout
from d3.record import Answer, BootPlan, EngineFacts, Failure, Frozen, Phases, RequestPlan
from d3.store import alone, cache_dir

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# What one boot compiled or measured must not be there for the next: no boot reads a cache, and none leaves one.
CACHES_OFF = {
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TRITON_CACHE_AUTOTUNING": "0",
}
# Where a study registered a warmed cache (d3.caches): what was compiled for the cell before its first boot is there.
CACHES_ON = {
    "VLLM_DISABLE_COMPILE_CACHE": "0",
    "VLLM_CACHE_ROOT": "{cache}/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "{cache}/inductor",
    "TRITON_CACHE_DIR": "{cache}/triton",
    "TRITON_CACHE_AUTOTUNING": "1",
}
WORKER = Path(__file__).with_name("worker.py")
IN_USE = re.compile(r"address already in use", re.IGNORECASE)
NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b|See root cause above")  # vLLM warns of errors that there may be
LAST_WORDS = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception)\b: .+|error: .+)")

LINE_KEPT = 500
UNREADABLE = (ValueError, RecursionError)  # what Python's json raises: not JSON, or JSON that is nested without end

M = TypeVar("M", bound=Frozen)


class EngineFailure(Exception):
    """An engine did not do what was asked; `failure` says at which stage, of which kind, in whose words."""

    def __init__(self, failure: Failure) -> None:
        line = printable(" ".join(failure.line.split()))[:LINE_KEPT]  # an engine's words end on terminals and in tags
        super().__init__(line)
        self.failure = failure.model_copy(update={"line": line})


class Engine(Protocol):
    """What a boot needs of an engine. `hidden`: secrets of its own, which must not be stored."""

    hidden: tuple[str, ...]

    def start(self) -> EngineFacts:
        """Start it and wait until it is ready. Raises EngineFailure."""

    def ask(self, request: RequestPlan) -> Answer:
        """Send one request and wait for its whole answer. Raises EngineFailure."""

    def stop(self) -> tuple[str, ...]:
        """End it and all it started; returns what it would have left behind."""

    @property
    def phases(self) -> Phases:
        """How long the parts of its start took, as far as it says."""

    @property
    def child(self) -> Child:
        """Its process."""


def environment(plan: BootPlan) -> dict[str, str]:
    """The child's environment: an allow-list of this process's, then what the plan sets."""
    passed = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
    folder = plan.launch.compile_cache
    caches = CACHES_OFF if folder is None else {k: v.replace("{cache}", folder) for k, v in CACHES_ON.items()}
    return {**passed, **OFFLINE, **caches, **plan.launch.env}


def worker_environment(plan: BootPlan) -> dict[str, str]:
    """The environment of the `worker` transport: vLLM's engine in the child itself, not in a child of its own."""
    return {**environment(plan), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1"}


def worker_command(plan: BootPlan) -> list[str]:
    """The command of the `worker` transport; all else it is told over its pipe."""
    return [plan.launch.python, str(WORKER)]


def last_words(log: Path, fallback: str) -> str:
    """The engine's own error line: the last line of its log that names an error, else `fallback`."""
    try:
        lines = log.read_bytes()[-200_000:].decode("utf-8", "replace").splitlines()
    except OSError:
        return fallback
    for line in reversed(lines):
        if (found := LAST_WORDS.search(line)) and not NO_ERROR.search(line):
            return found.group(1)[:500]
    return fallback


class Imported(Frozen):
    """What a worker says that has imported: when its Python began (seconds of the machine's monotonic clock; None where
    it does not say), how long importing took, and what a device has of it, in words; empty: nothing.
    """

    began: float | None = None
    import_s: float = 0.0
    device: str = ""


class WorkerEngine:
    """vLLM inside one child process, asked over pipes; less than half the start-up time of a server.

    `waits`: the process may be older than its boot (standby, fork), so that at 'go' no device may know of it yet.
    """

    hidden: tuple[str, ...] = ()

    def __init__(self, plan: BootPlan, log: Path, child: Child | None = None, waits: bool = False) -> None:
        """`child`: the process, where it is there already."""
        self.plan = plan
        self.waits = waits
        self.phases = Phases()
        self.imported = Imported()
        self._began = time.monotonic()
        self._importing = False
        self.child = child or launched(worker_command(plan), worker_environment(plan), log, piped=True)

    def begin(self) -> None:
        """Have the child import the engine, and do not wait for it. Raises EngineFailure where it has ended."""
        self._send({"op": "import"}, "boot")
        self._importing = True

    def start(self) -> EngineFacts:
        """Start vLLM in the child from the same flags that a server would get."""
        deadline = time.monotonic() + self.plan.launch.boot_timeout_s
        self.imported = self._import(deadline)
        if self.waits:
            self.imported = self._import(deadline)  # once more: its state now, at 'go'
            if self.imported.device:
                line = f"the device was initialised before 'go': {self.imported.device}"
                raise EngineFailure(Failure(stage="boot", kind="environment", line=line))
        waiting = time.monotonic()
        with turn() as waited:
            began = time.monotonic()
            self._send({"op": "start", "args": list(self.plan.launch.args)}, "boot")
            reply = self._reply(deadline - waiting, "boot")
        self.child.remember()
        self._count(time.monotonic() - began, reply.get("weights_s"), round(began - waiting, 3) if waited else None)
        return parsed(EngineFacts, reply.get("facts"), "boot")

    def ask(self, request: RequestPlan) -> Answer:
        """Run one request in the child."""
        message = request.model_dump(
            mode="json", include={"messages", "salt", "max_tokens", "temperature", "neighbours"}
        )
        self._send({"op": "ask", **message}, "request")
        reply = self._reply(self.plan.launch.request_timeout_s, "request")
        response = {k: reply.pop(k, None) for k in ("text", "token_ids", "logprobs", "gaps")}
        return parsed(Answer, {"response": response, **{k: v for k, v in reply.items() if k != "op"}}, "request")

    def stop(self) -> tuple[str, ...]:
        """End the child."""
        return self.child.stop()

    def _import(self, deadline: float) -> "Imported":
        """What the child says once it has imported, which `begin` may have told it before."""
        if not self._importing:
            self.begin()
        self._importing = False
        reply = self._reply(deadline - time.monotonic(), "boot")
        return parsed(Imported, {k: v for k, v in reply.items() if k != "op"}, "boot")

    def _count(self, built_s: float, weights_s: float | None, turn_s: float | None) -> None:
        if self.imported.began is None:
            return
        weights = round(weights_s, 3) if isinstance(weights_s, float) else None
        self.phases = Phases(
            python_s=round(max(0.0, self.imported.began - self._began), 3),
            import_s=round(self.imported.import_s, 3),
            weights_s=weights,
            ready_s=round(built_s - (weights or 0.0), 3),
            turn_s=turn_s,
        )

    def _send(self, message: Mapping[str, Any], stage: Any) -> None:
        try:
            self.child.send(json.dumps(message))
        except ChildDied as error:
            raise EngineFailure(died(stage, self.child.log, error)) from error

    def _reply(self, timeout_s: float, stage: Any) -> dict[str, Any]:
        try:
            reply = json.loads(self.child.receive(timeout_s, watch=stage == "boot"))
        except ChildDied as error:
            raise EngineFailure(died(stage, self.child.log, error)) from error
        except ChildTimeout as error:
            raise EngineFailure(Failure(stage=stage, kind="timeout", line=str(error))) from error
        except UNREADABLE as error:
            line = f"the engine's reply is no JSON: {error}"
            raise EngineFailure(Failure(stage=stage, kind="bad_answer", line=line)) from error
        if not isinstance(reply, dict) or "op" not in reply:
            line = f"the engine's reply has no op: {str(reply)[:200]}"
            raise EngineFailure(Failure(stage=stage, kind="bad_answer", line=line))
        if reply["op"] == "error":
            raise EngineFailure(Failure(stage=stage, kind="engine_error", line=str(reply.get("line"))))
        return reply


@contextmanager
def turn() -> Iterator[bool]:
    """Where boots share a GPU, one engine at a time starts on it: hold the others off inside, waiting for one's turn.

    Gives whether there was anything to wait for. Imports are no part of it, and neither are CPU engines.
    """
    if boots_at_once() == "1" or "gpu" not in machine():
        yield False
        return
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace("/", "-")
    with alone(cache_dir() / "locks" / f"gpu-{device}"):
        yield True


def died(stage: Any, log: Path, error: ChildDied) -> Failure:
    """Why an engine ended: its own last error line; killed from outside without one, it is no fault of the engine's."""
    line = last_words(log, "")
    if not line and error.returncode == -signal.SIGKILL:
        line = "the engine was killed by signal 9, as the kernel does when memory runs out; free memory and run again"
        return Failure(stage=stage, kind="environment", line=line)
    kind: Literal["environment", "engine_error"] = "environment" if IN_USE.search(line) else "engine_error"
    return Failure(stage=stage, kind=kind, line=line or str(error))


def launched(command: list[str], env: dict[str, str], log: Path, piped: bool) -> Child:
    """Start the engine's process. Raises EngineFailure when it cannot be started at all."""
    try:
        return Child(command, env, log, cwd=log.parent, piped=piped)
    except OSError as error:
        line = f"cannot start {command[0]}: {error.strerror}"
        raise EngineFailure(Failure(stage="launch", kind="environment", line=line)) from error


def parsed(model: type[M], value: Any, stage: Any) -> M:
    """A model from what an engine sent. Raises EngineFailure that names the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        line = f"the engine's {'.'.join(str(x) for x in first['loc']) or 'reply'}: {first['msg']}"
        raise EngineFailure(Failure(stage=stage, kind="bad_answer", line=line)) from error


if __name__ == "__main__":
    import sys

    from d3.engine_check import main

    sys.exit(main())
