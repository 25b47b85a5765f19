"""`python -m d3.host PLANS`: run planned boots where there is no network, MLflow or Hydra.

It needs pydantic, psutil and httpx. Where the study is registered, `python -m d3 -m ... plan_only=true` writes one plan
per boot under runs/studies/ID/boots.
Copy that folder to the host, run this, copy it back, then `python -m d3.sync && python -m d3.certify`.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from d3.errors import D3Error
from d3.machine import AT_ONCE
from d3.model import model_digest
from d3.record import BootPlan, canonical_json
from d3.store import PLAN, RECORD, load, write_atomic

PYTHON, MODEL, LOCATED = "{python}", "{model}", "located.json"


def located(plan: BootPlan, python: str, model: str) -> BootPlan:
    """The plan with this host's paths in the places that planning left open."""
    launch = plan.launch.model_copy(
        update={
            "python": plan.launch.python.replace(PYTHON, python),
            "model_path": plan.launch.model_path.replace(MODEL, model),
            "args": tuple(word.replace(MODEL, model) for word in plan.launch.args),
        }
    )
    return plan.model_copy(update={"launch": launch})


def check_model(plan: BootPlan, model: str) -> None:
    """Raise D3Error where the weights in `model` are not those that the boot was planned for."""
    if (found := model_digest(model)) != plan.model_digest:
        planned = plan.model_digest[:12]
        raise D3Error(f"{plan.boot_id} was planned for weights {planned}, {model} has {found[:12]}",
                      "copy or convert the registered model")  # fmt: skip


def run_all(plans: Path, python: str, model: str, at_once: int) -> int:
    """Run every plan without a record, in the registered order, `at_once` side by side; returns how many failed."""
    waiting = [(load(BootPlan, path), path.parent) for path in sorted(plans.glob(f"*/{PLAN}"))]
    for plan, _ in waiting:
        check_model(plan, model)
    waiting = sorted((p for p in waiting if not (p[1] / RECORD).exists()), key=lambda p: p[0].position)

    def one(item: tuple[BootPlan, Path]) -> bool:
        plan, folder = item
        write_atomic(folder / LOCATED, canonical_json(located(plan, python, model)) + "\n")
        # A process of its own per boot: what one boot reaps at its end can never be a neighbour's engine.
        command = [sys.executable, "-m", "d3.boot", str(folder / LOCATED), str(folder)]
        env = {**os.environ, AT_ONCE: str(at_once)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no word"])[-1]
        print(f"{plan.position:3d} {plan.stratum} {plan.cell} boot {plan.boot}: {said[:300]}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(at_once) as pool:
        return sum(not good for good in pool.map(one, waiting))


def main(argv: list[str] | None = None) -> int:
    """0 when every boot is valid, 1 when one is not."""
    parser = argparse.ArgumentParser(prog="python -m d3.host", description="Run planned boots.")
    parser.add_argument("plans", type=Path, help="a folder of planned boots, runs/studies/ID/boots")
    parser.add_argument("--python", default=sys.executable, help="the engine's Python (default: this one)")
    parser.add_argument("--model", required=True, help="the model's folder on this host")
    parser.add_argument("--at-once", type=int, default=1, help="how many boots run side by side (default 1)")
    options = parser.parse_args(argv)
    try:
        return min(1, run_all(options.plans, options.python, options.model, options.at_once))
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
