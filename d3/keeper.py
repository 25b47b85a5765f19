"""The engine's keeper: a tiny process beside an engine that ends the engine's whole family when D3 is gone.

A D3 that was killed (SIGKILL, out of memory) can stop nothing itself. The keeper reads a pipe whose writing end only D3
has: the engine's log, its folder for temporary files and then its process id come through it, then nothing until the
pipe closes, with D3's `Child.stop` or its death. D3 may die between the engine's start and its naming (seen on a busy
machine); the engine is then known by its log, which nobody else has open for its errors.
The keeper has a session of its own, so that a signal to D3's group or terminal does not reach it.
"""

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from d3.family import Family, in_session, segments

LOOK_S = 5.0  # a look at every process of the machine takes a few milliseconds
END_S = 15.0
LOOKS = 5
END = b"\0"
WORDS = 3


class Keeper:
    """D3's side: start the keeper before the engine, name the engine, let the keeper go after the engine's end."""

    def __init__(self, log: Path, temporary: Path) -> None:
        """`log`: the file that the engine will write its errors to; `temporary`: a folder; no other process's, both."""
        reading, self._writing = os.pipe()
        try:
            # As a module from the package's own folder: this folder's names (statistics) must not hide Python's.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "d3.keeper"], cwd=Path(__file__).parent.parent, stdin=reading,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        self.pid = self._process.pid
        self._tell(os.fsencode(log.absolute()), os.fsencode(temporary))

    def keep(self, pid: int) -> None:
        """Name the engine to be ended with D3."""
        self._tell(str(pid).encode())

    def release(self) -> None:
        """Let the keeper go; it has ended when this returns. A second call does nothing."""
        with contextlib.suppress(OSError):
            os.close(self._writing)
        self._writing = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def _tell(self, *words: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._writing, b"".join(word + END for word in words))


def watch(pipe: int) -> None:
    """Wait for the pipe's end; then end the family of the engine named in it, and remove its temporary files."""
    before = segments()
    pid, temporary = _named(pipe)
    if pid is not None:
        _watch_family(pipe, Family(pid), before)
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _watch_family(pipe: int, family: Family, before: set[Path]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            selector.register(os.pidfd_open(family.pid), selectors.EVENT_READ)
        while True:
            family.remember()
            ready = {key.fd for key, _ in selector.select(LOOK_S)}
            if pipe in ready:
                break
            if not family.lives():
                os.read(pipe, 1)  # nothing is left to end: wait for D3's own end
                return
            for engine in ready:  # it ended, but not all that it started: that is looked at as often as before
                selector.unregister(engine)
                os.close(engine)
    family.remember()
    rest = in_session(family.pid) if family.lives() else []
    for _ in range(LOOKS):
        family.end(rest, before)
        if not (rest := in_session(family.pid)):  # what was born while the others were ended
            break


def _named(pipe: int) -> tuple[int | None, Path | None]:
    """The engine's process id and its folder for temporary files, as told; None: D3 ended before there was one.

    Where D3 ended before it told the id, the engine is found by its log.
    """
    told = b""
    while told.count(END) < WORDS:
        word = os.read(pipe, 4096)
        if not word:
            break
        told += word
    log, temporary, pid, *_ = [*map(os.fsdecode, told.split(END)), "", "", ""]
    if not temporary:
        return None, None
    return int(pid) if pid else _leader(log), Path(temporary)


def _leader(log: str) -> int | None:
    """The session leader whose errors go to this file; None: there is none."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == process.pid and Path(f"/proc/{process.pid}/fd/2").samefile(log):
                return process.pid
    return None


if __name__ == "__main__":
    watch(sys.stdin.fileno())
