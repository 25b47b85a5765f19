"""`python -m d3.sync`: send every recorded boot under `runs/` that MLflow lacks, and close studies that were killed."""

import argparse
import sys

from d3.attempts import Attempts
from d3.errors import D3Error, Unreachable, command
from d3.reach import patiently
from d3.registration import Registration
from d3.spool import END_S, START_S, Spool
from d3.store import find_registration, lock_study, runs_dir
from d3.tracking import Tracking


def sync() -> int:
    """Send all studies' boots; returns how many boots are now in the store. Raises D3Error where it does not answer.

    A study that another process runs now is left open, and its boots are sent.
    """
    paths = sorted((runs_dir() / "studies").glob("*/registration.json"))
    return sum(_sent(find_registration(path.parent.name)) for path in paths)


def _sent(registration: Registration) -> int:
    spool = Spool(registration)
    try:
        lock = lock_study(registration.id())
    except D3Error:  # it is being run
        spool.send(END_S)
        return spool.count()
    with lock:
        before = patiently(lambda: Tracking().state(registration), START_S)
        study = spool.reopen()
        try:
            spool.recount()
            if waiting := spool.send(END_S):
                raise Unreachable(f"{waiting} boots of {registration.study} could not be sent", "see above, try again")
        finally:
            Tracking().close_study(study, _closed(registration, before))
    return spool.count()


def _closed(registration: Registration, before: str | None) -> str:
    """The state of a study that nobody runs: one whose process was killed stands as RUNNING in MLflow."""
    attempts = Attempts(registration)
    if not attempts.tally().missing:
        return "FINISHED"
    if before is None:
        return "KILLED" if attempts.at else "SCHEDULED"
    return "KILLED" if before == "RUNNING" else before


@command
def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.sync", description="Send the boots under runs/ to MLflow again."
    )
    parser.parse_args(argv)
    print(f"{sync()} boots are in MLflow\nnext: python -m d3.certify")
    return 0


if __name__ == "__main__":
    sys.exit(main())
