"""The real engine under every launcher that runs here: four cold boots each, and the same hashes as one at a time.

D3_TEST_CLUSTER=1 adds SLURM, which must be up, with this machine as a node, and a Ray cluster, which the test starts.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from conftest import left_in_shared_memory
from d3.family import segments
from d3.record import BootRecord
from d3.store import root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "What is the capital of France, and which river runs through it? Answer in one sentence, and add its length."
STUDY = (
    "-m",
    "apc=on,off",
    "invariant=0,1",
    "boots=1",
    "max_tokens=4",
    f"prompts.items=[{{id: one, text: '{PROMPT}'}}]",
)
LAUNCHERS = ("d3_joblib", "d3_submitit_local", "d3_ray")
CLUSTERS = ("d3_slurm hydra.launcher.mem_gb=8 hydra.launcher.cpus_per_task=1", "d3_ray hydra.launcher.address=auto")
ENDING_S = 10  # a SLURM job's own script ends a moment after its result is there
OF_AN_ENGINE = ("d3-", "vllm", "torchinductor")


class Study(NamedTuple):
    """A study's records, and what it printed and left."""

    code: int
    said: str
    seconds: float
    records: list[BootRecord]
    left: list[str]


def study(launcher: str, folder: Path) -> Study:
    env = os.environ | {"D3_RUNS": str(folder / "runs"), "PYTHONPATH": str(root())}
    for name in ("MLFLOW_TRACKING_URI", "D3_AT_ONCE"):
        env.pop(name, None)
    before, temporary = segments(), folder / "tmp"
    temporary.mkdir()
    env["TMPDIR"] = str(temporary)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "d3", *STUDY, *f"hydra/launcher={launcher}".split()],
        env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said, _ = process.communicate(timeout=900)
    seconds = time.monotonic() - began
    ours = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("D3_RUNS") == env["D3_RUNS"]]
    _, alive = psutil.wait_procs(ours, ENDING_S)
    left = [" ".join(p.cmdline()) for p in alive]
    left += [str(path) for path in left_in_shared_memory(before)]
    left += [str(path) for path in Path("/dev/shm").glob(f"joblib_*_{process.pid}_*")]  # noqa: S108
    left += [path.name for path in temporary.iterdir() if path.name.startswith(OF_AN_ENGINE)]
    paths = sorted((folder / "runs").glob("studies/*/boots/*/boot.json"))
    records = [BootRecord.model_validate_json(path.read_bytes()) for path in paths]
    print(f"{launcher}: {seconds:.0f} s for 4 boots, {[round(r.timings.total_s) for r in records]} s each")
    return Study(process.returncode, said, seconds, records, left)


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study("basic", tmp_path_factory.mktemp("basic"))


def hashes(found: Study) -> dict[str, list[tuple[str, str, str, int | None]]]:
    return {
        r.cell: [(q.phase, q.text_sha256, q.logprobs_sha256, q.cached_tokens) for q in r.requests]
        for r in found.records
    }


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*ray, "start", "--head", "--node-ip-address=127.0.0.1", "--port=6399", "--num-cpus=4",
                    "--include-dashboard=false", "--disable-usage-stats"], check=True)  # fmt: skip
    yield
    subprocess.run([*ray, "stop", "--force"], check=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_boots_at_a_time_by_two_give_the_same_hashes(launcher: str, one_at_a_time: Study, tmp_path: Path) -> None:
    same(study(launcher, tmp_path), one_at_a_time)


@pytest.mark.skipif(not os.environ.get("D3_TEST_CLUSTER"), reason="needs SLURM and Ray of its own: D3_TEST_CLUSTER=1")
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("launcher", CLUSTERS)
def test_boots_on_a_cluster_give_the_same_hashes(launcher: str, one_at_a_time: Study, tmp_path: Path) -> None:
    found = study(launcher, tmp_path)
    same(found, one_at_a_time)


def same(found: Study, one_at_a_time: Study) -> None:
    for each, at_once in ((one_at_a_time, "1"), (found, "2")):
        assert each.code == 0, each.said
        assert "4 of 4 boots valid" in each.said
        assert [r.status for r in each.records] == ["valid"] * 4
        assert {r.environment["boots_at_once"] for r in each.records} == {at_once}
        assert each.left == []
    assert hashes(found) == hashes(one_at_a_time)
    assert len(hashes(found)) == 4
    first, second = sorted(datetime.fromisoformat(r.started_at) for r in found.records)[:2]
    assert (second - first).total_seconds() < min(r.timings.total_s for r in found.records)  # side by side
