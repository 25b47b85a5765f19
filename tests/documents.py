"""Command lines in Markdown: find them in code, and say what is wrong with one without running it."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from markdown_it import MarkdownIt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conftest import TESTS
from d3.commands import command_parsers
from d3.config import register_schema
from d3.errors import D3Error, one_line
from d3.install import lock_digest
from d3.plan import Locations, boot_plan
from d3.study import Pins, register

ROOT = TESTS.parent
OWN_CONF = "/path/to/conf"  # how documents write a folder of the reader's own
STUDY = ("python", "-m", "d3", "-m", "apc=on,off", "invariant=0,1")
COMMAND = re.compile(r"python -m d3\b|^(\w+=\S+ )*(make|mlflow) |^\.\.\. ")
SETTINGS = re.compile(r"[a-z_]+(\.[a-z_]+)*=\S*( [a-z_]+(\.[a-z_]+)*=\S*)*")


def code(path: Path) -> Iterator[str]:
    """Every line of code in a document, in blocks and inline; of a program's output only what it advises."""
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        if token.type in {"fence", "code_block"}:
            lines = token.content.replace("\\\n", " ").splitlines()
            output = token.info == "text"
            yield from (line.removeprefix("next: ") for line in lines if not output or line.startswith("next: "))
        spans = [child.content for child in token.children or () if child.type == "code_inline"]
        yield from (
            re.sub(r"^python -m d3\.\w+( [a-z]+)?$", r"\g<0> --help", span) for span in spans
        )  # the name of a command


def command_lines(path: Path) -> list[tuple[str, ...]]:
    """The commands of a document, word by word: D3's, make's and MLflow's."""
    found: list[tuple[str, ...]] = []
    for line in code(path):
        if not COMMAND.search(line):
            continue
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in {";", "&&", "||", "|"}:
                found += [tuple(words)] if words else []
                words = []
            elif words or not re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", word):  # variables before a command
                words.append(word)
    return [c for c in found if COMMAND.search(" ".join(c) + " ")]


def settings(path: Path) -> list[str]:
    """Configuration keys with a value, as inline code names them."""
    return [word for span in code(path) if SETTINGS.fullmatch(span) for word in span.split()]


def files_of_the_reader(paths: Sequence[Path], folder: Path) -> None:
    """Write every YAML block that names its place below /path/to/conf into `folder`."""
    for path in paths:
        for token in MarkdownIt("commonmark").parse(path.read_text()):
            if token.type == "fence" and (named := re.match(rf"# {OWN_CONF}/(\S+)\n", token.content)):
                (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / named[1]).write_text(token.content)


@cache
def problem(command: tuple[str, ...], conf: Path) -> str:
    """What is wrong with a command; empty when it would be taken. `conf` stands in for the reader's own folder."""
    words = list(command)
    if words[0] == "...":
        return study_problem([*STUDY[3:], *words[1:]], conf)
    if words[0] == "make":
        return make_problem(words[1:])
    if words[:2] == ["mlflow", "run"]:
        return mlflow_problem(words[2:])
    if Path(words[0]).name != "python" or words[1] != "-m":
        return f"not a command that is known here: {' '.join(words)}"
    if words[2] == "d3":
        return study_problem(words[3:], conf)
    return module_problem(" ".join(["python", *words[1:3]]), words[3:])


parsers = cache(command_parsers)


def module_problem(name: str, words: Sequence[str]) -> str:
    """Whether a module's own parser takes these arguments. Brackets are a document's way to say optional."""
    if name not in parsers():
        source = ROOT / "d3" / f"{name.rpartition('.')[2]}.py"
        if list(words) not in ([], ["--help"]) or not source.exists() or "__main__" not in source.read_text():
            return f"there is no {name}"
        return ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parsers()[name].parse_args([w.removeprefix("[").removesuffix("]") for w in words])
    except SystemExit as left:
        return said.getvalue().strip().rpartition("\n")[2] if left.code else ""
    return ""


def study_problem(words: Sequence[str], conf: Path) -> str:
    """Whether Hydra composes these overrides, every cell of the sweep is a study's, and the engine has all levels."""
    try:
        options = get_args_parser().parse_args([w.replace(OWN_CONF, str(conf)) for w in words])
        overrides = OverridesParser.create().parse_overrides(options.overrides)
        swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
        if swept and not options.multirun:
            return f"a sweep over {swept[0]} without -m"
        jobs = BasicSweeper.split_arguments(overrides, None)[0]
        # The first and the last cell have every level of each two-level axis; others are rare and named alike.
        configs = [composed(tuple(job)) for job in dict.fromkeys(map(tuple, (jobs[0], jobs[-1])))]
        return study_of(configs, swept)
    except (D3Error, HydraException, OmegaConfBaseException) as error:
        return one_line(error)
    except SystemExit:
        return "Hydra does not take these options"


def study_of(configs: Sequence[DictConfig], swept: Sequence[str]) -> str:
    """Register a study and plan the first boot of each of its cells."""
    pins = Pins({c.engine.name: lock_digest(c.engine.lock) for c in configs}, {c.model.name: "0" * 64 for c in configs})
    registration = register(configs, swept, pins)
    for slot in (s for s in registration.order if s.boot == 0):
        boot_plan(registration, slot, 1, Locations(python="python", model="model"))
    return ""


@cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """The configuration under these overrides; the same words are composed once."""
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


def make_problem(words: Sequence[str]) -> str:
    """Whether make knows how to make these targets, and the Makefile these variables."""
    known = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in (w.partition("=")[0] for w in words if "=" in w):
        if name not in known:
            return f"the Makefile has no variable {name}"
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def mlflow_problem(words: Sequence[str]) -> str:
    """Whether MLproject has this entry point with these parameters."""
    points: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "MLproject"), resolve=False)
    pairs = list(pairwise(words))
    entry = next((value for option, value in pairs if option in {"-e", "--entry-point"}), "main")
    if words[:1] != ["."]:
        return "the project is ."
    if entry not in points["entry_points"]:
        return f"MLproject has no entry point {entry}"
    known = points["entry_points"][entry].get("parameters", {})
    given = [value.partition("=")[0] for option, value in pairs if option in {"-P", "--param-list"}]
    return next((f"entry point {entry} has no parameter {name}" for name in given if name not in known), "")
