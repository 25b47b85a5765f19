"""Boot records into MLflow and back: one parent run per study, one child run per attempt, keyed by boot id.

Whatever writes may be done again after it broke off, so that `reach.patiently` and a second command can.

Uses the client with explicit run states: the fluent interface would mark a killed run FINISHED at exit.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from d3.errors import D3Error, command
from d3.headline import metrics_of, params_of, run_name
from d3.price import Price
from d3.reach import one_at_a_time, prepare, reachable, reason, tracking_uri
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
    parsed,
    read_file,
    runs_dir,
    save_boot,
    save_registration,
    write_atomic,
)
from d3.view import (
    PROMPTS,
    boot_tags,
    changed,
    description,
    prompts_input,
    prompts_table,
    saved_view,
    study_metrics,
    study_tags,
)

EXPERIMENT = "d3"
PRICE = "d3.price"
LOG_KEPT = 200_000
NAME_KEPT = 250
OPENING = "d3.opening"
RUN_STATES: dict[Status, str] = {
    "valid": "FINISHED", "void": "FINISHED", "skipped": "FINISHED", "failed": "FAILED", "stopped": "KILLED",
}  # fmt: skip

AGAIN = "remove that run and send the boot again: python -m d3.sync"

T = TypeVar("T")


class Study(Frozen):
    """A study's parent run."""

    run_id: str
    experiment_id: str
    name: str
    registration_id: str
    registered_at: str


class Tracking:
    """One connection to the store. Every method raises D3Error where the store does not answer."""

    def __init__(self) -> None:
        with reachable(), one_at_a_time():
            prepare()
            self.client = MlflowClient(tracking_uri())
            found = self.client.get_experiment_by_name(EXPERIMENT)
            self.experiment: str = found.experiment_id if found else self._create()

    def _create(self) -> str:
        local = tracking_uri().startswith("sqlite")
        return str(self.client.create_experiment(EXPERIMENT, (runs_dir() / "artifacts").as_uri() if local else None))

    def open_study(self, registration: Registration) -> Study:
        """The parent run of a registration: the one it has, the one `mlflow run` opened, or a new one.

        The registration is logged before this returns, so before any boot. A run that was left while it was being
        filled is filled again.
        """
        with reachable():
            run = self._parent(registration)
            if run is None:
                run = self._adopted() or self.client.create_run(
                    self.experiment, start_time=_ms(save_registration(registration)),
                    tags=_opening(registration), run_name=f"{registration.study} {short(registration.id())}"[:NAME_KEPT]
                )  # fmt: skip
            if OPENING in run.data.tags or "d3.registration" not in run.data.tags:
                self._register(run.info.run_id, run.info.experiment_id, registration)
            self.client.update_run(run.info.run_id, status="RUNNING")
            return _study(self.client.get_run(run.info.run_id))

    def _adopted(self) -> Run | None:
        """The run that `mlflow run` opened, once: in the same shell it is the parent of no other study."""
        asked = os.environ.get("MLFLOW_RUN_ID")
        run = self.client.get_run(asked) if asked else None
        return run if run and "d3.registration" not in run.data.tags else None

    def _register(self, run_id: str, experiment: str, registration: Registration) -> None:
        """Log the registration; every step may be done twice, and the last one says that all were done."""
        params = {k: ",".join(v) for k, v in registration.axes.items()}
        params |= {
            "boots": str(registration.boots),
            "protocol": registration.protocol.name,
            "seed": str(registration.seed),
        }
        tags = _opening(registration)
        self.client.log_batch(
            run_id,
            params=[Param(k, v) for k, v in params.items()],
            tags=[RunTag(k, v) for k, v in tags.items()],
        )
        if os.environ.get("MLFLOW_RUN_ID") == run_id:
            del os.environ["MLFLOW_RUN_ID"]  # a boot's own run must not take the run that is its study's
        self.client.log_text(run_id, canonical_json(registration) + "\n", REGISTRATION)
        self.client.log_text(run_id, json.dumps(prompts_table(registration), indent=1) + "\n", PROMPTS)
        self.client.log_inputs(run_id, datasets=[prompts_input(registration, run_id)])
        self.client.set_experiment_tag(
            experiment, *saved_view(registration, run_id, _ms(save_registration(registration)))
        )
        self.client.delete_tag(run_id, OPENING)

    def _parent(self, registration: Registration) -> Run | None:
        """The parent run of this machine's own registering: the same study may be run elsewhere into the same store."""
        return self._registered(registration.id(), save_registration(registration))

    def find_study(self, registration_id: str, registered_at: str) -> Study | None:
        """The study that was registered so at that time (ISO 8601), if the store has it."""
        with reachable():
            run = self._registered(registration_id, registered_at)
            return _study(run) if run else None

    def _registered(self, registration_id: str, at: str) -> Run | None:
        runs = self._search(f"tags.`d3.kind` = 'study' and tags.`d3.registration` = '{registration_id}'")
        return next((run for run in runs if run.data.tags["d3.registered_at"] == at), None)

    def state(self, registration: Registration) -> str | None:
        """The state of a registration's parent run, None where the store has none."""
        with reachable():
            run = self._parent(registration)
            return str(run.info.status) if run else None

    def digests(self, study: Study) -> set[str]:
        """The SHA-256 of every record whose run is whole."""
        with reachable():
            runs = self._search(f"tags.`d3.kind` = 'boot' and tags.`mlflow.parentRunId` = '{study.run_id}'")
            return {r.data.tags["d3.record_sha256"] for r in runs if r.info.status != "RUNNING"}

    def studies(self) -> list[Study]:
        """All studies, the newest first."""
        with reachable():
            runs = self._search("tags.`d3.kind` = 'study'")
            return [_study(run) for run in runs if OPENING not in run.data.tags]

    def close_study(self, study: Study, status: str) -> None:
        """Give the parent run its last state: FINISHED, FAILED or KILLED."""
        with reachable():
            self.client.set_terminated(study.run_id, status=status)

    def set_price(self, study: Study, price: Price) -> None:
        """Note what the study's machine costs; the last one given counts."""
        with reachable():
            self.client.set_tag(study.run_id, PRICE, canonical_json(price))

    def price(self, study: Study) -> Price | None:
        """The price that the study was run with; None for a study of before there were prices."""
        with reachable():
            text = self.client.get_run(study.run_id).data.tags.get(PRICE)
        return None if text is None else Price.model_validate_json(text)

    def annotate(
        self, study: Study, certificate: Certificate, text: str, files: list[Path], logged: pd.DataFrame
    ) -> None:
        """Put the verdict where people compare runs: tags of parent and children, description, metrics, files.

        `logged`: the frame of `boots`, so that only what changed is written, at 1.4 ms a tag.
        """
        now = _ms(certificate.context.certified_at)
        note = description(text, f"certificate/{files[0].name}" if files else REGISTRATION)
        with reachable():
            self.client.log_batch(
                study.run_id,
                metrics=[Metric(k, v, now, 0) for k, v in study_metrics(certificate).items()],
                tags=[RunTag(k, v) for k, v in study_tags(certificate, note).items()],
            )
            known = {row["run_id"]: {str(k): v for k, v in row.items()} for row in logged.to_dict("records")}
            for run_id, tags in boot_tags(certificate).items():
                for key in changed(known.get(run_id, {}), tags):
                    self.client.set_tag(run_id, key, tags[key])
            for file in files:
                self.client.log_artifact(study.run_id, str(file), "certificate")

    def log_boot(self, study: Study, boot: Boot, log: Path | None) -> str:
        """One child run for one attempt; a second call for the same record changes nothing. Returns its run id.

        The run begins and ends when the boot did, whenever it is sent.
        """
        record = boot.record
        digest = sha256(canonical_json(record))
        began = _ms(record.started_at)
        ended = began + round(record.timings.total_s * 1000)
        with reachable():
            same = f"tags.`d3.boot_id` = '{record.boot_id}' and tags.`mlflow.parentRunId` = '{study.run_id}'"
            for run in self._search(same):
                if run.data.tags.get("d3.record_sha256") == digest and run.info.status != "RUNNING":
                    return str(run.info.run_id)
                self.client.delete_run(run.info.run_id)  # half written by a job that was killed
            tags = {
                "mlflow.parentRunId": study.run_id,
                "d3.kind": "boot",
                "d3.study": study.name,
                "d3.registration": record.registration,
                "d3.boot_id": record.boot_id,
                "d3.cell": record.cell,
                "d3.stratum": record.stratum,
                "d3.status": record.status,
                "d3.reason": record.reason[:500],
                "d3.record_sha256": digest,
            }
            run = self.client.create_run(study.experiment_id, began, tags, run_name(record)[:NAME_KEPT])
            run_id = str(run.info.run_id)
            self.client.log_batch(
                run_id,
                params=[Param(k, v[:500]) for k, v in params_of(record).items()],
                metrics=[Metric(k, v, ended, 0) for k, v in metrics_of(boot).items()],
            )
            inputs = self.client.get_run(study.run_id).inputs
            if prompts := inputs and inputs.dataset_inputs:
                self.client.log_inputs(run_id, datasets=prompts)
            _log_artifacts(str(run.info.artifact_uri), boot, log)
            self.client.set_terminated(run_id, RUN_STATES[record.status], ended)
            return run_id

    def boots(self, study: Study) -> tuple[pd.DataFrame, list[Boot]]:
        """Every attempt of a study out of MLflow alone: a frame of runs, and the boots in the same order.

        The frame has the columns run_id, boot_id, cell, stratum, status and record_sha256. Raises D3Error where an
        artifact does not have the digest that its run says.
        """
        with reachable():
            runs = self._search(f"tags.`d3.kind` = 'boot' and tags.`mlflow.parentRunId` = '{study.run_id}'")
            rows = [
                {"run_id": r.info.run_id, **{k[3:]: v for k, v in r.data.tags.items() if k.startswith("d3.")}}
                for r in runs
            ]
            frame = pd.DataFrame(rows).sort_values("boot_id", ignore_index=True) if rows else pd.DataFrame()
            folders = {r.info.run_id: local_folder(r.info.artifact_uri) for r in runs}
            found = [(row["run_id"], row["record_sha256"]) for row in frame.to_dict("records")]
            return frame, [self._boot(run_id, digest, folders[run_id]) for run_id, digest in found]

    def registration(self, study: Study) -> Registration:
        """The registration as it was logged before the first boot."""
        found = self._artifact(study.run_id, REGISTRATION, None, lambda path: load(Registration, path))
        if found.id() != study.registration_id:
            raise D3Error(
                f"run {study.run_id} holds a registration of another id", "its store was changed; run the study again"
            )
        return found

    def _boot(self, run_id: str, digest: str, folder: Path | None) -> Boot:
        raw = self._artifact(run_id, RECORD, folder, read_file)
        record = parsed(BootRecord, raw, f"run {run_id} {RECORD}")
        # The digest is that of the canonical text, and that is what was logged: only other bytes need a second look.
        if sha256(raw.removesuffix(b"\n")) != digest and sha256(canonical_json(record)) != digest:
            raise D3Error(f"run {run_id}: {RECORD} does not have the digest that the run was logged with",
                          f"the artifact was changed; {AGAIN}")  # fmt: skip
        text = self._artifact(run_id, RESPONSES, folder, lambda path: path.read_text("utf-8", "surrogatepass"))
        boot = Boot(record=record, responses=parse_responses(text, f"run {run_id} {RESPONSES}"))
        if {r.response for r in record.requests} != set(boot.responses):
            raise D3Error(f"run {run_id}: {RESPONSES} does not hold the record's responses", AGAIN)
        return boot

    def _artifact(self, run_id: str, name: str, local: Path | None, read: Callable[[Path], T]) -> T:
        """One file of a run, from its own folder where that is on this machine: a download takes 30 ms."""
        if local and (local / name).is_file():
            return read(local / name)
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = self.client.download_artifacts(run_id, name, folder)
            except (MlflowException, OSError) as error:
                raise D3Error(f"run {run_id} gives no {name}: {reason(error)}", AGAIN) from error
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


def _log_artifacts(artifact_uri: str, boot: Boot, log: Path | None) -> None:
    """By the run's own address: the client would keep a repository object of 8 KiB for every run."""
    with tempfile.TemporaryDirectory() as folder:
        save_boot(boot, Path(folder))
        if log and log.exists():
            write_atomic(Path(folder) / LOG, log.read_bytes()[-LOG_KEPT:])
        repository: Any = get_artifact_repository(artifact_uri, tracking_uri=tracking_uri())
        repository.log_artifacts(folder)


def local_folder(artifact_uri: str) -> Path | None:
    """The folder of a run's artifacts where they lie on this machine's disk."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and not parts.netloc:
        return Path(url2pathname(parts.path))
    return Path(artifact_uri) if not parts.scheme else None


def _ms(at: str) -> int:
    """A time in ISO 8601 as MLflow counts it: milliseconds since 1970."""
    return int(datetime.fromisoformat(at).timestamp() * 1000)


def _opening(registration: Registration) -> dict[str, str]:
    """A parent run's tags while it is being filled."""
    return {
        "d3.kind": "study",
        "d3.registration": registration.id(),
        "d3.registered_at": save_registration(registration),
        "d3.study": registration.study,
        OPENING: "1",
    }


def _study(run: Run) -> Study:
    tags = run.data.tags
    return Study(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        name=tags["d3.study"],
        registration_id=tags["d3.registration"],
        registered_at=tags["d3.registered_at"],
    )


@command
def main(argv: list[str] | None = None) -> int:
    """Work on the store from the command line; the exit code is the verb's own."""
    from d3.importing import add_command  # it builds on this module

    parser = argparse.ArgumentParser(prog="python -m d3.tracking", description="Work on the tracking store.")
    add_command(parser.add_subparsers(required=True, metavar="VERB"))
    options = parser.parse_args(argv)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
