"""Pairs of cells compared by the registered test, and which reading each pair speaks for. Pure."""

from collections.abc import Iterator, Sequence

from d3.record import ENDPOINTS, Endpoint, Frozen
from d3.registration import Registration
from d3.statistics import compare_rates
from d3.table import FIRST_DIFFERS, CellResult, Outcome, StratumTable


class Contrast(Frozen):
    """Cells `a` and `b`: the first request differs in `k` of `n` boots of each; `p` by the registered test.

    `prompt` None counts a boot once, whichever prompt differs. `supports` names registered readings.
    """

    endpoint: Endpoint
    prompt: str | None
    a: str
    b: str
    k_a: int
    n_a: int
    k_b: int
    n_b: int
    p: float | None
    supports: tuple[str, ...]
    words: str


def contrasts(registration: Registration, table: StratumTable, outcomes: Sequence[Outcome]) -> tuple[Contrast, ...]:
    """Cache on against off at each level of the flag, and the flag on against off at each cache setting."""
    left_out = {(e.endpoint, e.prompt) for e in table.excluded}
    found = []
    for endpoint in ENDPOINTS:
        prompts = [p.id for p in registration.prompts if (endpoint, p.id) not in left_out]
        own = [o for o in outcomes if o.stratum == table.stratum and o.endpoint == endpoint and o.prompt in prompts]
        for one, other in cell_pairs(table.cells):
            for prompt in [None, *prompts] if len(prompts) > 1 else prompts:
                rates = [rate(own, cell, prompt) for cell in (one, other)]
                found.append(_contrast(registration, endpoint, prompt, (one, other), rates))
    return tuple(found)


def cell_pairs(cells: Sequence[CellResult]) -> Iterator[tuple[CellResult, CellResult]]:
    """(on, off) at equal flag, then (flag off, flag on) at equal cache setting."""
    for factor, other in (("invariant", "apc"), ("apc", "invariant")):
        for i, a in enumerate(cells):
            for b in cells[i + 1 :]:
                if a.factors[factor] == b.factors[factor] and a.factors[other] != b.factors[other]:
                    first = a if a.factors[other] in {"on", "0"} else b
                    yield (first, b if first is a else a)


def rate(outcomes: Sequence[Outcome], cell: CellResult, prompt: str | None) -> tuple[int, int]:
    """In how many boots of how many the first request differs, for one prompt or for any."""
    valid = [o for o in outcomes if o.cell == cell.cell and prompt in {None, o.prompt} and o.kind != "void"]
    return len({o.boot_id for o in valid if o.kind in FIRST_DIFFERS}), len({o.boot_id for o in valid})


def _contrast(
    registration: Registration,
    endpoint: Endpoint,
    prompt: str | None,
    cells: tuple[CellResult, CellResult],
    rates: Sequence[tuple[int, int]],
) -> Contrast:
    (k_a, n_a), (k_b, n_b) = rates
    a, b = cells
    p = compare_rates(k_a, n_a, k_b, n_b, registration.test)
    supports, words = _meaning(a, b, rates, p, registration.confidence)
    named = {r.name for r in registration.readings}
    return Contrast(
        endpoint=endpoint, prompt=prompt, a=a.key, b=b.key, k_a=k_a, n_a=n_a, k_b=k_b, n_b=n_b, p=p,
        supports=tuple(s for s in supports if s in named), words=words,
    )  # fmt: skip


def _meaning(
    a: CellResult, b: CellResult, rates: Sequence[tuple[int, int]], p: float | None, confidence: float
) -> tuple[tuple[str, ...], str]:
    """The readings that a pair speaks for, and what it shows in words."""
    (k_a, n_a), (k_b, n_b) = rates
    if p is None:
        return (), "one side has no valid boot, so there is nothing to compare"
    if k_a == k_b == 0:
        return ("none",), "the first request differs on neither side"
    significant = p <= 1 - confidence
    if significant and k_a / n_a < k_b / n_b:
        return (), f"the first request differs more often with {b.key}"
    if a.factors["apc"] != b.factors["apc"]:
        return _cache_meaning(a.factors["invariant"], k_b, significant)
    return _flag_meaning(a.factors["apc"], k_a, k_b, significant)


TOO_FEW = "too few boots to tell"


def _cache_meaning(invariant: str, k_off: int, significant: bool) -> tuple[tuple[str, ...], str]:
    if significant:
        readings = ("closed_by_flag", "open_gap") if invariant == "0" else ("open_gap",)
        return (() if k_off else readings), "the prefix cache makes the difference"
    return (("boot_state",), "it differs without the prefix cache too") if k_off else ((), TOO_FEW)


def _flag_meaning(apc: str, k_without: int, k_with: int, significant: bool) -> tuple[tuple[str, ...], str]:
    if apc != "on":
        return (), "without the prefix cache, where nothing should differ"
    if k_with and k_without:
        return ("open_gap",), "the batch-invariant mode " + ("lessens it" if significant else "does not change it")
    return (("closed_by_flag",), "the batch-invariant mode closes it") if significant else ((), TOO_FEW)
