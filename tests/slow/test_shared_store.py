"""One tracking store for several machines: an MLflow server over HTTP, two sweeps at once, and an outage in between.

D3_TEST_STORE=postgresql://... puts an empty PostgreSQL database behind the server instead of SQLite (its driver must be
importable), and D3_TEST_OUTAGE_S=60 makes the outage a minute.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from conftest import FAKE, Home
from d3.certify import certify
from d3.store import root
from d3.sync import sync
from d3.verify import main as verify

OUTAGE_S = float(os.environ.get("D3_TEST_OUTAGE_S", "20"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server:
    """An MLflow server on loopback that can be stopped and started again."""

    def __init__(self, store: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                        "--workers", "1", "--backend-store-uri", os.environ.get("D3_TEST_STORE", f"sqlite:///{store}"),
                        "--serve-artifacts",
                        "--artifacts-destination", str(folder / "artifacts")]  # fmt: skip
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=quiet, stderr=quiet, start_new_session=True)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        os.killpg(self.process.pid, 15)
        self.process.wait(60)


@pytest.fixture
def server(home: Home, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server(store, home.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.address)
    yield found
    found.stop()


def sweep(runs: Path, *words: str) -> "subprocess.Popen[str]":
    env = os.environ | {"PYTHONPATH": str(root()), "D3_RUNS": str(runs)}
    return subprocess.Popen([sys.executable, "-m", "d3", "-m", *FAKE, *words], env=env, cwd=root(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def found(kind: str) -> list[Run]:
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    places = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(places, f"tags.`d3.kind` = '{kind}'", max_results=500))


def recorded(runs: Path) -> int:
    return len(list(runs.glob("studies/*/boots/*/boot.json")))


def test_two_sweeps_at_once_do_not_mix(home: Home, server: Server) -> None:
    """One of them is the same study on another machine: another registering, so another parent run."""
    places = [home.folder / name for name in ("one", "two", "other machine")]
    seeds = ("seed=1", "seed=2", "seed=1")
    sweeps = [sweep(p, "apc=on,off", "boots=2", s) for p, s in zip(places, seeds, strict=True)]
    for process in sweeps:
        out, err = process.communicate(timeout=400)
        assert (process.returncode, err) == (0, ""), out + err
        assert "4 of 4 boots valid" in out
    parents = found("study")
    assert len(parents) == 3
    assert {p.info.status for p in parents} == {"FINISHED"}
    assert len({p.data.tags["d3.registration"] for p in parents}) == 2
    by_parent = {p.info.run_id: [] for p in parents}  # type: ignore[var-annotated]
    for boot in found("boot"):
        by_parent[boot.data.tags["mlflow.parentRunId"]].append(boot.data.tags["d3.boot_id"])
    assert [len(set(ids)) for ids in by_parent.values()] == [len(ids) for ids in by_parent.values()] == [4, 4, 4]
    for number, parent in enumerate(by_parent):
        out = home.folder / f"c{number}.json"
        certificate, _ = certify(parent, out)
        assert certificate.totals.counted == 4
        assert verify([str(out)]) == 0


def test_a_server_that_is_down_in_mid_sweep_costs_nothing(home: Home, server: Server) -> None:
    boots = round(OUTAGE_S * 0.4)  # of each cell, so that the sweep outlasts the outage
    process = sweep(home.runs, "apc=on,off", f"boots={boots}")
    deadline = time.monotonic() + 120
    while recorded(home.runs) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    server.stop()
    time.sleep(OUTAGE_S)
    during = recorded(home.runs)
    server.start()
    out, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (0, ""), out + err
    assert during > 2  # it went on
    assert f"{2 * boots} of {2 * boots} boots valid" in out
    assert out.count("the sweep goes on, its boots are kept and sent later") <= 1
    assert len(found("boot")) == recorded(home.runs) == 2 * boots
    assert [p.info.status for p in found("study")] == ["FINISHED"]


def test_a_server_that_stays_down_gets_the_boots_from_sync(home: Home, server: Server) -> None:
    process = sweep(home.runs, "apc=on,off", "boots=2")
    deadline = time.monotonic() + 120
    while recorded(home.runs) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    server.stop()
    out, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (0, ""), out + err
    assert out.count("the sweep goes on, its boots are kept and sent later") == 1
    assert "boots are not in MLflow yet; once it answers, send them: python -m d3.sync" in out
    server.start()
    assert sync() == len(found("boot")) == recorded(home.runs) == 4
    assert [p.info.status for p in found("study")] == ["FINISHED"]
