"""Errors a user can act on: what went wrong, what to do, and the exit code."""

import difflib
import re


class D3Error(Exception):
    """A failure with its remedy; command lines print it as one line and exit with `code` (2: wrong use or input)."""

    def __init__(self, message: str, remedy: str = "", code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code

    def __reduce__(self) -> tuple[type["D3Error"], tuple[str, str, int]]:
        """Keep the remedy when an error crosses a process boundary (launchers pickle exceptions)."""
        return type(self), (self.message, self.remedy, self.code)

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


def one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one line, with the nearest known key where one was misspelt."""
    text = f"{error}\n{error.__cause__}" if error.__cause__ and str(error).startswith("Error merging") else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found := re.search(r"Could not override '([^']+)'", str(error)):
        return f"no configuration key is called {found[1]}; {_nearest(found[1])}"
    if found := re.search(r"Could not find '([^']+)'|In '[^']+': Could not find '([^']+)'", str(error)):
        options = [line for line in lines if re.fullmatch(r"[\w./-]+", line)]
        return f"there is no {found[1] or found[2]}" + (f"; known: {', '.join(options)}" if options else "")
    return "; ".join(dict.fromkeys(line for line in lines if not line.startswith(("full_key", "object_type"))))


def _nearest(key: str) -> str:
    from dataclasses import fields

    from d3.config import Config

    if "." in key:
        return f"to add it, write +{key}=..."
    known = [f.name for f in fields(Config)]
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
