"""`mlflow run`: the pinned reproduction, from a clean clone and from a git address, on the real engine."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bare repository with this commit; MLflow takes a file's address for a folder, not for git's."""
    folder = tmp_path_factory.mktemp("git")
    git("clone", "--quiet", "--bare", str(ROOT), str(folder / "d3.git"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = subprocess.Popen(
        ["git", "daemon", "--listen=127.0.0.1", f"--port={port}", f"--base-path={folder}", "--export-all", str(folder)]
    )
    try:
        until = time.monotonic() + 20
        while True:
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < until, "git daemon does not answer"
            time.sleep(0.1)
        yield f"git://127.0.0.1:{port}/d3.git"
    finally:
        daemon.terminate()
        daemon.wait(20)


def mlflow_run(folder: Path, uri: str, *words: str) -> str:
    """`mlflow run URI WORDS` with a store and environments of its own under `folder`; returns what it printed."""
    env = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_ENV_ROOT": str(folder / "envs"),
        "D3_RUNS": str(folder / "runs"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "mlflow", "run", uri, *words], env=env, cwd=folder, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def runs(folder: Path, kind: str) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    everywhere = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(everywhere, f"tags.`d3.kind` = '{kind}'"))


def test_from_a_clean_clone_the_run_that_mlflow_opens_is_the_study(address: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git("clone", "--quiet", address, str(clone))
    mlflow_run(
        tmp_path, str(clone), "--env-manager", "uv", *(f"-P{word}" for word in ("boots=1", "apc=on", "invariant=0"))
    )
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (opened,) = [r for r in client.search_runs(["0"]) if "mlflow.project.entryPoint" in r.data.tags]
    (study,) = runs(tmp_path, "study")
    assert study.info.run_id == opened.info.run_id
    assert study.info.status == "FINISHED"
    assert {r.data.tags["mlflow.parentRunId"] for r in runs(tmp_path, "boot")} == {study.info.run_id}
    assert [r.data.tags["d3.status"] for r in runs(tmp_path, "boot")] == ["valid"]
    path = clone / "results" / f"d3_determinism_2x2-{study.data.tags['d3.registration'][:12]}.json"
    assert json.loads(path.read_text())["totals"]["counted"] == 1
    assert git("-C", str(clone), "status", "--porcelain", "--untracked-files=no") == ""


def test_from_a_git_address_the_committed_cpu_certificate_gives_its_verdict_here(address: str, tmp_path: Path) -> None:
    commit = git("-C", str(ROOT), "rev-parse", "HEAD")
    words = ("--version", commit, "--env-manager", "local", "-e", "reproduce", "-P", "boots=1")
    out = mlflow_run(tmp_path, address, *words)
    assert "base, bytes: KNOWN here too" in out
    (study,) = runs(tmp_path, "study")
    assert study.data.tags["mlflow.source.git.commit"] == commit
    (path,) = (tmp_path / "runs" / "reproductions").glob("*.json")
    repeats = json.loads(path.read_text())["registration"]["repeats"]
    original = json.loads((ROOT / "results" / "d3_determinism_2x2.json").read_text())
    assert repeats == {"certificate": original["digest"], "number": 1}


@pytest.mark.parametrize("manager", ["local", "virtualenv"])
def test_the_other_environment_managers(address: str, tmp_path: Path, manager: str) -> None:
    out = mlflow_run(tmp_path, address, "--env-manager", manager, "-e", "verify")
    assert "holds; 24 of 24 boots counted" in out
