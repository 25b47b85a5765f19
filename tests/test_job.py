"""One job is one boot: what is recorded is not run again, what failed is, and a refused flag costs one attempt."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import build
from conftest import Home, composed, grid
from d3 import boot as booting
from d3 import job
from d3.attempts import Attempts
from d3.errors import D3Error
from d3.install import engine_python
from d3.model import model_digest
from d3.record import Boot, BootPlan, Failure
from d3.registration import Registration
from d3.store import boot_dir, recorded, save_registration
from d3.study import Pins, register
from d3.sync import sync
from d3.tracking import Tracking

FLAG = Failure(stage="request", kind="engine_error", line="TypeError: no flag here")


class Lab:
    """A study whose boots are played by a script: status or failure per call, in place of an engine."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        configs = grid("boots=2")
        self.study: Registration = register(
            configs, ("apc", "invariant"), Pins({"fake": ""}, {"fake-model": model_digest(str(home.model))})
        )
        self.ran: list[str] = []
        self.script: dict[str, list[Any]] = {}
        save_registration(self.study)
        monkeypatch.setattr(booting, "run", self._play)

    def _play(self, plan: BootPlan, folder: Path, progress: object, starter: object) -> Boot:
        self.ran.append(f"{plan.cell} b{plan.boot} a{plan.attempt}")
        script = self.script.get(plan.cell)
        outcome = script.pop(0) if script else None
        boot = booting.skipped(plan, "")
        record = boot.record.model_copy(update={"status": "valid", "reason": "", "failure": None})
        if isinstance(outcome, Failure):
            status = {"interrupted": "stopped"}.get(outcome.kind, "failed")
            record = record.model_copy(update={"status": status, "reason": outcome.line, "failure": outcome})
        elif outcome:
            record = record.model_copy(update={"status": outcome, "reason": "a check"})
        return Boot(record=record, responses={})

    def sweep(self, slots: Sequence[int] | None = None) -> list[str]:
        """Run the study's jobs in the registered order; returns their statuses."""
        self.ran.clear()
        found = []
        for index in range(8) if slots is None else slots:
            slot = self.study.order[index]
            cfg = composed().copy()
            cfg.apc, cfg.invariant, cfg.boot = "apc=on" in slot.cell, int(slot.cell[-1]), slot.boot
            cfg.registration = self.study.id()
            found.append(job.run(cfg))
        return found

    def statuses(self) -> list[str]:
        return sorted(r.status for _, r in recorded(self.study.id()))


@pytest.fixture
def lab(home: Home, store: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(home, monkeypatch)


def test_every_boot_runs_once_in_order_and_a_second_sweep_runs_nothing(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.sweep() == ["valid"] * 8
    assert lab.ran == [f"{s.cell} b{s.boot} a1" for s in lab.study.order]
    assert Attempts(lab.study).tally().words() == "8 of 8 boots valid"
    assert "[1/8] boot 0" in capsys.readouterr().out
    assert lab.sweep() == ["valid"] * 8
    assert lab.ran == []
    assert capsys.readouterr().out.count("already recorded") == 8


@pytest.mark.parametrize("ended", ["void", Failure(stage="boot", kind="timeout", line="slow")])
def test_a_boot_that_failed_is_tried_again_as_often_as_registered(lab: Lab, ended: object) -> None:
    lab.script["apc=on invariant=0"] = [ended] * 9
    cells = [i for i, s in enumerate(lab.study.order) if s.cell == "apc=on invariant=0"]
    for attempt in (1, 2):
        lab.sweep(cells)
        assert lab.ran == [f"apc=on invariant=0 b{b} a{attempt}" for b in (0, 1)]
    lab.sweep(cells)
    assert lab.ran == []
    tally = Attempts(lab.study).tally()
    assert (tally.valid, tally.missing) == (0, 8)
    assert "b00-a2: " in tally.words()


def test_stopped_boots_do_not_use_up_the_attempts(lab: Lab) -> None:
    lab.script["apc=on invariant=0"] = [Failure(stage="request", kind="interrupted", line="stopped by the user")] * 3
    slot = next(i for i, s in enumerate(lab.study.order) if s.cell == "apc=on invariant=0")
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            lab.sweep([slot])
    assert lab.sweep([slot]) == ["valid"]
    assert lab.statuses() == ["stopped"] * 3 + ["valid"]


def test_a_refused_flag_costs_one_attempt_per_cell(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in ("apc=on invariant=1", "apc=off invariant=1"):
        lab.script[cell] = [FLAG] * 9
    lab.sweep()
    assert lab.statuses() == ["failed"] * 2 + ["skipped"] * 2 + ["valid"] * 4
    skipped = [r.reason for _, r in recorded(lab.study.id()) if r.status == "skipped"]
    assert skipped == ["launch: the flag is unavailable: TypeError: no flag here"] * 2
    tally = Attempts(lab.study).tally()
    assert (tally.valid, tally.unavailable, tally.missing) == (4, 4, 0)
    assert tally.words() == "4 of 8 boots valid, 4 with the flag unavailable"
    lab.sweep()
    assert lab.ran == []
    assert len(lab.statuses()) == 8


@pytest.mark.parametrize("kind", ["timeout", "bad_answer", "environment"])
def test_only_an_error_of_the_engines_own_is_a_refusal(lab: Lab, kind: Any) -> None:
    lab.script["apc=on invariant=1"] = [Failure(stage="boot", kind=kind, line="x")] * 2
    lab.sweep()
    assert lab.statuses() == ["failed"] * 2 + ["valid"] * 6
    assert Attempts(lab.study).tally().missing == 2


def test_an_engine_that_fails_without_the_flag_too_refuses_nothing(lab: Lab) -> None:
    for cell in ("apc=on invariant=0", "apc=on invariant=1"):
        lab.script[cell] = [FLAG]
    lab.sweep()
    assert "skipped" not in lab.statuses()
    lab.sweep()  # the engine is well again: nothing of the first sweep stands in its way
    assert lab.statuses() == ["failed"] * 2 + ["valid"] * 8
    assert Attempts(lab.study).tally().missing == 0


def test_a_flag_that_worked_once_is_available(lab: Lab) -> None:
    lab.script["apc=on invariant=1"] = [None, FLAG]
    lab.sweep()
    assert "skipped" not in lab.statuses()
    assert Attempts(lab.study).tally().missing == 1
    lab.sweep()
    assert Attempts(lab.study).tally().missing == 0


def test_a_store_that_lost_the_boots_is_filled_again(
    lab: Lab, home: Home, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.sweep()
    (home.folder / "new.db").write_bytes(empty_store.read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home.folder}/new.db")
    lab.sweep()
    assert lab.ran == []
    assert sync() == 8
    tracking = Tracking()
    assert len(tracking.boots(tracking.studies()[0])[1]) == 8


def test_a_model_that_changed_since_it_was_registered_stops_the_study(lab: Lab, home: Home) -> None:
    (home.model / "model.safetensors").write_text("other weights\n")
    with pytest.raises(D3Error, match="changed since it was registered; restore it, or start a new study"):
        lab.sweep([0])
    assert lab.statuses() == []


def test_a_job_without_a_registered_place_is_refused(lab: Lab) -> None:
    cfg = composed().copy()
    with pytest.raises(D3Error, match="this job has no registration"):
        job.run(cfg)
    cfg.registration, cfg.boot = lab.study.id(), 7
    with pytest.raises(D3Error, match="boot 7 of apc=on invariant=0 is not registered; boots are 0 to 1"):
        job.run(cfg)


def test_the_plan_lies_beside_the_record(lab: Lab) -> None:
    lab.sweep([0])
    ((folder, record),) = recorded(lab.study.id())
    assert folder == boot_dir(record)
    assert BootPlan.model_validate_json((folder / "plan.json").read_bytes()).boot_id == record.boot_id


def test_an_engine_python_must_be_there(home: Home) -> None:
    for name, lock, python, said in (
        ("fake", None, "/no/such/python", "engine.python=/no/such/python is not an executable"),
        ("fake", None, None, "engine fake has no environment of its own"),
        ("vllm_cpu", "vllm_cpu", None, "engine vllm_cpu is not installed; run: python -m d3.engine install vllm_cpu"),
        ("x", "nope", None, "engine.lock=nope: there is no"),
    ):
        with pytest.raises(D3Error) as error:
            engine_python(name, lock, python)
        assert str(error.value).startswith(said)


def test_time_left_follows_the_valid_boots(capsys: pytest.CaptureFixture[str]) -> None:
    from d3.console import Console

    study = build.registration(boots=2)
    console = Console(study, [], study.order[0])
    records = [b.record for b in build.boots(study)]
    for record, seconds in zip(itertools.islice(records, 3), (10.0, 20.0, 60.0), strict=True):
        console.done(
            record.model_copy(update={"timings": record.timings.model_copy(update={"total_s": seconds})}), seconds
        )
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "valid in 10 s, about 70 s left", "valid in 20 s, about 2 min left", "valid in 60 s, about 2 min left",
    ]  # fmt: skip
