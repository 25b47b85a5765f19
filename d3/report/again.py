"""How to check a certificate and how to run its study again, as command lines. Pure."""

import shlex
from itertools import pairwise

from d3.registration import STUDY_FACTORS, Registration
from d3.schema import Certificate


def verify_command(file: str) -> str:
    """Recompute the certificate from its files."""
    return f"python -m d3.verify {file}"


def study_command(registration: Registration) -> str:
    """Run the study again: every registered setting that a word on the command line can give."""
    first = registration.cells[0].settings
    words = [f"{k}={','.join(registration.axes[k])}" for k in _slowest_first(registration)]
    engine = first.get("engine")
    if "engine" not in registration.axes and isinstance(engine, dict):
        words.append(f"engine={engine.get('name')}")
    words += [f"study.name={registration.study}", f"protocol={registration.protocol.name}"]
    words += [f"boots={registration.boots}", f"seed={registration.seed}", f"tie_gap={registration.tie_gap:g}"]
    for key, value in sorted(first.items()):
        if key not in registration.axes and key not in STUDY_FACTORS and not isinstance(value, dict | list):
            words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(f"python -m d3 -m {shlex.join(words)}".split())  # one line, whatever a forged setting holds


def _slowest_first(registration: Registration) -> list[str]:
    """The swept keys in the order in which they were given: the one that changes least from cell to cell is first."""
    pairs = list(pairwise(c.factors for c in registration.cells))
    return sorted(registration.axes, key=lambda k: sum(a[k] != b[k] for a, b in pairs))


def steps(certificate: Certificate, file: str) -> list[tuple[str, str]]:
    """What to do, in words, each with its command."""
    registration = certificate.registration
    prompts = ", ".join(p.id for p in registration.prompts)
    commit = certificate.context.git_commit or ""
    changed = ", but for changes that were not committed" if commit.endswith("+") else ""
    again = (
        f"Run the study again; where its prompts ({prompts}) are not the default, name their file in conf/prompts with "
        f"prompts=NAME. The same study has the same registration, {certificate.registration_id[:12]}:"
    )
    return [
        ("Recompute every number from the boots' files, without an engine:", verify_command(file)),
        *([(f"The code it was made with{changed}:", f"git checkout {commit.rstrip('+')}")] if commit else []),
        (again, study_command(registration)),
        ("Then build its certificate:", "python -m d3.certify"),
    ]
