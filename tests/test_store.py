"""Files under runs/: whole or not there, found again from any folder's name, and their damage named."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from conftest import Home
from d3.errors import D3Error
from d3.record import BootRecord
from d3.store import (
    boot_dir,
    find_registration,
    load,
    load_boot,
    lock_study,
    parse_responses,
    recorded,
    responses_text,
    root,
    runs_dir,
    save_boot,
    save_registration,
    slug,
    study_dir,
    write_atomic,
)

STUDY = build.registration(boots=1)
ODD = ["with space", "quo'te\"s", "new\nline", "ünï", "per%20cent"]


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def one_line(error: pytest.ExceptionInfo[D3Error], *parts: str) -> None:
    said = str(error.value)
    assert all(part in said for part in parts), said
    assert error.value.code == 2


def test_boots_come_back_from_folders_of_any_name(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3_RUNS", str(odd))
    boots = build.boots(STUDY, {"on/0": {"short": build.CACHE}})
    save_registration(STUDY)
    for boot in boots:
        save_boot(boot, boot_dir(boot.record))
    assert runs_dir() == odd
    assert find_registration(STUDY.id()) == find_registration(STUDY.id()[:12]) == STUDY
    found = {record.boot_id: load_boot(folder) for folder, record in recorded(STUDY.id())}
    assert found == {b.record.boot_id: b for b in boots}
    assert boots[0].record.requests[0].text_sha256[:12] in (boot_dir(boots[0].record) / "hashes.txt").read_text()


def test_relative_folders_mean_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("D3_RUNS", "here")
    assert runs_dir() == tmp_path / "here"
    monkeypatch.delenv("D3_RUNS")
    assert runs_dir() == root() / "runs"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(D3Error) as error:
        write_atomic(path, "new")
    one_line(error, f"cannot write {path}: No space left on device", "free disk space")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomic(path, "newer")
    assert (path.read_text(), oct(path.stat().st_mode)[-3:]) == ("newer", "644")


def test_a_write_where_no_folder_can_be_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(D3Error, match="cannot write .*file/deeper: File exists"):
        write_atomic(tmp_path / "file" / "deeper", "x")


def test_the_record_is_written_last(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("d3.store.write_atomic", lambda path, _data: order.append(path.name))
    save_boot(build.boots(STUDY)[0], home.runs)
    assert order[-1] == "boot.json"


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda text: text[:100], "file: Invalid JSON: EOF"),
        (lambda text: "", "file: Invalid JSON: EOF"),
        (lambda text: "[]", "file: Input should be an object"),
        (lambda text: text.replace('"attempt":1', '"attempt":"first"'), "attempt: Input should be a valid integer"),
        (lambda text: text.replace('"status":"valid"', '"status":"fine"'), "status: Input should be 'valid', 'void'"),
        (lambda text: text.replace('"boot":0,', ""), "boot: Field required"),
        (lambda text: text.replace('"phase":"C1"', '"phase":3', 1), "requests.0.phase: Input should be a valid string"),
    ],
)
def test_a_damaged_record_names_its_file_and_field(tmp_path: Path, damage, where: str) -> None:
    save_boot(build.boots(STUDY)[0], tmp_path)
    path = tmp_path / "boot.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(D3Error) as error:
        load(BootRecord, path)
    one_line(error, f"{path}: {where}", "the file is damaged or of another version")
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_a_folder_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(D3Error, match=r"boot\.json does not exist; check the path"):
        load(BootRecord, tmp_path / "boot.json")
    with pytest.raises(D3Error, match="cannot read .*: Is a directory"):
        load(BootRecord, tmp_path)


@pytest.mark.parametrize("damage", ["no JSON\n", '{"text": 3}\n'])
def test_damaged_responses_name_their_line(tmp_path: Path, damage: str) -> None:
    save_boot(build.boots(STUDY, {"on/0": {"short": build.CACHE}})[0], tmp_path)
    path = tmp_path / "responses.jsonl"
    path.write_text(path.read_text() + damage)
    with pytest.raises(D3Error) as error:
        load_boot(tmp_path)
    one_line(error, f"{path} line {path.read_text().count(chr(10))}: ", "the file is damaged")


def test_missing_and_undecodable_responses_are_errors_of_ours(tmp_path: Path) -> None:
    save_boot(build.boots(STUDY)[0], tmp_path)
    (tmp_path / "responses.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(D3Error, match=r"cannot read .*responses\.jsonl: .*can't decode"):
        load_boot(tmp_path)
    (tmp_path / "responses.jsonl").unlink()
    with pytest.raises(D3Error, match=r"cannot read .*responses\.jsonl: .*No such file"):
        load_boot(tmp_path)


@given(st.text(st.characters(categories=None), max_size=30))
def test_any_text_survives_the_responses_file(text: str) -> None:
    boot = build.boots(STUDY, letters={"a": build.response("a", text=text)})[0]
    written = responses_text(boot)
    assert written.count("\n") == len(boot.responses)
    raw = written.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    assert parse_responses(raw, "x") == boot.responses


def test_a_registration_is_written_once_and_keeps_its_time(home: Home) -> None:
    first = save_registration(STUDY)
    path = study_dir(STUDY.id()) / "registration.json"
    before = path.stat().st_mtime_ns
    assert save_registration(STUDY) == first
    assert path.stat().st_mtime_ns == before


def test_a_changed_registration_is_noticed(home: Home) -> None:
    save_registration(STUDY)
    path = study_dir(STUDY.id()) / "registration.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "seed": 99}))
    with pytest.raises(D3Error, match="the registration on disk has id .*, not .*; remove its folder"):
        find_registration(STUDY.id())


def test_names_become_file_names() -> None:
    assert slug("apc=on invariant=0") == "apc-on_invariant-0"
    assert slug("a/b\\c:d\n") == "a_b_c_d_"


def test_one_process_at_a_time_has_a_study(home: Home) -> None:
    first = lock_study("a" * 64)
    with pytest.raises(D3Error, match="another process"):
        lock_study("a" * 64)
    first.close()
    lock_study("a" * 64).close()


def test_registerings_one_after_the_other_have_times_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines that register the same study in one millisecond are two studies in a store that they share."""
    times = []
    for place in range(20):
        monkeypatch.setenv("D3_RUNS", str(tmp_path / str(place)))
        times.append(save_registration(STUDY))
    assert times == sorted(set(times))
