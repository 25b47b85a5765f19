"""An engine's family: every process that it started and the shared memory they hold, and an end for all of it.

An engine may start processes in sessions of their own and keep shared memory when it is killed (measured on vLLM: the
engine core survives its server, with 420 MB in /dev/shm), so the whole tree is remembered and reaped, not one group.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

POLL_S = 0.02
GRACE_S = 10.0
TRACKER_S = 2.0
SHARED = Path("/dev/shm")  # noqa: S108


class Family:
    """The processes below one, noted while they can still be found: a killed parent takes its family tree with it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.members: dict[int, psutil.Process] = {}
        self.segments: set[Path] = set()

    def remember(self) -> None:
        """Note its processes, and the shared memory that they map now: a segment nobody maps any more has no owner."""
        with contextlib.suppress(psutil.Error):
            for process in [p := psutil.Process(self.pid), *p.children(recursive=True)]:
                self.members[process.pid] = process
                self.segments |= shared_memory(process.pid)

    def lives(self) -> bool:
        """Whether any process of it that was noted still runs."""
        return any(_lives(p) for p in self.members.values())

    def end(self, others: Iterable[psutil.Process], spared: set[Path]) -> tuple[str, ...]:
        """Kill what lives of it and of `others`, unlink its segments but those in `spared`; returns both in words."""
        rest = {p.pid: p for p in [*self.members.values(), *others]}
        # Python's resource trackers unlink what their family left, once it is gone; killed with it, they cannot.
        trackers = [p for p in rest.values() if _tracks(p)]
        words = self._kill([p for p in rest.values() if p not in trackers])
        words += self._kill(_waited(trackers, TRACKER_S))
        for segment in self.segments - spared:
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
                self.segments |= shared_memory(process.pid)
                if _lives(process):
                    words.append(f"process {process.name()}")
                    process.kill()
        _waited(processes, GRACE_S)
        return words


def in_session(session: int) -> list[psutil.Process]:
    """The running processes of one session, by its leader's process id."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == session and _lives(process):
                found.append(process)
    return found


def end_all(processes: Sequence[psutil.Process], mapped: set[Path]) -> None:
    """Kill and reap these and remove the shared memory in `mapped`; resource trackers stay, they end by themselves."""
    ended = [p for p in processes if not _tracks(p)]
    for process in ended:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _waited(ended, GRACE_S)
    for segment in mapped:
        segment.unlink(missing_ok=True)


def segments() -> set[Path]:
    """All shared memory of the machine that has a name."""
    return set(SHARED.iterdir()) if SHARED.is_dir() else set()


def _lives(process: psutil.Process) -> bool:
    """Whether it runs: one that ended but was not reaped, by a parent that may be gone, does not."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _waited(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until these have ended, reaping those that are ours; returns those that still run after so many seconds."""
    deadline = time.monotonic() + timeout_s
    every = list(processes)
    while (left := [p for p in every if _lives(p)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in every:
        with contextlib.suppress(psutil.Error):
            process.wait(0)
    return left


def _tracks(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def shared_memory(pid: int) -> set[Path]:
    """The shared memory that a process maps, by its path; empty where it is gone or not ours."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line and "(deleted)" not in line}
