"""A certificate as an in-toto Statement, and its signature with a local key.

Statement: in-toto attestation framework v1 (in-toto.io/Statement/v1). Envelope: DSSE v1.0, made and checked by
securesystemslib, on one line in NAME.intoto.jsonl beside NAME.json.
"""

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import FormatError, VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]

from d3.certificate import REGISTRATION, Certificate, load, render
from d3.errors import D3Error
from d3.record import Frozen, canonical_json, plain, sha256
from d3.store import read_file, write_atomic

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:d3:determinism-certificate:v1"
PAYLOAD = "application/vnd.in-toto+json"
NEW_KEY = "make one: openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"


class Subject(Frozen):
    """One file that the statement is about, relative to the certificate's own folder."""

    name: str
    digest: dict[str, str]


def subjects(certificate: Certificate, name: str) -> list[Subject]:
    """The certificate's file NAME.json, its registration, and both files of every boot, by their SHA-256."""
    registration = sha256(canonical_json(certificate.registration) + "\n")
    files = {f"{name}/{REGISTRATION}": registration}
    files |= {f"{name}/{a.path}": a.sha256 for b in certificate.boots for a in (b.record, b.responses)}
    files = {f"{name}.json": sha256(render(certificate)), **files}
    return [Subject(name=path, digest={"sha256": value}) for path, value in files.items()]


def statement(certificate: Certificate, name: str) -> str:
    """The in-toto Statement as one line of JSON in ASCII: subjects are the files, the predicate is the certificate."""
    found = {
        "_type": STATEMENT,
        "subject": [plain(s) for s in subjects(certificate, name)],
        "predicateType": PREDICATE,
        "predicate": plain(certificate),
    }
    return json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)


def envelope_of(path: Path) -> Path:
    """Where a certificate's signed statement lies: results/NAME.intoto.jsonl for results/NAME.json."""
    return path.with_suffix(".intoto.jsonl")


def write_statement(certificate: Certificate, path: Path) -> Path:
    """Write the statement of the certificate that lies at `path`, unsigned; returns NAME.statement.json."""
    out = path.with_suffix(".statement.json")
    write_atomic(out, statement(certificate, path.stem) + "\n")
    return out


def sign(certificate: Certificate, path: Path, key: Path) -> Path:
    """Sign the statement of the certificate that lies at `path`; returns NAME.intoto.jsonl.

    `key`: a private key in PEM form, of a kind that the library knows (Ed25519, ECDSA, RSA). Raises D3Error.
    """
    envelope = Envelope(statement(certificate, path.stem).encode(), PAYLOAD, {})
    envelope.sign(CryptoSigner(_private(key)))
    write_atomic(envelope_of(path), _line(envelope))
    return envelope_of(path)


def check(path: Path, public: Path) -> list[str]:
    """Every problem of the signed statement beside a certificate, one line each; empty when it is that key's word.

    Raises D3Error where there is no statement or no usable key.
    """
    key = _public(public)
    signed = envelope_of(path)
    data = read_file(signed, "sign it: python -m d3.attest FILE --sign KEY")
    try:
        envelope = Envelope.from_dict(json.loads(data))
        whole = _line(envelope).encode() == data
    except (ValueError, TypeError, KeyError, AttributeError, FormatError, RecursionError):
        return [f"{signed.name}: not a DSSE envelope"]
    problems = []
    try:
        envelope.verify([key], 1)
    except VerificationError:
        problems.append(f"{signed.name}: not signed by {public.name}, or changed since")
    if not whole:
        problems.append(f"{signed.name}: not in the form in which D3 writes it")
    if envelope.payload_type != PAYLOAD:
        problems.append(f"{signed.name}: its payload is not an in-toto statement")
    if envelope.payload != statement(load(path), path.stem).encode():
        problems.append(f"{signed.name}: signed for another certificate, or under another name than {path.stem}")
    return problems


def _line(envelope: Envelope) -> str:
    return canonical_json(envelope.to_dict()) + "\n"


def _private(path: Path) -> Any:
    data = read_file(path, NEW_KEY)
    try:
        return load_pem_private_key(data, None)
    except TypeError as error:  # cryptography's word for a key under a password
        raise D3Error(f"{path} is encrypted", f"decrypt it first: openssl pkey -in {path} -out plain.pem") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise D3Error(f"{path} is not a private key in PEM form", NEW_KEY) from error


def _public(path: Path) -> SSlibKey:
    data = read_file(path, NEW_KEY)
    try:
        return SSlibKey.from_crypto(load_pem_public_key(data))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise D3Error(f"{path} is not a public key in PEM form", NEW_KEY) from error
