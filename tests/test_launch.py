"""Boots side by side under a launcher with processes of its own, against the pretend engine."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from test_cli import GRID, Done, d3, engines, finished, records, runs, shell

from conftest import Home
from d3 import launch
from d3.errors import D3Error

__all__ = ["d3"]  # a fixture
pytestmark = pytest.mark.usefixtures("nothing_left")
JOBLIB = (*GRID, "boots=1", "hydra/launcher=d3_joblib", "workers=2")
SLOW = pytest.mark.slow  # whole sweeps of a launcher's own processes: half a minute each
EVERY = pytest.mark.parametrize("launcher", ["d3_joblib", "d3_submitit_local", "d3_ray"])


def started(home: Home, boots: int) -> None:
    """Wait until so many engines run."""
    until = time.monotonic() + 120
    while len(engines(home)) < boots and time.monotonic() < until:
        time.sleep(0.1)
    assert len(engines(home)) >= boots
    time.sleep(1.5)  # into their first request


def ended(process: subprocess.Popen[str]) -> Done:
    """What it said; a library's helpers notice a moment later that it is gone."""
    done = finished(process)
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
    return done


@SLOW
@EVERY
def test_ctrl_c_stops_every_boot_in_order_and_the_study_goes_on(home: Home, store: object, launcher: str) -> None:
    words = (*GRID, "boots=1", f"hydra/launcher={launcher}", "workers=2")
    home.switch.write_text("hang_in_request")
    process = shell("d3", *words)
    started(home, 2)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    assert done.err.splitlines()[-2:] == [
        "stopping: engines end and records are written; once more kills them",
        "stopped; the boots already done are kept, the same command goes on where this one stopped",
    ]
    assert engines(home) == []
    assert [r.status for r in records(home)] == ["stopped", "stopped"]
    assert not list(home.runs.glob("studies/*/stop"))
    home.switch.unlink()
    again = ended(shell("d3", *words))
    assert again.code == 0, again
    assert "4 of 4 boots valid" in again.out
    assert {r.environment["boots_at_once"] for r in records(home)} == {"2"}
    assert len(runs("boot")) == 6


@SLOW
@EVERY
def test_a_killed_worker_costs_the_boots_in_flight_and_no_other(home: Home, store: object, launcher: str) -> None:
    home.switch.write_text("hang_in_request")
    words = (*GRID, "boots=1", f"hydra/launcher={launcher}", "workers=2", "engine.request_timeout_s=10")
    process = shell("d3", *words)
    started(home, 2)
    engine = next(p for p in psutil.process_iter(["cmdline"]) if str(home.switch) in (p.info["cmdline"] or []))
    home.switch.unlink()
    worker = engine.parent()
    assert worker is not None
    assert worker.pid != process.pid
    worker.kill()
    done = ended(process)
    assert done.code == 0, done
    assert "a boot's process was lost (" in done.err
    assert "4 of 4 boots valid" in done.out
    found = records(home)
    assert len([r for r in found if r.status == "valid"]) == 4
    # The boot beside the one that was killed hung: it ended with it, or failed at its own deadline and was tried again.
    assert [r.status for r in found if r.status != "valid"] in ([], ["failed"])
    assert engines(home) == []


@pytest.mark.parametrize(
    ("here", "tries", "said"),
    [(False, 1, "a job was lost (RuntimeError: node failed); once the cluster has no job of this study any more"),
     (True, 2, "a boot's process was lost twice (RuntimeError: node failed)")],
)  # fmt: skip
def test_a_lost_job_is_run_again_on_this_machine_alone(home: Home, here: bool, tries: int, said: str) -> None:
    class Lost(Launcher):
        tried = 0

        def setup(self, **_: object) -> None: ...

        def launch(self, job_overrides: object, initial_job_idx: int) -> list[JobReturn]:
            self.tried += 1
            raise RuntimeError("node failed")

    lost = Lost()
    with (
        pytest.raises(D3Error) as error,
        launch.Together(lost, "0" * 64, quiet=True, here=here) as together,
    ):
        together.launch([["boot=0"]], 0)
    assert str(error.value).startswith(said)
    assert lost.tried == tries


@SLOW
def test_an_error_of_one_job_stops_no_other(home: Home, store: object) -> None:
    process = shell("d3", *JOBLIB, "plan_only=true")
    assert ended(process).code == 0
    plan = next(home.runs.glob("studies/*/boots/*apc-off_invariant-1*"))
    (plan / "plan.json").unlink()
    (plan / "plan.json").mkdir()  # so that this boot's plan cannot be written
    done = ended(shell("d3", *JOBLIB))
    assert done.code == 1
    assert [line for line in done.err.splitlines() if line.startswith("error: cannot write")]
    assert "Traceback" not in done.err
    assert [r.status for r in records(home)] == ["valid"] * 3


@pytest.mark.parametrize(
    ("name", "package"),
    [("d3_joblib", "hydra_joblib_launcher"), ("d3_submitit_local", "hydra_submitit_launcher"),
     ("d3_slurm", "hydra_submitit_launcher"), ("d3_ray", "ray")],
)  # fmt: skip
def test_a_launcher_without_its_package_is_one_line(
    home: Home, d3: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    asked = []
    monkeypatch.setattr(launch, "find_spec", asked.append)
    done = d3(*GRID, f"hydra/launcher={name}")
    assert done.code == 2
    assert done.error() == f"the launcher needs {asked[0]}, which is not installed; run: pip install 'd3[launchers]'"
    assert asked[0].endswith(package)
    assert runs("study") == []


def test_too_many_at_once_for_the_memory_is_one_line(home: Home, d3: Callable[..., Done]) -> None:
    each = psutil.virtual_memory().available / 2.5e9
    done = d3(*GRID, "hydra/launcher=d3_joblib", "workers=4", "threads=1", f"engine.min_memory_gb={each}")
    assert done.code == 2
    assert f"4 boots of fake at once need {4 * each:.1f} GB; say workers=2, or lower engine.min" in done.error()
    assert runs("study") == []


def test_workers_without_a_launcher_for_it_is_refused(home: Home, d3: Callable[..., Done]) -> None:
    done = d3(*GRID, "workers=4")
    assert done.code == 2
    assert done.error() == "workers need a launcher that runs boots side by side; add hydra/launcher=d3_joblib"


@pytest.mark.parametrize(
    ("launcher", "found"),
    [({"_target_": "x.BasicLauncher"}, 1), ({"_target_": "x.Any"}, 3), ({"_target_": "x.Joblib", "n_jobs": 5}, 5),
     ({"_target_": "x.Joblib", "n_jobs": -1}, os.cpu_count()), ({"_target_": "x.Joblib", "n_jobs": -999}, 1),
     ({"_target_": "x.SlurmLauncher", "array_parallelism": 64}, 64)],
)  # fmt: skip
def test_how_many_run_at_once_is_what_the_launcher_is_told(launcher: dict[str, object], found: int) -> None:
    config = OmegaConf.create({"workers": 3, "hydra": {"mode": RunMode.MULTIRUN, "launcher": launcher}})
    assert launch.boots_at_once(config) == found


def test_a_job_returns_what_stopped_it(home: Home) -> None:
    cfg = OmegaConf.create({"registration": "0" * 64})

    def refused(_cfg: DictConfig) -> str:
        raise D3Error("no disk", "free some")

    def told_to_stop(_cfg: DictConfig) -> str:
        stop = launch.study_dir("0" * 64) / launch.STOP
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.touch()
        time.sleep(30)
        return "valid"

    handler = signal.getsignal(signal.SIGTERM)
    assert launch.run_job(lambda _cfg: "valid", cfg) == "valid"
    assert launch.run_job(refused, cfg) == "error: no disk; free some"
    assert launch.run_job(told_to_stop, cfg) == "stopped"
    assert launch.run_job(lambda _cfg: "valid", cfg) == "stopped"  # as long as the study is being stopped
    assert signal.getsignal(signal.SIGTERM) == handler


@SLOW
def test_a_registered_number_at_once_is_what_the_launcher_runs(
    home: Home, store: object, d3: Callable[..., Done]
) -> None:
    words = (*GRID, "boots=1", "hydra/launcher=d3_joblib", "at_once=3")
    done = ended(shell("d3", *words))
    assert done.code == 0, done
    assert {(r.status, r.environment["boots_at_once"]) for r in records(home)} == {("valid", "3")}
    assert all(c.held for r in records(home) for c in r.checks if c.name == "at_once")
    refused = d3(*GRID, "boots=1", "hydra/launcher=d3_slurm", "at_once=3")
    assert refused.code == 2
    assert refused.error().startswith(
        "at_once=3: this launcher's boots share no device that D3 knows of; plan here with"
    )
