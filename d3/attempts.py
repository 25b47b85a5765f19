"""Which attempts a registered boot has, which one settles it, what is due, and which number comes next."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from d3.errors import D3Error
from d3.flag import twin
from d3.plan import Locations, Planner
from d3.record import BootPlan, Failure, Frozen, Status, Timings
from d3.registration import CellSpec, Registration, Slot
from d3.store import RECORD, boots_dir, explain, read_file


class Attempt(BaseModel):
    """What of a boot's record decides whether it is tried again; the rest of the record is not even read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    boot_id: str
    stratum: str
    cell: str
    boot: int
    attempt: int
    status: Status
    reason: str
    timings: Timings
    failure: Failure | None = None

    def slot(self) -> Slot:
        """The registered place that it is an attempt at."""
        return Slot(boot=self.boot, stratum=self.stratum, cell=self.cell)


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


class Attempts:
    """All attempts at a study's boots that are on disk now, by place, each in the order of its attempts."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.at: Mapping[Slot, list[Attempt]] = defaultdict(list)
        for attempt in read(registration.id()):
            self.at[attempt.slot()].append(attempt)
        for tried in self.at.values():
            tried.sort(key=lambda a: a.attempt)

    def of(self, slot: Slot) -> Sequence[Attempt]:
        """The attempts at one place."""
        return self.at.get(slot, ())

    def next(self, slot: Slot) -> int:
        """The number of the next attempt, from 1."""
        return 1 + max((a.attempt for a in self.of(slot)), default=0)

    def settled(self, slot: Slot) -> Attempt | None:
        """The attempt that ends a place: a valid one, or the last one where no more may be tried; None: one is due."""
        mine = self.of(slot)
        if valid := [a for a in mine if a.status == "valid"]:
            return valid[-1]
        tried = [a for a in mine if a.status in {"failed", "void"}]
        return mine[-1] if mine and (len(tried) >= self.registration.max_attempts or self._refused(slot)) else None

    def due(self) -> Iterator[Slot]:
        """The places that may still be tried, in the registered order."""
        return (slot for slot in self.registration.order if self.settled(slot) is None)

    def plans(self, where: Locations) -> list[BootPlan]:
        """The plans of the boots that may still be tried, in the registered order."""
        planner = Planner(self.registration)
        return [planner.plan(slot, self.next(slot), where) for slot in self.due()]

    def refusal(self, slot: Slot) -> Attempt | None:
        """The boot that showed that the engine cannot run this cell's flag: one attempt says so, six would say no more.

        It must be the flag: the engine failed by itself and never ran here, while the same cell without the flag runs
        and never failed like that.
        """
        spec = self.registration.cell(slot.stratum, slot.cell)
        other = twin(spec, self.registration.cells)
        if spec.factors["invariant"] == "0" or other is None:
            return None
        own, its = self._of_cell(spec), self._of_cell(other)
        valid = any(a.status == "valid" for a in own)
        if valid or not any(a.status == "valid" for a in its) or any(map(_own_fault, its)):
            return None
        return next(filter(_own_fault, own), None)

    def seconds(self) -> list[float]:
        """How long each valid boot took, all included."""
        return [a.timings.total_s for tried in self.at.values() for a in tried if a.status == "valid"]

    def tally(self) -> Tally:
        """Count the study's boots."""
        valid = unavailable = 0
        reasons = []
        for slot in self.registration.order:
            mine = self.of(slot)
            if any(a.status == "valid" for a in mine):
                valid += 1
            elif self._refused(slot):
                unavailable += 1
            elif mine:
                reasons.append(f"{mine[-1].boot_id.partition('/')[2]}: {mine[-1].status}, {mine[-1].reason}")
        registered = len(self.registration.order)
        return Tally(registered=registered, valid=valid, unavailable=unavailable,
                     missing=registered - valid - unavailable, reasons=tuple(reasons[:5]))  # fmt: skip

    def _refused(self, slot: Slot) -> bool:
        """Whether a boot there ended for want of the flag: the engine refused it, or has none."""
        declared = self.registration.cell(slot.stratum, slot.cell).unavailable()
        return _ended(self.of(slot)) and bool(declared or self.refusal(slot))

    def _of_cell(self, spec: CellSpec) -> list[Attempt]:
        places = (Slot(boot=b, stratum=spec.stratum, cell=spec.cell) for b in range(self.registration.boots))
        return [a for slot in places for a in self.of(slot)]


def read(registration_id: str) -> Iterator[Attempt]:
    """Every attempt of a study on disk; a process reads each record once. Raises D3Error that names a damaged one."""
    try:
        folders = [entry.path for entry in os.scandir(boots_dir(registration_id))]
    except FileNotFoundError:
        return
    for folder in sorted(folders):
        path = Path(folder) / RECORD
        try:
            stamp = path.stat()
        except FileNotFoundError:  # planned, or running now
            continue
        yield _attempt(path, stamp.st_mtime_ns, stamp.st_ino)


@cache
def _attempt(path: Path, _modified_ns: int, _inode: int) -> Attempt:
    """One record's attempt. Records come by renaming, so a file of the same inode and time has the same content."""
    try:
        return Attempt.model_validate_json(read_file(path))
    except ValidationError as error:
        raise D3Error(f"{path}: {explain(error)}", "the file is damaged or of another version") from error


def _own_fault(attempt: Attempt) -> bool:
    return attempt.failure is not None and attempt.failure.kind == "engine_error"


def _ended(attempts: Sequence[Attempt]) -> bool:
    """Whether a boot was tried to its end, or skipped; one that was stopped was not."""
    return any(a.status != "stopped" for a in attempts)
