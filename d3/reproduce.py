"""`python -m d3.reproduce FILE`: run a certificate's own registration again on this machine, and compare.

The repetition is a study of its own, registered as one; stopped, it goes on where it was.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from d3.attempts import Attempts
from d3.certificate import Certificate
from d3.certify import certify
from d3.compare import read_side
from d3.comparison import Comparison, Evidence, Row, compare
from d3.errors import D3Error
from d3.install import engine_python, lock_digest, model_dir
from d3.job import run_slot
from d3.model import model_digest
from d3.opened import OpenStudy
from d3.plan import Locations
from d3.record import ENDPOINTS
from d3.registration import CellSpec, Registration, Repeats, repetition, short
from d3.signals import STOPPED, stop_on_signals
from d3.store import runs_dir
from d3.verdicts import WHAT


def next_repetition(certificate: Certificate, boots: int) -> Registration:
    """The repetition that was not finished on this machine, else a new one."""
    numbered = (Repeats(certificate=certificate.digest, number=n) for n in itertools.count(1))
    studies = (repetition(certificate.registration, boots, repeats) for repeats in numbered)
    return next(study for study in studies if next(Attempts(study).due(), None))


def locate(cell: CellSpec, python: str | None, model: str | None) -> Locations:
    """Where a cell's engine and model lie on this machine. Raises D3Error where they are not those registered."""
    engine, weights = cell.settings["engine"], cell.settings["model"]
    name, lock = engine["name"], engine["lock"]
    if not lock and not python:
        raise D3Error(f"engine {name} {engine['version']} is not one that D3 installs", "name its own: --python PATH")
    if lock and not python and lock_digest(lock) != engine["lock_sha256"]:
        raise D3Error(f"locks/{lock}.txt pins another {name} here than the certificate does",
                      "check out the certificate's commit, or name its environment: --python PATH")  # fmt: skip
    if not weights["package"] and not model:
        raise D3Error(f"model {weights['name']} is not one that D3 installs", "name its folder: --model PATH")
    folder = model_dir(weights["name"], weights["package"], model)
    if (found := model_digest(folder)) != weights["digest"]:
        raise D3Error(f"the weights in {folder} have digest {short(found)}, registered is {short(weights['digest'])}",
                      "name the registered model's folder: --model PATH")  # fmt: skip
    return Locations(python=engine_python(name, lock, python, engine.get("executable", "python")), model=folder)


def run(certificate: Certificate, boots: int | None, python: str | None, model: str | None) -> str:
    """Run the repetition; returns its MLflow run id. Raises D3Error where it cannot run here."""
    if boots is not None and boots < 1:
        raise D3Error(f"--boots {boots}: there is nothing to boot", "say how many boots per cell, such as --boots 1")
    registration = next_repetition(certificate, boots or certificate.registration.boots)
    where = {(c.stratum, c.cell): locate(c, python, model) for c in registration.cells}
    study = OpenStudy(registration)
    for slot in registration.order:
        run_slot(registration, slot, where[slot.stratum, slot.cell])
    if missing := study.finish():
        raise D3Error(f"{missing} boots have no valid answer here, so there is no verdict to compare",
                      "see why above; the same command tries them again")  # fmt: skip
    return study.run_id


def outcome(row: Row) -> str:
    """What became of one place, in words: another device or build may show the same pattern with other bytes."""
    if row.change == "not_comparable":
        return f"no answer ({row.why})"
    if row.change != "same":
        return "another pattern"
    return "identical" if row.responses == "same" else "same pattern, other values"


def shown(found: Comparison) -> RenderableType:
    """Per cell and prompt what became of it, per endpoint the verdicts, then what differs around them."""
    table = Table(title="the first request differs, of valid boots")
    for title in ("cell", "prompt", "certificate", "here", *(WHAT[e] for e in ENDPOINTS)):
        table.add_column(title, overflow="fold")
    places = dict.fromkeys((r.stratum, r.cell, r.prompt) for r in found.rows)
    several = len({stratum for stratum, _, _ in places}) > 1
    for stratum, cell, prompt in places:
        rows = {r.endpoint: r for r in found.rows if (r.stratum, r.cell, r.prompt) == (stratum, cell, prompt)}
        name = f"{stratum} {cell}" if several else cell
        counts = [_rate(side) for side in (rows["text"].old, rows["text"].new)]
        table.add_row(*(Text(x) for x in (name, prompt, *counts, *(outcome(rows[e]) for e in ENDPOINTS))))
    return Group(table, *(Text(line) for line in _lines(found)))


def _rate(side: Evidence) -> str:
    return f"{side.boots()} / {side.n}" if side.n else "none"


def _lines(found: Comparison) -> Iterator[str]:
    for v in found.verdicts:
        verdict = f"{v.old_disposition} here too" if not v.changed else f"{v.old_disposition}, here {v.new_disposition}"
        yield f"{v.stratum}, {WHAT[v.endpoint]}: {verdict}"
    yield from found.broken_controls
    around = [f"  {f.name}: {f.old} -> {f.new}" for f in found.environment]
    yield "environment that differs:" if around else "no fact of engine or machine differs"
    yield from around


def main(argv: list[str] | None = None) -> int:
    """Run, certify and compare; 0 same verdict, 1 another, 2 it cannot run here, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.reproduce",
        description="Run a certificate's own registration again on this machine, and compare response by response.",
        epilog="Exit code: 0 same verdict, 1 another verdict, 2 it cannot run here.",
    )
    parser.add_argument("file", type=Path, help="the certificate, such as results/d3_determinism_2x2.json")
    parser.add_argument("--boots", type=int, help="boots per cell (default: as many as registered; 1 is a quick look)")
    parser.add_argument("--python", help="the engine's Python, where D3 did not install the engine")
    parser.add_argument("--model", help="the model's folder, where D3 did not convert the model")
    parser.add_argument("--out", type=Path, help="the repetition's own certificate (default: under runs/reproductions)")
    options = parser.parse_args(argv)
    stop_on_signals()
    try:
        old = read_side(options.file)
        run_id = run(old.certificate, options.boots, options.python, options.model)
        out = options.out or runs_dir() / "reproductions" / f"{options.file.stem}-{run_id[:8]}.json"
        certify(run_id, out)
        found = compare(old, read_side(out))
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(shown(found))
    print(f"certificate {os.path.relpath(out)}")
    print(f"next: python -m d3.compare {os.path.relpath(options.file)} {os.path.relpath(out)}")
    return int(any(v.changed for v in found.verdicts))


if __name__ == "__main__":
    sys.exit(main())
