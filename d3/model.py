"""The digest of a model's weights: what a registration pins and every boot is checked against."""

import hashlib
from functools import lru_cache
from pathlib import Path

from d3.errors import D3Error

WEIGHTS = (".safetensors", ".gguf", ".bin")


def model_digest(folder: str) -> str:
    """SHA-256 over a checkpoint's weight files (name and SHA-256 of each, sorted by name), or over one weight file.

    Weights alone: a configuration names the library version that wrote it, and what tokenizer and chat template make
    of a prompt is recorded with every request. Raises D3Error where there are no weights.
    """
    path = Path(folder)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in WEIGHTS)
    if not files:
        raise D3Error(f"{folder} holds no model weights", "name a folder with a checkpoint")
    return _digest_of(tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files))


@lru_cache(maxsize=8)
def _digest_of(stamps: tuple[tuple[str, int, int], ...]) -> str:
    """Read files again only when their size or time changed, so that every boot can ask for the digest."""
    lines = []
    for name, _, _ in stamps:
        with Path(name).open("rb") as file:
            lines.append(f"{Path(name).name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
