"""Whole sweeps under faults: kills and signals at every stage, a full disk, two sweeps at once; the real context."""

# ruff: noqa: F811
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from test_cli import Done, d3, finished, records, runs, shell  # noqa: F401
from test_faults import fill

from conftest import FAKE, Home
from d3 import boot as booting
from d3 import preflight
from d3.engine import EngineFailure
from d3.errors import Unreachable
from d3.record import Boot, BootPlan, Message
from d3.server import ServerEngine
from d3.sync import sync
from d3.tracking import Tracking

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(900)]
ONE = (*FAKE, "apc=on", "invariant=0")
D3 = Callable[..., Done]
STAGES = (
    "d3.callbacks.register",
    "d3.opened.save_registration",
    "d3.tracking.Tracking._register",
    "d3.job.save_plan",
    "d3.server.ServerEngine.start",
    "d3.server.ServerEngine.ask",
    "d3.server.ServerEngine.stop",
    "d3.store.hashes_text",  # between two files of a record
    "d3.spool.Spool._send",
    "d3.opened.OpenStudy.finish",
)


def engines(home: Home) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if str(home.switch) in (p.info["cmdline"] or []) and p.status() != psutil.STATUS_ZOMBIE]


def test_sigkill_at_every_stage_loses_no_record_and_leaves_no_engine(home: Home, d3: D3) -> None:
    script = "import os, runpy, signal, sys; from unittest.mock import patch; sys.argv = ['d3', *sys.argv[2:]]; "
    script += "kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL); "
    script += "patch(STAGE, kill).start(); runpy.run_module('d3', run_name='__main__')"
    for stage in STAGES:
        killed = shell_script(script.replace("STAGE", "sys_stage"), stage)
        assert killed == -signal.SIGKILL, stage
        until = time.monotonic() + 20
        while engines(home) and time.monotonic() < until:
            time.sleep(0.05)
        assert engines(home) == [], stage
    done = d3(*ONE)
    assert (done.code, done.err) == (0, "")
    assert [r.status for r in records(home)] == ["valid"]
    assert [r.info.status for r in (*runs("study"), *runs("boot"))] == ["FINISHED", "FINISHED"]
    assert not list(home.runs.glob("studies/*/boots/*/.*"))


def shell_script(script: str, stage: str) -> int:
    words = [sys.executable, "-c", script.replace("sys_stage", repr(stage)), "-", *ONE]
    return subprocess.run(words, check=False, capture_output=True, cwd=Path(__file__).parents[2]).returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_every_stage_is_exit_130_and_the_same_command_goes_on(
    home: Home, d3: D3, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for stage in (
        "d3.callbacks.register",
        "d3.tracking.Tracking._register",
        "d3.job.save_plan",
        "d3.spool.Spool._send",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(stage, lambda *_, **__: (os.kill(os.getpid(), number), time.sleep(5)))
            done = d3(*ONE)
        gc.collect()  # what a process would let go of by ending: the study's lock
        assert done.code == 130, stage
        assert done.err.startswith("stopped; the boots already done are kept"), stage
        assert engines(home) == []
    done = d3(*ONE)
    assert (done.code, done.err) == (0, "")
    assert [r.status for r in records(home)] == ["valid"]
    assert [r.info.status for r in (*runs("study"), *runs("boot"))] == ["FINISHED", "FINISHED"]


@pytest.fixture
def small_disk(home: Home, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`runs/` on a disk of 4 MB, with an empty store."""
    kept = home.folder / "mlflow.db"
    shutil.move(store, kept)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "d3-test", home.runs], check=False).returncode:
        pytest.skip("no right to mount a small disk here")
    shutil.copy(kept, home.runs / "mlflow.db")
    monkeypatch.setattr(preflight, "FREE_DISK_GB", 0.0)
    yield home.runs
    subprocess.run(["umount", "-l", home.runs], check=True)


def test_a_disk_that_fills_up_in_mid_sweep_stops_it_in_one_line_and_loses_nothing(
    home: Home, d3: D3, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = booting.run, []

    def filling(plan: BootPlan, *rest: object) -> Boot:
        boot = run(plan, *rest)  # type: ignore[arg-type]
        ran.append(plan)
        if len(ran) == 2:
            fill(small_disk)
        return boot

    monkeypatch.setattr(booting, "run", filling)
    words = ("-m", *FAKE, "apc=on,off", "invariant=0", "boots=2")
    done = d3(*words)
    assert done.code == 2
    assert "No space left on device; free disk space or choose another folder" in done.error()
    assert engines(home) == []
    assert [r.status for r in records(home)] == ["valid"]
    (small_disk / "filler").unlink()
    done = d3(*words)
    assert (done.code, done.err) == (0, "")
    assert [r.status for r in records(home)] == ["valid"] * 4
    assert len(runs("boot")) == 4
    assert [r.info.status for r in runs("study")] == ["FINISHED"]


def test_two_sweeps_of_the_same_second_do_not_run_one_study_twice(home: Home, store: Path) -> None:
    words = ("d3", "-m", *FAKE, "apc=on,off", "invariant=0", "boots=2")
    both = [shell(*words), shell(*words)]
    done = [finished(process) for process in both]
    assert sorted(d.code for d in done) == [0, 2]
    refused = next(d for d in done if d.code == 2)
    assert "is being run by another process; wait for it, or stop it first" in refused.error()
    assert [r.status for r in records(home)] == ["valid"] * 4
    assert len(runs("study")) == 1


def test_mlflow_that_goes_down_at_the_end_costs_only_the_closing(
    home: Home, d3: D3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise Unreachable("MLflow does not answer", "start it")

    with monkeypatch.context() as patched:
        patched.setattr("d3.opened.BOOT_S", 0.1)
        patched.setattr(Tracking, "close_study", down)
        done = d3(*ONE)
    assert (done.code, done.err) == (0, "")
    assert "MLflow does not answer; the study's run is closed later: python -m d3.sync" in done.out
    assert sync() == 1
    assert [r.info.status for r in (*runs("study"), *runs("boot"))] == ["FINISHED", "FINISHED"]


def test_the_real_server_asks_for_the_boots_own_key_and_refuses_a_prompt_beyond_its_context(tmp_path: Path) -> None:
    from slow.test_real_engine import plan

    engine = ServerEngine(plan("server"), tmp_path / "log")
    try:
        assert engine.start().version == engine.plan.version_asked
        stranger = httpx.post(f"{engine.http.base_url}/v1/chat/completions", json={}, trust_env=False)
        assert stranger.status_code == httpx.codes.UNAUTHORIZED
        request = engine.plan.requests[0]
        assert engine.ask(request).response.text
        long = request.model_copy(update={"messages": (Message(role="user", content="word " * 20_000),)})
        with pytest.raises(EngineFailure, match="maximum context length is 2048 tokens|longer than the maximum"):
            engine.ask(long)
        assert engine.ask(request).response.text  # and goes on
    finally:
        engine.stop()
    assert engine.hidden[0] not in (tmp_path / "log").read_text()
