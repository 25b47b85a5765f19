"""Children that die, hang, run away and leave things behind: none of it may stay or block."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from d3.process import Child, ChildDied, ChildTimeout

pytestmark = pytest.mark.usefixtures("nothing_left")
SEGMENT = f"/dev/shm/d3-test-{os.getpid()}"  # noqa: S108


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[object]:
    """Start a shell script as a child; the test stops it itself or this does."""
    children: list[Child] = []

    def start(script: str, piped: bool = True) -> Child:
        env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
        children.append(Child(["sh", "-c", script], env, tmp_path / "log", tmp_path, piped))
        return children[-1]

    yield start
    for child in children:
        child.stop()


def test_lines_go_both_ways_and_errors_go_to_the_log(shell, tmp_path: Path) -> None:
    child = shell("read x; echo got $x >&2; echo answer $x; echo second; read y")
    child.send("ü1")
    assert child.receive(5) == "answer ü1"
    assert child.receive(5) == "second"
    assert child.alive()
    assert child.stop() == ()
    assert (tmp_path / "log").read_text() == "got ü1\n"


def test_a_silent_child_is_given_up_at_its_deadline(shell) -> None:
    child = shell("sleep 60")
    began = time.monotonic()
    with pytest.raises(ChildTimeout, match="no answer within 0 s"):
        child.receive(0.3)
    assert time.monotonic() - began < 2
    child.stop()


def test_a_dead_child_is_noticed_before_its_deadline_with_its_code(shell) -> None:
    with pytest.raises(ChildDied) as error:
        shell("exit 7").receive(30)
    assert error.value.returncode == 7


def test_a_dead_child_is_noticed_though_a_runaway_holds_its_pipe(shell) -> None:
    child = shell("setsid sleep 60 & exit 3")
    began = time.monotonic()
    with pytest.raises(ChildDied) as error:
        child.receive(30)
    assert (error.value.returncode, time.monotonic() - began < 5) == (3, True)
    assert child.stop() == ("process sleep",)


def test_what_a_dying_child_said_last_is_still_read(shell) -> None:
    child = shell("echo done; exit 0")
    time.sleep(0.2)
    assert child.receive(5) == "done"


def test_writing_to_a_dead_child_says_so(shell) -> None:
    child = shell("exit 5")
    while child.alive():
        time.sleep(0.01)
    with pytest.raises(ChildDied) as error:
        child.send("hello")
    assert error.value.returncode == 5


def test_a_process_in_another_session_is_ended_and_named(shell) -> None:
    child = shell("setsid sleep 61 & sleep 0.3; echo $!; read x")
    runaway = psutil.Process(int(child.receive(5)))
    assert child.stop() == ("process sleep",)
    assert not runaway.is_running()


def test_a_runaway_whose_parents_are_gone_is_found_too(shell) -> None:
    child = shell("(setsid sh -c 'sleep 62 & echo $!' &) ; sleep 0.3; exit 0")
    runaway = psutil.Process(int(child.receive(5)))
    child.stop()
    assert not runaway.is_running()


def test_a_child_that_ignores_sigterm_is_killed(shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3.process.GRACE_S", 0.3)
    child = shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    child.receive(5)
    child.stop()
    assert child.returncode() == -9


HOLD = f"""$PYTHON -S -c '
import mmap, os, sys, time
f = open("{SEGMENT}", "w+b"); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)
print("mapped", flush=True); time.sleep(WAIT)' """


@pytest.mark.parametrize(
    "script",
    [f"exec {HOLD.replace('WAIT', '60')}", f"setsid {HOLD.replace('WAIT', '60')} & sleep 0.5; exit 1"],
    ids=["the child's own", "a runaway's whose parent died"],
)
def test_shared_memory_is_removed(shell, script: str) -> None:
    child = shell(script)
    assert child.receive(5) == "mapped"
    while "exit" in script and child.alive():
        time.sleep(0.02)
    assert f"shared memory {Path(SEGMENT).name}" in child.stop()
    assert not Path(SEGMENT).exists()


def test_shared_memory_of_a_child_that_died_in_boot_is_removed(shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3.process.LOOK_S", 0.1)
    child = shell(f"exec {HOLD.replace('WAIT', '0.6').replace('mapped', '')}")
    assert child.receive(5) == ""
    with pytest.raises(ChildDied):
        child.receive(5, watch=True)
    assert child.stop() == (f"shared memory {Path(SEGMENT).name}",)


def test_shared_memory_of_somebody_else_is_left_alone(shell) -> None:
    other = Path(SEGMENT + "-other")
    other.write_bytes(bytes(4096))
    try:
        child = shell(f"""$PYTHON -S -c 'import mmap, time
f = open("{other}", "r+b"); m = mmap.mmap(f.fileno(), 4096); print("mapped", flush=True); time.sleep(60)'""")
        child.receive(5)
        assert not [word for word in child.stop() if "shared" in word]
        assert other.exists()
    finally:
        other.unlink()


def test_what_pythons_own_tracker_would_unlink_is_not_left(shell) -> None:
    """A segment that nobody maps any more: only the tracker knows of it, and it was killed with its family once."""
    child = shell("""exec $PYTHON -S -c 'import time; from multiprocessing.shared_memory import SharedMemory
s = SharedMemory(create=True, size=4096); s.close(); print(s.name, flush=True); time.sleep(60)'""")
    segment = Path("/dev/shm") / child.receive(10)  # noqa: S108
    assert segment.exists()
    assert child.stop() == ()
    assert not segment.exists()


def test_its_temporary_files_are_in_a_folder_of_its_own_that_goes_with_it(shell) -> None:
    words = 'touch "$TMPDIR/vllm_dist_1"; chmod 500 "$TMPDIR"; echo "$TMPDIR"; read x'
    first, second = shell(words), shell(words)
    folders = Path(first.receive(5)), Path(second.receive(5))
    assert folders[0] != folders[1]
    first.spare(second.pids())
    assert first.stop() == ()
    assert [f.exists() for f in folders] == [False, True]


def test_processes_that_the_child_did_not_start_are_left_alone(shell) -> None:
    before = subprocess.Popen(["sh", "-c", "sleep 63 & echo; wait"], start_new_session=True, stdout=subprocess.PIPE)
    assert before.stdout is not None
    before.stdout.readline()  # its child is there now, though perhaps not yet called sleep
    child = shell("read x")
    after = subprocess.Popen(["sleep", "63"])
    try:
        assert child.stop() == ()
        assert before.poll() is None
        assert after.poll() is None
        assert len(psutil.Process(before.pid).children()) == 1
    finally:
        os.killpg(before.pid, 15)
        after.kill()
        before.stdout.close()
        before.wait()
        after.wait()


def test_a_runaway_that_ended_by_itself_is_not_called_a_leftover(shell) -> None:
    child = shell("(setsid true &) ; sleep 0.3; echo; read x")
    child.receive(5)
    assert child.stop() == ()


def test_a_command_that_cannot_start_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(Path(tempfile.gettempdir()).glob("d3-*"))
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/python"], {}, tmp_path / "log", tmp_path)
    monkeypatch.setattr("d3.process.Keeper", Mock(side_effect=BlockingIOError))
    with pytest.raises(BlockingIOError):
        Child(["true"], {}, tmp_path / "log", tmp_path)
    assert set(Path(tempfile.gettempdir()).glob("d3-*")) <= before


def test_it_knows_who_listens_on_a_port(shell) -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    child = shell(f'(exec $PYTHON -S -c "{listen}" <&0)')
    port = int(child.receive(5))
    assert child.listens(port)
    assert not child.listens(port + 1)
    child.stop()
