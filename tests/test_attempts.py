"""Which attempt settles a boot, which boots are due, and which number comes next; each record is read once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from conftest import Home, grid
from d3 import attempts as module
from d3.attempts import Attempts, Tally
from d3.errors import D3Error
from d3.plan import Locations
from d3.registration import Registration, Slot
from d3.store import boot_dir, save_boot
from d3.study import Pins, register

STUDY = build.registration(boots=2)
KEYS = {"apc=on invariant=0": "on/0", "apc=off invariant=0": "off/0", "apc=on invariant=1": "on/1",
        "apc=off invariant=1": "off/1"}  # fmt: skip
WAYS = ("valid", "void", "failed", "stopped", "refused")


def saved(slot: Slot, way: str, number: int, study: Registration = STUDY) -> None:
    key = KEYS[slot.cell]
    if way in {"valid", "void"}:
        boot = build.boot(study, key, slot.boot, {p.id: build.AGREE for p in study.prompts}, attempt=number, status=way)
    else:
        kind = {"failed": "timeout", "stopped": "interrupted", "refused": "engine_error"}[way]
        boot = build.failed(study, key, slot.boot, kind=kind, attempt=number)
    save_boot(boot, boot_dir(boot.record))


def test_a_study_without_records_is_all_due(home: Home) -> None:
    found = Attempts(STUDY)
    assert list(found.due()) == list(STUDY.order)
    assert found.tally() == Tally(registered=8, valid=0, unavailable=0, missing=8, reasons=())
    assert {found.next(slot) for slot in STUDY.order} == {1}


@pytest.mark.parametrize(
    ("ways", "settled", "following"),
    [
        (["valid"], 1, 2), (["failed"], None, 2), (["void"], None, 2), (["failed", "void"], 2, 3),
        (["failed", "valid"], 2, 3), (["stopped", "stopped", "stopped"], None, 4), (["stopped", "failed"], None, 3),
        (["failed", "stopped", "failed"], 3, 4), (["valid", "failed", "failed"], 1, 4),
    ],
)  # fmt: skip
def test_what_settles_a_boot(home: Home, ways: list[str], settled: int | None, following: int) -> None:
    slot = STUDY.order[0]
    for number, way in enumerate(ways, 1):
        saved(slot, way, number)
    found = Attempts(STUDY)
    ended = found.settled(slot)
    assert (ended and ended.attempt) == settled
    assert found.next(slot) == following
    assert (slot in set(found.due())) == (settled is None)


def test_attempts_are_ordered_by_number_not_by_name(home: Home) -> None:
    slot = STUDY.order[0]
    for number in range(1, 12):  # a10 sorts before a2
        saved(slot, "stopped", number)
    found = Attempts(STUDY)
    assert [a.attempt for a in found.of(slot)] == list(range(1, 12))
    assert found.next(slot) == 12


@given(st.dictionaries(st.integers(0, 7), st.lists(st.sampled_from(WAYS[:4]), min_size=1, max_size=4), max_size=8))
def test_every_boot_is_valid_unavailable_or_missing_and_none_valid_is_due(ways: dict[int, list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        slots = {STUDY.order[i]: w for i, w in ways.items()}
        every = [attempt_of(slot, way, n) for slot, w in slots.items() for n, way in enumerate(w, 1)]
        patch.setattr(module, "read", lambda _id: iter(every))
        found = Attempts(STUDY)
        tally, due = found.tally(), set(found.due())
        assert tally.valid + tally.unavailable + tally.missing == tally.registered == 8
        assert tally.valid == sum("valid" in w for w in slots.values())
        for slot in STUDY.order:
            tried = slots.get(slot, [])
            spent = sum(w in {"failed", "void"} for w in tried) >= STUDY.max_attempts
            assert (slot in due) == ("valid" not in tried and not spent)


def attempt_of(slot: Slot, way: str, number: int) -> module.Attempt:
    record = build.failed(STUDY, KEYS[slot.cell], slot.boot, kind="timeout", attempt=number).record
    return module.Attempt.model_validate({**record.model_dump(), "status": way})


def test_a_flag_that_the_engine_refused_is_not_tried_again(home: Home) -> None:
    by_cell = {(s.cell, s.boot): s for s in STUDY.order}
    saved(by_cell["apc=on invariant=0", 0], "valid", 1)
    saved(by_cell["apc=on invariant=1", 0], "refused", 1)
    found = Attempts(STUDY)
    assert found.settled(by_cell["apc=on invariant=1", 0]) is not None
    assert found.refusal(by_cell["apc=on invariant=1", 1]) is not None
    assert found.settled(by_cell["apc=on invariant=1", 1]) is None  # to be recorded as skipped
    assert found.refusal(by_cell["apc=off invariant=1", 0]) is None
    assert found.tally().unavailable == 1


def test_a_record_is_read_once_and_again_when_it_changes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    read_file = module.read_file
    monkeypatch.setattr(module, "read_file", lambda path: (opened.append(path), read_file(path))[1])
    for slot in STUDY.order[:3]:
        saved(slot, "failed", 1)
    for _ in range(5):
        Attempts(STUDY)
    assert len(opened) == 3
    saved(STUDY.order[0], "valid", 1)
    assert Attempts(STUDY).tally().valid == 1
    assert len(opened) == 4


def test_a_damaged_record_is_named(home: Home) -> None:
    saved(STUDY.order[0], "valid", 1)
    (path,) = home.runs.glob("studies/*/boots/*/boot.json")
    path.write_text(path.read_text().replace('"status":"valid"', '"status":"fine"'))
    with pytest.raises(D3Error, match="boot.json: status: .*; the file is damaged or of another version"):
        Attempts(STUDY)


def test_plans_are_of_what_is_due_in_the_registered_order(home: Home) -> None:
    pins = Pins({"fake": ""}, {"fake-model": "0" * 64})
    study = register(grid("boots=2"), ("apc", "invariant"), pins)
    saved(study.order[0], "valid", 1, study)
    saved(study.order[1], "failed", 1, study)
    plans = Attempts(study).plans(Locations(python="python", model="model"))
    assert [(p.position, p.attempt) for p in plans] == [(1, 2), *((i, 1) for i in range(2, 8))]
