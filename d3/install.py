"""Engines in environments of their own, and the model they serve: built once under the user's cache, then found."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from d3.errors import D3Error
from d3.model import model_digest
from d3.store import cache_dir, read_json, root, write_atomic

READY = "d3-ready.json"
NEEDED_GB = 5.0


def lock_file(lock: str) -> Path:
    """The committed lock of an engine's environment."""
    return root() / "locks" / f"{lock}.txt"


def lock_digest(lock: str | None) -> str:
    """SHA-256 of a lock file; empty for an engine that D3 does not install."""
    if not lock:
        return ""
    try:
        return hashlib.sha256(lock_file(lock).read_bytes()).hexdigest()
    except OSError as error:
        raise D3Error(f"engine.lock={lock}: there is no {lock_file(lock)}",
                      "name a lock under locks/, or engine.lock=null with engine.python") from error  # fmt: skip


def engine_dir(lock: str) -> Path:
    """Where the environment of a lock lives: another lock, another folder, so versions stand side by side."""
    return cache_dir() / "engines" / f"{lock}-{lock_digest(lock)[:12]}"


def engine_python(name: str, lock: str | None, python: str | None) -> str:
    """The Python that runs an engine: the configured one, else the installed one. Raises D3Error when there is none."""
    if python:
        found = shutil.which(python)
        if not found:
            raise D3Error(f"engine.python={python} is not an executable", "name the engine environment's python")
        return found
    if not lock:
        raise D3Error(f"engine {name} has no environment of its own", "say engine.python=/path/to/its/python")
    if not (engine_dir(lock) / READY).exists():
        raise D3Error(f"engine {name} is not installed", f"run: python -m d3.engine install {name}")
    return str(engine_dir(lock) / "bin" / "python")


def install(name: str) -> Path:
    """Build the environment and the model of an engine if they are not there yet; returns the environment's folder."""
    lock = _lock_of(name)
    if lock is None:
        raise D3Error(f"engine {name} has no lock, so its environment is yours to make",
                      "on a GPU machine: pip install 'd3[cuda]', then engine.python=/path/to/its/python")  # fmt: skip
    folder = engine_dir(lock)
    if not (folder / READY).exists():
        _room_for(folder)
        print(f"installing {name} into {folder} (about 3 GB, minutes)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _build(folder, lock)
        write_atomic(folder / READY, json.dumps({"lock": lock_digest(lock)}) + "\n")
    _install_plugin(folder)
    return folder


def model_dir(name: str, package: str | None, path: str | None) -> str:
    """Where a model lies: the configured path, else its converted checkpoint. Raises D3Error when it is not there."""
    if path:
        if not Path(path).exists():
            raise D3Error(f"model.path={path} does not exist", "name a folder with a checkpoint")
        return str(Path(path).absolute())
    if not package:
        raise D3Error(f"model {name} names neither a package nor a path", "say model.path=/path/to/checkpoint")
    folder = cache_dir() / "models" / name
    if not (folder / READY).exists():
        raise D3Error(f"model {name} is not there", "run: python -m d3.engine install vllm_cpu")
    return str(folder)


def convert_model(python: Path, name: str, package: str, file: str, digest: str | None) -> Path:
    """Turn a packaged GGUF file into a bf16 checkpoint, once; checked against `digest` where one is registered."""
    folder = cache_dir() / "models" / name
    if not (folder / READY).exists():
        print(f"converting {name} into {folder} (270 MB)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        script = Path(__file__).with_name("convert.py")
        _run([str(python), str(script), package, file, str(folder)], "the model could not be converted")
        write_atomic(folder / READY, json.dumps({"digest": model_digest(str(folder))}) + "\n")
    found = model_digest(str(folder))
    ready = read_json(folder / READY)
    if found != (digest or (ready["digest"] if isinstance(ready, dict) else "")):
        raise D3Error(f"the model in {folder} has digest {found[:12]}, not the registered one",
                      f"remove the folder and run: python -m d3.engine install vllm_cpu")  # noqa: F541  # fmt: skip
    return folder


def _lock_of(name: str) -> str | None:
    """The lock that an engine's YAML names, itself or through the engine it builds on."""
    config: Any = OmegaConf.to_container(OmegaConf.load(_engine_file(name)))
    if config.get("lock"):
        return str(config["lock"])
    return next((lock for base in config.get("defaults", []) if (lock := _lock_of(base))), None)


def _engine_file(name: str) -> Path:
    known = sorted(p.stem for p in (root() / "conf" / "engine").glob("*.yaml"))
    if name not in known:
        raise D3Error(f"no engine is called {name}", f"known: {', '.join(known)}")
    return root() / "conf" / "engine" / f"{name}.yaml"


def _room_for(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < NEEDED_GB:
        raise D3Error(f"{folder.parent} has {free:.1f} GB free, the engine needs {NEEDED_GB:.0f}",
                      "free some, or set D3_CACHE to a larger disk")  # fmt: skip


def _build(folder: Path, lock: str) -> None:
    uv = [sys.executable, "-m", "uv"]
    _run([*uv, "venv", "--quiet", "--python", "3.11", str(folder)], "the engine's environment could not be made")
    sync = [*uv, "pip", "sync", "--python", str(folder / "bin" / "python"), "--compile-bytecode", str(lock_file(lock))]
    if _quiet(sync) == 0:
        return
    # Not where pip is configured to look: PyTorch's own CPU index has it, which uv knows by the backend's name.
    _run([*sync, "--torch-backend", "cpu"], "the engine's packages could not be installed")


def _install_plugin(folder: Path) -> None:
    """Put this checkout's D3 beside the engine (without dependencies), so that vLLM finds D3's CPU mode."""
    python = folder / "bin" / "python"
    plugin = root() / "d3" / "cpu_invariant.py"
    installed = next(folder.glob("lib/python*/site-packages/d3/cpu_invariant.py"), None)
    if installed and installed.read_bytes() == plugin.read_bytes():
        return
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), "--no-deps",
               "--reinstall-package", "d3", "--compile-bytecode", str(root())]  # fmt: skip
    _run(command, "D3's plugin could not be installed beside the engine")


def _environment() -> dict[str, str]:
    """The environment for uv: it is told where pip is configured to find local wheels."""
    env = dict(os.environ)
    found = subprocess.run([sys.executable, "-m", "pip", "config", "get", ":env:.find-links"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    links = found.stdout.strip()
    if not links:
        found = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.find-links"],
                               capture_output=True, text=True, check=False)  # fmt: skip
        links = found.stdout.strip()
    if links:
        env.setdefault("UV_FIND_LINKS", links.replace(" ", ","))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.pop("VIRTUAL_ENV", None)
    return env


def _quiet(command: Sequence[str]) -> int:
    return subprocess.run(list(command), env=_environment(), check=False, stderr=subprocess.DEVNULL).returncode


def _run(command: Sequence[str], failure: str) -> None:
    try:
        done = subprocess.run(list(command), env=_environment(), check=False, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise D3Error(f"{failure}: {error}", "check that the command exists") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise D3Error(f"{failure}: {last}", f"try it by hand: {' '.join(command)}")


def main(argv: list[str] | None = None) -> int:
    """The command line of `python -m d3.engine`."""
    parser = argparse.ArgumentParser(prog="python -m d3.engine", description="An engine's own environment.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    installing = verbs.add_parser("install", help="build it, and convert the default model, once")
    installing.add_argument("name", help="an engine of conf/engine, such as vllm_cpu")
    options = parser.parse_args(argv)
    try:
        folder = install(options.name)
        model = OmegaConf.load(root() / "conf" / "model" / "smollm2_135m.yaml")
        checkpoint = convert_model(folder / "bin" / "python", model.name, model.package, model.file, model.digest)
    except D3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(f"engine {options.name}: {folder}\nmodel {model.name}: {checkpoint}, digest {model_digest(str(checkpoint))}")
    return 0
