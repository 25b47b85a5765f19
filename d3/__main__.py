"""`python -m d3`: the Hydra entry. `-m apc=on,off invariant=0,1` runs the study; without -m, one boot."""

import difflib
import os
import re
import signal
import sys
from typing import Any

from d3.errors import D3Error


def main() -> int:
    """Run Hydra; returns the exit code (0 good, 1 a boot has no valid answer, 2 wrong use, 130 stopped)."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from d3.config import register_schema
    from d3.store import runs_dir
    from d3.sweeper import install

    register_schema()
    install()
    os.environ["D3_RUNS"] = str(runs_dir())  # jobs in other processes must agree on it
    # Hydra would print its errors over several lines and exit by itself; with this it lets them out.
    own_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "1") and os.environ.get("D3_TRACE")
    signal.signal(signal.SIGTERM, _terminated)

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def job(cfg: DictConfig) -> Any:
        from d3.job import run

        return run(cfg)

    try:
        job()
    except KeyboardInterrupt:
        print("stopped; the boots already done are kept, the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except D3Error as error:
        if own_trace:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except (HydraException, OmegaConfBaseException) as error:
        if own_trace:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one line, with the nearest known key where one was misspelt."""
    text = f"{error}\n{error.__cause__}" if error.__cause__ and str(error).startswith("Error merging") else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found := re.search(r"Could not override '([^']+)'", str(error)):
        return f"no configuration key is called {found[1]}; {_nearest(found[1])}"
    if found := re.search(r"Could not find '([^']+)'|In '[^']+': Could not find '([^']+)'", str(error)):
        options = [line for line in lines if re.fullmatch(r"[\w./-]+", line)]
        return f"there is no {found[1] or found[2]}" + (f"; known: {', '.join(options)}" if options else "")
    return "; ".join(dict.fromkeys(line for line in lines if not line.startswith(("full_key", "object_type"))))


def _nearest(key: str) -> str:
    from dataclasses import fields

    from d3.config import Config

    known = [f.name for f in fields(Config)]
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _terminated(number: int, _frame: Any) -> None:
    """SIGTERM ends a study as Ctrl-C does: engine stopped, boot recorded, parent run closed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
