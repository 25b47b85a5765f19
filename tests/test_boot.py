"""One boot from a plan: it always gives a record, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from d3.boot import main, run, skipped
from d3.headline import headline
from d3.record import BootRecord, canonical_json
from d3.store import load_boot
from planned import plan, wrapper

pytestmark = pytest.mark.usefixtures("nothing_left")
BOTH = ("server", "worker")


@pytest.fixture
def booted(tmp_path: Path):
    def boot(*arguments: str, transport: str = "server", **launch: object):
        if transport == "worker":
            launch["python"] = wrapper(tmp_path)
        return run(plan(*arguments, transport=transport, **launch), tmp_path / "boot")

    return boot


def texts(record: BootRecord, prompt: str) -> list[str]:
    return [r.text_sha256 for r in record.requests if r.prompt == prompt]


@pytest.mark.parametrize("transport", BOTH)
def test_a_boot_shows_the_engines_dependence_on_its_cache(booted, transport: str) -> None:
    boot = booted("on", "0", transport=transport)
    record = boot.record
    assert (record.status, record.reason, record.leftovers) == ("valid", "", ())
    assert [c.name for c in record.checks if c.held] == [
        "pin",
        "backend",
        "cache_setting",
        "flag",
        "serial",
        "cache",
        "cache",
    ]
    cold, warm, cold_again, warm_again = texts(record, "long")
    assert cold == cold_again != warm == warm_again
    assert len(set(texts(record, "short"))) == 1
    assert len(boot.responses) == 3
    assert [r.cached_tokens for r in record.requests] == [
        r.expected_cached * (r.expect == "warm") for r in record.requests
    ]
    numbers = headline(boot)
    assert (numbers["divergence/first_differs.long.text"], numbers["divergence/first_differs.short.text"]) == (1.0, 0.0)
    assert numbers["divergence/token.long"] == 3.0
    assert "divergence/token.short" not in numbers


def test_both_transports_give_the_same_hashes(booted) -> None:
    one, other = (booted("on", "0", transport=t).record for t in BOTH)
    kept = {
        "text_sha256",
        "tokens_sha256",
        "logprobs_sha256",
        "prompt_sha256",
        "cached_tokens",
        "expected_cached",
        "response",
    }
    assert [r.model_dump(include=kept) for r in one.requests] == [r.model_dump(include=kept) for r in other.requests]


def test_without_the_cache_and_under_the_flag_all_agree(booted) -> None:
    off, flag = booted("off", "0").record, booted("on", "1").record
    assert (off.status, flag.status) == ("valid", "valid")
    assert len(set(texts(off, "long"))) == len(set(texts(flag, "long"))) == 1
    assert {r.cached_tokens for r in off.requests} == {0}
    assert not {r.logprobs_sha256 for r in off.requests} & {r.logprobs_sha256 for r in flag.requests}


@pytest.mark.parametrize(
    ("apc", "do", "reason"),
    [
        ("on", "other_version", "pin: asked for version 1.0, the engine reports 9.9"),
        ("off", "ignore_cache_flag", "cache_setting: prefix caching asked off, the engine says on"),
    ],
)
def test_a_boot_whose_setting_did_not_hold_is_void(booted, apc: str, do: str, reason: str) -> None:
    record = booted(apc, "0", do).record
    assert (record.status, record.reason) == ("void", reason)
    assert len(record.requests) == 8


def test_a_failed_boot_is_data_with_the_engines_own_line(booted, tmp_path: Path) -> None:
    record = booted("on", "1", "die_with_flag").record
    assert (record.status, record.reason) == ("failed", "request: TypeError: 'function' object is not subscriptable")
    assert (record.failure.stage, record.failure.kind) == ("request", "engine_error")
    assert record.timings.boot_s > 0
    assert record.requests == record.checks == ()
    assert "TypeError" in (tmp_path / "boot/engine.log").read_text()


def test_an_engine_that_cannot_be_started_is_data_too(tmp_path: Path) -> None:
    record = run(plan(python="/no/such/python"), tmp_path).record
    assert (record.status, record.reason) == (
        "failed",
        "launch: cannot start /no/such/python: No such file or directory",
    )


def test_what_was_answered_before_a_failure_is_kept(booted) -> None:
    record = booted("on", "0", "", request_timeout_s=0.0001).record
    assert (record.status, record.failure.kind) == ("failed", "timeout")


def test_an_untidy_engine_is_recorded_as_such_and_its_boot_counts(booted) -> None:
    record = booted("on", "0", "orphan").record
    assert record.status == "valid"
    assert len(record.leftovers) == 2
    assert any(word.startswith("shared memory d3-fake-") for word in record.leftovers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_gives_a_stopped_record_and_ends_the_engine(tmp_path: Path, number: int) -> None:
    timers = [threading.Timer(0.3, os.kill, (os.getpid(), number))]

    def progress(phase: str) -> None:
        if phase == "short C1":
            timers[0].start()
        if phase == "engine stopping":  # an impatient second one must not cut the stopping short
            os.kill(os.getpid(), number)

    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        record = run(plan("on", "0", "hang_in_request"), tmp_path, progress).record
    finally:
        timers[0].join()
        signal.signal(signal.SIGTERM, old)
    assert (record.status, record.reason) == ("stopped", "request: stopped by the user")
    assert record.timings.total_s < 8


def test_ctrl_c_while_the_process_starts_does_not_lose_it(booted, monkeypatch: pytest.MonkeyPatch) -> None:
    import d3.server

    def launched(*arguments: object, **words: object):
        child = start(*arguments, **words)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return child

    start = d3.server.launched
    monkeypatch.setattr(d3.server, "launched", launched)
    record = booted().record
    assert (record.status, record.timings.boot_s) == ("stopped", 0.0)


def test_a_skipped_boot_says_why_and_starts_nothing() -> None:
    record = skipped(plan(), "the flag is unavailable").record
    assert (record.status, record.reason) == ("skipped", "launch: the flag is unavailable")


def test_paths_of_this_machine_stay_out_of_the_recorded_command(booted) -> None:
    record = booted("on", "0", "", args=("--model", "/nowhere/model"), transport="server").record
    assert record.engine.command[-2:] == ("--model", "MODEL")
    assert record.engine.command[0] == "python"


def test_the_command_line_runs_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(canonical_json(plan()))
    assert main([str(tmp_path / "plan.json"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "valid\n"
    assert load_boot(tmp_path / "out").record.status == "valid"
    (tmp_path / "plan.json").write_text("{}")
    assert main([str(tmp_path / "plan.json"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/plan.json: registration: Field required; ")


def test_the_boot_module_needs_no_mlflow_and_no_hydra() -> None:
    script = "import sys, d3.boot; sys.exit(bool({'mlflow', 'hydra', 'pandas', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
