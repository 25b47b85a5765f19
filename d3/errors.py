"""Errors a user can act on: what went wrong, what to do, and the exit code."""

import difflib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class D3Error(Exception):
    """A failure with its remedy; command lines print it as one line and exit with `code` (2: wrong use or input).

    The message may quote a file that nobody has checked: its control characters are shown as escapes.
    """

    def __init__(self, message: str, remedy: str = "", code: int = 2) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.remedy = remedy
        self.code = code

    def __reduce__(self) -> tuple[type["D3Error"], tuple[str, str, int]]:
        """Keep the remedy when an error crosses a process boundary (launchers pickle exceptions)."""
        return type(self), (self.message, self.remedy, self.code)

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Unreachable(D3Error):
    """A store that does not answer now, and may later."""


def command(main: Callable[P, int]) -> Callable[P, int]:
    """A command line's `main`, whose errors are one line each: a D3Error's own code, 130 for Ctrl-C.

    A reader that has had enough (`| head`) is no error to speak of: 141, as a shell has it.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = main(*args, **kwargs)
            sys.stdout.flush()
            return code
        except D3Error as error:
            print(printable(f"error: {error}"), file=sys.stderr)
            return error.code
        except KeyboardInterrupt:
            print("error: stopped by the user", file=sys.stderr)
            return 128 + signal.SIGINT
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE

    return guarded


def printable(text: str, keep: str = "") -> str:
    """Text without control characters but those to `keep`: what is shown comes from a file nobody has checked yet."""
    if text.translate(dict.fromkeys(map(ord, keep))).isprintable():  # as nearly all is; a page is long
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one line, with the nearest known key where one was misspelt."""
    text = f"{error}\n{error.__cause__}" if error.__cause__ and str(error).startswith("Error merging") else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found := re.search(r"Could not override '([^']+)'", str(error)):
        return f"no configuration key is called {found[1]}; {_nearest(found[1])}"
    if found := re.search(r"Could not find '([^']+)'|In '[^']+': Could not find '([^']+)'", str(error)):
        options = [line for line in lines if re.fullmatch(r"[\w./-]+", line)]
        return f"there is no {found[1] or found[2]}" + (f"; known: {', '.join(options)}" if options else "")
    if found := re.search(r"merging override (\S+?)=.*Value '([^']*)' is not a valid bool", " ".join(lines)):
        levels = "on, off or both: on,off" if found[1] == "apc" else "true, false or both: true,false"
        return f"{found[1]}={found[2]} is not a level; use {found[1]}={levels}"
    return "; ".join(dict.fromkeys(line for line in lines if not line.startswith(("full_key", "object_type"))))


def _nearest(key: str) -> str:
    """What to write instead of a key that is not there: the nearest one of its own group."""
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    from d3.config import Config

    parts = key.split(".")
    group: type = Config
    for i, part in enumerate(parts):
        if not is_dataclass(group):  # a mapping such as engine.env, which takes any key
            break
        known = [f.name for f in fields(group)]
        if part not in known:
            if close := difflib.get_close_matches(part, known, n=1):
                return f"did you mean {'.'.join([*parts[:i], close[0], *parts[i + 1 :]])}?"
            return f"known{' in ' * bool(i)}{'.'.join(parts[:i])}: {', '.join(known)}"
        group = get_type_hints(group)[part]
    return f"to add it, write +{key}=..."
