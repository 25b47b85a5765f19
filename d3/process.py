"""One child process in its own session: deadlines, liveness, and an end that leaves nothing behind, whoever ends."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

from d3.family import Family, segments
from d3.keeper import Keeper

POLL_S = 0.1
LOOK_S = 1.0
GRACE_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


class ChildDied(Exception):
    """The child ended when an answer was due; `returncode` as subprocess gives it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the engine process ended with code {returncode}")
        self.returncode = returncode


class ChildTimeout(Exception):
    """The child did not answer within its deadline (seconds)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class Process(Protocol):
    """What is needed of a process that is a child of this one; `subprocess.Popen` has it."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """How it ended, reaping it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """How it ended; raises subprocess.TimeoutExpired after so many seconds."""

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""


class Child:
    """A child process whose errors go to a log file; its standard pipes carry lines, or `piped` False logs them too.

    Its temporary files go to a folder of its own (TMPDIR, where `env` has none), removed with it: vLLM leaves some.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, piped: bool = True
    ) -> None:
        adopt_orphans()
        self.log = log
        with contextlib.ExitStack() as held:
            self._log = held.enter_context(log.open("ab"))
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="d3-", ignore_cleanup_errors=True))
            self.temporary = Path(folder)
            self._keeper = Keeper(log, self.temporary)
            held.callback(self._keeper.release)
            self._before = {p.pid for p in psutil.Process().children()}
            self._segments_before = segments()
            self._process = self._started(command, {"TMPDIR": folder, **env}, cwd, piped)
            self._held = held.pop_all()
        self._keeper.keep(self._process.pid)
        self._family = Family(self._process.pid)
        self._buffer = b""
        self._looked = 0.0

    def _started(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, piped: bool) -> Process:
        return subprocess.Popen(
            list(command), env=env, cwd=cwd, start_new_session=True, stderr=self._log,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else self._log,
        )  # fmt: skip

    def pids(self) -> tuple[int, int]:
        """The child and its keeper."""
        return self._process.pid, self._keeper.pid

    def spare(self, pids: Iterable[int]) -> None:
        """Name children of this process that were started since: they are no orphans of this child's family."""
        self._before |= set(pids)

    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def returncode(self) -> int:
        """How the child ended, waiting for it if need be; negative: the signal that killed it."""
        return self._ended()

    def ended_within(self, seconds: float) -> bool:
        """Whether the child ends within so many seconds: a broken connection may come before its last breath."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive()

    def send(self, line: str) -> None:
        """Write one line to the child. Raises ChildDied when nobody reads it any more."""
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildDied(self._ended()) from error

    def receive(self, timeout_s: float, watch: bool = False) -> str:
        """Read one line from the child; `watch` True remembers its family while waiting.

        Raises ChildTimeout after `timeout_s` seconds, ChildDied when it ended.
        """
        assert self._process.stdout is not None  # noqa: S101
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if time.monotonic() > deadline:
                    raise ChildTimeout(timeout_s)
                dead = not self.alive()  # asked before the read, so that its last words are not lost
                if selector.select(POLL_S):
                    chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        raise ChildDied(self._ended())
                    self._buffer += chunk
                elif dead:  # another process still holds the pipe open
                    raise ChildDied(self._ended())
                elif watch:
                    self.remember(LOOK_S)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "surrogatepass")

    def remember(self, after_s: float = 0.0) -> None:
        """Note the child's descendants and shared memory now, if `after_s` seconds have passed since the last look."""
        if self._looked and time.monotonic() < self._looked + after_s:
            return
        self._looked = time.monotonic()
        self._family.remember()

    def listens(self, port: int) -> bool:
        """Whether the child or a process it started listens on this port."""
        self.remember()
        for process in self._family.members.values():
            with contextlib.suppress(psutil.Error):
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
                    return True
        return False

    def stop(self) -> tuple[str, ...]:
        """End the child and all it started. Returns what it would have left behind, in words (empty: it was tidy)."""
        self.remember()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        if self.alive():
            self._signal_group(signal.SIGKILL)
        self._ended()
        self._family.members.pop(self._process.pid, None)
        leftovers = self._family.end(self._orphans(), self._segments_before)
        self._signal_group(signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._held.close()
        return leftovers

    def _ended(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_S)
        self._process.kill()
        return self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _orphans(self) -> list[psutil.Process]:
        """What the child's family left to us: always in another session than ours, unlike what we start ourselves."""
        found = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid not in self._before and os.getsid(process.pid) != os.getsid(0):
                    found += [process, *process.children(recursive=True)]
        return found


def adopt_orphans() -> None:
    """Make orphans of the child our children (Linux prctl), so that they can be found and reaped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
