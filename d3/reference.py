"""`python -m d3.reference OUT`: the reference pages of the documentation, written from the code and `conf/`.

Types, defaults and class docstrings come from the dataclasses of `conf/`, the record and the certificate; command lines
from their own argparse parsers. One line per field comes from the comments of `conf/config.yaml`, where it has one, and
else from `docs/reference/fields.yaml`. A field without a line, or a line without its field, is an error.
"""

import argparse
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from omegaconf import MISSING, DictConfig, OmegaConf
from pydantic import BaseModel

from d3.commands import command_parsers, verbs
from d3.config import Config, register_schema
from d3.errors import D3Error, command
from d3.record import BootPlan, BootRecord, Response
from d3.schema import Certificate
from d3.store import root, write_atomic

WORDS: dict[Any, str] = {
    str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "anything"
}  # fmt: skip
NOTE = (
    "<!-- Written by `python -m d3.reference docs/reference`; change the code, or fields.yaml, and run it again. -->\n"
)

Said = Mapping[str, Mapping[str, str]]


def pages() -> dict[str, str]:
    """Every page by its file name. Raises D3Error where code and descriptions do not fit together."""
    said = descriptions()
    roots: dict[str, tuple[type, ...]] = {
        "config": (Config,), "record": (BootPlan, BootRecord, Response), "certificate": (Certificate,)
    }  # fmt: skip
    home: dict[str, str] = {}  # which page describes a class: the first that reaches it
    owned = {page: _reached(tops, page, home) for page, tops in roots.items()}
    _one_line_each([cls for classes in owned.values() for cls in classes], said)
    found = {
        "config": _config([cls for cls in owned["config"] if cls is not Config], said, home),
        "record": _models("The record of a boot", said["pages"]["record"], owned["record"], said, home),
        "certificate": _models("The certificate", said["pages"]["certificate"], owned["certificate"], said, home),
        "commands": _commands(said["pages"]["commands"]),
    }
    return {f"{page}.md": NOTE + "\n" + text.rstrip() + "\n" for page, text in found.items()}


def descriptions() -> dict[str, dict[str, str]]:
    """One line per field, by class; Config's from the comments of `conf/config.yaml`, all others from fields.yaml."""
    said = _yaml(root() / "docs/reference/fields.yaml")
    comments = _comments((root() / "conf/config.yaml").read_text())
    if twice := sorted(comments.keys() & said["Config"].keys()):
        raise D3Error(f"fields.yaml explains Config.{twice[0]} as conf/config.yaml does", "remove it from fields.yaml")
    return {**said, "Config": {**said["Config"], **comments}}


def _yaml(path: Path) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    return dict(found)


def _comments(text: str) -> dict[str, str]:
    """The comment behind each top-level key of a YAML file."""
    split = [line.partition("#") for line in text.splitlines() if line[:1].isalpha() and "#" in line]
    return {left.partition(":")[0]: comment.strip() for left, _, comment in split}


def _one_line_each(classes: Sequence[type], said: Said) -> None:
    """Every field described once, and nothing else described."""
    for cls in classes:
        for name in _fields(cls):
            _line(cls, name, said)
    known = {c.__name__: inspect.get_annotations(c) for cls in classes for c in cls.__mro__}
    for owner in said.keys() - {"pages"}:
        for name in said[owner]:
            if name not in known.get(owner, {}):
                raise D3Error(f"fields.yaml explains {owner}.{name}, which does not exist", "remove or rename it")


def _line(cls: type, name: str, said: Said) -> str:
    """A field's description: from the class that declares it."""
    owner = next(c.__name__ for c in cls.__mro__ if name in inspect.get_annotations(c))
    try:
        return said[owner][name]
    except KeyError:
        raise D3Error(f"{owner}.{name} has no description", "add a line to docs/reference/fields.yaml") from None


def _fields(cls: Any) -> list[str]:
    if issubclass(cls, BaseModel):
        return list(cls.model_fields)
    return [f.name for f in dataclasses.fields(cls)]


def _reached(tops: Sequence[type], page: str, home: dict[str, str]) -> list[type]:
    """These classes and those of their fields, in the order in which a reader meets them."""
    found: list[type] = []
    waiting = list(tops)
    while waiting:
        cls = waiting.pop(0)
        if cls.__name__ in home:
            continue
        home[cls.__name__] = page
        found.append(cls)
        hints = get_type_hints(cls)
        waiting = [c for name in _fields(cls) for c in _classes_in(hints[name])] + waiting
    return found


def _classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and (issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint)):
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)


def _type(hint: Any, page: str, home: Mapping[str, str]) -> str:
    """A type in words; a class as a link to its section."""
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in {Union, types.UnionType}:
        return " or ".join(_type(i, page, home) for i in inner)
    if origin is dict:
        return f"mapping of {_type(inner[0], page, home)} to {_type(inner[1], page, home)}"
    if origin in {list, tuple}:
        return f"list of {_type(inner[0], page, home)}"
    there = home[hint.__name__]
    return f"[{hint.__name__}]({'' if there == page else there + '.md'}#{hint.__name__.lower()})"


def _models(title: str, intro: str, classes: Sequence[type], said: Said, home: Mapping[str, str]) -> str:
    page = home[classes[0].__name__]
    parts = [f"# {title}\n\n{intro.strip()}\n"]
    for cls in classes:
        hints = get_type_hints(cls)
        rows = [f"| `{n}` | {_type(hints[n], page, home)} | {_cell(_line(cls, n, said))} |" for n in _fields(cls)]
        parts.append(f"## {cls.__name__}\n\n{_doc(cls)}\n\n" + _table(("field", "type", "meaning"), rows))
    return "\n".join(parts)


def _doc(cls: Any) -> str:
    return _plain(inspect.getdoc(cls) or "")


def _plain(text: str) -> str:
    """Braces and single quotes are plain text in Markdown; only < would be read as HTML."""
    return text.replace("<", "&lt;")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "&#124;").replace("\n", " ")


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows, ""])


def _config(classes: Sequence[type], said: Said, home: Mapping[str, str]) -> str:
    cfg = _composed()
    hints = get_type_hints(Config)
    rows = []
    for name in _fields(Config):
        group = next(_classes_in(hints[name]), None)
        value = cfg[name].name if group else cfg[name]
        shown = _chosen(name) if group else _value(value)
        rows.append(
            f"| `{name}` | {_type(hints[name], 'config', home)} | {shown} | {_cell(_line(Config, name, said))} |"
        )
    parts = [f"# Configuration keys\n\n{said['pages']['config'].strip()}\n", f"## Config\n\n{_doc(Config)}\n"]
    parts.append(_table(("key", "type", "default", "meaning"), rows))
    groups = {c: n for n in _fields(Config) for c in _classes_in(hints[n])}
    for cls in classes:
        parts.append(f"## {cls.__name__}\n\n{_doc(cls)}\n")
        if cls in groups:
            parts.append(_options(groups[cls]))
        own = get_type_hints(cls)
        lines = [
            f"| `{f.name}` | {_type(own[f.name], 'config', home)} | {_default(f)} | {_cell(_line(cls, f.name, said))} |"
            for f in dataclasses.fields(cls)
        ]
        parts.append(_table(("key", "type", "default", "meaning"), lines))
    return "\n".join(parts)


def _composed() -> DictConfig:
    """The configuration that `python -m d3` without a word more gives."""
    register_schema()
    with initialize_config_dir(str(root() / "conf"), version_base="1.3"):
        return compose("config")


def _chosen(group: str) -> str:
    """The option of a group that the defaults list of `conf/config.yaml` names."""
    listed = _yaml(root() / "conf/config.yaml")["defaults"]
    return next(f"`{entry[group]}`" for entry in listed if isinstance(entry, dict) and group in entry)


def _lines(path: Path) -> list[str]:
    """A file's lines but the one that tells Hydra its package."""
    return [line for line in path.read_text().splitlines() if not line.startswith("# @package")]


def _options(group: str) -> str:
    """The options of a group with the comment that each file begins with."""
    lines = []
    for path in sorted((root() / "conf" / group).glob("*.yaml")):
        head = takewhile(lambda line: line.startswith("# ") and line[2] != " ", _lines(path))
        words = " ".join(line.removeprefix("# ") for line in head)
        words = words.rpartition(". ")[0] + "." if words.endswith(":") else words  # a list or code would follow
        lines.append(f"- `{group}={path.stem}`" + (f": {_plain(words)}" if words else ""))
    return "\n".join([f"Options, in `conf/{group}/`:\n", *lines, ""])


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "empty"
    return "required" if field.default == MISSING else _value(field.default)


def _value(value: Any) -> str:
    if value == "":
        return "empty"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def _commands(intro: str) -> str:
    parts = [f"# Commands\n\n{intro.strip()}\n"]
    for parser in command_parsers().values():
        parts.append(_command(parser, "##"))
        parts += [_command(sub, "###") for _, sub in sorted(verbs(parser).items())]
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, level: str) -> str:
    actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
    usage = " ".join([parser.prog, *(_usage(a) for a in actions)])
    words = [f"{level} {parser.prog}\n", f"```text\n{usage}\n```\n"]
    words += [_plain(" ".join(text.split())) + "\n" for text in (parser.description, parser.epilog) if text]
    shown = [a for a in actions if not isinstance(a, argparse._SubParsersAction)]
    rows = [f"| `{_spelt(a)}` | {_cell(a.help or '')} | {_said_default(a)} |" for a in shown]
    return "\n".join(words) + ("\n" + _table(("argument", "meaning", "default"), rows) if rows else "")


def _spelt(action: argparse.Action) -> str:
    """An argument as it is typed."""
    if action.nargs == 0:
        return action.option_strings[0]
    value = str(action.metavar or action.dest).upper()
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    value += " ..." if action.nargs in {"+", "*"} else ""
    return f"{action.option_strings[0]} {value}" if action.option_strings else value


def _usage(action: argparse.Action) -> str:
    return f"[{_spelt(action)}]" if action.option_strings and not action.required else _spelt(action)


def _said_default(action: argparse.Action) -> str:
    if not action.option_strings or action.required:
        return "required"
    if action.default in (None, False, sys.executable):  # paths of this machine are none of the reader's
        return ""
    default = action.default
    if isinstance(default, Path) and default.is_relative_to(root()):  # wherever the checkout lies
        default = default.relative_to(root())
    return _value(" ".join(map(str, default)) if isinstance(default, list) else default)


@command
def main(argv: list[str] | None = None) -> int:
    """Write the pages; 0 when they are written."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.reference", description="Write the reference pages of the documentation."
    )
    parser.add_argument("out", type=Path, help="folder for the pages, docs/reference in this repository")
    out: Path = parser.parse_args(argv).out
    for name, text in pages().items():
        write_atomic(out / name, text)
    print(f"wrote {', '.join(pages())} in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
