"""The signed statement is that key's word for exactly these files; anything else beside it is refused."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as new_ecdsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from build import CONTEXT, small_study
from d3 import attest, verify
from d3.certificate import build, write
from d3.record import sha256
from d3.statement import PREDICATE, STATEMENT, check

STUDY, BOOTS = small_study()
GOOD = build(STUDY, BOOTS, CONTEXT)


def keys(folder: Path, name: str = "key", kind: str = "ed25519", password: bytes = b"") -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate() if kind == "ed25519" else new_ecdsa(SECP256R1())
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate with its signed statement, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    path = write(GOOD, BOOTS, folder / "c.json")
    private, public = keys(folder)
    assert attest.main([str(path), "--sign", str(private)]) == 0
    return path, public


def test_a_plain_statement_names_every_file_by_its_digest(tmp_path: Path) -> None:
    path = write(GOOD, BOOTS, tmp_path / "c.json")
    assert attest.main([str(path)]) == 0
    found = json.loads((tmp_path / "c.statement.json").read_text())
    assert (found["_type"], found["predicateType"]) == (STATEMENT, PREDICATE)
    assert found["predicate"] == json.loads(path.read_text())
    named = {s["name"]: s["digest"]["sha256"] for s in found["subject"]}
    there = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "c.statement.json"]
    assert named == {p.relative_to(tmp_path).as_posix(): sha256(p.read_bytes()) for p in there}
    assert verify.main([str(path)]) == 0


def test_the_signature_is_plain_dsse_that_others_can_check(signed: tuple[Path, Path]) -> None:
    """By the DSSE specification's own words (pre-authentication encoding), without the library that signed."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    path, public = signed
    found = json.loads(path.with_suffix(".intoto.jsonl").read_text())
    payload = base64.b64decode(found["payload"])
    kind = found["payloadType"].encode()
    pae = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    (signature,) = found["signatures"]
    load_pem_public_key(public.read_bytes()).verify(base64.b64decode(signature["sig"]), pae)  # type: ignore[union-attr,call-arg]


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_verify_takes_the_signers_key_and_no_other(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(GOOD, BOOTS, tmp_path / "c.json")
    private, public = keys(tmp_path, kind=kind)
    _, other = keys(tmp_path, "other", kind)
    assert verify.main([str(path), "--verify-key", str(public)]) == 2
    assert "c.intoto.jsonl does not exist; sign it" in capsys.readouterr().err
    assert attest.main([str(path), "--sign", str(private)]) == 0
    assert "next: python -m d3.verify" in capsys.readouterr().out
    assert verify.main([str(path), "--verify-key", str(public)]) == 0
    assert "signed with the key of" in capsys.readouterr().out
    assert verify.main([str(path), "--verify-key", str(other)]) == 1
    assert "not signed by other.pub, or changed since" in capsys.readouterr().out


@given(st.data())
def test_no_changed_byte_of_a_statement_passes(signed: tuple[Path, Path], data: st.DataObject) -> None:
    path, public = signed
    envelope = path.with_suffix(".intoto.jsonl")
    good = envelope.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != good[at]))
    how = data.draw(st.sampled_from(["change", "drop", "double"]))
    middle = {"change": bytes([byte]), "drop": b"", "double": good[at : at + 1] * 2}[how]
    try:
        envelope.write_bytes(good[:at] + middle + good[at + 1 :])
        assert check(path, public)
    finally:
        envelope.write_bytes(good)
    assert check(path, public) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "\x00", "[" * 100_000,
             '{"payload":"e30=","payloadType":"x","signatures":[{}]}', '{"payload":1,"signatures":[3]}'],
)  # fmt: skip
def test_what_is_no_envelope_is_said_to_be_none(signed: tuple[Path, Path], tmp_path: Path, text: str) -> None:
    path = Path(shutil.copy(signed[0], tmp_path))
    path.with_suffix(".intoto.jsonl").write_text(text)
    assert check(path, signed[1]) == ["c.intoto.jsonl: not a DSSE envelope"]


def test_a_statement_of_another_certificate_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    path, public = signed
    renamed = Path(shutil.copy(path, tmp_path / "d.json"))
    shutil.copy(path.with_suffix(".intoto.jsonl"), tmp_path / "d.intoto.jsonl")
    assert check(renamed, public) == ["d.intoto.jsonl: signed for another certificate, or under another name than d"]


def test_a_certificate_that_does_not_hold_is_not_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD, BOOTS, tmp_path / "c.json")
    path.write_text(path.read_text().replace('"answer": "Bytes', '"answer": "No bytes'))
    private, _ = keys(tmp_path)
    assert attest.main([str(path), "--sign", str(private)]) == 1
    assert "does not hold" in capsys.readouterr().err
    assert not path.with_suffix(".intoto.jsonl").exists()


def test_unusable_keys_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD, BOOTS, tmp_path / "c.json")
    private, public = keys(tmp_path)
    locked, _ = keys(tmp_path, "locked", password=b"secret")
    for key, words in (
        (tmp_path / "none.pem", "none.pem does not exist; make one: openssl genpkey"),
        (tmp_path, "cannot read"),
        (path, "is not a private key in PEM form"),
        (public, "is not a private key in PEM form"),
        (locked, "locked.pem is encrypted; decrypt it first: openssl pkey"),
    ):
        assert attest.main([str(path), "--sign", str(key)]) == 2
        assert words in capsys.readouterr().err
    assert attest.main([str(path), "--sign", str(private)]) == 0
    capsys.readouterr()
    assert verify.main([str(path), "--verify-key", str(private)]) == 2
    assert "is not a public key in PEM form" in capsys.readouterr().err
