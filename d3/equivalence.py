"""`python -m d3.equivalence`: is a faster start the same boot? The same cells by every way to start, hash by hash.

An ordinary study (`conf/study/equivalence.yaml`): planned, run by `d3.host`, certified, and compared by `d3.across`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir

from d3 import across_report
from d3.across import Across, across
from d3.compare import read_side
from d3.config import register_schema
from d3.errors import D3Error, command, printable
from d3.install import engine_python, model_dir
from d3.starter import SHOWN
from d3.store import root

KEYS = ("start", "at_once")
OUT = Path("results/equivalence.json")


@command
def main(argv: list[str] | None = None) -> int:
    """Run the study and compare; 0 every way gives the same responses, 1 one does not, 2 it could not be asked."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.equivalence",
        description="Does the way a boot starts change an answer? Runs the same cells by plain start, by standby, by "
        "fork, and two at once on the real engine, certifies that, and compares it response by response.",
        epilog="Exit code: 0 all the same, 1 not, and where; 2 it could not be asked. A standby is the default only "
        f"for engines that were found the same: {', '.join(SHOWN)}.",
    )
    parser.add_argument("overrides", nargs="*", help="keys of the study, such as boots=2 or start=plain,standby")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the certificate goes (default {OUT})")
    parser.add_argument("--read", action="store_true", help="run nothing: compare the certificate that is there")
    options = parser.parse_args(argv)
    if not options.read:
        measure(options.overrides, options.out)
    return judged(options.out)


def measure(overrides: Sequence[str], out: Path) -> None:
    """Plan the study, run its boots here, certify them into `out`. Raises D3Error where a step fails."""
    said = _step(["d3", "-m", "study=equivalence", "plan_only=true", *overrides], "planning")
    (folder,) = (line.partition(": ")[2] for line in said.splitlines() if line.startswith("planned, nothing run: "))
    register_schema()
    single = [word for word in overrides if "," not in word]
    with initialize_config_dir(str(root() / "conf"), version_base="1.3"):
        cfg = compose("config", single)
    python = engine_python(cfg.engine.name, cfg.engine.lock, cfg.engine.python)
    model = model_dir(cfg.model.name, cfg.model.package, cfg.model.path)
    _step(["d3.host", folder, "--python", python, "--model", model], "running the boots")
    _step(["d3.sync"], "logging the boots")
    _step(["d3.certify", "--run", Path(folder).parent.name, "--out", str(out)], "certifying")


def _step(words: Sequence[str], what: str) -> str:
    print(f"$ python -m {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, cwd=root(), env=dict(os.environ), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None  # noqa: S101
        said = ""
        for line in child.stdout:
            print(line, end="", flush=True)
            said += line
    if child.returncode:
        raise D3Error(f"{what} failed", "see above; the same command goes on where this one stopped")
    return said


def judged(path: Path) -> int:
    """Print, for every key that was swept, whether its levels give the same responses; 1 where one does not."""
    side = read_side(path)
    axes = side.certificate.registration.axes
    found: list[Across] = [across(side, key) for key in KEYS if len(axes.get(key, ())) > 1]
    if not found:
        raise D3Error(f"{path} sweeps neither {' nor '.join(KEYS)}", "run: python -m d3.equivalence")
    for one in found:
        for pairing in one.pairings:
            print(printable(f"{one.key}: {across_report.conclusion(pairing)}"))
        print(printable(across_report.gate_line(one)))
    return 0 if all(one.same() for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
