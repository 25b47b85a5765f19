"""How a study stops: on Ctrl-C and on SIGTERM alike, the engine ended, the boot recorded, the parent run closed."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPED = "stopped; the boots already done are kept, the same command goes on where this one stopped"
SWEEP = "D3_SWEEP_PID"
PR_SET_PDEATHSIG = 1


def stop_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM.

    A shell's background jobs start with SIGINT ignored; a signal that is sent all the same should stop the study.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)


def lead_sweep() -> None:
    """Note this process as the one that was started, for the jobs that a launcher may run in others."""
    os.environ[SWEEP] = str(os.getpid())


def end_with_sweep() -> None:
    """In a worker process that the sweep's own process started: be killed when that one is (Linux prctl).

    joblib's workers live on for minutes after a killed sweep, and would go on to boot engines for nobody.
    """
    sweep = os.environ.get(SWEEP)
    if sweep == str(os.getppid()):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(sweep):  # it ended before this took effect
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def shielded() -> Iterator[list[int]]:
    """Hold Ctrl-C off inside, so that an engine is stopped to the end; gives the signals that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signal handlers belong to the main thread
        yield came
        return
    old = {
        number: signal.signal(number, lambda n, _frame: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C wait until a process that was just started has an owner who can end it."""
    with shielded() as came:
        yield
    if came:
        raise KeyboardInterrupt


def _terminated(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt
