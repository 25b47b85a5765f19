"""A store that came back as files is merged into another: whole, once, checked, and with its paths moved."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

import build
from conftest import Home, at_home
from d3 import certify, importing
from d3.errors import D3Error
from d3.importing import FROM, import_store
from d3.reach import tracking_uri
from d3.record import Boot
from d3.registration import Registration
from d3.store import LOG, REGISTERED_AT, study_dir, write_atomic
from d3.tracking import Tracking, main
from d3.verify import verify

STUDY = build.registration(boots=1)
BOOTS = build.boots(STUDY, {"on/0": {"short": build.CACHE}})
OTHER = build.registration(("on/0",), boots=1, prompts=("short",))


class Machines:
    """Two machines, one after the other: `there` logs boots, its folder comes back elsewhere, `here` imports it."""

    def __init__(self, folder: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.empty_store, self.monkeypatch = folder, empty_store, monkeypatch
        self.back = folder / "came back" / "runs"

    def at(self, name: str) -> Tracking:
        """Be that machine, with its own store."""
        home: Home
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            home = at_home(folder, self.monkeypatch)
            home.runs.mkdir()
            shutil.copy(self.empty_store, home.runs / "mlflow.db")
        else:
            self.monkeypatch.setenv("D3_RUNS", str(folder / "runs"))
        return Tracking()

    def send_back(self) -> str:
        """Copy the store of `there`, and let nothing be left at its old paths."""
        shutil.rmtree(self.back, ignore_errors=True)
        shutil.copytree(self.folder / "there" / "runs", self.back)
        (self.folder / "there").rename(self.folder / "gone")
        return str(self.back)

    def return_there(self) -> Tracking:
        (self.folder / "gone").rename(self.folder / "there")
        return self.at("there")


@pytest.fixture
def machines(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(tmp_path, empty_store, monkeypatch)


def logged(
    tracking: Tracking,
    registration: Registration,
    boots: list[Boot],
    log: Path | None = None,
    registered_at: str = build.CONTEXT.registered_at,
) -> str:
    write_atomic(study_dir(registration.id()) / REGISTERED_AT, registered_at)
    study = tracking.open_study(registration)
    for boot in boots:
        tracking.log_boot(study, boot, log)
    tracking.close_study(study, "FINISHED")
    return study.run_id


def runs(kind: str, folder: Path | None = None) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}" if folder else tracking_uri())
    places = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(places, f"tags.`d3.kind` = '{kind}'"))


def everything() -> dict[str, object]:
    """All that the store here says, to see that nothing changed."""
    client = MlflowClient(tracking_uri())
    return {
        r.info.run_id: (r.to_dictionary(), sorted(f.path for f in client.list_artifacts(r.info.run_id)))
        for r in [*runs("study"), *runs("boot")]
    }


def test_a_study_arrives_whole_and_can_be_certified_here(machines: Machines, tmp_path: Path) -> None:
    there = machines.at("there")
    (tmp_path / LOG).write_text("the engine's words")
    old = logged(there, STUDY, BOOTS, tmp_path / LOG)
    certify.certify(None, tmp_path / "out" / "at_first.json")
    back = machines.send_back()
    here = machines.at("here")
    (found,) = import_store(back)
    assert (found.opened, found.added, found.there, found.problems) == (True, 4, 0, ())
    (study,) = here.studies()
    assert study is not None
    assert here.registration(study) == STUDY
    boots = here.boots(study)[1]
    assert boots == sorted(BOOTS, key=lambda b: b.record.boot_id)
    (parent,) = runs("study")
    (source,) = runs("study", machines.back)
    assert parent.data.tags[FROM] == source.info.run_id == old
    assert parent.info.run_id != old
    assert {k: v for k, v in parent.data.tags.items() if k != FROM} == source.data.tags
    for attribute in ("status", "start_time", "end_time", "run_name"):
        assert getattr(parent.info, attribute) == getattr(source.info, attribute)
    assert (parent.data.params, parent.data.metrics) == (source.data.params, source.data.metrics)
    names = {f.path for f in here.client.list_artifacts(parent.info.run_id, "certificate")}
    assert "certificate/at_first.json" in names
    sources = {r.info.run_id: r for r in runs("boot", machines.back)}
    for run in runs("boot"):
        origin = sources.pop(run.data.tags[FROM])
        assert (run.data.params, run.data.metrics) == (origin.data.params, origin.data.metrics)
        assert list(run.data.metrics) == list(origin.data.metrics)
        assert (run.info.status, run.info.start_time, run.info.end_time) == (
            origin.info.status,
            origin.info.start_time,
            origin.info.end_time,
        )
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.inputs is not None
        (prompts,) = run.inputs.dataset_inputs
        assert f"runs:/{parent.info.run_id}/prompts.json" in prompts.dataset.source
        assert {f.path for f in here.client.list_artifacts(run.info.run_id)} >= {"boot.json", "responses.jsonl", LOG}
    assert sources == {}
    certificate, path = certify.certify(None, tmp_path / "out" / "at_last.json")
    assert (certificate.totals.counted, verify(path)) == (4, [])
    assert certificate.context.registered_at == source.data.tags["d3.registered_at"]


def test_a_second_import_changes_nothing_and_says_so(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    machines.at("here")
    assert main(["import", f"{back}/mlflow.db"]) == 0
    said = capsys.readouterr().out
    assert ": 4 boots imported, 0 here already, MLflow run " in said
    assert "\nnext: python -m d3.certify --run " in said
    before = everything()
    raw = (machines.back / "mlflow.db").read_bytes()
    assert main(["import", back]) == 0
    said = capsys.readouterr().out
    assert ": all 4 boots here already, MLflow run " in said
    assert "nothing to import: this store has it already" in said
    assert everything() == before
    assert (machines.back / "mlflow.db").read_bytes() == raw


def test_a_study_that_is_here_gets_only_the_boots_it_lacks(machines: Machines) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    own = logged(machines.at("here"), STUDY, BOOTS[:2])
    before = everything()
    (found,) = import_store(back)
    assert (found.opened, found.run_id, found.added, found.there) == (False, own, 2, 2)
    after = everything()
    assert {run: after[run] for run in before} == before
    assert len(after) == len(before) + 2


def test_boots_that_came_later_are_added_by_the_next_import(machines: Machines) -> None:
    there = machines.at("there")
    logged(there, STUDY, BOOTS[:3])
    machines.send_back()
    machines.at("here")
    assert import_store(str(machines.back))[0].added == 3
    logged(machines.return_there(), STUDY, BOOTS)
    machines.send_back()
    machines.at("here")
    (found,) = import_store(str(machines.back))
    assert (found.added, found.there) == (1, 3)


@pytest.mark.parametrize("fails_at", ["log_batch", "log_artifacts", "log_inputs", "set_terminated"])
@pytest.mark.parametrize("call", [1, 3])
def test_an_import_that_was_cut_short_is_completed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, fails_at: str, call: int
) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    here = machines.at("here")
    calls = iter(range(1, 1000))
    real: Callable[..., object] = getattr(MlflowClient, fails_at)

    def killed(self: MlflowClient, *args: object, **more: object) -> object:
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(self, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, fails_at, killed)
        with pytest.raises(KeyboardInterrupt):
            import_store(back)
    (found,) = import_store(back)
    assert found.added + found.there == 4
    assert found.problems == ()
    (parent,) = runs("study")
    assert (parent.info.status, len(runs("boot"))) == ("FINISHED", 4)
    assert {r.info.status for r in runs("boot")} == {"FINISHED"}
    (study,) = here.studies()
    assert study is not None
    assert here.boots(study)[1] == sorted(BOOTS, key=lambda b: b.record.boot_id)
    assert parent.inputs is not None
    assert len(parent.inputs.dataset_inputs) == 1
    before = everything()
    import_store(back)
    assert everything() == before


def test_a_boot_that_was_changed_on_its_way_is_not_imported_and_the_others_are(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    machines.at("here")
    first, second, *_ = sorted(machines.back.glob("artifacts/*/artifacts/boot.json"))
    first.write_text(first.read_text().replace('"latency_s":0.1', '"latency_s":0.2'))
    (second.parent / "responses.jsonl").write_text("")
    assert main(["import", back]) == 1
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: not imported: ") for line in lines)
    assert (
        sum("does not hold the boot that was logged; its files were changed; copy the store again" in x for x in lines)
        == 2
    )
    assert ": 2 boots imported, 0 here already" in printed.out
    assert len(runs("boot")) == 2


def test_the_same_study_registered_at_another_time_stays_a_study_of_its_own(machines: Machines) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    own = logged(machines.at("here"), STUDY, BOOTS[:2], registered_at="2026-09-02T00:00:00.000+00:00")
    (found,) = import_store(back)
    assert (found.opened, found.added, found.there) == (True, 4, 0)
    assert found.run_id != own
    assert len(runs("study")) == 2


def test_another_boot_of_the_same_id_stays(machines: Machines) -> None:
    logged(machines.at("there"), STUDY, BOOTS)
    back = machines.send_back()
    moved = [build.boots(STUDY)[0], *BOOTS[1:]]
    logged(machines.at("here"), STUDY, moved)
    before = everything()
    (found,) = import_store(back)
    (problem,) = found.problems
    assert problem.startswith(f"{BOOTS[0].record.boot_id}: another boot of this id is here already, it stays; compare")
    assert (found.added, found.there) == (0, 3)
    assert everything() == before


def test_several_studies_come_in_one_call_into_the_store_that_is_named(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = machines.at("there")
    logged(there, STUDY, BOOTS)
    logged(there, OTHER, build.boots(OTHER))
    back = machines.send_back()
    machines.at("here")
    into = f"sqlite:///{shutil.copy(machines.empty_store, machines.folder / 'shared.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri())
    assert main(["import", back, "--into", into]) == 0
    assert f"next: MLFLOW_TRACKING_URI={into} python -m d3.certify --run" in capsys.readouterr().out
    assert tracking_uri() == into
    assert (len(runs("study")), len(runs("boot"))) == (2, 5)


def test_a_run_that_was_half_written_there_is_named(machines: Machines) -> None:
    there = machines.at("there")
    logged(there, STUDY, BOOTS)
    (run, *_) = runs("boot")
    there.client.update_run(run.info.run_id, status="RUNNING")
    back = machines.send_back()
    machines.at("here")
    (found,) = import_store(back)
    assert found.problems == (
        f"{run.data.tags['d3.boot_id']}: half written there; send it again on that machine: python -m d3.sync",
    )
    assert found.added == 3


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def older(path: Path) -> None:
    execute(path, "update alembic_version set version_num = '451aebb31d03'")


def newer(path: Path) -> None:
    execute(path, "update alembic_version set version_num = 'ffffffffffff'")


def no_store(path: Path) -> None:
    path.unlink()
    execute(path, "create table notes (words text)")


def damaged(path: Path) -> None:
    path.write_text("no database at all, but long enough to look like a file" * 99)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.unlink(), "mlflow.db does not exist; name the SQLite file of the store that came back"),
        (damaged, "mlflow.db cannot be read as an SQLite file: file is not a database; name the store's .db file"),
        (no_store, "mlflow.db is no MLflow store; name the SQLite file of the store that came back"),
        (older, "mlflow.db is of an older MLflow than the one here, "),
        (newer, "mlflow.db is of a newer MLflow than the one here, "),
        (lambda path: shutil.rmtree(path.parent / "artifacts"), "copy the folder of artifacts with the store"),
        (
            lambda path: execute(path, "delete from tags where key = 'd3.kind'"),
            "mlflow.db has no D3 study; name the store",
        ),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    machines: Machines, spoil: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(machines.at("there"), OTHER, build.boots(OTHER))
    back = machines.send_back()
    machines.at("here")
    spoil(machines.back / "mlflow.db")
    assert main(["import", f"{back}/mlflow.db"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) == 1
    assert said in printed.err
    assert runs("study") == []
    if spoil is older:
        assert f"run: mlflow db upgrade sqlite:///{machines.back}/mlflow.db" in printed.err
    if spoil is newer:
        assert "install the MLflow that wrote it: pip install -U mlflow" in printed.err


def test_a_store_is_not_imported_into_itself(machines: Machines) -> None:
    logged(machines.at("there"), OTHER, build.boots(OTHER))
    with pytest.raises(D3Error, match="is the store that is used here already; name the one that came back"):
        import_store(str(machines.folder / "there" / "runs"))


def test_artifacts_are_looked_for_below_the_store_only(machines: Machines, tmp_path: Path) -> None:
    logged(machines.at("there"), OTHER, build.boots(OTHER))
    (run,) = runs("study")
    shutil.copytree(machines.folder / "there" / "runs", machines.back)
    found = importing.Source(path=machines.back / "mlflow.db", copy_path=machines.back / "mlflow.db")
    assert found.artifacts(run) == (machines.back / "artifacts" / run.info.run_id / "artifacts").resolve()
    run.info._artifact_uri = f"file:///x/../../{run.info.run_id}"
    (tmp_path / run.info.run_id).mkdir()
    with pytest.raises(D3Error, match="are not below"):
        found.artifacts(run)
