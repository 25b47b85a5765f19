"""What must hold on this machine before a study is registered: the engine is there, and disk and memory suffice."""

import shutil
from collections.abc import Iterable
from typing import Any

import psutil

from d3.errors import D3Error
from d3.install import engine_python
from d3.store import runs_dir

FREE_DISK_GB = 0.5


def preflight(configs: Iterable[Any], at_once: int = 1) -> None:
    """Check every engine that the configurations name, `at_once` of it here. Raises D3Error with what to do."""
    _room_for_records()
    for engine in {c.engine.name: c.engine for c in configs}.values():
        if engine.transport == "attach":
            continue
        engine_python(engine.name, engine.lock, engine.python, engine.executable)
        _memory_for(engine.name, engine.min_memory_gb, at_once)


def _room_for_records() -> None:
    folder = next(p for p in (runs_dir(), *runs_dir().parents) if p.exists())
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_DISK_GB:
        raise D3Error(f"{runs_dir()} has {free:.1f} GB of disk left, a study needs {FREE_DISK_GB} GB",
                      "free some, or set D3_RUNS to a larger disk")  # fmt: skip


def _memory_for(name: str, each_gb: float, at_once: int) -> None:
    free, needed = psutil.virtual_memory().available / 1e9, at_once * each_gb
    if free >= needed:
        return
    room = int(free // each_gb)
    if at_once > 1 and room:
        raise D3Error(f"{free:.1f} GB of memory are free, {at_once} boots of {name} at once need {needed:.1f} GB",
                      f"say workers={room}, or lower engine.min_memory_gb")  # fmt: skip
    raise D3Error(f"{free:.1f} GB of memory are free, engine {name} needs {each_gb:.1f} GB",
                  "end other programs, or lower engine.min_memory_gb")  # fmt: skip
