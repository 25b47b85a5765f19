"""One Hydra job is one boot: find what is recorded already, run the boot if it is not, write it, log it."""

import time
from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from d3 import boot as booting
from d3.console import Console
from d3.errors import D3Error
from d3.flag import twin
from d3.host import MODEL, PYTHON
from d3.install import engine_python, model_dir
from d3.model import model_digest
from d3.plan import Locations, boot_plan
from d3.record import Boot, BootPlan, BootRecord, Frozen
from d3.registration import Registration, Slot, cell_name, stratum_name
from d3.store import LOG, boot_dir, find_registration, load_boot, recorded, save_boot, save_plan
from d3.study import axes_of
from d3.tracking import Tracking

OPEN = Locations(python=PYTHON, model=MODEL)


class Tally(Frozen):
    """How many of the registered boots have a valid record, and what became of the others."""

    registered: int
    valid: int
    unavailable: int
    missing: int
    reasons: tuple[str, ...]

    def words(self) -> str:
        """One line, and the first reasons where boots are missing."""
        line = f"{self.valid} of {self.registered} boots valid"
        if self.unavailable:
            line += f", {self.unavailable} with the flag unavailable"
        if self.missing:
            line += f", {self.missing} without a valid record (run the same command again to retry)"
        return "\n".join([line, *(f"  {reason}" for reason in self.reasons)])


def tally(registration: Registration) -> Tally:
    """Count a study's boots from the records on disk."""
    attempts = [record for _, record in recorded(registration.id())]
    valid = unavailable = 0
    reasons = []
    for slot in registration.order:
        mine = _of_slot(attempts, slot)
        if any(r.status == "valid" for r in mine):
            valid += 1
        elif _ended(mine) and _refusal(registration, attempts, slot):
            unavailable += 1
        elif mine:
            reasons.append(f"{mine[-1].boot_id.partition('/')[2]}: {mine[-1].status}, {mine[-1].reason}")
    missing = len(registration.order) - valid - unavailable
    return Tally(registered=len(registration.order), valid=valid, unavailable=unavailable, missing=missing,
                 reasons=tuple(reasons[:5]))  # fmt: skip


def run(cfg: DictConfig) -> str:
    """Run the boot that a job's configuration names. Returns its status; failures of an engine are data, not raised."""
    if not cfg.registration:
        raise D3Error("this job has no registration", "start studies with: python -m d3 -m apc=on,off invariant=0,1")
    registration = find_registration(cfg.registration)
    slot = _slot(cfg, registration)
    if cfg.plan_only:
        attempts = _of_slot((record for _, record in recorded(registration.id())), slot)
        return _planned(boot_plan(registration, slot, _next_attempt(attempts), OPEN))
    return run_slot(registration, slot, _locations(cfg))


def run_slot(registration: Registration, slot: Slot, where: Locations) -> str:
    """Run one registered boot if it has no valid record yet, write it and log it. Returns its status.

    Raises KeyboardInterrupt after a boot that was stopped, and D3Error where the model or MLflow is not as it must be.
    """
    attempts = [record for _, record in recorded(registration.id())]
    mine = _of_slot(attempts, slot)
    console = Console(registration, attempts, slot)
    tracking = Tracking()
    study = tracking.find_study(registration.id()) or tracking.open_study(registration)
    for earlier in mine:  # a store that was down or is new gets what it lacks
        tracking.log_boot(study, load_boot(boot_dir(earlier)), boot_dir(earlier) / LOG)
    if ended := settled(registration, attempts, slot):
        again = f"not tried again: attempt {ended.attempt} was {ended.status}: {ended.reason}"
        console.say("already recorded" if ended.status == "valid" else again)
        return ended.status
    refused = _refusal(registration, attempts, slot)
    plan = boot_plan(registration, slot, _next_attempt(mine), where)
    began = time.monotonic()
    boot = booting.skipped(plan, f"the flag is unavailable: {refused.reason}") if refused else _boot(plan, console)
    save_boot(boot, boot_dir(plan))
    tracking.log_boot(study, boot, boot_dir(plan) / LOG)
    console.done(boot.record, time.monotonic() - began)
    if boot.record.status == "stopped":
        raise KeyboardInterrupt
    return boot.record.status


def settled(registration: Registration, attempts: Sequence[BootRecord], slot: Slot) -> BootRecord | None:
    """The record that ends a slot: a valid one, or the last one where no more may be tried; None where one is due."""
    mine = _of_slot(attempts, slot)
    if valid := [r for r in mine if r.status == "valid"]:
        return valid[-1]
    tried = [r for r in mine if r.status in {"failed", "void"}]
    refused = _ended(mine) and _refusal(registration, attempts, slot)
    return mine[-1] if mine and (len(tried) >= registration.max_attempts or refused) else None


def due(registration: Registration) -> list[BootPlan]:
    """The plans of the boots that may still be tried, in the registered order, their paths open."""
    attempts = [record for _, record in recorded(registration.id())]
    slots = [slot for slot in registration.order if settled(registration, attempts, slot) is None]
    return [boot_plan(registration, slot, _next_attempt(_of_slot(attempts, slot)), OPEN) for slot in slots]


def _planned(plan: BootPlan) -> str:
    """Leave the plan for another host, its paths open (d3.host fills them in)."""
    save_plan(plan)
    return "planned"


def _boot(plan: BootPlan, console: Console) -> Boot:
    save_plan(plan)
    if model_digest(plan.launch.model_path) != plan.model_digest:
        raise D3Error(f"the model in {plan.launch.model_path} changed since it was registered",
                      "restore it, or start a new study")  # fmt: skip
    with console.live(plan):
        return booting.run(plan, boot_dir(plan), console.phase)


def _locations(cfg: DictConfig) -> Locations:
    return Locations(
        python=engine_python(cfg.engine.name, cfg.engine.lock, cfg.engine.python),
        model=model_dir(cfg.model.name, cfg.model.package, cfg.model.path),
    )


def _slot(cfg: DictConfig, registration: Registration) -> Slot:
    factors = axes_of(cfg, tuple(registration.axes))
    slot = Slot(boot=cfg.boot, stratum=stratum_name(factors), cell=cell_name(factors))
    if slot not in registration.order:
        raise D3Error(f"boot {cfg.boot} of {slot.cell} is not registered", f"boots are 0 to {registration.boots - 1}")
    return slot


def _of_slot(records: Iterable[BootRecord], slot: Slot) -> list[BootRecord]:
    return [r for r in records if (r.boot, r.stratum, r.cell) == (slot.boot, slot.stratum, slot.cell)]


def _next_attempt(mine: Iterable[BootRecord]) -> int:
    return 1 + max((r.attempt for r in mine), default=0)


def _refusal(registration: Registration, attempts: Sequence[BootRecord], slot: Slot) -> BootRecord | None:
    """The boot that showed that the engine cannot run this cell's flag: one attempt says so, six would say no more.

    It must be the flag: the engine failed by itself and never ran here, while the same cell without the flag runs and
    never failed like that.
    """
    spec = registration.cell(slot.stratum, slot.cell)
    other = twin(spec, registration.cells)
    if spec.factors["invariant"] == "0" or other is None:
        return None
    own = [r for r in attempts if (r.stratum, r.cell) == (spec.stratum, spec.cell)]
    its = [r for r in attempts if (r.stratum, r.cell) == (other.stratum, other.cell)]
    if any(r.status == "valid" for r in own) or not any(r.status == "valid" for r in its) or any(map(_own_fault, its)):
        return None
    return next(filter(_own_fault, own), None)


def _own_fault(record: BootRecord) -> bool:
    return record.failure is not None and record.failure.kind == "engine_error"


def _ended(records: Sequence[BootRecord]) -> bool:
    """Whether a boot was tried to its end, or skipped; one that was stopped was not."""
    return any(r.status != "stopped" for r in records)
