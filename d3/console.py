"""Progress for people: which boot of how many, in which cell and phase, and how long is left."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.status import Status

from d3.record import BootRecord
from d3.registration import Registration, Slot


class Console:
    """One line when a boot begins and ends; between them a live line, where there is a terminal."""

    def __init__(self, registration: Registration, attempts: Sequence[BootRecord], slot: Slot) -> None:
        self.rich = RichConsole(highlight=False, soft_wrap=True)
        self.status: Status | None = None
        self.total = len(registration.order)
        self.place = registration.order.index(slot) + 1
        self.times = [r.timings.total_s for r in attempts if r.status == "valid"]
        stratum = "" if slot.stratum == "base" else f" {slot.stratum}"
        self.name = f"[{self.place:>{len(str(self.total))}}/{self.total}] boot {slot.boot} {slot.cell}{stratum}"

    def say(self, words: str) -> None:
        """One line about this boot."""
        self.rich.print(f"{self.name}: {words}", markup=False)

    @contextmanager
    def live(self) -> Iterator[None]:
        """A live line while the boot runs; in a pipe, nothing."""
        if not self.rich.is_terminal:
            yield
            return
        with self.rich.status(self.name) as self.status:
            yield

    def phase(self, words: str) -> None:
        """What the boot does now."""
        if self.status is not None:
            self.status.update(f"{self.name}: {words}{self._left(self.total - self.place + 1)}")

    def done(self, record: BootRecord, seconds: float) -> None:
        """How the boot ended, and the time left as the median of valid boots times the number left."""
        if record.status == "valid":
            self.times.append(record.timings.total_s)
        reason = f" ({record.reason})" if record.reason else ""
        self.say(f"{record.status}{reason} in {seconds:.0f} s{self._left(self.total - self.place)}")

    def _left(self, boots: int) -> str:
        if not self.times or not boots:
            return ""
        seconds = statistics.median(self.times) * boots
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
