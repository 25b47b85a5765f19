"""One Hydra job is one boot: find what is recorded already, run the boot if it is not, write it, log it."""

import time
from datetime import UTC, datetime

from omegaconf import DictConfig

from d3 import boot as booting
from d3.attempts import Attempts
from d3.console import Console
from d3.errors import D3Error
from d3.host import CACHES, MODEL, PYTHON
from d3.install import engine_python, model_dir
from d3.machine import boots_at_once
from d3.model import model_digest
from d3.plan import Locations, boot_plan
from d3.record import Boot, BootPlan
from d3.registration import Registration, Slot, cell_name, stratum_name
from d3.signals import end_with_sweep
from d3.spool import BOOT_S, Spool
from d3.starter import Starter
from d3.store import LOG, boot_dir, caches_dir, find_registration, save_boot, save_plan, save_registration
from d3.study import axes_of

NOWHERE = "(not on this machine)"  # where an endpoint that D3 did not start has its program and its model
OPEN = Locations(python=PYTHON, model=MODEL, caches=CACHES)


def run(cfg: DictConfig, starter: Starter | None = None) -> str:
    """Run the boot that a job's configuration names. Returns its status; failures of an engine are data, not raised.

    `starter`: where the same process runs the study's other boots, one after the other; the next may then be prepared.
    """
    if not cfg.registration:
        raise D3Error("this job has no registration", "start studies with: python -m d3 -m apc=on,off invariant=0,1")
    end_with_sweep()
    registration = find_registration(cfg.registration)
    slot = _slot(cfg, registration)
    if cfg.plan_only:
        return _planned(boot_plan(registration, slot, Attempts(registration).next(slot), OPEN))
    return run_slot(registration, slot, locations(cfg), starter, cfg.engine.min_memory_gb)


def run_slot(
    registration: Registration,
    slot: Slot,
    where: Locations,
    starter: Starter | None = None,
    memory_gb: float = 0.0,
) -> str:
    """Run one registered boot if it has no valid record yet, write it and log it. Returns its status.

    Raises KeyboardInterrupt after a boot that was stopped, and D3Error where the model is not as it must be, or MLflow
    does not have the registration and does not answer.
    """
    _check_clock(registration)
    where = where.model_copy(update={"caches": str(caches_dir(registration.id()))})
    attempts = Attempts(registration)
    console = Console(registration, attempts.seconds(), slot)
    if ended := attempts.settled(slot):
        again = f"not tried again: attempt {ended.attempt} was {ended.status}: {ended.reason}"
        console.say("already recorded" if ended.status == "valid" else again)
        return ended.status
    spool = Spool(registration)
    spool.open()
    refused = attempts.refusal(slot)
    plan = boot_plan(registration, slot, attempts.next(slot), where)
    began = time.monotonic()
    if starter is not None:
        following = _following(attempts, slot, where)
        starter.expect(following, boot_dir(following) / LOG if following else None, memory_gb)
    unavailable = f"the flag is unavailable: {refused.reason}" if refused else ""
    boot = booting.skipped(plan, unavailable) if refused else _boot(plan, console, starter)
    save_boot(boot, boot_dir(plan))
    spool.send(BOOT_S)
    console.done(boot.record, time.monotonic() - began)
    if boot.record.status == "stopped":
        raise KeyboardInterrupt
    return boot.record.status


def _planned(plan: BootPlan) -> str:
    """Leave the plan for another host, its paths open (d3.host fills them in)."""
    save_plan(plan)
    return "planned"


def _following(attempts: Attempts, slot: Slot, where: Locations) -> BootPlan | None:
    """The plan of the boot that comes after this one in the registered order, if it has the same engine and model."""
    study = attempts.registration
    after = study.order[study.order.index(slot) + 1 :]
    cells = {s: study.cell(s.stratum, s.cell) for s in after}
    due = next((s for s in after if not (attempts.settled(s) or attempts.refusal(s) or cells[s].unavailable())), None)
    if due is None:
        return None
    mine, its = (study.cell(s.stratum, s.cell).settings for s in (slot, due))
    if any(mine[group]["name"] != its[group]["name"] for group in ("engine", "model")):
        return None
    return boot_plan(study, due, attempts.next(due), where)


def _boot(plan: BootPlan, console: Console, starter: Starter | None) -> Boot:
    if plan.at_once is not None and str(plan.at_once) != boots_at_once():
        raise D3Error(f"registered are boots with {plan.at_once} side by side, here run {boots_at_once()}",
                      "plan with plan_only=true and run them with python -m d3.host")  # fmt: skip
    save_plan(plan)
    _check_model(plan)
    with console.live(plan):
        boot = booting.run(plan, boot_dir(plan), console.phase, starter)
    _check_model(plan)  # again: nobody knows which weights an engine read that started while they changed
    return boot


def _check_model(plan: BootPlan) -> None:
    if plan.launch.transport != "attach" and model_digest(plan.launch.model_path) != plan.model_digest:
        raise D3Error(f"the model in {plan.launch.model_path} changed since it was registered",
                      "restore it, or start a new study")  # fmt: skip


def _check_clock(registration: Registration) -> None:
    """A boot from before its registration is evidence of nothing, so a clock that was set back stops the study."""
    at, now = save_registration(registration), datetime.now(UTC)
    if now < datetime.fromisoformat(at):
        raise D3Error(f"this machine's clock says {now:%Y-%m-%d %H:%M:%S} UTC, the study was registered at {at}",
                      "set the clock right, then run the same command again")  # fmt: skip


def locations(cfg: DictConfig) -> Locations:
    """Where the configured engine and model lie here. Raises D3Error where they are not there."""
    if cfg.engine.transport == "attach":
        return Locations(python=NOWHERE, model=NOWHERE, key_env=cfg.engine.key_env)
    return Locations(
        python=engine_python(cfg.engine.name, cfg.engine.lock, cfg.engine.python, cfg.engine.executable),
        model=model_dir(cfg.model.name, cfg.model.package, cfg.model.path),
    )


def _slot(cfg: DictConfig, registration: Registration) -> Slot:
    factors = axes_of(cfg, tuple(registration.axes))
    slot = Slot(boot=cfg.boot, stratum=stratum_name(factors), cell=cell_name(factors))
    if slot not in registration.order:
        raise D3Error(f"boot {cfg.boot} of {slot.cell} is not registered", f"boots are 0 to {registration.boots - 1}")
    return slot
