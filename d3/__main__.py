"""`python -m d3`: the Hydra entry. `-m apc=on,off invariant=0,1` runs the study; without -m, one boot."""

import os
import sys
from typing import Any

from d3.errors import D3Error, one_line
from d3.signals import STOPPED, lead_sweep, stop_on_signals

DRY_RUN = {"--dry-run": "dry_run=true"}  # every setting is a key; this one is also what one types


def main() -> int:
    """Run Hydra; returns the exit code (0 good, 1 a boot has no valid answer, 2 wrong use, 130 stopped)."""
    import hydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from d3.config import register_schema
    from d3.starter import Starter
    from d3.store import runs_dir

    register_schema()
    sys.argv = [DRY_RUN.get(word, word) for word in sys.argv]
    os.environ["D3_RUNS"] = str(runs_dir())  # jobs in other processes must agree on it
    # Hydra would print its errors over several lines and exit by itself; with this it lets them out.
    own_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "1") and os.environ.get("D3_TRACE")
    stop_on_signals()
    lead_sweep()
    starter = Starter()

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def job(cfg: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig

        from d3.job import run
        from d3.launch import run_job, side_by_side

        if side_by_side(HydraConfig.get()):
            return run_job(run, cfg)
        try:
            return run(cfg, starter if HydraConfig.get().mode == RunMode.MULTIRUN else None)
        except D3Error as error:
            if own_trace:
                raise
            # What stops one boot (a full disk, MLflow down) would stop all that follow: leave at once.
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.code)

    try:
        with starter:
            job()
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130
    except D3Error as error:
        if own_trace:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except (HydraException, OmegaConfBaseException, OverflowError) as error:  # the last: a number beyond all floats
        if own_trace:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
