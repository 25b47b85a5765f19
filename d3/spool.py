"""Boots on their way to MLflow: a store that is down costs no boot and stops no sweep, it gets them later.

Records lie in `runs/` first, so there is no queue to lose: what was sent is noted line by line beside them, and what
has no line is waiting. It goes with the next boot, at the end of the sweep, or with `python -m d3.sync`.
"""

from functools import partial
from pathlib import Path

from d3.errors import Unreachable
from d3.reach import patiently, tracking_uri
from d3.record import Frozen, sha256
from d3.registration import Registration
from d3.store import (
    DOWN,
    LOG,
    PARENT,
    RECORD,
    SENT,
    alone,
    append,
    boots_dir,
    load,
    load_boot,
    read_file,
    study_dir,
    write_atomic,
)
from d3.tracking import Study, Tracking

START_S, BOOT_S, END_S = 3.0, 5.0, 30.0  # how long to try: before a study, after a boot, at the end


class Parent(Frozen):
    """A study's run, and the store that it is in, by the digest of its address (which may hold a password)."""

    store: str
    study: Study


class Spool:
    """The boots of one study that MLflow does not have yet, for one store. Several processes may use it at once."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.id = registration.id()
        self.folder = study_dir(self.id)
        self.study: Study | None = None
        self.tracking: Tracking | None = None

    def open(self) -> Study:
        """The study's run, the registration logged; asks MLflow only where no process here did before.

        Raises D3Error where it must be asked and does not answer.
        """
        if self.study is None:
            self.study = self._known() or self.reopen()
        return self.study

    def reopen(self) -> Study:
        """Ask MLflow for the study's run whatever was known before, or make it; keep the answer. Raises D3Error."""
        self.study = patiently(lambda: Tracking().open_study(self.registration), START_S)
        known = Parent(store=sha256(tracking_uri()), study=self.study)
        write_atomic(self.folder / PARENT, known.model_dump_json() + "\n")
        return self.study

    def _known(self) -> Study | None:
        if not (self.folder / PARENT).exists():
            return None
        found = load(Parent, self.folder / PARENT)
        return found.study if found.store == sha256(tracking_uri()) else None

    def waiting(self) -> list[Path]:
        """The folders of the recorded boots that were not sent."""
        sent = self._sent()
        return [p.parent for p in sorted(boots_dir(self.id).glob(f"*/{RECORD}")) if p.parent.name not in sent]

    def count(self) -> int:
        """How many boots MLflow has, as far as was noted."""
        return len(self._sent())

    def _sent(self) -> set[str]:
        study, path = self.open(), self.folder / SENT
        notes = path.read_text().splitlines() if path.exists() else []
        return {name for run, _, name in (note.partition(" ") for note in notes) if run == study.run_id}

    def recount(self) -> None:
        """Ask MLflow which boots it has and note those alone: runs are deleted, stores restored. Raises D3Error."""
        study = self.open()
        with alone(self.folder / "sending"):
            has = patiently(lambda: Tracking().digests(study), START_S)
            files = sorted(boots_dir(self.id).glob(f"*/{RECORD}"))
            names = [p.parent.name for p in files if sha256(read_file(p).removesuffix(b"\n")) in has]
            write_atomic(self.folder / SENT, "".join(f"{study.run_id} {name}\n" for name in names))

    def send(self, seconds: float) -> int:
        """Send what waits, trying for so many seconds; returns how many boots still wait.

        The first process that meets an outage says so in one line and the one that ends it in another; during it every
        boot is sent at the first try or waits on.
        """
        if not self.waiting():
            return 0
        down = self.folder / DOWN
        with alone(self.folder / "sending"):
            waiting = self.waiting()  # another process may have sent them meanwhile
            known = down.exists()
            for number, folder in enumerate(waiting):
                try:
                    patiently(partial(self._send, folder), 0.0 if known and seconds < END_S else seconds)
                except Unreachable as error:
                    if not known:
                        write_atomic(down, f"{error.message}\n")
                        print(f"{error.message}; the sweep goes on, its boots are kept and sent later", flush=True)
                    return len(waiting) - number
            if known:
                down.unlink(missing_ok=True)
                print(f"MLflow answers again: {len(waiting)} waiting boots sent", flush=True)
        return 0

    def _send(self, folder: Path) -> None:
        study = self.open()
        self.tracking = self.tracking or Tracking()
        self.tracking.log_boot(study, load_boot(folder), folder / LOG)
        append(self.folder / SENT, f"{study.run_id} {folder.name}\n")
