"""A sweep killed at random moments, again and again: the same command ends with an uninterrupted run's table."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from conftest import FAKE, Home, at_home, left_in_shared_memory, logging_to
from d3.certificate import Certificate
from d3.certify import certify
from d3.family import segments
from d3.reach import tracking_uri
from d3.store import root
from d3.sync import sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STUDY = ("-m", *FAKE, "apc=on,off", "invariant=0,1", "boots=4", "max_attempts=30")
KILLS = 10
Kill = Callable[["subprocess.Popen[bytes]", Home], bool]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Certificate:
    """The certificate of the same study, run without interruption."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        home = at_home(tmp_path_factory.mktemp("whole"), monkeypatch)
        home.runs.mkdir()
        shutil.copy(empty_store, home.runs / "mlflow.db")
        assert started(*STUDY).wait(300) == 0
        return certify(None, home.folder / "whole.json")[0]


def started(*words: str) -> "subprocess.Popen[bytes]":
    env = os.environ | {"PYTHONPATH": str(root())}
    return subprocess.Popen([sys.executable, "-m", "d3", *words], env=env, cwd=root(), start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def engines(name: str) -> list[psutil.Process]:
    """Processes whose command line has this word: the pretend engine's is its switch file, of this test alone."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(name in word for word in p.info["cmdline"] or [])]


def keepers(home: Home) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "environ"])
    ours = [p for p in found if (p.info["environ"] or {}).get("D3_RUNS") == str(home.runs)]
    return [p for p in ours if "d3.keeper" in (p.info["cmdline"] or [])]


def soon(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def the_sweep(process: "subprocess.Popen[bytes]", home: Home) -> bool:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    return True


def its_whole_group(process: "subprocess.Popen[bytes]", home: Home) -> bool:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)
    return True


def the_engine(process: "subprocess.Popen[bytes]", home: Home) -> bool:
    """The sweep goes on: the boot is recorded as failed, and tried again by the next command."""
    found = engines(str(home.switch))
    for engine in found:
        engine.kill()
    return bool(found)


@pytest.fixture
def no_process_left(home: Home) -> Iterator[None]:
    yield
    assert soon(lambda: not engines(str(home.switch)), 20), engines(str(home.switch))


@pytest.mark.usefixtures("store", "no_process_left")
@pytest.mark.parametrize("seed", [1])
def test_ten_random_kills_cost_no_boot_and_count_none_twice(home: Home, whole: Certificate, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    kills: list[Kill] = [the_sweep, its_whole_group, the_engine, the_engine]
    done, process = 0, started(*STUDY)
    assert soon(lambda: bool(keepers(home)), 60)
    recorded = lambda: len(list(home.runs.glob("studies/*/boots/*/boot.json")))  # noqa: E731
    while done < KILLS:
        # Anywhere in a boot, and now and then in the start of the sweep itself.
        moment = chance.uniform(0.0, 2.5)
        if chance.random() < 0.8:
            soon(lambda p=process: bool(engines(str(home.switch))) or p.poll() is not None, 60)
        time.sleep(moment)
        if process.poll() is not None and recorded() >= 16 + done:
            break
        done += chance.choice(kills)(process, home)
        if process.poll() is not None:
            assert soon(lambda: not engines(str(home.switch)), 20)  # the engine does not survive its sweep
            process = started(*STUDY)
    assert done == KILLS
    for _ in range(KILLS):  # boots whose engine was killed are tried again by the same command
        if process.wait(300) == 0:
            break
        process = started(*STUDY)
    assert process.returncode == 0
    certificate, _ = certify(None, home.folder / "killed.json")
    assert table(certificate) == table(whole)
    assert certificate.totals.counted == whole.totals.counted == 16
    assert len({(b.stratum, b.cell, b.boot) for b in certificate.boots if b.counted}) == 16
    assert len(certificate.boots) == recorded()  # every attempt is in the certificate
    client = MlflowClient(tracking_uri())
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()], max_results=1000)
    assert "RUNNING" not in {r.info.status for r in runs}
    assert len(runs) == recorded() + 1
    assert soon(lambda: not keepers(home), 20)


def table(certificate: Certificate) -> list[object]:
    """Everything that is counted or concluded; how often a boot was tried is no part of it."""
    cells = [c.model_copy(update={"attempts": 0}) for s in certificate.strata for c in s.cells]
    return [*cells, *(v for s in certificate.strata for v in s.verdicts), certificate.answer]


@pytest.mark.usefixtures("store")
def test_a_killed_study_is_closed_by_sync(home: Home) -> None:
    home.switch.write_text("hang_in_request")
    process = started(*STUDY)
    assert soon(lambda: bool(engines(str(home.switch))), 60)
    time.sleep(1)
    the_sweep(process, home)
    assert soon(lambda: not engines(str(home.switch)), 20)
    sync()
    client = MlflowClient(tracking_uri())
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "KILLED"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("transport", ["worker", "server"])
def test_the_real_engine_does_not_survive_a_killed_sweep(
    home: Home, monkeypatch: pytest.MonkeyPatch, transport
) -> None:
    monkeypatch.delenv("D3_CACHE")
    shared = segments()
    ours = lambda: logging_to(home.runs)  # noqa: E731
    process = started("apc=on", "invariant=0", f"engine.transport={transport}")
    assert soon(lambda: len(ours()) >= 1, 120)
    time.sleep(30 if transport == "server" else 12)  # in the middle of its start, with all its processes
    assert process.poll() is None
    family = [x for p in ours() for x in [p, *p.children(recursive=True)]]
    its_whole_group(process, home)
    assert soon(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 30)
    assert soon(lambda: not ours(), 10)
    assert not left_in_shared_memory(shared)
