"""`python -m d3.host PLANS`: run planned boots where there is no network, MLflow or Hydra.

It needs pydantic, psutil and httpx. Where the study is registered, `python -m d3 -m ... plan_only=true` writes one plan
per boot under runs/studies/ID/boots.
Copy that folder to the host, run this, copy it back, then `python -m d3.sync && python -m d3.certify`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

from d3 import boot as booting
from d3.errors import D3Error, command
from d3.machine import AT_ONCE
from d3.model import model_digest
from d3.record import BootPlan, Frozen, canonical_json
from d3.starter import Starter
from d3.store import CACHES_DIR, LOG, PLAN, RECORD, load, save_boot, write_atomic

Planned = tuple[BootPlan, Path]  # a plan, and the folder that its record goes to

PYTHON, MODEL, CACHES, LOCATED = "{python}", "{model}", "{caches}", "located.json"


def located(plan: BootPlan, python: str, model: str, caches: str) -> BootPlan:
    """The plan with this host's paths in the places that planning left open; `caches`: for warmed compile caches."""
    launch = plan.launch.model_copy(
        update={
            "python": plan.launch.python.replace(PYTHON, python),
            "model_path": plan.launch.model_path.replace(MODEL, model),
            "args": tuple(word.replace(MODEL, model) for word in plan.launch.args),
            "compile_cache": plan.launch.compile_cache and plan.launch.compile_cache.replace(CACHES, caches),
            "body": {k: v.replace(MODEL, model) if isinstance(v, str) else v for k, v in plan.launch.body.items()},
        }
    )
    return plan.model_copy(update={"launch": launch})


def check_model(plan: BootPlan, model: str) -> None:
    """Raise D3Error where the weights in `model` are not those that the boot was planned for."""
    if (found := model_digest(model)) != plan.model_digest:
        planned = plan.model_digest[:12]
        raise D3Error(f"{plan.boot_id} was planned for weights {planned}, {model} has {found[:12]}",
                      "copy or convert the registered model")  # fmt: skip


class Pythons(Frozen):
    """The engines' Pythons on this host: one for all, or one by the engine's name."""

    default: str
    named: dict[str, str]

    def of(self, engine: str) -> str:
        """The Python of that engine."""
        return self.named.get(engine, self.default)


def pythons(words: Sequence[str], engines: Collection[str]) -> Pythons:
    """`PATH`, or `ENGINE=PATH` per engine; raises D3Error for an engine that no plan names."""
    default, named = sys.executable, {}
    for word in words:
        engine, equals, path = word.partition("=")
        if not equals or "/" in engine:
            default = word
        elif engine in engines:
            named[engine] = path
        else:
            raise D3Error(f"--python {word}: no plan has the engine {engine}",
                          f"the plans' engines are: {', '.join(sorted(engines))}")  # fmt: skip
    return Pythons(default=default, named=named)


def read_plans(folder: Path) -> list[Planned]:
    """Every plan below a folder, in the registered order. Raises D3Error where there is none."""
    found = [(load(BootPlan, path), path.parent) for path in folder.glob(f"*/{PLAN}")]
    if not found:
        raise D3Error(f"{folder} has no plans", "name the folder that planning printed, runs/studies/ID/boots")
    return sorted(found, key=lambda item: (item[0].position, item[0].attempt))


def grouped(plans: Sequence[Planned], at_once: int | None) -> dict[int, list[Planned]]:
    """The plans by how many of them run side by side, the fewest first: no boot has neighbours of another group.

    `at_once` is for plans whose study does not fix it (1 where it is None). Raises D3Error where it is below 1, or
    contradicts a plan.
    """
    if at_once is not None and at_once < 1:
        raise D3Error(f"--at-once {at_once} runs no boot", "say how many boots run side by side, 1 or more")
    registered = sorted({plan.at_once for plan, _ in plans if plan.at_once is not None})
    if at_once is not None and registered not in ([], [at_once]):
        raise D3Error(f"--at-once {at_once}: the study registered at_once={', '.join(map(str, registered))}",
                      "leave --at-once out; each plan says its own")  # fmt: skip
    groups: dict[int, list[Planned]] = {}
    for plan in sorted(plans, key=lambda item: item[0].at_once or at_once or 1):
        groups.setdefault(plan[0].at_once or at_once or 1, []).append(plan)
    return groups


def run_all(plans: Path, python: Sequence[str], model: str, at_once: int | None) -> int:
    """Run every plan without a record, group after group, each in the registered order; returns how many failed."""
    planned = read_plans(plans)
    where = pythons(python, {plan.engine for plan, _ in planned})
    groups = grouped(planned, at_once)
    for plan, _ in planned:
        check_model(plan, model)
    failed = 0
    caches = str(plans.absolute().parent / CACHES_DIR)
    for together, group in groups.items():
        waiting = [item for item in group if not (item[1] / RECORD).exists()]
        if waiting:
            print(f"{len(waiting)} boots, {together} side by side", flush=True)
            failed += _run_group(waiting, where, model, caches, together)
    return failed


def _run_group(waiting: Sequence[Planned], where: Pythons, model: str, caches: str, at_once: int) -> int:
    here = [(located(plan, where.of(plan.engine), model, caches), folder) for plan, folder in waiting]
    for plan, folder in here:
        write_atomic(folder / LOCATED, canonical_json(plan) + "\n")
    return _run_in_turn(here) if at_once == 1 else _run_side_by_side(here, at_once)


def _run_in_turn(waiting: Sequence[Planned]) -> int:
    """One boot after the other, here, so that the next one's standby may be prepared; returns how many failed.

    Raises KeyboardInterrupt where a boot was stopped; it has no record then, so the same command runs it.
    """
    os.environ[AT_ONCE] = "1"
    failed = 0
    with Starter() as starter:
        for (plan, folder), following in zip_longest(waiting, waiting[1:]):
            starter.expect(following and following[0], following and following[1] / LOG)
            boot = booting.run(plan, folder, starter=starter)
            if boot.record.status == "stopped":
                raise KeyboardInterrupt
            save_boot(boot, folder)
            _say(plan, f"{boot.record.status} {boot.record.reason}".strip())
            failed += boot.record.status != "valid"
    return failed


def _run_side_by_side(waiting: Sequence[Planned], at_once: int) -> int:
    def one(item: Planned) -> bool:
        plan, folder = item
        # A process of its own per boot: what one boot reaps at its end can never be a neighbour's engine.
        command = [sys.executable, "-m", "d3.boot", str(folder / LOCATED), str(folder)]
        env = {**os.environ, AT_ONCE: str(at_once)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no word"])[-1]
        _say(plan, said)
        return done.returncode == 0

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return sum(not good for good in pool.map(one, waiting))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # the boots that run end, no other begins
            raise


def _say(plan: BootPlan, said: str) -> None:
    print(f"{plan.position:3d} {plan.stratum} {plan.cell} boot {plan.boot}: {said[:300]}", flush=True)


@command
def main(argv: list[str] | None = None) -> int:
    """0 when every boot is valid, 1 when one is not, 130 stopped."""
    parser = argparse.ArgumentParser(prog="python -m d3.host", description="Run planned boots.")
    parser.add_argument("plans", type=Path, help="a folder of planned boots, runs/studies/ID/boots")
    parser.add_argument("--python", action="append", default=[], metavar="PATH",
                        help="the engine's Python (default: this one); ENGINE=PATH where a study has several engines, "
                        "once for each")  # fmt: skip
    parser.add_argument("--model", required=True, help="the model's folder on this host")
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="how many boots run side by side (default 1); leave it out where the study registered it",
    )
    options = parser.parse_args(argv)
    try:
        return min(1, run_all(options.plans, options.python, options.model, options.at_once))
    except KeyboardInterrupt:
        print("stopped; the boots already done are kept, the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
