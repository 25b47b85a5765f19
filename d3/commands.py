"""The argparse parser of every `python -m d3.X`, found by looking: for reference pages and tests of documents."""

import argparse
import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from d3.errors import D3Error
from d3.store import root


class _Parser(Exception):
    """Carries a parser out of the command that made it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command line by what one types: each module of d3 whose `main(argv)` uses argparse."""
    package = root() / "d3"
    paths = [p for p in sorted([*package.glob("*.py"), *package.glob("*/__main__.py")]) if _has_command(p)]
    found = [_parser_of(import_module(".".join(p.relative_to(root()).with_suffix("").parts)).main) for p in paths]
    return {parser.prog: parser for parser in sorted(found, key=lambda p: p.prog)}


def _has_command(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    uses = any(isinstance(n, ast.Import) and any(a.name == "argparse" for a in n.names) for n in tree.body)
    mains = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    return uses and any(m.args.args and m.args.args[0].arg == "argv" for m in mains)


def _parser_of(main: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """The parser that a command builds, caught as it is asked for its help: nothing else of the command runs."""

    def caught(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Parser(parser)

    with patch.object(argparse.ArgumentParser, "print_help", caught):
        try:
            main(["--help"])
        except _Parser as found:
            return found.parser
    raise D3Error(f"{main.__module__} prints no help", "parse argv before anything else")


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's verbs, such as `install`."""
    return {name: sub for a in parser._actions if isinstance(a, argparse._SubParsersAction)
            for name, sub in a.choices.items()}  # fmt: skip
