"""Recompute a certificate from the files beside it, without tracking store or engine: `python -m d3.verify FILE`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from d3.certificate import REGISTRATION, build, folder_of, load, render
from d3.errors import D3Error, command, printable
from d3.record import Boot, BootRecord, Frozen, canonical_json, plain, sha256
from d3.registration import diff_paths, short
from d3.schema import CERTIFICATE_VERSION, Artifact, BootEntry, Certificate, digest
from d3.statement import check
from d3.store import explain, parse_responses, read_file

SHOWN = 20  # problems of one kind that are printed; the rest is counted


class Examined(Frozen):
    """A certificate with the boots beside it that could be read, and every problem, one line each."""

    certificate: Certificate
    boots: tuple[Boot, ...]
    problems: tuple[str, ...]


def verify(path: Path) -> list[str]:
    """Every problem of a certificate and its artifacts, one line each; an empty list when it holds.

    Raises D3Error where there is nothing to check: no file, no folder, or no certificate of a version known here.
    """
    return list(examine(path).problems)


def examine(path: Path) -> Examined:
    """`verify`, with what was read on the way, so that whoever goes on with it goes on with what was checked."""
    certificate, folder = _read(path), folder_of(path)
    problems = _itself(path, certificate)
    problems += _files(folder, certificate)
    boots: list[Boot] = []
    for entry in certificate.boots:
        try:
            boots.append(read_boot(folder, entry))
        except D3Error as error:
            problems.append(error.message)
    if len(boots) == len(certificate.boots):
        problems += _rebuilt(certificate, boots)
    return Examined(certificate=certificate, boots=tuple(boots), problems=tuple(problems))


def _read(path: Path) -> Certificate:
    """The certificate, if it is one of a version that this D3 can recompute."""
    try:
        found = json.loads(read_file(path, "name a certificate, such as results/NAME.json"))
    except (ValueError, RecursionError) as error:
        raise D3Error(f"{path}: not JSON ({error})", "name a certificate; if this was one, it is damaged") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if isinstance(version, int | float) and version > CERTIFICATE_VERSION:
        raise D3Error(
            f"{path}: schema_version {version} is newer than this D3 knows ({CERTIFICATE_VERSION})", "update D3"
        )
    if not isinstance(found, dict) or not {"registration", "strata", "digest"} & set(found):
        raise D3Error(f"{path} is no certificate", "name one, such as results/NAME.json")
    try:
        return load(path)
    except D3Error as error:
        raise D3Error(error.message, error.remedy, code=1) from error


def _itself(path: Path, certificate: Certificate) -> list[str]:
    """What the file says of itself: its bytes, digest and registration."""
    problems = []
    if path.read_bytes() != render(certificate).encode("utf-8", "surrogatepass"):
        problems.append(f"{path.name}: not in the form in which D3 writes it (reordered, reformatted, or a key twice)")
    if certificate.digest != digest(certificate):
        problems.append(f"digest: recorded {short(certificate.digest)}, computed {short(digest(certificate))}")
    own = certificate.registration.id()
    if certificate.registration_id != own:
        problems.append(f"registration_id: recorded {short(certificate.registration_id)}, computed {short(own)}")
    return problems


def _files(folder: Path, certificate: Certificate) -> list[str]:
    """Every file of the folder against the certificate: missing, extra, changed, or outside."""
    if not folder.is_dir():
        raise D3Error(f"{folder} does not exist", "the folder of artifacts belongs beside the certificate", code=2)
    text = canonical_json(certificate.registration) + "\n"
    wanted = [Artifact(path=REGISTRATION, sha256=sha256(text))]
    wanted += [a for e in certificate.boots for a in (e.record, e.responses)]
    problems = []
    for artifact in wanted:
        try:
            found = sha256(read_artifact(folder, artifact.path))
        except D3Error as error:
            problems.append(error.message)
            continue
        if found != artifact.sha256:
            problems.append(f"{artifact.path}: digest {short(found)}, the certificate says {short(artifact.sha256)}")
    names = {a.path for a in wanted}
    there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return problems + [f"{p}: not named by the certificate" for p in there if p not in names]


def read_artifact(folder: Path, path: str) -> bytes:
    """The bytes of an artifact; a path or a link that leaves the folder is an error, not a file."""
    try:
        full = folder / path
        if not full.resolve().is_relative_to(folder.resolve()) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise D3Error(f"{path}: leaves the certificate's folder")
        if full.exists() and not full.is_file():
            raise D3Error(f"{path}: not a file")
        return full.read_bytes()
    except FileNotFoundError:
        raise D3Error(f"{path}: missing") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise D3Error(f"{path!r}: cannot be read ({error})") from error


def read_boot(folder: Path, entry: BootEntry) -> Boot:
    """One boot from its two files. Raises D3Error that names the file and the field."""
    try:
        record = BootRecord.model_validate(json.loads(read_artifact(folder, entry.record.path)))
        lines = read_artifact(folder, entry.responses.path).decode("utf-8", "surrogatepass")
    except ValidationError as error:
        raise D3Error(f"{entry.record.path}: {explain(error)}") from error
    except ValueError as error:
        raise D3Error(f"{entry.record.path} or its responses: not JSON text ({error})") from error
    return Boot(record=record, responses=parse_responses(lines, entry.responses.path))


def _rebuilt(certificate: Certificate, boots: Sequence[Boot]) -> list[str]:
    """Build the certificate anew from registration, boots and context, and compare field by field."""
    try:
        again = build(certificate.registration, boots, certificate.context)
    except D3Error as error:
        return [error.message]
    except Exception as error:  # a forged registration can hold values that no study could have had
        return [f"cannot be recomputed: {type(error).__name__}: {error}"]
    recorded, computed = plain(certificate), plain(again)
    paths = [p for p in diff_paths("", recorded, computed) if p != "digest"]
    more = [f"... and {len(paths) - SHOWN} fields more"] if len(paths) > SHOWN else []
    return [f"{p}: not what the artifacts give" for p in paths[:SHOWN]] + more


@command
def main(argv: list[str] | None = None) -> int:
    """Check one certificate; 0 it holds, 1 it does not, 2 there is nothing to check."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.verify",
        description="Recompute every count, interval, reading and limit of a certificate from the files beside it.",
        epilog="Exit code: 0 it holds, 1 it does not, 2 nothing to check. Needs no engine and no tracking store.",
    )
    parser.add_argument("file", type=Path, help="the certificate, such as results/d3_determinism_2x2.json")
    parser.add_argument(
        "--verify-key",
        type=Path,
        metavar="KEY",
        help="a public key (PEM): the statement beside FILE must be signed by it",
    )
    options = parser.parse_args(argv)
    out = getattr(sys.stdout, "reconfigure", None)
    if out:
        out(errors="backslashreplace")
    code, lines = _said(options.file, options.verify_key)
    try:
        print("\n".join(map(printable, lines)), flush=True)
    except BrokenPipeError:  # `| head` has read enough; the exit code still says what was found
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _said(path: Path, key: Path | None) -> tuple[int, list[str]]:
    """The exit code and the lines to print."""
    examined = examine(path)
    problems = [*examined.problems, *(check(path, key) if key else ())]
    if problems:
        end = f"{path}: does not hold, {len(problems)} problem{'s' * (len(problems) > 1)}"
        return 1, [*(f"{path}: {problem}" for problem in problems), end]
    found = examined.certificate
    counts = f"{found.totals.counted} of {found.totals.boots} boots counted"
    lines = [f"{path}: holds; {counts}, registration {short(found.registration_id)}", found.answer]
    return 0, lines + ([f"signed with the key of {key}"] if key else [])


if __name__ == "__main__":
    sys.exit(main())
