"""A sweep by standby, through the command: every boot a process of its own, all gone with the sweep, however it ends.

And the real engine, once by every way to start.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import FAKE, Home, logging_to
from d3.boot import run
from d3.record import BootRecord
from d3.starter import Starter
from d3.store import LOG, RECORD, load, root
from planned import wrapper
from slow.test_real_engine import plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def started(home: Home, *words: str) -> "subprocess.Popen[str]":
    env = os.environ | {"PYTHONPATH": str(root())}
    engine = ("engine.transport=worker", f"engine.python={wrapper(home.folder)}", "start=standby")
    command = [sys.executable, "-m", "d3", "-m", *FAKE, *engine, *words, "apc=on,off", "invariant=0,1", "boots=1"]
    return subprocess.Popen(command, env=env, cwd=root(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def engines(process: psutil.Process) -> list[psutil.Process]:
    return [p for p in process.children(recursive=True) if any("fake_worker" in word for word in p.cmdline())]


@pytest.fixture
def nothing_of_ours(home: Home) -> Iterator[None]:
    yield
    assert logging_to(home.folder) == []


@pytest.mark.usefixtures("store", "nothing_of_ours")
def test_a_sweep_by_standby_records_how_every_boot_started(home: Home) -> None:
    said, _ = started(home).communicate(timeout=300)
    assert "4 of 4 boots valid" in said
    records = [load(BootRecord, path) for path in home.runs.glob(f"studies/*/boots/*/{RECORD}")]
    assert [(r.start, r.coldness, r.leftovers) for r in records] == [("standby", "L1", ())] * 4
    assert len(list(home.runs.glob("studies/*/boots/*"))) == 4


@pytest.mark.usefixtures("store", "nothing_of_ours")
def test_a_standby_goes_with_its_sweep(home: Home) -> None:
    home.switch.write_text("hang_in_request")
    process = started(home)
    until = time.monotonic() + 60
    while len(found := engines(psutil.Process(process.pid))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(found) == 2  # the boot that hangs, and the standby of the next
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert not any(p.is_running() for p in found)
    assert [p.name for p in home.runs.glob("studies/*/boots/*") if not (p / RECORD).exists()] == []


def test_the_real_engine_gives_the_same_hashes_however_it_starts(tmp_path: Path) -> None:
    asked = plan("worker")
    plans = [
        asked.model_copy(update={"start": start, "boot": n}) for n, start in enumerate(("plain", "standby", "fork"))
    ]
    with Starter() as starter:
        records = []
        for number, one in enumerate(plans):
            following = plans[number + 1] if number == 0 else None
            starter.expect(following, tmp_path / f"b{number + 1}" / LOG)
            records.append(run(one, tmp_path / f"b{number}", starter=starter).record)
    assert [(r.status, r.reason, r.start, r.leftovers) for r in records] == [
        ("valid", "", start, ()) for start in ("plain", "standby", "fork")
    ]
    assert len({tuple(r.response for r in record.requests) for record in records}) == 1
    phases = [r.timings for r in records]
    alone = [t.python_s + t.import_s + t.weights_s + t.ready_s for t in phases]
    assert phases[0].boot_s >= alone[0] - 0.01
    assert phases[1].boot_s < alone[1]  # imports were over before it began, or partly
