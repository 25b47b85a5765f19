"""Boot records into MLflow and back: one parent run per study, one child run per attempt, keyed by boot id.

Uses the client with explicit run states: the fluent interface would mark a killed run FINISHED at exit.
"""

import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from d3.errors import D3Error
from d3.headline import metrics_of, params_of
from d3.record import Boot, BootRecord, Frozen, Status, canonical_json, sha256
from d3.registration import Registration, short
from d3.schema import Certificate
from d3.store import (
    LOG,
    RECORD,
    REGISTRATION,
    RESPONSES,
    load,
    parse_responses,
    responses_text,
    runs_dir,
    save_boot,
    save_registration,
    write_atomic,
)

EXPERIMENT = "d3"
LOG_KEPT = 200_000
RUN_STATES: dict[Status, str] = {
    "valid": "FINISHED", "void": "FINISHED", "skipped": "FINISHED", "failed": "FAILED", "stopped": "KILLED",
}  # fmt: skip

AGAIN = "remove that run and send the boot again: python -m d3.sync"

T = TypeVar("T")


class Study(Frozen):
    """A study's parent run."""

    run_id: str
    experiment_id: str
    registration_id: str
    registered_at: str


def tracking_uri() -> str:
    """$MLFLOW_TRACKING_URI, else an SQLite file under `runs/`, always absolute."""
    path = str(runs_dir() / "mlflow.db").replace("%", "%25").replace("?", "%3F")  # it is read as a URL
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path}"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError, sqlite3.Error, SQLAlchemyError) as error:
        raise D3Error(f"MLflow at {tracking_uri()} does not answer: {_line(error)}",
                      "start it, or set MLFLOW_TRACKING_URI; recorded boots are kept, send them with: "
                      "python -m d3.sync") from error  # fmt: skip


def _open_sqlite() -> None:
    """Open an SQLite store once ourselves: where it cannot be opened, MLflow would try again for 100 seconds."""
    if tracking_uri().startswith("sqlite:") and (path := make_url(tracking_uri()).database):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("select count(*) from sqlite_master")


class Tracking:
    """One connection to the store. Every method raises D3Error where the store does not answer."""

    def __init__(self) -> None:
        # MLflow reads these at every call; by its defaults a server that is down blocks one for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the error itself says so
        with _reachable():
            runs_dir().mkdir(parents=True, exist_ok=True)
            _open_sqlite()
            self.client = MlflowClient(tracking_uri())
            found = self.client.get_experiment_by_name(EXPERIMENT)
            self.experiment: str = found.experiment_id if found else self._create()

    def _create(self) -> str:
        local = tracking_uri().startswith("sqlite")
        return str(self.client.create_experiment(EXPERIMENT, (runs_dir() / "artifacts").as_uri() if local else None))

    def open_study(self, registration: Registration) -> Study:
        """The parent run of a registration: the one it has, the one `mlflow run` opened, or a new one.

        The registration is logged before this returns, so before any boot.
        """
        with _reachable():
            if found := self.find_study(registration.id()):
                self.client.update_run(found.run_id, status="RUNNING")
                return found
            # Consumed once: a boot's own run must not take the run that `mlflow run` opened for the study.
            adopted = os.environ.pop("MLFLOW_RUN_ID", None)
            run = self.client.get_run(adopted) if adopted else None
            if run is None or "d3.registration" in run.data.tags:
                name = f"{registration.study} {short(registration.id())}"
                run = self.client.create_run(self.experiment, run_name=name)
            run_id = run.info.run_id
            at = save_registration(registration)
            params = {k: ",".join(v) for k, v in registration.axes.items()}
            params |= {
                "boots": str(registration.boots),
                "protocol": registration.protocol.name,
                "seed": str(registration.seed),
            }
            tags = {"d3.kind": "study", "d3.registration": registration.id(), "d3.registered_at": at,
                    "d3.study": registration.study}  # fmt: skip
            self.client.log_batch(
                run_id,
                params=[Param(k, v) for k, v in params.items()],
                tags=[RunTag(k, v) for k, v in tags.items()],
            )
            self.client.log_text(run_id, canonical_json(registration) + "\n", REGISTRATION)
            return _study(self.client.get_run(run_id))

    def find_study(self, registration_id: str) -> Study | None:
        """The parent run of a registration, if the store has one."""
        runs = self._search(f"tags.`d3.kind` = 'study' and tags.`d3.registration` = '{registration_id}'")
        return _study(runs[0]) if runs else None

    def studies(self) -> list[Study]:
        """All studies, the newest first."""
        with _reachable():
            return [_study(run) for run in self._search("tags.`d3.kind` = 'study'")]

    def close_study(self, study: Study, status: str) -> None:
        """Give the parent run its last state: FINISHED, FAILED or KILLED."""
        with _reachable():
            self.client.set_terminated(study.run_id, status=status)

    def annotate(self, study: Study, certificate: Certificate, text: str, files: list[Path]) -> None:
        """Put the verdict where people compare runs: the parent's tags, its description and its artifacts."""
        with _reachable():
            readings = [f"{s.stratum} {v.endpoint}: {v.reading}" for s in certificate.strata for v in s.verdicts]
            tags = {
                "d3.reading": "; ".join(readings),
                "d3.answer": certificate.answer,
                "mlflow.note.content": text,
            }
            self.client.log_batch(study.run_id, tags=[RunTag(k, v[:5000]) for k, v in tags.items()])
            for file in files:
                self.client.log_artifact(study.run_id, str(file), "certificate")

    def log_boot(self, study: Study, boot: Boot, log: Path | None) -> str:
        """One child run for one attempt; a second call for the same record changes nothing. Returns its run id."""
        record = boot.record
        digest = sha256(canonical_json(record))
        with _reachable():
            same = f"tags.`d3.boot_id` = '{record.boot_id}' and tags.`mlflow.parentRunId` = '{study.run_id}'"
            for run in self._search(same):
                if run.data.tags.get("d3.record_sha256") == digest and run.info.status != "RUNNING":
                    return str(run.info.run_id)
                self.client.delete_run(run.info.run_id)  # half written by a job that was killed
            tags = {
                "mlflow.parentRunId": study.run_id,
                "d3.kind": "boot",
                "d3.registration": record.registration,
                "d3.boot_id": record.boot_id,
                "d3.cell": record.cell,
                "d3.stratum": record.stratum,
                "d3.status": record.status,
                "d3.reason": record.reason[:500],
                "d3.record_sha256": digest,
            }
            name = f"{record.cell} · boot {record.boot}" + (f" · {record.stratum}" if record.stratum != "base" else "")
            run = self.client.create_run(study.experiment_id, run_name=name, tags=tags)
            run_id = str(run.info.run_id)
            now = int(datetime.now(UTC).timestamp() * 1000)
            self.client.log_batch(
                run_id,
                params=[Param(k, v[:500]) for k, v in params_of(record).items()],
                metrics=[Metric(k, v, now, 0) for k, v in metrics_of(boot).items()],
            )
            self._log_artifacts(run_id, boot, log)
            self.client.set_terminated(run_id, RUN_STATES[record.status])
            return run_id

    def _log_artifacts(self, run_id: str, boot: Boot, log: Path | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save_boot(boot, Path(folder))
            if log and log.exists():
                write_atomic(Path(folder) / LOG, log.read_bytes()[-LOG_KEPT:])
            self.client.log_artifacts(run_id, folder)

    def boots(self, study: Study) -> tuple[pd.DataFrame, list[Boot]]:
        """Every attempt of a study out of MLflow alone: a frame of runs, and the boots in the same order.

        The frame has the columns run_id, boot_id, cell, stratum, status and record_sha256. Raises D3Error where an
        artifact does not have the digest that its run says.
        """
        with _reachable():
            runs = self._search(f"tags.`d3.kind` = 'boot' and tags.`mlflow.parentRunId` = '{study.run_id}'")
            rows = [
                {"run_id": r.info.run_id, **{k[3:]: v for k, v in r.data.tags.items() if k.startswith("d3.")}}
                for r in runs
            ]
            frame = pd.DataFrame(rows).sort_values("boot_id", ignore_index=True) if rows else pd.DataFrame()
            return frame, [self._boot(row["run_id"], row["record_sha256"]) for row in frame.to_dict("records")]

    def registration(self, study: Study) -> Registration:
        """The registration as it was logged before the first boot."""
        found = self._artifact(study.run_id, REGISTRATION, lambda path: load(Registration, path))
        if found.id() != study.registration_id:
            raise D3Error(
                f"run {study.run_id} holds a registration of another id", "its store was changed; run the study again"
            )
        return found

    def _boot(self, run_id: str, digest: str) -> Boot:
        record = self._artifact(run_id, RECORD, lambda path: load(BootRecord, path))
        if sha256(canonical_json(record)) != digest:
            raise D3Error(f"run {run_id}: {RECORD} does not have the digest that the run was logged with",
                          f"the artifact was changed; {AGAIN}")  # fmt: skip
        text = self._artifact(run_id, RESPONSES, lambda path: path.read_text("utf-8", "surrogatepass"))
        boot = Boot(record=record, responses=parse_responses(text, f"run {run_id} {RESPONSES}"))
        if {r.response for r in record.requests} != set(boot.responses) or responses_text(boot) != text:
            raise D3Error(f"run {run_id}: {RESPONSES} does not hold the record's responses", AGAIN)
        return boot

    def _artifact(self, run_id: str, name: str, read: Callable[[Path], T]) -> T:
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = self.client.download_artifacts(run_id, name, folder)
            except (MlflowException, OSError) as error:
                raise D3Error(f"run {run_id} gives no {name}: {_line(error)}", AGAIN) from error
            return read(Path(path))

    def _search(self, condition: str) -> list[Run]:
        # All experiments: `mlflow run` opens the parent in its own, and the boots go where their parent is.
        places = [e.experiment_id for e in self.client.search_experiments()]
        found: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs(places, condition, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return found


def _study(run: Run) -> Study:
    tags = run.data.tags
    return Study(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        registration_id=tags["d3.registration"],
        registered_at=tags["d3.registered_at"],
    )
