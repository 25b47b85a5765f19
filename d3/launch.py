"""Boots side by side, whatever Hydra launcher starts them: how many, whether they fit, and how all of them end.

Libraries that start jobs kill them when they are interrupted. So Ctrl-C does not reach the jobs: this process leaves a
file in the study's folder, each job sees it, stops its engine, writes its record, and the launcher returns by itself.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from d3.errors import D3Error
from d3.family import end_all, segments, shared_memory
from d3.machine import AT_ONCE
from d3.process import adopt_orphans
from d3.record import BootRecord
from d3.store import RECORD, load, study_dir, write_atomic

POLL_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP = "stop"
ERROR = "error: "  # how a job returns what stopped it
PACKAGES = {  # by a part of a launcher's name
    ".hydra_joblib_launcher.": "hydra_plugins.hydra_joblib_launcher",
    ".hydra_submitit_launcher.": "hydra_plugins.hydra_submitit_launcher",
    ".d3_ray.": "ray",
}


def side_by_side(hydra: Any) -> bool:
    """Whether this is a sweep whose launcher runs jobs in processes of its own."""
    return hydra.mode == RunMode.MULTIRUN and not hydra.launcher._target_.endswith(".BasicLauncher")


def boots_at_once(config: DictConfig) -> int:
    """How many boots the launcher has running at a time: its own setting, whatever it calls it, else `workers`."""
    launcher = config.hydra.launcher
    if not side_by_side(config.hydra):
        return 1
    found = launcher.get("n_jobs") or launcher.get("array_parallelism") or config.workers
    return int(found) if found > 0 else max(1, (os.cpu_count() or 1) + 1 + int(found))  # as joblib counts


def on_this_machine(hydra: DictConfig) -> bool:
    """Whether the boots share this machine, so that its memory and cores must hold all of them."""
    return not (hydra.launcher._target_.endswith(".SlurmLauncher") or hydra.launcher.get("address"))


def prepare(config: DictConfig, boots: int) -> int:
    """Check that the launcher can run, tell it and every boot how many run at once, and return that number.

    `boots`: of the whole study. Raises D3Error with what to install or to say instead.
    """
    launcher = config.hydra.launcher._target_
    if not side_by_side(config.hydra):
        if any(word.startswith("workers=") for word in config.hydra.overrides.task):
            raise D3Error("workers need a launcher that runs boots side by side", "add hydra/launcher=d3_joblib")
        return 1
    for part, package in PACKAGES.items():
        if part in launcher and not _installed(package):
            raise D3Error(f"the launcher needs {package}, which is not installed", "run: pip install 'd3[launchers]'")
    if config.at_once is not None:  # a registered condition
        config.workers = config.at_once
    at_once = min(boots_at_once(config), boots)
    os.environ[AT_ONCE] = str(at_once)  # every launcher hands its jobs this process's environment
    if launcher.endswith(".LocalLauncher"):  # submitit's starts all jobs of a batch at once
        config.hydra.sweeper.max_batch_size = at_once
    cores = os.cpu_count() or 1
    if on_this_machine(config.hydra) and at_once * config.threads > cores:
        print(f"note: {at_once} boots at once x {config.threads} threads share {cores} cores; each boot takes longer")
    return at_once


def check_registered(registered: Sequence[int | None], hydra: DictConfig, at_once: int) -> None:
    """Raise D3Error where the launcher, which runs `at_once` boots, does not run as many side by side as registered."""
    levels = sorted({n for n in registered if n is not None})
    planned = "plan here with plan_only=true and run the boots with python -m d3.host, which can"
    if len(levels) > 1:
        raise D3Error(f"one sweep runs its boots with one at_once, this one has {', '.join(map(str, levels))}", planned)
    if levels and not on_this_machine(hydra):
        raise D3Error(f"at_once={levels[0]}: this launcher's boots share no device that D3 knows of", planned)
    if levels not in ([], [at_once]):
        one = "one boot after the other" if at_once == 1 else f"{at_once} boots at a time"
        raise D3Error(f"at_once={levels[0]}: this launcher runs {one}", planned)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def run_job(run: Callable[[DictConfig], str], cfg: DictConfig) -> str:
    """One boot in a launcher's own process. Returns its status, or what stopped it, so that it stops no other."""
    try:
        with _until_stopped(study_dir(cfg.registration) / STOP):
            return run(cfg)
    except KeyboardInterrupt:
        return "stopped"
    except D3Error as error:
        return f"{ERROR}{error}"


@contextmanager
def _until_stopped(stop: Path) -> Iterator[None]:
    """Raise KeyboardInterrupt inside once `stop` is there, or on the first SIGTERM, as SLURM sends it."""

    def once(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch() -> None:
        while not over.wait(POLL_S):
            if stop.exists():
                os.kill(os.getpid(), signal.SIGTERM)  # a signal also ends the wait for an answer
                return

    if stop.exists():
        raise KeyboardInterrupt
    over = threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    old = signal.signal(signal.SIGTERM, once)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        over.set()
        watcher.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, old)


class Together(Launcher):
    """A launcher whose jobs end together: the first Ctrl-C or SIGTERM stops all boots in order, the second kills them.

    On leaving, nothing that a job started here still runs, and a stop is raised as KeyboardInterrupt. `quiet`: the jobs
    say themselves how they ended. `here`: they run on this machine.
    """

    def __init__(self, launcher: Launcher, registration_id: str, quiet: bool, here: bool) -> None:
        self._launcher = launcher
        self._here = here
        self._boots = study_dir(registration_id) / "boots"
        self._stop = study_dir(registration_id) / STOP
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        self._presses = 0
        self._over = threading.Event()
        self._segments: set[Path] = set()
        self._segments_before = segments()
        self._seen = None if quiet else self._records()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing: the launcher inside was set up when it was made."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs; where the library lost a process here, once more: what is recorded by then does not run again.

        Raises KeyboardInterrupt after a stop, D3Error where a process was lost again, or on a cluster, whose other jobs
        may still be waiting or running.
        """
        try:
            returns = self._launched(job_overrides, initial_job_idx)
        except Exception as error:
            if not self._here:
                remedy = "once the cluster has no job of this study any more, the same command goes on"
                raise D3Error(f"a job was lost ({_kind(error)})", remedy, 1) from error
            print(f"a boot's process was lost ({_kind(error)}); what ran beside it is run again", file=sys.stderr)
            self._end_jobs()
            try:
                returns = self._launched(job_overrides, initial_job_idx)
            except Exception as again:
                raise D3Error(f"a boot's process was lost twice ({_kind(again)})",
                              "the same command goes on; fewer at once need less memory", 1) from again  # fmt: skip
        said = [r.return_value for r in returns if isinstance(r.return_value, str)]
        for line in dict.fromkeys(word for word in said if word.startswith(ERROR)):
            print(line, file=sys.stderr)
        return returns

    def _launched(self, jobs: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        try:
            returns = self._launcher.launch(jobs, initial_job_idx=first)
        except Exception:
            if self._presses:
                raise KeyboardInterrupt from None
            raise
        if self._presses:
            raise KeyboardInterrupt
        return returns

    def __enter__(self) -> "Together":
        self._stop.unlink(missing_ok=True)
        adopt_orphans()
        self._handlers = {number: signal.signal(number, lambda _n, _f: self._press()) for number in SIGNALS}
        # Children inherit what is blocked: the terminal's Ctrl-C goes to every process of its group.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watcher.join()
        self._news()
        self._end_jobs(strays=kind is None)
        self._stop.unlink(missing_ok=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _press(self) -> None:
        self._presses += 1
        if self._presses == 1:
            write_atomic(self._stop, "")
            print("stopping: engines end and records are written; once more kills them", file=sys.stderr, flush=True)
        else:
            self._end_jobs()

    def _watch(self) -> None:
        """Take signals, note the engines' shared memory, and say which boots ended where nobody else says it."""
        while not self._over.is_set():
            if signal.sigtimedwait(SIGNALS, POLL_S) is not None:
                self._press()
            for process in self._jobs(strays=True):
                self._segments |= shared_memory(process.pid)
            self._news()

    def _records(self) -> set[Path]:
        return set(self._boots.glob(f"*/{RECORD}"))

    def _news(self) -> None:
        if self._seen is None:
            return
        for path in sorted(self._records() - self._seen):
            self._seen.add(path)
            record = load(BootRecord, path)
            words = f"{record.status} ({record.reason})" if record.reason else record.status
            print(f"boot {record.boot} {record.stratum} {record.cell}: {words} in {record.timings.total_s:.0f} s",
                  flush=True)  # fmt: skip

    def _jobs(self, strays: bool) -> list[psutil.Process]:
        """What the jobs started and still runs; `strays`: only sessions of their own, which engines have."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.pid in self._before or (strays and os.getsid(process.pid) == os.getsid(0)):
                    continue
            except OSError:
                continue
            found.append(process)
        return found

    def _end_jobs(self, strays: bool = False) -> None:
        end_all(self._jobs(strays), self._segments - self._segments_before)


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
