"""`python -m d3.certify`: query MLflow, and build the certificate, its table and its report from what is there."""

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf
from rich.console import Console

from d3 import __version__
from d3.certificate import Certificate, Context, build, write
from d3.certificate import load as load_certificate
from d3.config import PriceConfig
from d3.errors import D3Error, command
from d3.price import Price
from d3.registration import Registration, short
from d3.report.evidence import Evidence
from d3.report.files import write_from
from d3.report.terminal import terminal
from d3.store import root
from d3.tracking import Study, Tracking


def certify(run: str | None, out: Path | None, price: Price | None = None) -> tuple[Certificate, Path]:
    """The certificate of one study out of MLflow alone, written to `out` with its artifacts and reports.

    `run` is a parent run's id or the start of a registration id; without it, the newest study. `price`: another than
    the one that the study was run with. Raises D3Error.
    """
    tracking = Tracking()
    study = _chosen(tracking.studies(), run)
    registration = tracking.registration(study)
    frame, boots = tracking.boots(study)
    if frame.empty:
        raise D3Error(
            f"study {short(study.registration_id)} has no boots yet", "run it: python -m d3 -m apc=on,off invariant=0,1"
        )
    _one_registration(frame, study)
    context = Context(
        registered_at=study.registered_at,
        certified_at=datetime.now(UTC).isoformat(timespec="seconds"),
        parent_run=study.run_id,
        runs=dict(zip(frame["boot_id"], frame["run_id"], strict=True)),
        d3_version=__version__,
        git_commit=commit(),
        price=price or tracking.price(study),
    )
    certificate = build(registration, boots, context)
    path = out or default_path(registration)
    write(certificate, boots, path)
    by_id = {boot.record.boot_id: boot for boot in boots}
    evidence = Evidence(certificate=certificate, boots=tuple(by_id[entry.boot_id] for entry in certificate.boots))
    reports = write_from(evidence, path, path.parent)
    tracking.annotate(study, certificate, reports[0].read_text("utf-8", "replace"), [path, *reports], frame)
    return certificate, path


def named_price(name: str) -> Price:
    """A price of conf/price by its name. Raises D3Error that names the known ones."""
    folder = root() / "conf" / "price"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise D3Error(f"there is no price/{name}", f"known: {', '.join(known)}")
    merged = OmegaConf.merge(OmegaConf.structured(PriceConfig), OmegaConf.load(folder / f"{name}.yaml"))
    return Price.model_validate(OmegaConf.to_container(merged))


def default_path(registration: Registration) -> Path:
    """results/NAME.json; where another registration's certificate lies there, results/NAME-ID.json beside it."""
    results = root() / "results"
    path = results / f"{registration.study}.json"
    if path.exists() and load_certificate(path).registration_id != registration.id():
        return results / f"{registration.study}-{short(registration.id())}.json"
    return path


def commit() -> str | None:
    """D3's own git commit, with `+` where the tree has changes; None outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root(), capture_output=True, text=True, check=False)  # noqa: S607
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        return (
            head + ("+" if git("status", "--porcelain", "--untracked-files=no", "d3", "conf") else "") if head else None
        )
    except OSError:
        return None


def _chosen(studies: list[Study], run: str | None) -> Study:
    if not studies:
        raise D3Error("MLflow has no study yet", "run one: python -m d3 -m apc=on,off invariant=0,1")
    if run is None:
        return studies[0]
    for study in studies:
        if study.run_id == run or (len(run) >= 6 and study.registration_id.startswith(run)):
            return study
    raise D3Error(f"no study has the run id or registration {run}", f"the newest is: --run {studies[0].run_id}")


def _one_registration(frame: pd.DataFrame, study: Study) -> None:
    """Boots of several registrations are several experiments; putting them in one table would be wrong."""
    others = sorted(set(frame["registration"]) - {study.registration_id})
    if others:
        rows = frame[frame["registration"] == others[0]]
        raise D3Error(f"run {study.run_id} also holds {len(rows)} boots of registration {short(others[0])}",
                      f"delete those runs, the first is {rows['run_id'].iloc[0]}")  # fmt: skip


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector: nearly all that is read is kept, and walking it over and over is a third."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@command
def main(argv: list[str] | None = None) -> int:
    """Certify, print the table and where things are; 0 when a certificate was written, whatever it reads."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.certify", description="Build the certificate of a study from MLflow."
    )
    parser.add_argument(
        "--run", help="the study's MLflow run id, or the start of its registration id (default: the newest)"
    )
    parser.add_argument("--out", type=Path, help="where to write it (default: results/STUDY.json)")
    parser.add_argument("--price", help="a price of conf/price (default: the one that the study was run with)")
    options = parser.parse_args(argv)
    price = named_price(options.price) if options.price else None
    with _uncollected():
        certificate, path = certify(options.run, options.out, price)
    Console().print(terminal(certificate))
    shown = os.path.relpath(path)
    print(f"certificate {shown}")
    print(f"report      {os.path.relpath(path.with_suffix('.md'))}")
    print(f"page        {os.path.relpath(path.with_suffix('.html'))}")
    print(f"next: python -m d3.verify {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
