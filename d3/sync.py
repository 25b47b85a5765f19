"""`python -m d3.sync`: send every recorded boot under `runs/` to MLflow; what is there already stays as it is."""

import argparse
import sys

from d3.errors import D3Error
from d3.store import LOG, find_registration, load_boot, recorded, runs_dir
from d3.tracking import Tracking


def sync() -> int:
    """Send all studies' boots; returns how many boots are now in the store. Raises D3Error."""
    tracking, sent = Tracking(), 0
    for path in sorted((runs_dir() / "studies").glob("*/registration.json")):
        registration = find_registration(path.parent.name)
        study = tracking.open_study(registration)
        for folder, _ in recorded(registration.id()):
            tracking.log_boot(study, load_boot(folder), folder / LOG)
            sent += 1
        tracking.close_study(study, "FINISHED")
    return sent


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.sync", description="Send the boots under runs/ to MLflow again."
    )
    parser.parse_args(argv)
    try:
        print(f"{sync()} boots are in MLflow\nnext: python -m d3.certify")
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
