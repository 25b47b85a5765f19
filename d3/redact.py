"""Secrets that an engine may print: struck out of its log and its error line before either is stored."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from d3.store import write_atomic

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8  # characters: a shorter value is a word such as `false`, which would be struck out everywhere
STRUCK = "[secret]"


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables whose names look secret, each line of them, and passwords in any address."""
    found = [line.strip() for k, v in environ.items() if SECRET.search(k) for line in (v, *v.splitlines())]
    found += [password for v in environ.values() if (password := _password(v))]
    return tuple(sorted({v for v in found if len(v) >= SHORTEST}, key=len, reverse=True))


def without_password(address: str) -> str:
    """An address as it may be shown: what stands between `//` and `@` may be a user's name and password."""
    return re.sub(r"(?<=//)[^/@\s]*:[^/\s]*@", f"{STRUCK}@", address)


def struck(text: str, hidden: Iterable[str]) -> str:
    """The text without these values; the longest first, as one may hold another."""
    for value in hidden:
        text = text.replace(value, STRUCK)
    return text


def strike_file(path: Path, hidden: Iterable[str]) -> None:
    """The same for a file, which may be missing. Raises D3Error where it cannot be written."""
    if not path.is_file():
        return
    before = after = path.read_bytes()
    for value in hidden:
        after = after.replace(value.encode("utf-8", "surrogateescape"), STRUCK.encode())
    if after != before:
        write_atomic(path, after)


def _password(address: str) -> str | None:
    try:
        return urlsplit(address).password
    except ValueError:  # no address at all
        return None
