"""One child process in its own session: deadlines, liveness, and an end that leaves nothing behind.

An engine may start processes in sessions of their own and keep shared memory when it is killed (measured on vLLM: the
engine core survives its server, with 420 MB in /dev/shm), so the whole tree is remembered and reaped, not one group.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

POLL_S = 0.1
LOOK_S = 1.0
GRACE_S = 10.0
TRACKER_S = 2.0
PR_SET_CHILD_SUBREAPER = 36
SHARED = Path("/dev/shm")  # noqa: S108


class ChildDied(Exception):
    """The child ended when an answer was due; `returncode` as subprocess gives it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the engine process ended with code {returncode}")
        self.returncode = returncode


class ChildTimeout(Exception):
    """The child did not answer within its deadline (seconds)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class Child:
    """A child process whose errors go to a log file; its standard pipes carry lines, or `piped` False logs them too."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, piped: bool = True
    ) -> None:
        _adopt_orphans()
        self._log = log.open("ab")
        self._before = {p.pid for p in psutil.Process().children()}
        self._segments_before = _segments()
        try:
            self._process = subprocess.Popen(
                list(command), env=dict(env), cwd=cwd, start_new_session=True, stderr=self._log,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else self._log,
            )  # fmt: skip
        except OSError:
            self._log.close()
            raise
        self._buffer = b""
        self._tree: dict[int, psutil.Process] = {}
        self._segments: set[Path] = set()
        self._looked = 0.0
        self.log = log

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
        """Note the child's descendants and shared memory now, if `after_s` seconds have passed since the last look.

        A killed parent takes its family tree with it, and a segment that nobody maps any more has no owner.
        """
        if self._looked and time.monotonic() < self._looked + after_s:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(psutil.Error):
            for process in [p := psutil.Process(self._process.pid), *p.children(recursive=True)]:
                self._tree[process.pid] = process
                self._segments |= _shared_memory(process.pid)

    def listens(self, port: int) -> bool:
        """Whether the child or a process it started listens on this port."""
        self.remember()
        for process in self._tree.values():
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
        leftovers = self._reap_rest()
        self._signal_group(signal.SIGKILL)
        self._log.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return leftovers

    def _ended(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_S)
        self._process.kill()
        return self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _reap_rest(self) -> tuple[str, ...]:
        rest = {
            p.pid: p for p in [*self._tree.values(), *self._orphans()] if p.pid != self._process.pid and p.is_running()
        }
        # Python's resource trackers unlink what their family left, once it is gone; killed with it, they cannot.
        trackers = [p for p in rest.values() if _tracks(p)]
        words = self._kill([p for p in rest.values() if p not in trackers])
        _, late = psutil.wait_procs(trackers, timeout=TRACKER_S)
        words += self._kill(late)
        for segment in self._segments - self._segments_before:
            if segment.exists():
                words.append(f"shared memory {segment.name}")
                with contextlib.suppress(OSError):
                    segment.unlink()
        return tuple(sorted(words))

    def _kill(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Kill and reap these, noting what they map; returns those that still lived, in words."""
        words = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                self._segments |= _shared_memory(process.pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    words.append(f"process {process.name()}")
                    process.kill()
        psutil.wait_procs(list(processes), timeout=GRACE_S)
        return words

    def _orphans(self) -> list[psutil.Process]:
        """What the child's family left to us: always in another session than ours, unlike what we start ourselves."""
        found = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid not in self._before and os.getsid(process.pid) != os.getsid(0):
                    found += [process, *process.children(recursive=True)]
        return found


def _adopt_orphans() -> None:
    """Make orphans of the child our children (Linux prctl), so that they can be found and reaped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _tracks(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def _segments() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.is_dir() else set()


def _shared_memory(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line and "(deleted)" not in line}
