"""A running engine: start, facts, ask, stop; and the `worker` transport, vLLM inside one child, over its pipes."""

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from d3.process import Child, ChildDied, ChildTimeout
from d3.record import Answer, BootPlan, EngineFacts, Failure, Frozen, RequestPlan

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
WORKER = Path(__file__).with_name("worker.py")
IN_USE = re.compile(r"address already in use", re.IGNORECASE)
LAST_WORDS = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception)\b: .+|error: .+)")

M = TypeVar("M", bound=Frozen)


class EngineFailure(Exception):
    """An engine did not do what was asked; `failure` says at which stage, of which kind, in whose words."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


class Engine(Protocol):
    """What a boot needs of an engine."""

    def start(self) -> EngineFacts:
        """Start it and wait until it is ready. Raises EngineFailure."""

    def ask(self, request: RequestPlan) -> Answer:
        """Send one request and wait for its whole answer. Raises EngineFailure."""

    def stop(self) -> tuple[str, ...]:
        """End it and all it started; returns what it would have left behind."""


def environment(plan: BootPlan) -> dict[str, str]:
    """The child's environment: an allow-list of this process's, then what the plan sets."""
    return {**{k: os.environ[k] for k in PASSED_ON if k in os.environ}, **OFFLINE, **plan.launch.env}


def worker_environment(plan: BootPlan) -> dict[str, str]:
    """The environment of the `worker` transport: vLLM's engine in the child itself, not in a child of its own."""
    return {**environment(plan), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1"}


def last_words(log: Path, fallback: str) -> str:
    """The engine's own error line: the last line of its log that names an error, else `fallback`."""
    try:
        lines = log.read_bytes()[-200_000:].decode("utf-8", "replace").splitlines()
    except OSError:
        return fallback
    for line in reversed(lines):
        if (found := LAST_WORDS.search(line)) and "See root cause above" not in line:
            return found.group(1)[:500]
    return fallback


class WorkerEngine:
    """vLLM inside one child process, asked over pipes; less than half the start-up time of a server."""

    def __init__(self, plan: BootPlan, log: Path) -> None:
        self.plan = plan
        command = [plan.launch.python, str(WORKER)]
        self.child = launched(command, worker_environment(plan), log, piped=True)

    def start(self) -> EngineFacts:
        """Start vLLM in the child from the same flags that a server would get."""
        reply = self._call(
            {"op": "start", "args": list(self.plan.launch.args)}, self.plan.launch.boot_timeout_s, "boot"
        )
        self.child.remember()
        return parsed(EngineFacts, reply.get("facts"), "boot")

    def ask(self, request: RequestPlan) -> Answer:
        """Run one request in the child."""
        message = request.model_dump(
            mode="json", include={"messages", "salt", "max_tokens", "temperature", "neighbours"}
        )
        reply = self._call({"op": "ask", **message}, self.plan.launch.request_timeout_s, "request")
        response = {k: reply.pop(k, None) for k in ("text", "token_ids", "logprobs", "gaps")}
        return parsed(Answer, {"response": response, **{k: v for k, v in reply.items() if k != "op"}}, "request")

    def stop(self) -> tuple[str, ...]:
        """End the child."""
        return self.child.stop()

    def _call(self, message: Mapping[str, Any], timeout_s: float, stage: Any) -> dict[str, Any]:
        try:
            self.child.send(json.dumps(message))
            reply = json.loads(self.child.receive(timeout_s, watch=stage == "boot"))
        except ChildDied as error:
            raise EngineFailure(died(stage, self.child.log, error)) from error
        except ChildTimeout as error:
            raise EngineFailure(Failure(stage=stage, kind="timeout", line=str(error))) from error
        except ValueError as error:
            line = f"the engine's reply is no JSON: {error}"
            raise EngineFailure(Failure(stage=stage, kind="bad_answer", line=line)) from error
        if not isinstance(reply, dict) or "op" not in reply:
            line = f"the engine's reply has no op: {str(reply)[:200]}"
            raise EngineFailure(Failure(stage=stage, kind="bad_answer", line=line))
        if reply["op"] == "error":
            raise EngineFailure(Failure(stage=stage, kind="engine_error", line=str(reply.get("line"))))
        return reply


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

    from d3.install import main

    sys.exit(main())
