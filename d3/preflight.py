"""What must hold on this machine before a study is registered: the engine is there, and disk and memory suffice."""

import shutil
from collections.abc import Iterable
from typing import Any

import psutil

from d3.errors import D3Error
from d3.install import engine_python
from d3.store import runs_dir

FREE_DISK_GB = 0.5


def preflight(configs: Iterable[Any]) -> None:
    """Check every engine that the configurations name. Raises D3Error with what to do."""
    _room_for_records()
    for engine in {c.engine.name: c.engine for c in configs}.values():
        engine_python(engine.name, engine.lock, engine.python)
        _memory_for(engine.name, engine.min_memory_gb)


def _room_for_records() -> None:
    folder = next(p for p in (runs_dir(), *runs_dir().parents) if p.exists())
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_DISK_GB:
        raise D3Error(f"{runs_dir()} has {free:.1f} GB of disk left, a study needs {FREE_DISK_GB} GB",
                      "free some, or set D3_RUNS to a larger disk")  # fmt: skip


def _memory_for(name: str, needed_gb: float) -> None:
    free = psutil.virtual_memory().available / 1e9
    if free < needed_gb:
        raise D3Error(f"{free:.1f} GB of memory are free, engine {name} needs {needed_gb:.1f} GB",
                      "end other programs, or lower engine.min_memory_gb")  # fmt: skip
