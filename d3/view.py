"""What MLflow's pages show of a study: its prompts as a dataset, its description, a saved view of its boots. Pure."""

import json
from collections.abc import Mapping

from mlflow.entities import Dataset, DatasetInput, InputTag

from d3.headline import ANSWERS
from d3.record import canonical_json, plain, sha256
from d3.registration import Registration, short
from d3.schema import Certificate, Stratum

PROMPTS = "prompts.json"
COLSPEC = ("id", "messages", "sha256")
NOTE = "mlflow.note.content"
NOTE_KEPT, TAG_KEPT = 5000, 5000  # older servers take no longer tag
SAVED_VIEW = "mlflow.sharedViewState."
COLUMNS = 12  # of prompts in a saved view: more than a screen is wide


def prompts_table(registration: Registration) -> list[dict[str, str]]:
    """The prompts as rows: id, messages as text, and the SHA-256 of the messages' canonical JSON."""
    return [
        {
            "id": prompt.id,
            "messages": "\n\n".join(f"{m.role}: {m.content}" for m in prompt.messages),
            "sha256": sha256(canonical_json(plain(prompt)["messages"])),
        }
        for prompt in registration.prompts
    ]


def prompts_input(registration: Registration, run_id: str) -> DatasetInput:
    """The prompts as an input of runs; the rows themselves are the artifact `prompts.json` of `run_id`."""
    rows = prompts_table(registration)
    dataset = Dataset(
        name=f"{registration.study} prompts"[:500],
        digest=sha256(canonical_json(rows))[:12],
        source_type="local",
        source=json.dumps({"uri": f"runs:/{run_id}/{PROMPTS}"}),
        schema=json.dumps({"mlflow_colspec": [{"name": n, "type": "string", "required": True} for n in COLSPEC]}),
        profile=json.dumps({"num_rows": len(rows)}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "prompts")])


def saved_view(registration: Registration, run_id: str, registered_ms: int) -> tuple[str, str]:
    """The experiment's tag, key and value, that puts this study's boots and their columns into MLflow's Views menu.

    The form is that of MLflow 3.17's own "Save view"; a version that knows another one leaves the tag alone.
    """
    prompts = [p.id for p in registration.prompts][:COLUMNS]
    factors = [f"params.`{axis}`" for axis in registration.axes]
    columns = [*factors, *(f"params.`{ANSWERS}{p}`" for p in prompts), "tags.`d3.status`", "tags.`d3.reading`"]
    state = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}'",
        "orderByKey": "tags.`d3.cell`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": columns,
    }
    name = f"{registration.study} {short(registration.id())}"
    view = {"name": name, "createdAt": registered_ms, "updatedAt": registered_ms, "state": json.dumps(state)}
    return SAVED_VIEW + short(registration.id()), json.dumps(view)


def description(report: str, artifact: str) -> str:
    """A Markdown report as a run's description: the answer first; what does not fit is left out by sections."""
    head, _, rest = report.partition("\n")
    body = rest.lstrip("\n") if head.startswith("# ") else report
    whole = f"\n\nThe whole report is the artifact `{artifact}`.\n"
    room = NOTE_KEPT - len(whole)
    if len(body) > room:
        cut = body[:room]
        body = cut[: max(cut.rfind("\n## "), 0) or max(cut.rfind("\n"), 0) or room]
    return body.rstrip() + whole


def readings(stratum: Stratum) -> str:
    """A stratum's readings: one where all endpoints agree, else each by its endpoint."""
    found = {v.endpoint: v.reading for v in stratum.verdicts}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{endpoint} {reading}" for endpoint, reading in found.items())


def study_tags(certificate: Certificate, note: str) -> dict[str, str]:
    """The parent run's tags: every stratum's readings, the answer, the certificate's digest and the description."""
    several = len(certificate.strata) > 1
    each = [f"{s.stratum}: {readings(s)}" if several else readings(s) for s in certificate.strata]
    tags = {
        "d3.reading": "; ".join(each),
        "d3.answer": certificate.answer,
        "d3.certificate": certificate.digest,
        NOTE: note,
    }
    return {key: value[:TAG_KEPT] for key, value in tags.items()}


def changed(logged: Mapping[str, object], tags: Mapping[str, str]) -> list[str]:
    """Which of a boot's tags its row of logged tags, named without `d3.`, does not have; counting is the rule."""
    rule = {"d3.counted": "yes"}
    has = {f"d3.{name}": value for name, value in logged.items() if isinstance(value, str)}
    return [key for key, value in tags.items() if has.get(key, rule.get(key)) != value]


def boot_tags(certificate: Certificate) -> dict[str, dict[str, str]]:
    """By run: the readings of the boot's stratum, and whether the boot counts (no tag: it does)."""
    found = {s.stratum: readings(s) for s in certificate.strata}
    return {
        boot.run: {
            "d3.reading": found[boot.stratum][:TAG_KEPT],
            "d3.counted": "yes" if boot.counted else f"no, {boot.why_not}"[:500],
        }
        for boot in certificate.boots
        if boot.run
    }


def study_metrics(certificate: Certificate) -> dict[str, float]:
    """Per cell, prompt and endpoint the share of valid boots whose first request differs, for comparing studies."""
    found: dict[str, float] = {}
    for stratum in certificate.strata:
        place = f"{stratum.stratum}/" if len(certificate.strata) > 1 else ""
        for cell in stratum.cells:
            for prompt in cell.prompts:
                name = f"first_differs/{place}{cell.key.replace('/', '-')}.{prompt.prompt}"
                found |= {_metric(f"{name}.{k.endpoint}"): k.k / k.n for k in prompt.counts if k.n}
    return found


def _metric(name: str) -> str:
    """Only characters that MLflow takes in a metric's name, and no more than it takes."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-./ ") else "-" for c in name)[:250]
