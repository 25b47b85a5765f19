"""One boot inside a Modal container: the body of the function that `d3.modal_app` defines.

A module of its own, because the container imports it and has no more of D3's needs than pydantic, psutil and httpx.
"""

import sys
import tempfile
from pathlib import Path
from typing import Literal

from d3.boot import run
from d3.errors import D3Error
from d3.host import check_model, located
from d3.record import Boot, BootPlan, Frozen
from d3.store import LOG

WEIGHTS = "/weights"  # where the volume is mounted: one folder per model digest
USED = "d3-has-booted-here"
LOG_BYTES = 1_000_000


class Returned(Frozen):
    """What comes back from a container: the boot, and the end of its engine's log."""

    boot: Boot
    log: bytes


def boot(plan: BootPlan, weights: str = WEIGHTS) -> Returned:
    """Run one planned boot with the container's own Python and the weights of the plan's digest.

    Raises D3Error where the weights are not those, and KeyboardInterrupt where Modal took the container back: such a
    boot has no record, and Modal gives its input to another container (https://modal.com/docs/guide/preemption).
    """
    model = _model(Path(weights) / plan.model_digest)
    check_model(plan, model)
    coldness = _coldness()
    with tempfile.TemporaryDirectory(prefix="d3-") as name:
        found = run(located(plan, sys.executable, model, name), Path(name))
        if found.record.status == "stopped":
            raise KeyboardInterrupt
        log = Path(name) / LOG
        tail = log.read_bytes()[-LOG_BYTES:] if log.exists() else b""
    return Returned(boot=found.model_copy(update={"record": found.record.model_copy(update=coldness)}), log=tail)


def _model(folder: Path) -> str:
    inside = sorted(folder.glob("*"))
    if len(inside) != 1:
        raise D3Error(f"the volume holds {len(inside)} models at {folder}, not one",
                      "remove that folder (modal volume rm) and run the command again")  # fmt: skip
    return str(inside[0])


def _coldness() -> dict[str, Literal["L0", "L1"]]:
    """L0 where this is a Modal container and its first boot: a mark in its own disk says whether there was another."""
    import modal

    mark = Path(tempfile.gettempdir()) / USED
    if modal.is_local() or mark.exists():
        return {"coldness": "L1"}
    mark.touch()
    return {"coldness": "L0"}
