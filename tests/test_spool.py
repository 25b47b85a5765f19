"""A store that is down costs no boot: what was not sent is sent later, once, whoever sends it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

import build
from conftest import Home
from d3 import sync
from d3.errors import Unreachable
from d3.opened import OpenStudy
from d3.reach import patiently, tracking_uri
from d3.spool import Spool
from d3.store import boot_dir, lock_study, save_boot, save_registration
from d3.tracking import OPENING, Tracking

STUDY = build.registration(boots=2)
BOOTS = build.boots(STUDY)
DOWN = "http://127.0.0.1:9"
ROOT = Path(__file__).parent.parent


@pytest.fixture
def spool(home: Home, store: Path) -> Spool:
    save_registration(STUDY)
    found = Spool(STUDY)
    found.open()
    return found


def saved(*numbers: int) -> None:
    for number in numbers:
        save_boot(BOOTS[number], boot_dir(BOOTS[number].record))


def children() -> list[str]:
    client = MlflowClient(tracking_uri())
    places = [e.experiment_id for e in client.search_experiments()]
    return sorted(r.data.tags["d3.boot_id"] for r in client.search_runs(places, "tags.`d3.kind` = 'boot'"))


def state() -> str:
    return str(Tracking().state(STUDY))


def fail(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Make so many calls of log_boot fail; returns the boots that it was called for."""
    calls: list[str] = []
    log_boot = Tracking.log_boot

    def failing(self: Tracking, study: object, boot: object, log: object) -> object:
        calls.append(boot.record.boot_id)  # type: ignore[attr-defined]
        if len(calls) <= times:
            raise Unreachable("MLflow does not answer", "start it")
        return log_boot(self, study, boot, log)  # type: ignore[arg-type]

    monkeypatch.setattr(Tracking, "log_boot", failing)
    return calls


def test_what_is_recorded_is_sent_once(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail(monkeypatch, 0)
    saved(0, 1)
    assert spool.send(0.1) == 0
    assert Spool(STUDY).send(0.1) == 0
    assert len(calls) == len(children()) == spool.count() == 2


def test_a_call_that_fails_once_is_tried_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fail(monkeypatch, 1)
    saved(0)
    assert spool.send(5) == 0
    assert (len(calls), len(children()), capsys.readouterr().out) == (2, 1, "")


def test_an_outage_is_one_line_its_end_another_and_nothing_is_lost(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fail(monkeypatch, 10**9)
    saved(0)
    assert spool.send(0.1) == 1
    tried = len(calls)
    saved(1)
    assert Spool(STUDY).send(5) == 2  # another process: no second line, and one try instead of five seconds of them
    assert len(calls) == tried + 1
    said = capsys.readouterr().out
    assert said == "MLflow does not answer; the sweep goes on, its boots are kept and sent later\n"
    calls.clear()
    monkeypatch.setattr(Tracking, "log_boot", lambda *a: "run")
    assert spool.send(5) == 0
    assert capsys.readouterr().out == "MLflow answers again: 2 waiting boots sent\n"


def test_boots_that_were_sent_to_another_store_are_sent_to_this_one(
    spool: Spool, home: Home, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(0, 1, 2)
    spool.send(5)
    (home.folder / "other.db").write_bytes(empty_store.read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home.folder}/other.db")
    other = Spool(STUDY)
    assert len(other.waiting()) == 3
    other.send(5)
    assert len(children()) == 3


def test_a_run_that_was_deleted_is_sent_again_by_sync(spool: Spool) -> None:
    saved(0, 1)
    spool.send(5)
    client = MlflowClient(tracking_uri())
    study = spool.open()
    run = client.search_runs([study.experiment_id], "tags.`d3.kind` = 'boot'")[0]
    client.delete_run(run.info.run_id)
    assert len(children()) == 1
    assert sync.sync() == len(children()) == 2


def test_the_address_of_the_store_is_nowhere_on_disk(spool: Spool, home: Home) -> None:
    saved(0)
    spool.send(5)
    text = "".join(p.read_text(errors="replace") for p in home.runs.glob("studies/*/*") if p.is_file())
    assert tracking_uri() not in text


def test_a_study_is_not_opened_where_the_store_is_down(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    with pytest.raises(Unreachable, match="Connection refused"):
        OpenStudy(STUDY)


def test_a_registered_study_asks_the_store_for_nothing(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3.spool.Tracking", None)
    assert Spool(STUDY).open() == spool.open()


@pytest.mark.parametrize(
    ("before", "recorded", "after"),
    [("RUNNING", 3, "KILLED"), ("RUNNING", 8, "FINISHED"), ("SCHEDULED", 0, "SCHEDULED"), ("FAILED", 3, "FAILED"),
     ("KILLED", 8, "FINISHED")],
)  # fmt: skip
def test_sync_closes_a_study_whose_process_is_gone(spool: Spool, before: str, recorded: int, after: str) -> None:
    saved(*range(recorded))
    Tracking().close_study(spool.open(), before)
    sync.sync()
    assert state() == after


def test_sync_leaves_a_study_that_is_running_open_and_sends_its_boots(spool: Spool) -> None:
    saved(0)
    with lock_study(STUDY.id()):
        assert sync.sync() == 1
        assert state() == "RUNNING"
    assert len(children()) == 1


def test_a_parent_that_was_left_half_filled_is_filled_and_found_again(home: Home, store: Path, monkeypatch) -> None:
    save_registration(STUDY)
    with monkeypatch.context() as killed:
        killed.setattr(MlflowClient, "log_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Tracking().open_study(STUDY)
    assert Tracking().studies() == []  # certify does not see it
    study = Tracking().open_study(STUDY)
    assert Tracking().studies() == [study]
    assert Tracking().registration(study) == STUDY
    run = MlflowClient(tracking_uri()).get_run(study.run_id)
    assert OPENING not in run.data.tags
    everywhere = MlflowClient(tracking_uri()).search_runs([study.experiment_id])
    assert [r.info.run_id for r in everywhere] == [study.run_id]


def test_the_same_study_of_two_machines_is_two_studies_in_one_store(
    spool: Spool, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri())
    saved(0)
    spool.send(5)
    monkeypatch.setenv("D3_RUNS", str(home.folder / "elsewhere"))
    save_registration(STUDY)
    saved(0, 1)
    other = Spool(STUDY)
    assert other.open().run_id != spool.open().run_id
    other.send(5)
    assert len(children()) == 3
    assert [len(Tracking().boots(s.open())[1]) for s in (spool, other)] == [1, 2]


SEND = "import sys; sys.path[:0] = sys.argv[1:3]\nimport test_spool as t\nt.Spool(t.STUDY).send(20)"


def test_processes_that_send_at_once_log_every_boot_once(spool: Spool) -> None:
    saved(*range(6))
    command = [sys.executable, "-c", SEND, str(ROOT), str(Path(__file__).parent)]
    senders = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(3)]
    assert [s.wait(120) for s in senders] == [0, 0, 0]
    assert children() == sorted(b.record.boot_id for b in BOOTS[:6])
    assert spool.waiting() == []


def test_a_store_may_be_made_by_several_at_once(home: Home) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(Tracking().experiment)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 3
    assert len(set(found)) == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def never() -> None:
        tried.append(1)
        raise Unreachable("no")

    with pytest.raises(Unreachable, match="no"):
        patiently(never, 0)
    assert len(tried) == 1


def test_a_try_that_takes_all_the_time_is_not_the_last() -> None:
    """Seen on a busy machine: another sweep was quicker to insert the same row, and the one try took the seconds."""
    tried: list[int] = []

    def second() -> str:
        tried.append(1)
        if len(tried) == 1:
            time.sleep(0.3)
            raise Unreachable("UNIQUE constraint failed")
        return "there"

    assert patiently(second, 0.2) == "there"
