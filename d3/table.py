"""The table that `analysis` makes of the boots: models only."""

from typing import Literal

from d3.divergence import Divergence
from d3.record import Boot, Endpoint, Expect, Frozen
from d3.statistics import Interval

Kind = Literal["agree", "cache", "boot", "unknown", "scattered", "void"]
State = Literal["absent", "void", "unavailable", "agrees", "diverges", "boot_state", "scattered"]
FlagState = Literal["absent", "unavailable", "inert", "works", "unknown"]

KINDS: tuple[Kind, ...] = ("agree", "cache", "boot", "unknown", "scattered", "void")
FIRST_DIFFERS: tuple[Kind, ...] = ("cache", "boot", "unknown")


class Outcome(Frozen):
    """One boot, prompt and endpoint. `cache`, `boot` and `unknown` are the causes of a first request that differs.

    `hashes` holds the endpoint's hashes per expected cache state, empty where the outcome is void.
    """

    boot_id: str
    stratum: str
    cell: str
    prompt: str
    endpoint: Endpoint
    kind: Kind
    why: str = ""
    hashes: dict[Expect, frozenset[str]]


class Selected(Frozen):
    """A boot and whether its answers count; `why` says why they do not."""

    boot: Boot
    counted: bool
    why: str


class Counts(Frozen):
    """One cell, prompt and endpoint: `k` of `n` valid boots in which the first request differs and the rest agree."""

    endpoint: Endpoint
    n: int
    k: int
    agree: int
    cache: int
    boot: int
    unknown: int
    scattered: int
    void: int
    interval: Interval
    null_bound: float | None
    distinct_cold: int
    distinct_warm: int
    cold_equals_off: bool | None
    void_reasons: tuple[str, ...]


class Pair(Frozen):
    """Two responses that parted inside a boot, by key, and the number of boots that showed just this pair."""

    first: str
    later: str
    boots: int
    divergence: Divergence


class PromptResult(Frozen):
    """One cell and prompt: counts per endpoint, and every distinct pair of first and later response."""

    prompt: str
    prompt_tokens: int | None
    counts: tuple[Counts, ...]
    divergences: tuple[Pair, ...]


class CellState(Frozen):
    """What a cell shows at one endpoint, with the reason in words."""

    endpoint: Endpoint
    state: State
    why: str


class CellResult(Frozen):
    """One cell: `key` is apc/invariant as the readings write it, `boots` the number that counted of `attempts`."""

    key: str
    cell: str
    factors: dict[str, str]
    boots: int
    attempts: int
    states: tuple[CellState, ...]
    prompts: tuple[PromptResult, ...]

    def state(self, endpoint: Endpoint) -> CellState:
        """The cell's state at this endpoint."""
        return next(s for s in self.states if s.endpoint == endpoint)


class Flag(Frozen):
    """What the batch-invariant flag did in a stratum."""

    state: FlagState
    why: str


class Excluded(Frozen):
    """A prompt that cannot answer the cache question: no boot with the cache on could use it."""

    prompt: str
    endpoint: Endpoint
    why: str


class StratumTable(Frozen):
    """One stratum: its cells, the flag's state, and the prompts that were left out."""

    stratum: str
    cells: tuple[CellResult, ...]
    flag: Flag
    excluded: tuple[Excluded, ...]


class Analysis(Frozen):
    """All boots with what became of them, every outcome of the counted ones, and a table per stratum."""

    selected: tuple[Selected, ...]
    outcomes: tuple[Outcome, ...]
    strata: tuple[StratumTable, ...]

    def counted(self) -> list[Boot]:
        """The boots that count, in the order of their ids."""
        return [s.boot for s in self.selected if s.counted]
