"""Progress for people: which boot of how many, in which cell and phase, and how long is left."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from d3.record import BootPlan, BootRecord
from d3.registration import Registration, Slot

REFRESHES = 4  # per second


class Console:
    """A line when a boot begins and one when it ends; in a terminal a live line instead of the first.

    `times`: seconds of the valid boots so far.
    """

    def __init__(self, registration: Registration, times: Sequence[float], slot: Slot) -> None:
        self.rich = RichConsole(highlight=False, soft_wrap=True)
        self.total = len(registration.order)
        self.place = registration.order.index(slot) + 1
        self.times = list(times)
        factors = registration.cell(slot.stratum, slot.cell).factors
        stratum = "" if slot.stratum == "base" else f" {slot.stratum}"
        self.short = f"[{self.place:>{len(str(self.total))}}/{self.total}] boot {slot.boot}"
        self.key = f"{self.short} {factors['apc']}/{factors['invariant']}{stratum}"
        self.name = f"{self.short} {slot.cell}{stratum}"
        self.words = ""
        self.requests: tuple[str, ...] = ()
        self.began = time.monotonic()
        self.display: Live | None = None

    def say(self, words: str) -> None:
        """One line about this boot."""
        self.rich.print(f"{self.name}: {words}", markup=False)

    @contextmanager
    def live(self, plan: BootPlan) -> Iterator[None]:
        """While the boot runs a live line, which ends with it; in a pipe or a dumb terminal one line, and no more."""
        self.requests = tuple(f"{r.prompt} {r.phase}" for r in plan.requests)
        self.began = time.monotonic()
        if not (self.rich.is_interactive and self.rich.file.isatty()):
            self.say(f"begins{self._left(self.total - self.place + 1)}")
            yield
            return
        self.display = Live(
            get_renderable=self._line, console=self.rich, refresh_per_second=REFRESHES, transient=True
        )  # fmt: skip
        try:
            with self.display:
                yield
        finally:
            self.display = None

    def phase(self, words: str) -> None:
        """What the boot does now, as `d3.boot` names it: a prompt and its phase while requests run."""
        self.words = words
        if self.display is not None:
            self.display.refresh()

    def done(self, record: BootRecord, seconds: float) -> None:
        """How the boot ended, and the time left as the median of valid boots times the number left."""
        if record.status == "valid":
            self.times.append(record.timings.total_s)
        reason = f" ({record.reason})" if record.reason else ""
        self.say(f"{record.status}{reason} in {seconds:.0f} s{self._left(self.total - self.place)}")

    def _line(self) -> Text:
        """The live line in the longest form that fits the terminal, which may have been resized."""
        spent = time.monotonic() - self.began
        left = self._left(self.total - self.place + 1, spent)
        count = number = ""
        if self.words in self.requests:
            index, of = self.requests.index(self.words) + 1, len(self.requests)
            count, number = f", request {index} of {of}", f" {index}/{of}"
        brief = f"{self.words}{number}, {spent:.0f} s{left.replace('about ', '')}"
        forms = (f"{self.name}: {self.words}{count}, {spent:.0f} s{left}", f"{self.name}: {brief}",
                 f"{self.key}: {brief}", f"{self.short}: {brief}")  # fmt: skip
        room = self.rich.width - 1
        return Text(next((form for form in forms if len(form) <= room), forms[-1][:room]), no_wrap=True)

    def _left(self, boots: int, spent: float = 0.0) -> str:
        if not self.times or not boots:
            return ""
        seconds = max(0.0, statistics.median(self.times) * boots - spent)
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
