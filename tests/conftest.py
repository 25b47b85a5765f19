"""A home of its own for every test: runs, cache, MLflow store and model are temporary folders."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, settings
from omegaconf import DictConfig

from d3.family import segments, shared_memory

# A loaded machine is no failure: how long one example takes says nothing here.
settings.register_profile("d3", deadline=None, suppress_health_check=[HealthCheck.too_slow],
                          derandomize="CI" in os.environ)  # fmt: skip
settings.load_profile("d3")

# Whoever starts the tests in a shell's background passes SIGINT on as ignored; these tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
FAKE = (f"hydra.searchpath=[file://{TESTS}/conf]", "engine=fake", "model=fake", "prompts=fake", "study.name=fake_study")


class Home(NamedTuple):
    """Where a test's files lie; write words into `switch` to make the fake engine misbehave."""

    folder: Path
    runs: Path
    switch: Path
    model: Path


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty MLflow database: copying it takes a tenth of a second, making it several."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with chdir(path.parent):  # its default experiment keeps artifacts below the folder that it was made in
        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return at_home(tmp_path, monkeypatch)


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Make `folder` the home of everything that D3 writes, for as long as `monkeypatch` holds."""
    found = Home(folder, folder / "runs", folder / "switch", folder / "model")
    found.model.mkdir()
    (found.model / "model.safetensors").write_text("no weights at all\n")
    monkeypatch.setenv("D3_RUNS", str(found.runs))
    monkeypatch.setenv("D3_CACHE", str(folder / "cache"))
    monkeypatch.setenv("D3_TESTS", str(TESTS))
    monkeypatch.setenv("D3_TEST_SWITCH", str(found.switch))
    monkeypatch.setenv("D3_TEST_MODEL", str(found.model))
    monkeypatch.setenv("D3_TEST_PYTHON", sys.executable)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "D3_TRACE", "D3_AT_ONCE"):
        monkeypatch.setenv(name, "")  # so that what a sweep sets in this process is undone after the test
        monkeypatch.delenv(name)
    return found


@pytest.fixture
def store(home: Home, empty_store: Path) -> Path:
    """The default store under `home.runs`, migrated."""
    home.runs.mkdir(exist_ok=True)
    return Path(shutil.copy(empty_store, home.runs / "mlflow.db"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """A test that starts processes may leave none of them behind, and no shared-memory file."""
    yield
    left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not left
    until = time.monotonic() + 5
    while (segments := orphaned()) and time.monotonic() < until:  # another worker may be about to remove its own
        time.sleep(0.05)
    assert not segments


def orphaned() -> list[str]:
    """Shared memory of pretend engines that are gone; each names it by its process id."""
    pids = [p.name.removeprefix("d3-fake-") for p in Path("/dev/shm").glob("d3-fake-*")]  # noqa: S108
    return [pid for pid in pids if not psutil.pid_exists(int(pid))]


def logging_to(folder: Path) -> list[psutil.Process]:
    """Every process whose errors go to a file in this folder, as those of a boot and all that it starts do.

    Tests run beside each other: the same engine's processes may be another test's.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if Path(f"/proc/{process.pid}/fd/2").resolve().is_relative_to(folder):
                found.append(process)
    return found


def left_in_shared_memory(before: set[Path], within_s: float = 10) -> set[Path]:
    """Shared memory that is new since `before` and that no process maps, where it stays so long.

    Tests run beside each other: what a running process maps is its own; pretend engines answer for theirs
    (`orphaned`); and folders are no engine's, but of joblib and of the MLflow server.
    """
    until = time.monotonic() + within_s
    while left := {p for p in segments() - before if p.is_file() and not p.name.startswith("d3-fake-")}:
        left -= {path for pid in psutil.pids() for path in shared_memory(pid)}
        if not left or time.monotonic() > until:
            break
        time.sleep(0.2)
    return left


@cache
def composed(*overrides: str, fake: bool = True) -> DictConfig:
    """The configuration that a command line with these overrides gives; the environment is read when it is used."""
    from d3.config import register_schema

    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(TESTS.parent / "conf"), version_base="1.3"):
        return compose("config", [*(FAKE if fake else ()), *overrides])


def grid(*overrides: str) -> list[DictConfig]:
    """One configuration per cell, in the product's order."""
    cells = [composed(*overrides).copy() for _ in range(4)]
    for cell, (apc, invariant) in zip(cells, product((True, False), (0, 1)), strict=True):
        cell.apc, cell.invariant = apc, invariant
    return cells
