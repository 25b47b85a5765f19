"""A certificate that was touched anywhere must not verify; one that was not must, from its own files alone."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from build import CACHE, CONTEXT, boots, registration, response, seed_study, small_study
from d3.certificate import artifacts, build, folder_of, render, write
from d3.record import BootRecord, canonical_json, plain, sha256
from d3.schema import CERTIFICATE_VERSION, Certificate, digest
from d3.verify import main, verify

DATA = Path(__file__).parent / "data"
COMMITTED = sorted(DATA.glob("certificate_v*.json"))
STUDY, BOOTS = small_study()
GOOD = build(STUDY, BOOTS, CONTEXT)
COUNTED = next(i for i, e in enumerate(GOOD.boots) if e.counted)
FILES = {"c.json": render(GOOD)} | {f"c/{p}": t for b in BOOTS for p, t in artifacts(b).items()}
FILES["c/registration.json"] = canonical_json(STUDY) + "\n"
BYTES = {name: text.encode() for name, text in sorted(FILES.items())}


def first_boot():
    entry = GOOD.boots[COUNTED]
    return entry.record.path, entry.responses.path


@contextmanager
def on_disk(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        yield Path(folder) / "c.json"


def code_of(files):
    with on_disk(files) as path:
        return main([str(path)])


def forged(value):
    """A certificate file in D3's own form whose digest fits its content, as a careful forger would write it."""
    try:
        certificate = Certificate.model_validate(value)
    except ValidationError:
        return json.dumps(value).encode()
    return render(certificate.model_copy(update={"digest": digest(certificate)})).encode("utf-8", "surrogatepass")


# --- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.name)
def test_every_committed_version_still_holds(path):
    assert verify(path) == []


def test_committed_boots_still_fit_their_schema():
    records = sorted(DATA.glob("certificate_v*/boots/*/boot.json"))
    assert len(records) >= 5
    for path in records:
        assert canonical_json(BootRecord.model_validate_json(path.read_bytes())) + "\n" == path.read_text()


@pytest.mark.parametrize("name", ["seed.json", "a b'c\"d\n.json", "1.2.json", "größe.json"])
def test_holds_in_any_folder(tmp_path, name, capsys):
    study, found = seed_study()
    out = write(build(study, found, CONTEXT), found, tmp_path / name)
    assert main([str(out)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "holds; 24 of 24 boots counted" in first
    assert second.startswith("Bytes: KNOWN.")


def test_odd_responses_hold(tmp_path):
    study = registration(boots=1, prompts=("short",))
    odd = {"a": response("a", text="half \ud83d\u2028 \x85", logprobs=(-0.1, float("nan"), None, float("-inf")))}
    found = boots(study, {"on/0": {"short": CACHE}}, letters=odd)
    assert verify(write(build(study, found, CONTEXT), found, tmp_path / "c.json")) == []


def test_the_base_of_every_mutation_holds():
    assert code_of(BYTES) == 0


def test_a_certificate_without_boots_holds(tmp_path):
    assert verify(write(build(STUDY, [], CONTEXT), [], tmp_path / "c.json")) == []


def test_needs_neither_store_nor_engine():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['mlflow', 'hydra', 'omegaconf', 'vllm', 'httpx']));"
        f"from d3.verify import main; sys.exit(main([{str(COMMITTED[-1])!r}]))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- wrong use: exit 2, one line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p, "does not exist"),
        (lambda p: p.parent, "cannot read"),
        (lambda p: p.write_text(render(GOOD)) and p, "the folder of artifacts belongs beside the certificate"),
        (lambda p: p.write_text('{"schema_version": 99}') and p, "schema_version 99"),
    ],
)
def test_nothing_to_check(tmp_path, capsys, make, words):
    assert main([str(make(tmp_path / "c.json"))]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "Exit code: 0 it holds, 1 it does not, 2 nothing to check" in capsys.readouterr().out


# --- what does not hold: exit 1, and the place named ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop(f"c/{first_boot()[0]}"), f"{first_boot()[0]}: missing"),
        (lambda f: f.pop(f"c/{first_boot()[1]}"), f"{first_boot()[1]}: missing"),
        (lambda f: f.pop("c/registration.json"), "registration.json: missing"),
        (lambda f: f.update({"c/boots/extra.json": b"{}"}), "boots/extra.json: not named by the certificate"),
        (lambda f: f.update({"c/registration.json": b"{}"}), "registration.json: digest"),
        (lambda f: f.update({"c.json": f["c.json"].replace(b'"k": 1', b'"k": 0', 1)}), "digest: recorded"),
        (lambda f: f.update({"c.json": b'{"digest": "0"}'}), "answer: Field required"),
        (lambda f: f.update({"c.json": f["c.json"] + b"\n"}), "not in the form in which D3 writes it"),
    ],
)
def test_place_is_named(capsys, change, words):
    files = dict(BYTES)
    change(files)
    assert code_of(files) == 1
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "is no certificate; name one"),
        (b'"text"', "is no certificate; name one"),
        (b'{"name": "a package", "version": 1}', "is no certificate; name one"),
    ],
)
def test_a_file_that_is_no_certificate_is_nothing_to_check(capsys, raw, words):
    assert code_of({**BYTES, "c.json": raw}) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("files", "code"), [(BYTES, 0), ({**BYTES, "c/boots/extra.json": b"{}"}, 1)])
def test_a_reader_that_leaves_early_changes_no_exit_code_and_gets_no_traceback(files, code):
    root = Path(__file__).parent.parent
    with on_disk(files) as path:
        reader, writer = os.pipe()
        os.close(reader)  # what `| head` does, sooner than any race would
        command = [sys.executable, "-m", "d3.verify", str(path)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=root)
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda v: v["strata"][0]["cells"][0]["prompts"][0]["counts"][0].update(k=0),
            "cells[0].prompts[0].counts[0].k",
        ),
        (lambda v: v["strata"][0]["cells"].reverse(), "strata[0].cells[0].cell"),
        (lambda v: v["boots"].pop(), "not named by the certificate"),
        (lambda v: v["boots"].append(v["boots"][0]), "boots: not what the artifacts give"),
        (lambda v: v["boots"].reverse(), "boots[0]"),
        (lambda v: v["limits"].pop(0), "limits: not what the artifacts give"),
        (lambda v: v.update(registration_id="0" * 64), "registration_id: recorded 000000000000, computed"),
        (lambda v: v["registration"].update(boots=2), "registration_id: recorded"),
        (lambda v: v["registration"]["cells"].clear(), ""),
        (lambda v: v["context"].update(registered_at="2026-01-31T15:00:00+00:00"), "after the first boot"),
        (lambda v: v["context"].update(registered_at="\u001b[2J"), "\\x1b[2J"),
        (lambda v: v["boots"][0]["record"].update(path="../secret"), "../secret: leaves the certificate's folder"),
        (
            lambda v: v["boots"][0]["record"].update(path="/etc/hostname"),
            "/etc/hostname: leaves the certificate's folder",
        ),
        (lambda v: v["boots"][0]["record"].update(path="a\0b"), "cannot be read"),
        (lambda v: v["boots"][0]["record"].update(path="boots"), "boots: not a file"),
        (lambda v: v["boots"][0]["record"].update(path="x" * 5000), "cannot be read"),
    ],
)
def test_a_forger_who_mends_the_digest_is_caught(capsys, edit, words):
    value = plain(GOOD)
    edit(value)
    assert code_of({**BYTES, "c.json": forged(value)}) == 1
    printed = capsys.readouterr()
    assert words in printed.out
    assert printed.err == ""
    assert all(line.isprintable() for line in printed.out.splitlines())


def test_an_edited_response_with_every_digest_mended_is_caught():
    """The forger changes one word of a response, and the digests of the file: the record still has the old hashes."""
    path = first_boot()[1]
    raw = BYTES[f"c/{path}"].replace(b"one two", b"one ten")
    value = plain(GOOD)
    value["boots"][COUNTED]["responses"]["sha256"] = sha256(raw)
    assert code_of({**BYTES, f"c/{path}": raw, "c.json": forged(value)}) == 1


def test_a_response_written_twice_with_its_digest_mended_is_caught():
    path = first_boot()[1]
    raw = BYTES[f"c/{path}"] * 2
    value = plain(GOOD)
    value["boots"][COUNTED]["responses"]["sha256"] = sha256(raw)
    assert code_of({**BYTES, f"c/{path}": raw, "c.json": forged(value)}) == 1


def test_a_study_that_cannot_be_recomputed_is_a_problem_not_a_traceback(capsys):
    study = registration(boots=1, prompts=("short",), protocol_name="seed", concurrency="many")
    others = boots(study)
    value = {**plain(GOOD), "registration": plain(study), "registration_id": study.id()}
    files = {**BYTES, **{f"c/{p}": t.encode() for b in others for p, t in artifacts(b).items()}}
    value["boots"] = [e for e in value["boots"] if e["attempt"] == 1]
    assert code_of({**files, "c.json": forged(value)}) == 1
    assert "cannot be recomputed: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["outside", "inside"])
def test_links_are_not_followed_out_of_the_folder(tmp_path, target):
    out = write(GOOD, BOOTS, tmp_path / "c.json")
    folder = folder_of(out) / "boots"
    moved = tmp_path / "elsewhere" if target == "outside" else folder_of(out) / "elsewhere"
    shutil.move(folder, moved)
    folder.symlink_to(moved, target_is_directory=True)
    assert main([str(out)]) == 1


# --- mutations: none may pass -----------------------------------------------------------------------------------------

names = st.sampled_from(sorted(BYTES))


def bits_of(name):
    return st.tuples(st.just(name), st.integers(0, len(BYTES[name]) * 8 - 1))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([n for n in sorted(BYTES) if BYTES[n]]).flatmap(bits_of))
def test_any_flipped_bit_is_caught(place):
    name, bit = place
    raw = bytearray(BYTES[name])
    raw[bit // 8] ^= 1 << (bit % 8)
    assert code_of({**BYTES, name: bytes(raw)}) != 0


def lines_of(raw):
    return raw.splitlines(keepends=True)


@settings(max_examples=120, deadline=None)
@given(names, st.sampled_from(["drop", "double", "swap", "cut", "empty", "remove", "exchange", "copy"]), st.data())
def test_anything_dropped_doubled_or_reordered_is_caught(name, how, data):
    files, raw = dict(BYTES), BYTES[name]
    lines = lines_of(raw)
    i = data.draw(st.integers(0, max(len(lines) - 1, 0)))
    j = data.draw(st.integers(0, max(len(lines) - 1, 0)))
    other = data.draw(names)
    if how == "remove":
        files.pop(name)
    elif how == "exchange":
        files[name], files[other] = files[other], files[name]
    elif how == "copy":
        files[other] = raw
    elif how == "cut":
        files[name] = raw[: data.draw(st.integers(0, max(len(raw) - 1, 0)))]
    elif how == "empty":
        files[name] = b""
    elif how == "drop":
        files[name] = b"".join(lines[:i] + lines[i + 1 :])
    elif how == "double":
        files[name] = b"".join(lines[: i + 1] + lines[i:])
    elif lines:
        lines[i], lines[j] = lines[j], lines[i]
        files[name] = b"".join(lines)
    if files != BYTES:
        assert code_of(files) != 0


def leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


VALUE = plain(GOOD)
# Only the maker of a certificate knows these; nothing beside it can contradict them, so only the digest guards them.
TOLD = {("context", k) for k in ("certified_at", "parent_run", "d3_version", "git_commit", "cost_usd", "registered_at")}
LEAVES = [path for path in leaves(VALUE) if path[:2] not in TOLD and path != ("digest",)]


def changed(old, data):
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return old + data.draw(st.sampled_from([1, -1, 0.5, 1e-6, 1e9]))
    if isinstance(old, str):
        return data.draw(
            st.sampled_from([old + "x", old[1:] + "y", "", "z", "on", "0", "1", "nan"]).filter(lambda x: x != old)
        )
    return data.draw(st.sampled_from(["x", 1, 0.5, True, []]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LEAVES), st.data())
def test_any_edited_value_is_caught_though_the_digest_is_mended(path, data):
    value = json.loads(json.dumps(VALUE))
    where = value
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = changed(where[path[-1]], data)
    version = value["schema_version"]
    newer = isinstance(version, int | float) and version > CERTIFICATE_VERSION  # cannot be checked, so 2 and not 1
    assert code_of({**BYTES, "c.json": forged(value)}) == (2 if newer else 1)
