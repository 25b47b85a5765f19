"""How a study stops: on Ctrl-C and on SIGTERM alike, the engine ended, the boot recorded, the parent run closed."""

import signal
from typing import Any

STOPPED = "stopped; the boots already done are kept, the same command goes on where this one stopped"


def stop_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM.

    A shell's background jobs start with SIGINT ignored; a signal that is sent all the same should stop the study.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt
