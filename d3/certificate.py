"""The certificate: what was registered, what ran, what it shows and what it does not. Built by a pure function.

On disk: NAME.json and, beside it, the folder NAME with registration.json and boots/SLUG/{boot.json, responses.jsonl}.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from d3.analysis import analyse
from d3.contrasts import contrasts
from d3.controls import Control, controls, temperature
from d3.errors import D3Error
from d3.limits import environment, held, implementations, limits, neither, varied
from d3.price import cost
from d3.record import Boot, BootRecord, Check, canonical_json, plain, sha256
from d3.registration import STUDY_FACTORS, Registration
from d3.schema import Artifact, BootEntry, Certificate, CheckSummary, Context, Stratum, Totals, digest
from d3.store import RECORD, RESPONSES, boot_slug, responses_text, write_atomic
from d3.store import load as load_model
from d3.table import Analysis, Selected, StratumTable
from d3.verdicts import WHAT, verdicts

__all__ = ["Certificate", "Context", "build", "load", "write"]

REGISTRATION = "registration.json"
WRITERS = 16


def build(registration: Registration, boots: Sequence[Boot], context: Context) -> Certificate:
    """The certificate of these boots, in whatever order they come; a pure function.

    Raises D3Error where boots do not belong together, and where the registration did not come before the first boot.
    """
    analysis = analyse(registration, boots)
    counted = analysis.counted()
    entries = tuple(_entry(s, context) for s in analysis.selected)
    if clash := [path for path, n in Counter(e.record.path for e in entries).items() if n > 1]:
        raise D3Error(
            f"two boots would be written to {clash[0]}", "give cells and strata names that differ as file names"
        )
    first = _first_boot(context, entries)
    strata = tuple(_stratum(registration, table, analysis) for table in analysis.strata)
    found = environment(counted)
    checked = controls(registration, analysis.strata, analysis.outcomes)
    certificate = Certificate(
        answer=_answer(strata, checked),
        registration_id=registration.id(),
        registration=registration,
        context=context,
        first_boot_at=first,
        boots=entries,
        strata=strata,
        controls=checked,
        checks=_checks([s.boot.record for s in analysis.selected]),
        environment=found,
        varied=varied(registration),
        held=held(registration),
        neither=neither(registration, found),
        coldness=dict(sorted(Counter(b.record.coldness for b in counted).items())),
        limits=limits(registration, counted),
        prior_art=registration.prior_art,
        totals=_totals(entries, analysis),
        cost=cost(context.price, [s.boot.record for s in analysis.selected]) if context.price else None,
        digest="",
    )
    return certificate.model_copy(update={"digest": digest(certificate)})


def _entry(selected: Selected, context: Context) -> BootEntry:
    record = selected.boot.record
    files = artifacts(selected.boot)
    paths = sorted(files)
    return BootEntry(
        boot_id=record.boot_id,
        stratum=record.stratum,
        cell=record.cell,
        boot=record.boot,
        attempt=record.attempt,
        position=record.position,
        status=record.status,
        reason=record.reason,
        counted=selected.counted,
        why_not=selected.why,
        coldness=record.coldness,
        started_at=record.started_at,
        timings=record.timings,
        failure=record.failure,
        leftovers=record.leftovers,
        run=context.runs.get(record.boot_id),
        record=Artifact(path=paths[0], sha256=sha256(files[paths[0]])),
        responses=Artifact(path=paths[1], sha256=sha256(files[paths[1]])),
    )


def artifacts(boot: Boot) -> dict[str, str]:
    """The two files of a boot, record first: path inside the certificate's folder, and content."""
    record = boot.record
    folder = f"boots/{boot_slug(record.stratum, record.cell, record.boot, record.attempt)}"
    return {f"{folder}/{RECORD}": canonical_json(record) + "\n", f"{folder}/{RESPONSES}": responses_text(boot)}


def _first_boot(context: Context, entries: Sequence[BootEntry]) -> str | None:
    """When the first boot began. Raises D3Error when the registration was logged after it."""
    for boot_id in sorted(set(context.runs) - {e.boot_id for e in entries}):
        raise D3Error(f"context.runs names boot {boot_id}, which is not among the boots", "leave it out")
    if not entries:
        return None
    first = min(entries, key=lambda e: moment(e.started_at, f"boot {e.boot_id}: started_at")).started_at
    if moment(context.registered_at, "registered_at") > moment(first, "started_at"):
        raise D3Error(f"the registration was logged at {context.registered_at}, after the first boot ({first})",
                      "register first, then boot; or was this machine's clock set back?")  # fmt: skip
    return first


def moment(text: str, where: str) -> datetime:
    """An ISO 8601 time with its offset. Raises D3Error that names the field."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise D3Error(
            f"{where}: {text!r} is not an ISO 8601 time with an offset", "write it like 2026-01-31T12:00:00+00:00"
        )
    return found


def _stratum(registration: Registration, table: StratumTable, analysis: Analysis) -> Stratum:
    boots = [b for b in analysis.counted() if b.record.stratum == table.stratum]
    factors = table.cells[0].factors
    compared = contrasts(registration, table, analysis.outcomes)
    modes = implementations(boots)
    return Stratum(
        stratum=table.stratum,
        role="instrument" if temperature(registration, table.stratum) > 0 else "study",
        settings={k: v for k, v in sorted(factors.items()) if k not in STUDY_FACTORS},
        cells=table.cells,
        flag=table.flag,
        implementations=modes,
        excluded=table.excluded,
        contrasts=compared,
        verdicts=verdicts(registration, table, analysis.outcomes, compared, modes),
    )


def _answer(strata: Sequence[Stratum], checked: Sequence[Control]) -> str:
    """Bytes first, every endpoint that reads otherwise, and failed controls; sampled strata answer nothing."""
    study = [s for s in strata if s.role == "study"] or list(strata)
    words = []
    for stratum in study:
        text = stratum.verdict("text")
        others = [f"For {WHAT[v.endpoint]}: {v.disposition}." for v in stratum.verdicts if v.reading != text.reading]
        name = f"[{stratum.stratum}] " if len(study) > 1 else ""
        words.append(" ".join([name + text.answer, *others]))
    words += [f"The {c.kind} control ({c.stratum}) failed: {c.words}." for c in checked if c.held is False]
    return " ".join(words)


def _checks(records: Sequence[BootRecord]) -> tuple[CheckSummary, ...]:
    found: dict[str, list[tuple[BootRecord, Check]]] = defaultdict(list)
    for record in records:
        for check in record.checks:
            found[check.name].append((record, check))
    return tuple(
        CheckSummary(
            name=name,
            held=sum(c.held for _, c in every),
            total=len(every),
            failures=tuple(f"{_where(r, c)}: {c.evidence}" for r, c in every if not c.held),
        )
        for name, every in sorted(found.items())
    )


def _where(record: BootRecord, check: Check) -> str:
    prompt = f", prompt {check.prompt}" if check.prompt else ""
    return f"{record.stratum} {record.cell} boot {record.boot} attempt {record.attempt}{prompt}"


def _totals(entries: Sequence[BootEntry], analysis: Analysis) -> Totals:
    times = [e.timings for e in entries]
    return Totals(
        boots=len(entries),
        counted=sum(e.counted for e in entries),
        requests=sum(len(s.boot.record.requests) for s in analysis.selected),
        boot_s=round(sum(t.boot_s for t in times), 3),
        requests_s=round(sum(t.requests_s for t in times), 3),
        stop_s=round(sum(t.stop_s for t in times), 3),
        total_s=round(sum(t.total_s for t in times), 3),
    )


def render(certificate: Certificate) -> str:
    """The bytes of a certificate's file: sorted keys, so that equal certificates are equal files."""
    return json.dumps(plain(certificate), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def folder_of(path: Path) -> Path:
    """The folder of a certificate's artifacts: results/NAME for results/NAME.json."""
    return path.with_suffix("")


def write(certificate: Certificate, boots: Sequence[Boot], out: Path) -> Path:
    """Write `out` (results/NAME.json) last, after its folder with the registration and the boots; returns `out`."""
    if out.suffix != ".json":
        raise D3Error(f"{out} does not end in .json", "name the certificate like results/NAME.json")
    folder = folder_of(out)
    wanted = {REGISTRATION: canonical_json(certificate.registration) + "\n"}
    for boot in boots:
        wanted |= artifacts(boot)
    write_files(folder, wanted)
    write_atomic(out, render(certificate))
    return out


def write_files(folder: Path, wanted: dict[str, str]) -> None:
    """Write these files, and remove the boots of an earlier certificate of the same name; other files stay."""
    with ThreadPoolExecutor(WRITERS) as pool:  # they wait for the disk, one fsync per file
        list(pool.map(lambda item: write_atomic(folder / item[0], item[1]), wanted.items()))
    for name in (RECORD, RESPONSES):
        for old in folder.glob(f"boots/*/{name}"):
            if old.relative_to(folder).as_posix() not in wanted:
                old.unlink()
    for empty in (d for d in folder.glob("boots/*") if d.is_dir() and not any(d.iterdir())):
        empty.rmdir()


def load(path: Path) -> Certificate:
    """Read a certificate. Raises D3Error that names the file and the field."""
    return load_model(Certificate, path)
