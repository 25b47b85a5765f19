"""A study that this process holds: locked against others, registered, its MLflow parent run open until it is closed."""

import atexit

from d3.attempts import Attempts
from d3.errors import D3Error
from d3.price import Price
from d3.reach import patiently
from d3.registration import Registration, short
from d3.spool import BOOT_S, END_S, Spool
from d3.store import lock_study, save_registration
from d3.tracking import Tracking


class OpenStudy:
    """Registers and logs a study before its first boot. Raises D3Error where another process holds it.

    Ctrl-C and errors may leave without `finish`; the parent run is then closed as KILLED at exit, never left RUNNING.
    """

    def __init__(self, registration: Registration, price: Price | None = None) -> None:
        self.registration = registration
        self._lock = lock_study(registration.id())
        save_registration(registration)
        self._spool = Spool(registration)
        self._study = self._spool.reopen()
        self._spool.recount()
        self.run_id = self._study.run_id
        if price is not None:
            patiently(lambda: Tracking().set_price(self._study, price), BOOT_S)
        self._open = True
        atexit.register(self.close, "KILLED")
        print(f"registered {short(registration.id())}: {registration.study}, {len(registration.cells)} cells x "
              f"{registration.boots} boots, MLflow run {self.run_id}", flush=True)  # fmt: skip
        self._spool.send(BOOT_S)

    def finish(self) -> int:
        """Close after the last boot, say how it went; returns how many boots are without a valid record."""
        counts = Attempts(self.registration).tally()
        waiting = self._spool.send(END_S)
        self.close("FAILED" if counts.missing else "FINISHED")
        print(counts.words())
        if waiting:
            print(f"{waiting} boots are not in MLflow yet; once it answers, send them: python -m d3.sync")
        return counts.missing

    def close(self, status: str) -> None:
        """Let go of the study, its parent run in this state; a second call does nothing."""
        if self._open:
            self._open = False
            self._lock.close()
            try:
                patiently(lambda: Tracking().close_study(self._study, status), BOOT_S)
            except D3Error as error:  # at exit nobody else would catch it
                print(f"{error.message}; the study's run is closed later: python -m d3.sync")
