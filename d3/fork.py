"""Boots by fork (coldness L2): a process that has only imported the engine is forked for every boot. CPU engines alone.

What a fork shares with the other boots of its server is what a new process draws anew: the hash seed, the addresses of
all that was imported, and whatever the imports left in memory.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from d3.process import Child, ChildDied, ChildTimeout, Process

FORK_S = 30.0
Streams = tuple[str, str, str]  # what the fork reads, writes and logs to, by path


class ForkRefused(Exception):
    """The server did not fork, and why in its words."""


class Adopted:
    """A process that another one forked and that is a child of this one since its parent ended (Linux subreaper)."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self._process = psutil.Process(pid)
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended, reaping it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, negative: the signal. Raises subprocess.TimeoutExpired."""
        if self._returncode is None:
            try:
                ended = self._process.wait(timeout)
            except psutil.TimeoutExpired as error:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from error
            self._returncode = int(ended or 0)
        return self._returncode

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()


class ForkServer:
    """A process of the engine's Python that has imported the engine and forks a process for every boot."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        """Start it and wait, `timeout_s` at most, until it has imported. Raises ForkRefused, OSError."""
        self._temporary = tempfile.TemporaryDirectory(prefix="d3-fork-")
        self.folder = Path(self._temporary.name)
        self.import_s = 0.0
        try:
            self.child = Child(command, env, self.folder / "server.log", self.folder)
        except OSError:
            self._temporary.cleanup()
            raise
        try:
            said = self._asked({"op": "import"}, timeout_s)
            if said["device"]:
                raise ForkRefused(f"importing the engine touched a device: {said['device']}")
            self.import_s = float(said["import_s"])
        except BaseException:
            self.stop()
            raise

    def fork(self, log: Path) -> Process:
        """A new process for a boot that logs to `log`, in that file's folder. Raises ForkRefused."""
        with _pipes() as (streams, stdin, stdout):
            said = self._asked({"op": "fork", "streams": [*streams, str(log)], "folder": str(log.parent)}, FORK_S)
            process = Adopted(said["pid"], stdin, stdout)
        if said["threads"]:
            process.kill()
            process.wait(FORK_S)
            raise ForkRefused(f"{said['threads']} threads of the imported engine would be missing in a fork")
        return process

    def stop(self) -> None:
        """End it."""
        self.child.stop()
        self._temporary.cleanup()

    def _asked(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self.child.send(json.dumps(message))
            said: dict[str, Any] = json.loads(self.child.receive(timeout_s))
        except (ChildDied, ChildTimeout, ValueError) as error:
            raise ForkRefused(f"the fork server: {error}") from error
        if said.get("op") == "error":
            raise ForkRefused(str(said.get("line")))
        return said


class ForkedChild(Child):
    """A boot's process, forked from a server instead of started."""

    def __init__(self, server: ForkServer, log: Path) -> None:
        """Raises ForkRefused."""
        self._server = server
        super().__init__((), {}, log, log.parent)

    def _started(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, piped: bool) -> Process:
        return self._server.fork(self.log)


@contextmanager
def _pipes() -> Iterator[tuple[tuple[str, str], IO[bytes], IO[bytes]]]:
    """Two pipes: the paths by which the fork opens its ends, then ours; its ends are closed here on leaving."""
    its_in, ours_in = os.pipe()
    ours_out, its_out = os.pipe()
    ours = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
    try:
        own = Path("/proc") / str(os.getpid()) / "fd"
        yield (str(own / str(its_in)), str(own / str(its_out))), *ours
    except BaseException:
        for file in ours:
            file.close()
        raise
    finally:
        os.close(its_in)
        os.close(its_out)
