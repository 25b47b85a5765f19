"""D3 killed in any way: its engine does not survive it, nor does the keeper, and nothing is left in shared memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from joblib import Parallel, delayed

from d3.keeper import Keeper
from d3.process import Child

pytestmark = pytest.mark.usefixtures("nothing_left")
ROOT = Path(__file__).parent.parent
D3 = """
import sys, time
from pathlib import Path
from d3.process import Child
child = Child(["sh", "-c", sys.argv[1]], {"PATH": sys.argv[2], "PYTHON": sys.executable}, Path("log"), Path.cwd())
print(child._process.pid, child._keeper._process.pid, child.receive(20), flush=True)
child.remember()
time.sleep(60)
"""
KILLED_BEFORE_NAMING = """
import os
from d3.keeper import Keeper
def keep(self, pid):
    Path("ids").write_text(f"{pid} {self._process.pid}")
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
Keeper.keep = keep
"""
SHARED = """$PYTHON -S -c 'import time; from multiprocessing.shared_memory import SharedMemory
s = SharedMemory(create=True, size=4096); print(s.name, flush=True); time.sleep(60)'"""


def started(folder: Path, script: str) -> tuple[subprocess.Popen[str], int, int, str]:
    """A process that holds a child as D3 does: itself, the child's id, its keeper's, and the child's first line."""
    d3 = subprocess.Popen([sys.executable, "-c", D3, script, os.environ["PATH"]], cwd=folder, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)  # fmt: skip
    assert d3.stdout is not None
    child, keeper, word = d3.stdout.readline().split()
    return d3, int(child), int(keeper), word


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def gone(*pids: int, within_s: float = 20.0) -> bool:
    return soon(lambda: not any(map(runs, pids)), within_s)


def soon(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; sleep 64 & echo $!; while :; do sleep 0.1; done", "setsid sleep 64 & echo $!; wait",
     "setsid sh -c 'setsid sleep 64 & echo $!; wait' & wait", "(sleep 64 & echo $!); cat >/dev/null; sleep 64"],
    ids=["deaf to SIGTERM", "a session of its own", "two sessions deep", "an orphan in the engine's session"],
)  # fmt: skip
def test_the_engine_and_all_it_started_end_with_a_killed_d3(tmp_path: Path, script: str) -> None:
    d3, child, keeper, word = started(tmp_path, script)
    assert all(map(runs, (child, keeper, int(word))))
    d3.kill()
    assert gone(child, int(word))
    assert gone(keeper)
    d3.communicate()


def test_a_signal_to_d3s_whole_group_does_not_reach_the_keeper(tmp_path: Path) -> None:
    d3, child, keeper, _ = started(tmp_path, "trap '' TERM INT; echo x; while :; do sleep 0.1; done")
    assert os.getsid(keeper) == keeper
    d3.send_signal(signal.SIGSTOP)  # even a D3 that hangs and is then killed
    d3.kill()
    assert gone(child, keeper)
    d3.communicate()


@pytest.mark.parametrize("script", [SHARED, f"exec {SHARED}"], ids=["of a descendant", "of the engine"])
def test_shared_memory_goes_too_whether_pythons_tracker_or_the_keeper_unlinks_it(tmp_path: Path, script: str) -> None:
    before = set(Path("/dev/shm").glob("sem.mp-*"))  # noqa: S108
    d3, child, keeper, name = started(tmp_path, script)
    segment = Path("/dev/shm") / name  # noqa: S108
    assert segment.exists()
    d3.kill()
    assert gone(child, keeper)
    assert soon(lambda: not segment.exists(), 5)
    assert set(Path("/dev/shm").glob("sem.mp-*")) <= before  # noqa: S108
    d3.communicate()


WRITES = 'touch "$TMPDIR/vllm_dist_1"; mkdir "$TMPDIR/torchinductor"; echo "$TMPDIR"; '


@pytest.mark.parametrize("after", ["sleep 60", "exit 1"], ids=["that runs", "that ended by itself"])
def test_temporary_files_of_an_engine_go_with_a_killed_d3(tmp_path: Path, after: str) -> None:
    d3, child, keeper, folder = started(tmp_path, WRITES + after)
    assert sorted(p.name for p in Path(folder).iterdir()) == ["torchinductor", "vllm_dist_1"]
    assert gone(child) or after == "sleep 60"
    d3.kill()
    assert gone(child, keeper)
    assert not Path(folder).exists()
    d3.communicate()


def test_a_stopped_child_leaves_no_keeper_and_waiting_for_it_costs_little(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "echo x; sleep 60"], {"PATH": os.environ["PATH"]}, tmp_path / "log", tmp_path)
    child.receive(10)
    keeper = child._keeper._process
    time.sleep(0.5)
    assert keeper.poll() is None
    began = time.monotonic()
    child._keeper.release()
    spent = time.monotonic() - began
    assert keeper.poll() == 0
    assert spent < 1  # 0.03 s on a quiet machine
    assert child.alive() is False or runs(child._process.pid) is False
    child.stop()


@pytest.mark.parametrize("script", ["exec sleep 66", "setsid sleep 66 & exec sleep 66"])
def test_an_engine_ends_with_a_d3_that_was_killed_before_it_could_name_it(tmp_path: Path, script: str) -> None:
    d3 = subprocess.Popen([sys.executable, "-c", KILLED_BEFORE_NAMING + D3, script, os.environ["PATH"]], cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    other = subprocess.Popen(["sleep", "67"], stderr=(tmp_path / "other").open("w"), start_new_session=True)
    assert d3.wait(20) == -signal.SIGKILL
    assert gone(*map(int, (tmp_path / "ids").read_text().split()))
    assert runs(other.pid)  # whose log is another one
    other.kill()
    other.wait()


def test_a_keeper_that_was_never_told_of_an_engine_ends_with_its_pipe(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    keeper = Keeper(tmp_path / "log", tmp_path / "own")
    keeper.release()
    assert keeper._process.poll() == 0
    assert not (tmp_path / "own").exists()


def _held(folder: str) -> None:
    child = Child(["sh", "-c", "echo $$; sleep 65"], {"PATH": os.environ["PATH"]}, Path(folder, "log"), Path(folder))
    Path(folder, "ids").write_text(f"{child._process.pid} {child._keeper._process.pid} {os.getpid()}")
    time.sleep(60)


def test_an_engine_of_a_joblib_worker_ends_with_the_worker(tmp_path: Path) -> None:
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\nimport test_keeper as t\n"
    script += "t.two(sys.argv[1])"
    (tmp_path / "tmp").mkdir()  # joblib kills the second worker with all its children, its keeper among them
    sweep = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], start_new_session=True,
                             env=os.environ | {"TMPDIR": str(tmp_path / "tmp")})  # fmt: skip
    assert soon(lambda: len(list(tmp_path.glob("*/ids"))) == 2, 60)
    time.sleep(0.2)
    first, second = (tuple(map(int, p.read_text().split())) for p in sorted(tmp_path.glob("*/ids")))
    os.kill(first[2], signal.SIGKILL)  # one job
    assert gone(first[0], first[1])
    sweep.wait(60)  # joblib ends the other worker
    assert gone(*second)
    assert soon(
        lambda: not any(runs(p.pid) for p in psutil.Process().children())
    )  # and its resource tracker goes by itself


def two(folder: str) -> None:
    """The sweep of the test above: two jobs at once, as Hydra's joblib launcher runs them."""
    for name in ("a", "b"):
        Path(folder, name).mkdir(exist_ok=True)
    try:
        Parallel(n_jobs=2)(delayed(_held)(str(Path(folder, name))) for name in ("a", "b"))
    except Exception as error:
        sys.exit(type(error).__name__)
