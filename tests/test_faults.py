"""Faults, each injected for real: the boot is failed or void with the reason, and nothing is left behind or lost.

docs/faults.md lists all of them, those of other files too; whole sweeps under faults are in tests/slow/test_faults.py.
"""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

import build
from conftest import Home, composed
from d3 import boot as booting
from d3 import certificate, job
from d3.boot import main, run
from d3.classify import unusable
from d3.errors import D3Error
from d3.model import model_digest
from d3.record import BootPlan, BootRecord, Message, canonical_json
from d3.store import RECORD, append, load, save_boot, save_registration, study_dir
from d3.study import Pins, register
from planned import plan, wrapper

pytestmark = pytest.mark.usefixtures("nothing_left")
NOTICED_S = 8.0  # a fault is noticed within this, on a machine that does much else


def kill_engine(way: str) -> None:
    """Kill the engine as the kernel does when memory runs out."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that ended meanwhile
            if any(way in word for word in process.cmdline()):
                process.kill()


@pytest.mark.parametrize("transport", ["server", "worker"])
@pytest.mark.parametrize(
    ("stage", "do", "answered"), [("boot", "hang_in_boot", 0), ("between", "", 3), ("request", "hang_in_request", 0)]
)
def test_an_engine_that_is_killed_fails_its_boot_at_once(
    tmp_path: Path, transport: str, stage: str, do: str, answered: int
) -> None:
    script = f"fake_{'engine' if transport == 'server' else 'worker'}.py"
    timer = threading.Timer(1.0, kill_engine, (script,))
    sent = 0

    def progress(phase: str) -> None:
        nonlocal sent
        if phase == "engine starting" and stage == "boot":
            timer.start()
        sent += phase.startswith(("short", "long"))
        if phase.startswith("short") and stage == "request" and sent == 1:
            timer.start()
        if stage == "between" and sent == answered + 1:
            kill_engine(script)

    python = {"python": wrapper(tmp_path)} if transport == "worker" else {}
    boot = run(plan(do=do, transport=transport, **python), tmp_path / "boot", progress)
    failure = boot.record.failure
    assert failure is not None
    assert boot.record.status == "failed"
    assert (failure.stage, failure.kind) == ("boot" if stage == "boot" else "request", "environment")
    assert failure.line.startswith("the engine was killed by signal 9, as the kernel does when memory runs out")
    assert len(boot.record.requests) == answered  # what was answered before is kept
    assert boot.record.timings.total_s < NOTICED_S + 4


@pytest.mark.parametrize(
    ("do", "status", "reason"),
    [
        ("die_in_answer", "failed", "request: the engine process ended with code 3"),
        ("no_answer", "failed", "request: short C1: the answer is empty: no text and no tokens"),
        ("more_tokens", "failed", "request: short C1: the answer has 120 tokens, asked for at most 4"),
        ("longer_prompt", "void", "cache, every prompt: prompt lengths differ: [22, 23]"),
        ("other_prompt", "void", "cache, every prompt: the engine made other tokens of the same prompt; 22 prompt"),
    ],
)
def test_an_engine_that_answers_something_else_gives_no_evidence(
    tmp_path: Path, do: str, status: str, reason: str
) -> None:
    record = run(plan(do=do), tmp_path / "boot").record
    assert (record.status, record.reason[: len(reason)]) == (status, reason)
    assert record.timings.total_s < NOTICED_S


def test_an_answer_that_comes_in_pieces_without_end_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    record = run(plan(do="drip", request_timeout_s=0.5), tmp_path / "boot").record
    assert (record.status, record.reason) == ("failed", "request: no answer within 0 s")
    assert record.timings.requests_s < NOTICED_S


def test_a_prompt_beyond_the_context_is_the_engines_own_error_line(tmp_path: Path) -> None:
    long = Message(role="user", content="word " * 20_000)  # 100 kB
    asked = plan(do="short_context")
    asked = asked.model_copy(update={"requests": (asked.requests[0].model_copy(update={"messages": (long,)}),)})
    record = run(asked, tmp_path / "boot").record
    assert (record.status, record.reason) == (
        "failed",
        'request: HTTP 400: {"error": "This model\'s maximum context length is 1000 tokens."}',
    )


@pytest.mark.parametrize("text", ["word " * 20_000, "nul \0, escape \x1b[2J, bell \a, \u2028 and 🦜, and enough words"])
def test_long_and_odd_prompts_reach_the_engine_as_they_are(tmp_path: Path, text: str) -> None:
    asked = plan()
    odd = tuple(r.model_copy(update={"messages": (Message(role="user", content=text),)}) for r in asked.requests[:2])
    record = run(asked.model_copy(update={"requests": odd}), tmp_path / "boot").record
    assert [r.prompt_tokens for r in record.requests] == [4 + len(text.split())] * 2
    assert record.failure is None


@pytest.mark.parametrize(("do", "why"), [("no_logprobs", "reports no log-probabilities"), ("nan_logprobs", "NaN")])
def test_answers_without_usable_log_probabilities_count_for_text_alone(tmp_path: Path, do: str, why: str) -> None:
    boot = run(plan(do=do), tmp_path / "boot")
    assert boot.record.status == "valid"
    responses = list(boot.responses.values())
    assert unusable("text", responses) == unusable("tokens", responses) == ""
    assert why in unusable("logprobs", responses)


def test_a_verdict_is_never_built_on_fewer_log_probabilities_than_registered() -> None:
    study = build.registration(("on/0", "off/0"), boots=2)
    letters = {"b": build.response("a", logprobs=(-0.1, math.nan, -0.3, -0.4))}
    found = build.boots(study, {"on/0": {"long": "b" * 8}}, letters=letters)
    made = certificate.build(study, found, build.CONTEXT)
    assert made.strata[0].verdict("logprobs").disposition.startswith("INCONCLUSIVE")
    assert made.strata[0].verdict("text").disposition == "NO DIVERGENCE"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("do", "at", "after_s", "reason"),
    [
        ("hang_in_boot", "engine starting", 0.5, "boot: stopped by the user"),
        ("", "short W1", 0.0, "request: stopped by the user"),
    ],
)
def test_a_signal_at_any_stage_gives_a_stopped_record(
    tmp_path: Path, *, number: int, do: str, at: str, after_s: float, reason: str
) -> None:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))

    def progress(phase: str) -> None:
        if phase == at:
            timer.start()
            timer.join(0 if after_s else None)  # type: ignore[arg-type]

    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        record = run(plan(do=do), tmp_path / "boot", progress).record
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, old)
    assert (record.status, record.reason) == ("stopped", reason)
    assert record.timings.total_s < NOTICED_S


def test_whoever_follows_a_boot_and_goes_leaves_no_engine_behind(tmp_path: Path) -> None:
    def progress(phase: str) -> None:
        if phase != "engine starting":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(plan(), tmp_path / "boot", progress)


def test_what_a_killed_attempt_was_writing_is_gone_after_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "boot"
    folder.mkdir()
    for name in (".boot.json.x1y2", ".responses.jsonl.z3", ".gitignore"):
        (folder / name).write_text("half")
    assert run(plan(), folder).record.status == "valid"
    assert sorted(p.name for p in folder.iterdir()) == [".gitignore", "engine.log"]  # not ours to remove


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "d3-test", folder], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    raise AssertionError("it was not full")


def test_a_full_disk_is_one_line_leaves_no_half_file_and_the_boot_can_be_run_again(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(canonical_json(plan()))
    (disk / "out").mkdir()
    filler = fill(disk)
    words = [str(tmp_path / "plan.json"), str(disk / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: cannot write {disk}/out/responses.jsonl: No space left on device; free disk space")
    assert {p.name for p in (disk / "out").iterdir()} <= {"engine.log"}
    filler.unlink()
    assert main(words) == 0
    assert load(BootRecord, disk / "out" / RECORD).status == "valid"


def test_a_disk_that_fills_up_keeps_the_record_that_was_there(disk: Path) -> None:
    boot = build.boots(build.registration(boots=1))[0]
    save_boot(boot, disk)
    before = (disk / RECORD).read_bytes()
    fill(disk)
    with pytest.raises(D3Error, match="No space left on device"):
        save_boot(boot, disk)
    assert (disk / RECORD).read_bytes() == before
    assert not list(disk.glob(".*"))


def test_a_file_that_may_grow_no_more_is_one_line_too(tmp_path: Path) -> None:
    """The same without a disk of one's own: the kernel refuses what is written beyond a limit of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(D3Error, match="cannot write .*: File too large; free disk space"):
            save_boot(build.boots(build.registration(boots=1))[0], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_cannot_be_written_is_an_error_of_ours() -> None:
    with pytest.raises(D3Error, match="cannot write /dev/full: No space left on device"):
        append(Path("/dev/full"), "x\n")


def test_results_on_a_read_only_disk_are_one_line(disk: Path) -> None:
    study = build.registration(boots=1)
    found = build.boots(study)
    made = certificate.build(study, found, build.CONTEXT)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(D3Error, match=r"cannot write .*: Read-only file system; .*choose another folder"):
        certificate.write(made, found, disk / "c.json")


def test_a_file_in_the_way_of_a_boots_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(canonical_json(plan()))
    (tmp_path / "out").write_text("a file")
    assert main([str(tmp_path / "plan.json"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: cannot write in {tmp_path}/out: File exists; free disk space or name another folder"


class Yesterday(datetime):
    """A clock that was set back by a day."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) - timedelta(days=1)


def test_a_clock_that_was_set_back_stops_the_study_before_a_boot(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    study = build.registration(boots=1)
    save_registration(study)
    monkeypatch.setattr(job, "datetime", Yesterday)
    monkeypatch.setattr(Yesterday, "fromisoformat", datetime.fromisoformat)
    with pytest.raises(D3Error, match="clock says .* UTC, the study was registered at .*; set the clock right"):
        job.run_slot(study, study.order[0], job.OPEN)
    assert not (study_dir(study.id()) / "boots").exists()


def test_a_clock_that_is_set_back_in_mid_boot_changes_no_duration_and_certifies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(booting, "datetime", Yesterday)
    record = run(plan(), tmp_path / "boot").record
    assert record.status == "valid"
    assert 0 < record.timings.total_s < NOTICED_S
    study = build.registration(boots=1)
    found = build.boots(study, started_at=record.started_at)
    context = build.CONTEXT.model_copy(update={"registered_at": datetime.now(UTC).isoformat()})
    with pytest.raises(D3Error, match="after the first boot .*; or was this machine's clock set back"):
        certificate.build(study, found, context)


def test_a_model_that_changes_while_the_boot_runs_gives_no_record(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = composed().copy()
    study = register([cfg], (), Pins({"fake": ""}, {"fake-model": model_digest(str(home.model))}))
    asked: list[BootPlan] = []

    def changing(plan: BootPlan, *_: object) -> object:
        asked.append(plan)
        (home.model / "model.safetensors").write_text("other weights\n")
        return booting.skipped(plan, "")

    monkeypatch.setattr(booting, "run", changing)
    monkeypatch.setattr(job, "Spool", lambda _study: type("Quiet", (), {"open": lambda _self: None})())
    save_registration(study)
    with pytest.raises(D3Error, match="changed since it was registered; restore it, or start a new study"):
        job.run_slot(study, study.order[0], job.Locations(python="", model=str(home.model)))
    assert len(asked) == 1
    assert not list(home.runs.glob("studies/*/boots/*/boot.json"))


def test_a_registration_of_another_schema_names_the_field(home: Home) -> None:
    study = build.registration(boots=1)
    save_registration(study)
    path = study_dir(study.id()) / "registration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "speed": 1}))
    with pytest.raises(D3Error, match=r"registration\.json: speed: Extra inputs are not permitted; the file is"):
        load(type(study), path)
