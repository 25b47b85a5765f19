"""A Hydra launcher on plain Ray, `hydra/launcher=d3_ray`: a Ray of its own on this machine, or a cluster that is up.

Hydra's own Ray launcher holds Ray back at a version that does not go with D3's other packages.
"""

import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

OBJECT_STORE = 100 * 2**20  # bytes; by itself Ray takes a third of the memory, and jobs hand over next to nothing
# Read when Ray is imported. The first keeps a Ray of one's own on the loopback address, which its name does not say;
# with the second and a token nobody else on this machine can hand it a job.
OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
PASSED_ON = (
    "D3_AT_ONCE",
    "D3_RUNS",
    "D3_CACHE",
    "MLFLOW_TRACKING_URI",
)  # to a cluster


class RayLauncher(Launcher):
    """Hands jobs to Ray in the order given, `at_once` of them at a time; `num_cpus`, `num_gpus`: of one job."""

    def __init__(self, at_once: int, address: str | None, num_cpus: int, num_gpus: float) -> None:
        self.at_once = at_once
        self.address = address
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what a job needs."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs. Raises what Ray says of a job whose process was lost, once the others have ended."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not self.address:
            os.environ.update(OWN)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())  # Ray reads it once in a process
        import ray

        setup_globals()
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        with self._connected():
            # No retries: a boot whose process was lost is begun anew by whoever asked for it.
            remote = ray.remote(num_cpus=self.num_cpus, num_gpus=self.num_gpus, max_retries=0)(_run)
            shared = ray.put((self.hydra_context, self.task_function, self.config, Singleton.get_state()))
            running: dict[Any, int] = {}
            found: dict[int, JobReturn] = {}
            lost: list[Exception] = []
            waiting = list(enumerate(job_overrides))[::-1]
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    place, overrides = waiting.pop()
                    running[remote.remote(shared, list(overrides), initial_job_idx + place)] = place
                ready, _ = ray.wait(list(running), timeout=1.0)
                for reference in ready:
                    place = running.pop(reference)
                    try:
                        found[place] = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        lost.append(error)
        if lost:
            raise lost[0]
        return [found[place] for place in range(len(job_overrides))]

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Ray, for as long as this lasts: nothing of it stays, and nothing is sent to its makers."""
        import ray

        with tempfile.TemporaryDirectory(prefix="d3-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            # Ray's processes end on SIGTERM, so it must not be blocked in them.
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            try:
                ray.init(**self._where(folder), log_to_driver=False, logging_level=logging.ERROR)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                yield
            finally:
                ray.shutdown()

    def _where(self, folder: str) -> dict[str, Any]:
        if self.address:
            passed = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
            return {"address": self.address, "runtime_env": {"env_vars": passed}}
        return {
            "num_cpus": self.at_once * self.num_cpus,
            "object_store_memory": OBJECT_STORE,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": folder,
        }


def _run(shared: tuple[HydraContext, TaskFunction, DictConfig, Any], overrides: list[str], number: int) -> JobReturn:
    """One job, in a process of Ray's."""
    context, task_function, config, singletons = shared
    setup_globals()
    Singleton.set_state(singletons)
    job = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = f"{job.hydra.job.name}_{number}"
        job.hydra.job.num = number
    HydraConfig.instance().set_config(job)
    return run_job(
        hydra_context=context,
        task_function=task_function,
        config=job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
