"""How to check a certificate and how to run its study again, as command lines. Pure."""

from d3.registration import STUDY_FACTORS, Registration
from d3.schema import Certificate


def verify_command(file: str) -> str:
    """Recompute the certificate from its files."""
    return f"python -m d3.verify {file}"


def study_command(registration: Registration) -> str:
    """Run the study again: every registered setting that a word on the command line can give."""
    first = registration.cells[0].settings
    words = [f"{k}={','.join(v)}" for k, v in registration.axes.items()]
    words += [f"{name}={first[name]['name']}" for name in ("engine",) if name not in registration.axes]
    words += [f"study.name={registration.study}", f"protocol={registration.protocol.name}"]
    words += [f"boots={registration.boots}", f"seed={registration.seed}", f"tie_gap={registration.tie_gap:g}"]
    for key, value in sorted(first.items()):
        if key not in registration.axes and key not in STUDY_FACTORS and not isinstance(value, dict | list):
            words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return f"python -m d3 -m {' '.join(words)}"


def steps(certificate: Certificate, file: str) -> list[tuple[str, str]]:
    """What to do, in words, each with its command."""
    registration = certificate.registration
    prompts = ", ".join(p.id for p in registration.prompts)
    commit = (certificate.context.git_commit or "").rstrip("+")
    again = (
        f"Run the study again, with the prompts of the registration ({prompts}) as a file of conf/prompts, named by "
        f"prompts=NAME where they are not the default. An equal study has the id {certificate.registration_id[:12]}."
    )
    return [
        ("Recompute every number from the boots' files, without an engine:", verify_command(file)),
        *([("The code it was made with:", f"git checkout {commit}")] if commit else []),
        (again, study_command(registration)),
        ("Then build its certificate:", "python -m d3.certify"),
    ]
