"""The command lines, against the pretend engine: from `python -m d3 -m ...` to the certificate."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hydra.core.global_hydra import GlobalHydra
from mlflow import MlflowClient
from mlflow.entities import Run

from conftest import FAKE, TESTS, Home
from d3 import certify, host, preflight, sync, verify
from d3.reach import tracking_uri
from d3.record import BootRecord

pytestmark = pytest.mark.usefixtures("nothing_left")
ROOT = TESTS.parent
GRID = ("-m", *FAKE, "apc=on,off", "invariant=0,1")


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one line that a failure prints; no traceback, nothing else."""
        assert "Traceback" not in self.err + self.out
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")


@pytest.fixture
def d3(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `python -m d3 WORDS` in this process, with what it left for its exit."""

    def run(*words: str) -> Done:
        at_exit: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        monkeypatch.setattr("d3.opened.atexit.register", lambda f, *a: at_exit.append((f, a)))
        monkeypatch.setattr(sys, "argv", ["d3", *words])
        GlobalHydra.instance().clear()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            code = 0
            runpy.run_module("d3", run_name="__main__")
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
            for function, arguments in reversed(at_exit):
                function(*arguments)
        return Done(code, *capsys.readouterr())

    return run


def shell(*words: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", *words], env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def records(home: Home) -> list[BootRecord]:
    paths = sorted(home.runs.glob("studies/*/boots/*/boot.json"))
    return sorted(
        (BootRecord.model_validate_json(p.read_bytes()) for p in paths), key=lambda r: (r.position, r.attempt)
    )


def runs(kind: str) -> list[Run]:
    client = MlflowClient(tracking_uri())
    everywhere = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(everywhere, f"tags.`d3.kind` = '{kind}'", max_results=500))


def test_the_whole_study_from_any_folder_to_a_certificate_out_of_mlflow_alone(
    home: Home, store: Path, d3: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    done = finished(shell("d3", *GRID, "boots=2", cwd=home.folder))
    assert (done.code, done.err) == (0, "")
    assert "4 cells x 2 boots" in done.out
    assert "8 of 8 boots valid\n" in done.out
    assert done.out.count(": begins") == done.out.count(": valid in ") == 8
    assert not [c for c in done.out if not c.isprintable() and c != "\n"]
    found = records(home)
    assert [r.position for r in found] == list(range(8))
    assert [r.started_at for r in found] == sorted(r.started_at for r in found)
    (parent,) = runs("study")
    children = runs("boot")
    assert parent.info.status == "FINISHED"
    assert len(children) == 8
    assert {c.data.tags["mlflow.parentRunId"] for c in children} == {parent.info.run_id}
    assert parent.data.tags["d3.registered_at"] < found[0].started_at

    # The same command again, in this process: nothing runs.
    again = d3(*GRID, "boots=2")
    assert (again.code, again.out.count("already recorded")) == (0, 8)
    assert records(home) == found
    assert len(runs("boot")) == 8

    for gone in ("hydra", "studies"):
        shutil.rmtree(home.runs / gone)
    path = home.folder / "certificate.json"
    assert certify.main(["--out", str(path)]) == 0
    assert "next: python -m d3.verify" in capsys.readouterr().out
    certificate = json.loads(path.read_text())
    assert certificate["registration_id"] == found[0].registration
    readings = {v["endpoint"]: v["reading"] for v in certificate["strata"][0]["verdicts"]}
    assert readings == {"text": "closed_by_flag", "tokens": "closed_by_flag", "logprobs": "closed_by_flag"}
    assert verify.main([str(path)]) == 0
    (parent,) = runs("study")
    assert "closed_by_flag" in parent.data.tags["d3.reading"]
    kept = MlflowClient(tracking_uri()).list_artifacts(parent.info.run_id, "certificate")
    for name in ("certificate.md", "certificate.html"):
        assert "the first answer after a cold cache can differ from later ones" in (home.folder / name).read_text()
        assert f"certificate/{name}" in {a.path for a in kept}


def test_a_flag_that_the_engine_cannot_run_is_tried_once_per_cell_and_certified_so(
    home: Home, d3: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    home.switch.write_text("die_with_flag")
    done = d3(*GRID, "boots=2")
    assert done.code == 0
    assert "4 of 8 boots valid, 4 with the flag unavailable" in done.out
    assert sorted((r.cell[-1], r.status) for r in records(home)) == [
        *[("0", "valid")] * 4, *[("1", "failed")] * 2, *[("1", "skipped")] * 2,
    ]  # fmt: skip
    assert certify.main(["--out", str(home.folder / "c.json")]) == 0
    certificate = json.loads((home.folder / "c.json").read_text())
    assert {v["reading"] for v in certificate["strata"][0]["verdicts"]} == {"flag_unavailable"}
    assert "TypeError: 'function' object is not subscriptable" in (home.folder / "c.json").read_text()


def test_the_same_command_tries_a_failed_boot_again(home: Home, d3: Callable[..., Done]) -> None:
    home.switch.write_text("die_in_boot")
    assert d3(*FAKE).code == 1
    home.switch.unlink()
    assert d3(*FAKE).code == 0
    assert [r.status for r in records(home)] == ["failed", "valid"]
    assert runs("study")[0].info.status == "FINISHED"


def test_one_boot_to_look_at(home: Home, d3: Callable[..., Done]) -> None:
    done = d3(*FAKE, "apc=on", "invariant=0")
    assert (done.code, done.err) == (0, "")
    assert "[1/1] boot 0 apc=on invariant=0: valid" in done.out
    assert f"next: python -m d3.certify --run {runs('study')[0].info.run_id}" in done.out


@pytest.mark.parametrize(
    ("way", "limits", "status", "reason"),
    [
        ("die_in_boot", [], "failed", "boot: ValueError: no available memory for the cache blocks"),
        ("hang_in_boot", ["engine.boot_timeout_s=0.5"], "failed", "boot: not healthy within 0 s"),
        ("hang_in_request", ["engine.request_timeout_s=0.5"], "failed", "request: no answer within 0 s"),
        ("other_version", [], "void", "pin: asked for version 1.0, the engine reports 9.9"),
    ],
)
def test_a_boot_without_a_valid_answer_exits_1_and_is_kept(
    home: Home, d3: Callable[..., Done], *, way: str, limits: list[str], status: str, reason: str
) -> None:
    home.switch.write_text(way)
    done = d3(*FAKE, "apc=on", "invariant=0", *limits)
    assert done.code == 1
    assert "0 of 1 boots valid, 1 without a valid record (run the same command again to retry)" in done.out
    assert [(r.status, r.reason) for r in records(home)] == [(status, reason)]
    assert runs("study")[0].info.status == "FAILED"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["aps=on,off"], "no configuration key is called aps; did you mean apc?"),
        (["engine.pyton=x"], "no configuration key is called engine.pyton; did you mean engine.python?"),
        (["engin.python=x"], "no configuration key is called engin.python; did you mean engine.python?"),
        (
            ["model.colour=x"],
            "no configuration key is called model.colour; known in model: name, digest, package, file",
        ),
        (["engine.env.A=1"], "no configuration key is called engine.env.A; to add it, write +engine.env.A=..."),
        (["apc=maybe"], "apc=maybe is not a level; use apc=on, off or both: on,off"),
        (["apc=on,maybe"], "apc=maybe is not a level; use apc=on, off or both: on,off"),
        (["eager=true,false"], "engine fake has no setting for eager=false; its levels are: true"),
        (["eager=perhaps"], "eager=perhaps is not a level; use eager=true, false or both: true,false"),
        (
            ["apc=on,off", "registration=0123"],
            "registration= names the study of a single boot, a sweep registers its own",
        ),
        (["registration=0123456789ab"], "registration.json does not exist; check the path"),
        (["engine=nope"], "there is no engine/nope; known: attach, fake, llama_cpp"),
        (["boots=many"], "Error merging override boots=many; Value 'many' of type 'str'"),
        (["invariant=0,2"], "invariant=2 is not a level; use invariant=0, 1 or both: 0,1"),
        (["+engine.speed=1"], "Key 'speed' not in 'EngineConfig'"),
        (["boots=1,2"], "boots holds for a whole study and cannot be swept in one"),
        (["boots=400", "apc=on,off"], "this study has 800 boots, hours of work; add allow_large=true if you mean it"),
        (["tie_gap=1" + "0" * 400], "int too large to convert to float"),
        (["threads=range(1,1001)", "boots=1"], "this study has 1000 boots, hours of work; add allow_large=true if"),
        (["model.path=/no/such/model"], "model.path=/no/such/model does not exist; name a folder with a checkpoint"),
        (["model.digest=0123456789abcdef"], "model fake-model has digest "),
        (["engine.python=/no/python"], "engine.python=/no/python is not an executable"),
        (["eager=true,false"], "engine fake has no setting for eager=false; its levels are: true"),
        (["engine.lock=nope"], "engine.lock=nope: there is no"),
        (["at_once=8"], "at_once=8: this launcher runs one boot after the other; plan here with plan_only=true and"),
        (
            ["at_once=1,2"],
            "one sweep runs its boots with one at_once, this one has 1, 2; plan here with plan_only=true",
        ),
        (["at_once=0"], "at_once=0 runs no boot; it counts the boots that run side by side"),
        (["engine.min_memory_gb=1e6"], "GB of memory are free, engine fake needs 1000000.0 GB; end other programs"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2_before_anything_runs(
    home: Home, d3: Callable[..., Done], words: list[str], said: str
) -> None:
    sweep = ["-m"] if any("," in word for word in words) else []
    done = d3(*sweep, *FAKE, *words)
    assert done.code == 2
    assert said in done.error()
    assert records(home) == []
    assert runs("study") == []


def test_too_little_disk_is_said_before_anything_runs(
    home: Home, d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=300_000_000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _path: usage)
    done = d3(*FAKE)
    assert done.code == 2
    assert f"{home.runs} has 0.3 GB of disk left, a study needs 0.5 GB; free some" in done.error()
    assert runs("study") == []


def test_mlflow_that_is_down_is_one_line_and_runs_nothing(
    home: Home, d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = d3(*FAKE)
    assert done.code == 2
    assert done.error().startswith("MLflow at http://127.0.0.1:9 does not answer: Connection refused; start it")
    assert len(done.error()) < 200
    assert records(home) == []


def test_mlflow_that_goes_down_in_mid_study_costs_no_boot(
    home: Home, d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3.errors import Unreachable
    from d3.tracking import Tracking

    def down(*_: object) -> None:
        raise Unreachable("MLflow does not answer", "start it")

    for name in ("job.BOOT_S", "opened.BOOT_S", "opened.END_S"):
        monkeypatch.setattr(f"d3.{name}", 0.1)

    log_boot, close_study = Tracking.log_boot, Tracking.close_study
    monkeypatch.setattr(Tracking, "log_boot", down)
    monkeypatch.setattr(Tracking, "close_study", down)
    done = d3("-m", *FAKE, "apc=on,off", "boots=1")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("MLflow does not answer; the sweep goes on, its boots are kept and sent later") == 1
    assert "2 of 2 boots valid\n2 boots are not in MLflow yet; once it answers, send them: " in done.out
    assert [r.status for r in records(home)] == ["valid", "valid"]
    assert [r.info.status for r in runs("study")] == ["RUNNING"]
    monkeypatch.setattr(Tracking, "log_boot", log_boot)
    monkeypatch.setattr(Tracking, "close_study", close_study)
    assert sync.main([]) == 0
    assert len(records(home)) == len(runs("boot")) == 2
    assert [r.info.status for r in runs("study")] == ["FINISHED"]


def test_the_run_of_mlflow_run_becomes_the_parent(
    home: Home, d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = MlflowClient(tracking_uri()).create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", adopted)
    done = d3("-m", *FAKE, "apc=on,off", "boots=1")
    assert (done.code, done.err) == (0, "")
    assert [r.info.run_id for r in runs("study")] == [adopted]
    assert {r.data.tags["mlflow.parentRunId"] for r in runs("boot")} == {adopted}
    assert len(runs("boot")) == 2


def test_any_other_key_may_be_swept_and_plans_can_be_made_without_running(home: Home, d3: Callable[..., Done]) -> None:
    done = d3("-m", *FAKE, "apc=on,off", "+engine.env.A=x,y", "boots=1", "plan_only=true")
    assert (done.code, done.err) == (0, "")
    (path,) = home.runs.glob("studies/*/registration.json")
    registration = json.loads(path.read_text())
    assert registration["axes"]["engine.env.A"] == ["x", "y"]
    assert len({c["stratum"] for c in registration["cells"]}) == 2
    assert len(list(home.runs.glob("studies/*/boots/*/plan.json"))) == 4
    assert records(home) == []


def test_a_dry_run_says_what_would_run_and_writes_nothing(home: Home, d3: Callable[..., Done]) -> None:
    assert d3(*GRID, "boots=1").code == 0
    before = sorted(home.runs.rglob("*"))
    done = d3(*GRID, "boots=2", "price=modal_l4", "price.gpu=null", "--dry-run")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[1] == "grid: 4 cells x 2 boots"
    assert lines[lines.index("order of boots:") + 1].startswith("    1 boot 0 base apc=")
    assert "to run: 8 of 8 boots" in done.out
    assert re.search(
        r"time: about \d+ s, 1 at once \(\d+ s a boot, by 4 earlier boots of this engine on this mach", done.out
    )
    assert re.search(
        r"cost: about \$0\.\d\d at \$0\.7992 per hour and boot, price modal_l4 of 2026-05-07, http", done.out
    )
    assert sorted(home.runs.rglob("*")) == before
    assert len(runs("study")) == 1
    assert d3(*FAKE, "dry_run=true").code == 0
    assert len(runs("study")) == 1


def test_a_price_reaches_the_certificate_and_is_not_registered(
    home: Home, d3: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    assert d3(*FAKE).code == 0
    assert d3(*FAKE, "price=modal_l4").code == 0  # the same study: its price is no part of it
    (parent,) = runs("study")
    path = home.folder / "c.json"
    assert certify.main(["--out", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["context"]["price"]["usd_per_hour"] == 0.7992
    assert found["cost"]["usd"] == pytest.approx(found["cost"]["boot_s"] * 0.7992 / 3600, abs=1e-4)
    assert "modal_l4" not in json.dumps(found["registration"])
    assert "Cost: 1 boots took" in path.with_suffix(".md").read_text()
    assert certify.main(["--out", str(path), "--price", "none"]) == 0
    assert json.loads(path.read_text())["cost"]["usd"] is None
    assert verify.main([str(path)]) == 0
    assert certify.main(["--price", "nope"]) == 2
    assert parent.info.status == "FINISHED"


def test_how_many_boots_share_a_device_may_be_swept_and_is_run_by_the_host(home: Home, d3: Callable[..., Done]) -> None:
    assert d3("-m", *FAKE, "apc=on,off", "at_once=2,1", "boots=1", "plan_only=true").code == 0
    (path,) = home.runs.glob("studies/*/registration.json")
    registration = json.loads(path.read_text())
    assert {(c["stratum"], c["settings"]["at_once"]) for c in registration["cells"]} == {
        ("at_once=1", 1),
        ("at_once=2", 2),
    }
    done = d3(*FAKE, "apc=on", "at_once=2", f"registration={path.parent.name}")
    assert done.code == 2
    assert done.error().startswith("registered are boots with 2 side by side, here run 1; plan with plan_only=true")
    assert records(home) == []
    assert host.main([str(path.parent / "boots"), "--model", str(home.model)]) == 0
    assert {(r.stratum, r.environment["boots_at_once"], r.status) for r in records(home)} == {
        ("at_once=1", "1", "valid"),
        ("at_once=2", "2", "valid"),
    }
    out = home.folder / "c.json"
    assert sync.main([]) == certify.main(["--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [s["stratum"] for s in found["strata"]] == ["at_once=2", "at_once=1"]
    assert "at_once: 2, 1" in found["varied"]
    assert not [line for line in found["neither"] if "at_once" in line]
    assert verify.main([str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "levels"),
    [([], ["0", "1", "7", "31"]), (["concurrency=0,2"], ["0", "2"]), (["concurrency=3"], None)],
)
def test_a_study_may_bring_an_axis_of_its_own_and_the_command_line_overrides_it(
    home: Home, d3: Callable[..., Done], words: list[str], levels: list[str] | None
) -> None:
    done = d3("-m", *FAKE, "study=batch", "apc=on,off", *words, "plan_only=true")
    assert (done.code, done.err) == (0, "")
    (path,) = home.runs.glob("studies/*/registration.json")
    registration = json.loads(path.read_text())
    assert registration["axes"].get("concurrency") == levels
    plans = [json.loads(p.read_text()) for p in home.runs.glob("studies/*/boots/*/plan.json")]
    assert len(plans) == 2 * 2 * len(levels or ["3"])
    asked = {(p["factors"].get("concurrency", "3"), len(r["neighbours"])) for p in plans for r in p["requests"]}
    assert asked == {(level, int(level)) for level in levels or ["3"]}


def engines(home: Home) -> list[str]:
    """Engines of this test that still run, by the switch file that their command lines name."""
    return [p.name() for p in psutil.process_iter(["cmdline"]) if str(home.switch) in (p.info["cmdline"] or [])]


def test_ctrl_c_in_mid_boot_leaves_nothing_behind_and_the_study_goes_on(home: Home, d3: Callable[..., Done]) -> None:
    words = ("-m", *FAKE, "apc=on,off", "boots=1")
    home.switch.write_text("hang_in_request")
    process = shell("d3", *words)
    deadline = time.monotonic() + 60
    while not list(home.runs.glob("studies/*/boots/*/engine.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    assert engines(home)
    process.send_signal(signal.SIGINT)
    done = finished(process)
    assert done.code == 130
    assert done.err == "stopped; the boots already done are kept, the same command goes on where this one stopped\n"
    assert engines(home) == []
    assert [(r.status, r.reason) for r in records(home)] == [("stopped", "request: stopped by the user")]
    assert [r.info.status for r in (*runs("study"), *runs("boot"))] == ["KILLED", "KILLED"]
    home.switch.unlink()
    assert d3(*words).code == 0
    assert [r.status for r in records(home)] == ["stopped", "valid", "valid"]
    assert runs("study")[0].info.status == "FINISHED"


def test_one_boot_of_a_registered_study_can_be_run_by_itself(home: Home, d3: Callable[..., Done]) -> None:
    words = (*FAKE, "apc=on,off", "boots=1")
    home.switch.write_text("die_in_boot")
    assert d3("-m", *words).code == 1
    home.switch.unlink()
    (parent,) = runs("study")
    one = (*FAKE, "apc=off", f"registration={parent.data.tags['d3.registration'][:12]}")
    done = d3(*one)
    assert (done.code, done.err) == (0, "")
    assert "boot 0 apc=off invariant=0: valid in" in done.out
    assert sorted(r.status for r in records(home)) == ["failed", "failed", "valid"]
    assert len(runs("boot")) == 3
    assert runs("study")[0].info.status == "FAILED"  # as the sweep left it; running it again closes it
    assert "already recorded" in d3(*one).out
    home.switch.write_text("die_in_boot")
    done = d3(*FAKE, "apc=on", f"registration={parent.data.tags['d3.registration']}")
    assert (done.code, done.err) == (1, "")
    assert "failed (boot: ValueError: no available memory" in done.out


def test_sigterm_ends_a_study_as_ctrl_c_does(d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3.job.run", lambda _cfg, _starter: os.kill(os.getpid(), signal.SIGTERM))
    assert d3(*FAKE).code == 130
    assert runs("study")[0].info.status == "KILLED"


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "d3", "--help"]
    began = time.process_time(), os.times().children_user + os.times().children_system
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    spent = os.times().children_user + os.times().children_system - began[1]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "python -m d3 -m apc=on,off invariant=0,1 " in done.stdout
    assert "vllm, vllm_0_33, vllm_cpu" in done.stdout
    assert len(done.stdout.splitlines()) < 45
    named = set(re.findall(r"python -m (d3\.\w+)", done.stdout))
    assert all(importlib.util.find_spec(command) for command in named)
    assert named >= {f"d3.{name}" for name in ("attest", "certify", "compare", "engine", "host", "modal_app", "report",
                                               "reproduce", "sync", "verify")}  # fmt: skip
    assert not imported & {"mlflow", "pandas", "scipy", "torch", "vllm", "httpx"}
    assert spent < 1.5


@pytest.mark.parametrize(
    "module",
    ["d3.certify", "d3.verify", "d3.sync", "d3.tracking", "d3.boot", "d3.engine", "d3.host", "d3.report", "d3.attest",
     "d3.compare", "d3.reproduce", "d3.reference", "d3.bench_invariant", "d3.bench_scale", "d3.invariant_probe",
     "d3.convert", "d3.speed", "d3.worker"],
)  # fmt: skip
def test_every_command_has_help(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib

    places = {"d3.engine": "d3.engine_check", "d3.report": "d3.report.__main__"}
    main = importlib.import_module(places.get(module, module)).main
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    assert f"usage: python -m {module}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "MLflow has no study yet; run one: python -m d3 -m apc=on,off invariant=0,1"),
     (["--run", "nope"], "MLflow has no study yet")],
)  # fmt: skip
def test_certify_without_a_study_says_what_to_run(
    store: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify.main(arguments) == 2
    assert said in Done(2, *capsys.readouterr()).error()
