"""What of this machine may move a result, by allow-list: processor, memory, kernel, GPU and driver. Nothing else."""

import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import psutil

AT_ONCE = "D3_AT_ONCE"  # set by whoever runs boots side by side, so that every record says so


def boots_at_once() -> str:
    """How many boots share this machine's device, by the word of whoever runs them; 1 where nobody says."""
    return os.environ.get(AT_ONCE, "1")


def machine() -> dict[str, str]:
    """Facts of the machine as text, and how many boots share it now; the GPU's only where a driver answers."""
    return {**_machine(), "boots_at_once": boots_at_once()}


@lru_cache(maxsize=1)
def _machine() -> dict[str, str]:
    facts = {
        "os": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": str(psutil.cpu_count(logical=True)),
        "memory_gib": str(round(psutil.virtual_memory().total / 2**30)),
    }
    return facts | _gpu()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {k.strip(): v.strip() for k, v in fields.items()}
    isa = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in values.get("flags", "").split()]
    return f"{values.get('model name', platform.machine())} ({', '.join(isa) or platform.machine()})"


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, driver = done.stdout.strip().splitlines()[0].partition(", ")
    return {"gpu": name, "driver": driver}
