"""A study that this process holds: locked against others, registered, its MLflow parent run open until it is closed."""

import atexit
import sys

from d3.errors import D3Error
from d3.job import tally
from d3.registration import Registration, short
from d3.store import lock_study, save_registration
from d3.tracking import Tracking


class OpenStudy:
    """Registers and logs a study before its first boot. Raises D3Error where another process holds it.

    Ctrl-C and errors may leave without `finish`; the parent run is then closed as KILLED at exit, never left RUNNING.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self._lock = lock_study(registration.id())
        self._tracking = Tracking()
        save_registration(registration)
        self._study = self._tracking.open_study(registration)
        self.run_id = self._study.run_id
        self._open = True
        atexit.register(self.close, "KILLED")
        print(f"registered {short(registration.id())}: {registration.study}, {len(registration.cells)} cells x "
              f"{registration.boots} boots, MLflow run {self.run_id}", flush=True)  # fmt: skip

    def finish(self) -> int:
        """Close after the last boot, say how it went; returns how many boots are without a valid record."""
        counts = tally(self.registration)
        self.close("FAILED" if counts.missing else "FINISHED")
        print(counts.words())
        return counts.missing

    def close(self, status: str) -> None:
        """Let go of the study, its parent run in this state; a second call does nothing."""
        if self._open:
            self._open = False
            self._lock.close()
            try:
                self._tracking.close_study(self._study, status)
            except D3Error as error:  # at exit nobody else would catch it
                print(f"error: {error}", file=sys.stderr)
