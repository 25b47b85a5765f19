"""What is fixed before the first boot: the resolved study, its id, and the order of boots and prompts. No I/O."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from d3.record import Expect, Frozen, Message, canonical_json, sha256

STUDY_FACTORS = ("apc", "invariant")


class Phase(Frozen):
    """One place in the request sequence; requests with the same `series` share a cache salt."""

    name: str
    series: int
    expect: Expect


class Protocol(Frozen):
    """The request order inside a boot. `salted` False sends no salt at all, as the seed study did."""

    name: str
    salted: bool
    phases: tuple[Phase, ...]


class Prompt(Frozen):
    """A registered prompt, sent through the model's chat template."""

    id: str
    messages: tuple[Message, ...]


class ReadingSpec(Frozen):
    """A pre-registered reading: holds when every cell of one `any_of` clause is in one of the named states."""

    name: str
    any_of: tuple[dict[str, tuple[str, ...]], ...]
    disposition: str
    says: str


class PriorArt(Frozen):
    """One source searched before the study, and what it has."""

    source: str
    says: str


class CellSpec(Frozen):
    """One cell of one stratum; `settings` is the whole resolved configuration of its boots, without paths."""

    cell: str
    stratum: str
    factors: dict[str, str]
    settings: dict[str, Any]

    def unavailable(self) -> str:
        """Why the engine has no batch-invariant mode, as its YAML says; empty where it has one, or none is asked."""
        levels = self.settings.get("engine", {}).get("factors", {}).get("invariant", {})
        level = self.factors["invariant"]
        return "" if level == "0" else str(levels.get(level, {}).get("unavailable") or "")


class Slot(Frozen):
    """One place in the registered order of boots."""

    boot: int
    stratum: str
    cell: str


class Repeats(Frozen):
    """What a study repeats: a certificate by its digest. `number` counts the repetitions on one machine from 1."""

    certificate: str
    number: int


class Registration(Frozen):
    """The whole study as it was fixed before the first boot. Its id is the SHA-256 of its canonical JSON.

    `repeats` is left out of the JSON where it is None, so that ids of studies from before it was there stay.
    """

    schema_version: int = 1
    study: str
    question: str
    axes: dict[str, tuple[str, ...]]
    boots: int
    min_valid_boots: int
    max_attempts: int
    seed: int
    protocol: Protocol
    prompts: tuple[Prompt, ...]
    tie_gap: float
    confidence: float
    test: str
    readings: tuple[ReadingSpec, ...]
    prior_art_searched: str
    prior_art: tuple[PriorArt, ...]
    cells: tuple[CellSpec, ...]
    order: tuple[Slot, ...]
    repeats: Repeats | None = Field(default=None, exclude_if=lambda value: value is None)

    def id(self) -> str:
        """The registration id: 64 hex digits."""
        return sha256(canonical_json(self))

    def cell(self, stratum: str, cell: str) -> CellSpec:
        """The cell of that name; KeyError when it was not registered."""
        for spec in self.cells:
            if (spec.stratum, spec.cell) == (stratum, cell):
                return spec
        raise KeyError(f"{stratum} {cell}")


def short(registration_id: str) -> str:
    """The first 12 digits, which name folders and runs."""
    return registration_id[:12]


def cell_name(factors: Mapping[str, str]) -> str:
    """`apc=on invariant=0`: the study's two factors."""
    return " ".join(f"{k}={factors[k]}" for k in STUDY_FACTORS)


def stratum_name(factors: Mapping[str, str]) -> str:
    """Every other swept key, or `base` when none was swept."""
    return " ".join(f"{k}={v}" for k, v in sorted(factors.items()) if k not in STUDY_FACTORS) or "base"


def block_order(cells: Sequence[tuple[str, str]], boots: int, seed: int) -> tuple[Slot, ...]:
    """Randomised blocks: block k holds boot k of every (stratum, cell), shuffled, so drift lands on no cell."""
    order: list[Slot] = []
    for boot in range(boots):
        block = sorted(cells)
        random.Random(f"{seed}:block:{boot}").shuffle(block)  # noqa: S311
        order += [Slot(boot=boot, stratum=s, cell=c) for s, c in block]
    return tuple(order)


def prompt_order(prompts: Sequence[Prompt], boot: int, seed: int) -> tuple[Prompt, ...]:
    """The order of prompts in a boot: a permutation per boot index, the same in every cell of a block."""
    shuffled = list(prompts)
    random.Random(f"{seed}:prompts:{boot}").shuffle(shuffled)  # noqa: S311
    return tuple(shuffled)


def repetition(original: Registration, boots: int, repeats: Repeats) -> Registration:
    """The same study with `boots` boots per cell, registered anew as a repetition; its blocks are drawn as then."""
    names = [(c.stratum, c.cell) for c in original.cells]
    changes = {
        "boots": boots,
        "min_valid_boots": min(original.min_valid_boots, boots),
        "order": block_order(names, boots, original.seed),
        "repeats": repeats,
    }
    return original.model_copy(update=changes)


def differences(one: Registration, other: Registration) -> list[str]:
    """The fields in which two registrations differ, by dotted path; empty when they are the same."""
    return diff_paths("", one.model_dump(mode="json"), other.model_dump(mode="json"))


def diff_paths(path: str, a: Any, b: Any) -> list[str]:
    """The dotted paths below `path` at which two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted({*a, *b}) for d in diff_paths(f"{path}.{k}".strip("."), a.get(k), b.get(k))]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in diff_paths(f"{path}[{i}]", x, y)]
    return [] if a == b else [path]
