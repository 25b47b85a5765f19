"""The command line of `python -m d3.engine`: install an engine; boot one and say what it can do."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from d3 import boot as booting
from d3.capabilities import Capability, capabilities, studied
from d3.config import register_schema
from d3.errors import command, one_line
from d3.install import install, install_model
from d3.model import model_digest
from d3.plan import boot_plan
from d3.store import root


def check(name: str, overrides: Sequence[str]) -> tuple[Capability, ...]:
    """Boot an engine once with the cache on, ask it cold, warm and cold again, and say what it can do.

    `overrides`: keys as for a study. Nothing is registered or kept. Raises D3Error where the engine is not there.
    """
    from d3.callbacks import pins
    from d3.job import locations
    from d3.study import register

    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(root() / "conf"), version_base="1.3"):
        config = compose("config", ["protocol=brief", f"engine={name}", "boots=1", *overrides])
    registration = register([config], (), pins([config]))
    plan = boot_plan(registration, registration.order[0], 1, locations(config))
    with TemporaryDirectory() as folder:
        return capabilities(registration.cells[0], booting.run(plan, Path(folder), _say))


def _say(phase: str) -> None:
    print(f"\r{phase:60}", end="", file=sys.stderr, flush=True)


def table(found: Sequence[Capability]) -> str:
    """One line per capability, and the verdict."""
    words = {(True, True): "yes", (True, False): "yes", (False, True): "MISSING", (False, False): "no"}
    lines = [f"{c.name:18} {words[c.has, c.needed]:8} {c.evidence}" for c in found]
    missing = [c.name for c in found if c.needed and not c.has]
    verdict = f"no study can be run on it; missing: {', '.join(missing)}" if missing else "a study can be run on it"
    return "\n".join([*lines, verdict])


@command
def main(argv: list[str] | None = None) -> int:
    """0 done, or a study can be run on the engine; 1 it cannot; 2 wrong use."""
    parser = argparse.ArgumentParser(prog="python -m d3.engine", description="Engines: install one, check one.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    installing = verbs.add_parser("install", help="build its environment and its model, once")
    installing.add_argument("name", help="an engine of conf/engine that has a lock, such as vllm_cpu or llama_cpp")
    checking = verbs.add_parser("check", help="boot it once and say what it can do for a study")
    checking.add_argument("name", help="an engine of conf/engine, or of a folder that hydra.searchpath names")
    checking.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for a study, such as engine.python=PATH"
    )
    checking.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.verb == "install":
        return _install(options.name)
    try:
        found = check(options.name, options.overrides)
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
    rows = [c.model_dump() for c in found]
    said = json.dumps({"engine": options.name, "study": studied(found), "capabilities": rows}, indent=1)
    print(said if options.json else table(found))
    return 0 if studied(found) else 1


def _install(name: str) -> int:
    folder = install(name)
    model, place = install_model(name, folder)
    print(f"engine {name}: {folder}\nmodel {model}: {place}, digest {model_digest(place)}")
    return 0
