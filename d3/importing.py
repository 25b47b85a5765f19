"""Merge the studies of one MLflow store, an SQLite file that came from another machine, into the store used here.

The source is read from a copy and stays as it is. Its artifacts are looked for below the file's own folder, since the
addresses that it holds are paths of the other machine. A boot is imported only if its record has the digest that its
run says and its responses are the record's. A second import changes nothing.
"""

import argparse
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from alembic.script import ScriptDirectory
from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Metric, Param, Run, RunTag
from sqlalchemy.engine import make_url

from d3.classify import check_boot
from d3.errors import D3Error, printable
from d3.reach import reachable, reason, tracking_uri
from d3.record import Boot, BootRecord, Frozen, canonical_json, sha256
from d3.registration import Registration, short
from d3.store import RECORD, REGISTRATION, RESPONSES, load, parse_responses, read_file, responses_text
from d3.tracking import Study, Tracking
from d3.view import prompts_input, saved_view

FROM = "d3.imported_run_id"
PARENT = "mlflow.parentRunId"
OWN_TAGS = (PARENT, "mlflow.runName")  # set when a run is created
DEFAULT = "mlflow.db"


class Imported(Frozen):
    """What became of one study: its run here, how many boots came and were there already, and what did not come."""

    name: str
    registration_id: str
    run_id: str
    opened: bool
    added: int
    there: int
    problems: tuple[str, ...]


class Source(Frozen):
    """A store that came as files: `copy` is read in place of `path`."""

    path: Path
    copy_path: Path

    @property
    def client(self) -> MlflowClient:
        """A client of the copy."""
        return MlflowClient(f"sqlite:///{self.copy_path}")

    def artifacts(self, run: Run) -> Path:
        """The folder of a run's artifacts below the store's own folder: the longest end of its address that is there.

        Raises D3Error where there is none.
        """
        address = unquote(urlsplit(run.info.artifact_uri).path)
        parts = [p for p in Path(address).parts if p != "/"]
        here = self.path.parent.resolve()
        for start in range(len(parts)):
            folder = here.joinpath(*parts[start:])
            if ".." not in parts and run.info.run_id in parts[start:] and folder.is_dir():
                return folder
        raise D3Error(f"the artifacts of run {run.info.run_id} are not below {here}",
                      "copy the folder of artifacts with the store, to the same place beside it")  # fmt: skip


@contextmanager
def source(store: str) -> Iterator[Source]:
    """Open a store for reading, a file or a folder that holds `mlflow.db`. Raises D3Error where it is none."""
    path = Path((make_url(store).database or store) if store.startswith("sqlite:") else store)
    path = path / DEFAULT if path.is_dir() else path
    if not path.exists():
        raise D3Error(
            f"{path} does not exist", "name the SQLite file of the store that came back, such as DIR/mlflow.db"
        )
    with tempfile.TemporaryDirectory(prefix="d3-") as folder:
        copy_path = Path(folder) / DEFAULT
        _copy(path, copy_path)
        _check_schema(path, copy_path)
        yield Source(path=path.absolute(), copy_path=copy_path)


def import_store(store: str) -> list[Imported]:
    """Every study of `store` into the store at `tracking_uri()`. Raises D3Error where nothing can be imported."""
    with source(store) as found:
        _not_itself(found.path)
        studies = _runs(found.client, "tags.`d3.kind` = 'study'")
        if not studies:
            raise D3Error(f"{found.path} has no D3 study", "name the store in which the study was logged")
        tracking = Tracking()
        with reachable():
            return [_study(tracking, found, run) for run in reversed(studies)]


def _copy(path: Path, to: Path) -> None:
    """Copy a database with what its log still holds; SQLite's own backup, so that nothing is read half."""
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(to)) as new,
        ):
            old.backup(new)
    except sqlite3.Error as error:
        raise D3Error(
            f"{path} cannot be read as an SQLite file: {reason(error)}", "name the store's .db file"
        ) from error


def _check_schema(path: Path, copy_path: Path) -> None:
    with closing(sqlite3.connect(copy_path)) as connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        if not {"experiments", "runs", "alembic_version"} <= tables:
            raise D3Error(f"{path} is no MLflow store", "name the SQLite file of the store that came back")
        versions = [version for (version,) in connection.execute("select version_num from alembic_version")]
    migrations = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    if versions == list(migrations.get_heads()):
        return
    known = {revision.revision for revision in migrations.walk_revisions()}
    if set(versions) <= known:
        raise D3Error(f"{path} is of an older MLflow than the one here, {mlflow.__version__}",
                      f"run: mlflow db upgrade sqlite:///{path.absolute()}")  # fmt: skip
    raise D3Error(f"{path} is of a newer MLflow than the one here, {mlflow.__version__}",
                  "install the MLflow that wrote it: pip install -U mlflow")  # fmt: skip


def _not_itself(path: Path) -> None:
    into = tracking_uri()
    if into.startswith("sqlite:") and (there := make_url(into).database) and Path(there).resolve() == path.resolve():
        raise D3Error(
            f"{path} is the store that is used here already", "name the one that came back, or --into another"
        )


def _study(tracking: Tracking, found: Source, run: Run) -> Imported:
    tags, client = run.data.tags, tracking.client
    registration = load(Registration, found.artifacts(run) / REGISTRATION)
    if registration.id() != tags["d3.registration"]:
        raise D3Error(f"run {run.info.run_id} of {found.path} holds a registration of another id",
                      "the store was changed; copy it again")  # fmt: skip
    known = tracking.find_study(registration.id(), tags["d3.registered_at"])
    state = client.get_run(known.run_id) if known else None
    begun = state is not None and state.info.status == "RUNNING" and state.data.tags.get(FROM) == run.info.run_id
    study = known if known and not begun else _open(tracking, found, run, registration, state)
    added, there, problems = 0, 0, []
    condition = f"tags.`d3.kind` = 'boot' and tags.`{PARENT}` = '{run.info.run_id}'"
    for boot in reversed(_runs(found.client, condition)):
        try:
            new = _boot(tracking, found, boot, study, registration)
        except D3Error as error:
            problems.append(str(error))
            continue
        added, there = added + new, there + (not new)
    if begun or not known:
        status = run.info.status if run.info.status != "RUNNING" else "KILLED"  # nobody runs it any more
        client.set_terminated(study.run_id, status, run.info.end_time)
    return Imported(name=registration.study, registration_id=registration.id(), run_id=study.run_id, opened=not known,
                    added=added, there=there, problems=tuple(problems))  # fmt: skip


def _open(tracking: Tracking, found: Source, run: Run, registration: Registration, half: Run | None) -> Study:
    """The parent run, filled and RUNNING until its boots are there too. `half`: one that an import began before."""
    client, info = tracking.client, run.info
    tags = {"d3.kind": "study", "d3.registration": registration.id(), "d3.study": registration.study,
            "d3.registered_at": run.data.tags["d3.registered_at"], FROM: info.run_id}  # fmt: skip
    half = half or client.create_run(tracking.experiment, info.start_time, tags, info.run_name)
    run_id = half.info.run_id
    _fill(client, run, run_id, found.artifacts(run))
    if not _datasets(client, run_id):
        client.log_inputs(run_id, datasets=[prompts_input(registration, run_id)])
    client.set_experiment_tag(half.info.experiment_id, *saved_view(registration, run_id, info.start_time))
    study = tracking.find_study(registration.id(), tags["d3.registered_at"])
    if study is None:
        raise D3Error(f"run {run_id} was written and is not found", "run the same command again")
    return study


def _boot(tracking: Tracking, found: Source, run: Run, study: Study, registration: Registration) -> bool:
    """Import one boot; False where it is there already. Raises D3Error where it may not be imported."""
    tags, client = run.data.tags, tracking.client
    boot_id, digest = tags["d3.boot_id"], tags["d3.record_sha256"]
    if run.info.status == "RUNNING":
        raise D3Error(f"{boot_id}: half written there", "send it again on that machine: python -m d3.sync")
    for other in _runs(client, f"tags.`d3.boot_id` = '{boot_id}' and tags.`{PARENT}` = '{study.run_id}'"):
        if other.info.status == "RUNNING":  # by an import, or a job, that was killed
            client.delete_run(other.info.run_id)
        elif other.data.tags["d3.record_sha256"] == digest:
            return False
        else:
            raise D3Error(f"{boot_id}: another boot of this id is here already, it stays",
                          f"compare them, and delete run {other.info.run_id} to import the other")  # fmt: skip
    folder = found.artifacts(run)
    check_boot(registration, _verified(folder, boot_id, digest))
    own = {PARENT: study.run_id, "d3.boot_id": boot_id, FROM: run.info.run_id}
    made = client.create_run(study.experiment_id, run.info.start_time, own, run.info.run_name)
    _fill(client, run, made.info.run_id, folder)
    if datasets := _datasets(client, study.run_id):
        client.log_inputs(made.info.run_id, datasets=datasets)
    client.set_terminated(made.info.run_id, run.info.status, run.info.end_time)
    return True


def _datasets(client: MlflowClient, run_id: str) -> list[DatasetInput]:
    inputs = client.get_run(run_id).inputs
    return list(inputs.dataset_inputs) if inputs else []


def _fill(client: MlflowClient, run: Run, run_id: str, folder: Path) -> None:
    """Give run `run_id` what `run` has: parameters, metrics, tags and artifacts."""
    client.log_batch(
        run_id,
        params=[Param(k, v) for k, v in run.data.params.items()],
        metrics=[Metric(k, v, run.info.end_time or run.info.start_time, 0) for k, v in run.data.metrics.items()],
        tags=[RunTag(k, v) for k, v in run.data.tags.items() if k not in OWN_TAGS],
    )
    client.log_artifacts(run_id, str(folder))


def _verified(folder: Path, boot_id: str, digest: str) -> Boot:
    """A boot out of a run's folder of artifacts. Raises D3Error where it is not the one that was logged."""
    record = load(BootRecord, folder / RECORD)
    text = read_file(folder / RESPONSES).decode("utf-8", "surrogatepass")
    boot = Boot(record=record, responses=parse_responses(text, f"{boot_id} {RESPONSES}"))
    whole = {r.response for r in record.requests} == set(boot.responses) and responses_text(boot) == text
    if record.boot_id != boot_id or sha256(canonical_json(record)) != digest or not whole:
        raise D3Error(f"{boot_id}: {folder} does not hold the boot that was logged",
                      "its files were changed; copy the store again")  # fmt: skip
    return boot


def _runs(client: MlflowClient, condition: str) -> list[Run]:
    """All runs of a store that meet a condition, the newest first."""
    places = [e.experiment_id for e in client.search_experiments()]
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(places, condition, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def run(options: argparse.Namespace) -> int:
    """Import, and say what came; 0 all of it is here, 1 a boot could not be imported, 2 nothing could."""
    if options.into:
        os.environ["MLFLOW_TRACKING_URI"] = options.into
    found = import_store(options.store)
    for one in found:
        print(printable(f"{one.name} {short(one.registration_id)}: {_words(one)}, MLflow run {one.run_id}"))
        for problem in one.problems:
            print(printable(f"error: not imported: {problem}"), file=sys.stderr)
    if not any(one.opened or one.added for one in found):
        print("nothing to import: this store has it already")
    where = f"MLFLOW_TRACKING_URI={options.into} " if options.into else ""
    print(printable(f"next: {where}python -m d3.certify --run {found[-1].run_id}"))
    return int(any(one.problems for one in found))


def _words(one: Imported) -> str:
    if one.added:
        return f"{one.added} boots imported, {one.there} here already"
    return f"all {one.there} boots here already" if one.there else "no boot to import"


def add_command(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The verb `import` of `python -m d3.tracking`."""
    made = verbs.add_parser(
        "import",
        help="merge a store that came back as files into the one used here",
        description="Merge the studies of an SQLite store that came from another machine into the store used here. "
        "Boots are checked against their digests; a second call changes nothing.",
        epilog="Exit code: 0 all of it is here, 1 a boot could not be imported, 2 nothing could.",
    )
    made.add_argument("store", help="the SQLite file, with the folder of artifacts beside it, or the folder of both")
    made.add_argument(
        "--into", metavar="URI", help="the store to merge into (default: MLFLOW_TRACKING_URI, else the one under runs/)"
    )
    made.set_defaults(run=run)
