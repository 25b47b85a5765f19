"""The verdict of one stratum at each endpoint, and the answer in one plain sentence. Pure."""

from collections.abc import Iterable, Sequence

from d3.contrasts import Contrast, rate
from d3.limits import OWN_MODE
from d3.readings import UNEXPLAINED, Evaluated, evaluate, first_held
from d3.record import ENDPOINTS, Endpoint, Frozen
from d3.registration import ReadingSpec, Registration
from d3.statistics import null_bound
from d3.table import Outcome, StratumTable

OWN_WORDS = "the mode measured is {}, which says nothing about vLLM's own flag."
WHAT: dict[Endpoint, str] = {"text": "bytes", "tokens": "tokens", "logprobs": "log-probabilities"}


class Verdict(Frozen):
    """The readings of one endpoint: the first that holds gives the disposition, `unexplained` where none does.

    `answer` is one sentence; `notes` are what a reader must know beside it.
    """

    endpoint: Endpoint
    reading: str
    disposition: str
    answer: str
    notes: tuple[str, ...]
    readings: tuple[Evaluated, ...]


def verdicts(
    registration: Registration,
    table: StratumTable,
    outcomes: Sequence[Outcome],
    compared: Sequence[Contrast],
    modes: Sequence[str],
) -> tuple[Verdict, ...]:
    """The verdict at every endpoint. `modes`: the batch-invariant modes in force, by the engine's word."""
    specs = [_with_mode(spec, modes) for spec in registration.readings]
    found = []
    for endpoint in ENDPOINTS:
        states = {c.key: c.state(endpoint).state for c in table.cells}
        readings = evaluate(specs, {**states, "flag": table.flag.state})
        chosen = first_held(readings)
        own = [o for o in outcomes if o.stratum == table.stratum and o.endpoint == endpoint]
        rates = {c.key: rate(own, c, None) for c in table.cells}
        seen = ", ".join(f"{k} of {n} in {cell}" for cell, (k, n) in rates.items())
        notes = [
            *_states(chosen, table, endpoint),
            *_bound(chosen, rates.values(), registration.confidence),
            *(f"{c.a} against {c.b}: {c.words} (p = {c.p:.2g})." for c in compared if _weak(c, endpoint)),
            *_between_boots(table, endpoint),
            *(f"Prompt {e.prompt} is left out: {e.why}." for e in table.excluded if e.endpoint == endpoint),
        ]
        says = chosen.says.rstrip(".")
        answer = (
            f"{WHAT[endpoint].capitalize()}: {chosen.disposition}. {says}; boots whose first request differs: {seen}."
        )
        found.append(
            Verdict(
                endpoint=endpoint,
                reading=chosen.name,
                disposition=chosen.disposition,
                answer=answer,
                notes=tuple(notes),
                readings=readings,
            )
        )
    return tuple(found)


def _with_mode(spec: ReadingSpec, modes: Sequence[str]) -> ReadingSpec:
    """A reading about the flag, measured with a mode that is not the engine's own flag, must say so."""
    own = [m for m in modes if m.startswith(OWN_MODE)]
    about_flag = any(not where.endswith("/0") for clause in spec.any_of for where in clause)
    if not own or not about_flag:
        return spec
    return spec.model_copy(update={"says": f"{spec.says.rstrip('.')}; {OWN_WORDS.format(own[0])}"})


def _states(chosen: Evaluated, table: StratumTable, endpoint: Endpoint) -> list[str]:
    """What the cells and the flag showed, where the reading alone does not say it."""
    states = [(c.key, c.state(endpoint)) for c in table.cells]
    found = [f"{key} is {s.state}: {s.why}." for key, s in states if s.state in {"void", "unavailable", "scattered"}]
    if chosen.name == UNEXPLAINED:
        found += [
            f"{key} is {s.state}: {s.why}." for key, s in states if s.state in {"diverges", "boot_state", "agrees"}
        ]
    if table.flag.state in {"inert", "unavailable", "unknown"}:
        found.append(f"The flag is {table.flag.state}: {table.flag.why}.")
    return found


def _bound(chosen: Evaluated, rates: Iterable[tuple[int, int]], confidence: float) -> list[str]:
    """A null is never printed without its bound."""
    clean = [n for k, n in rates if n and not k]
    if not clean or chosen.name == "void":
        return []
    room = f"a true rate of up to {null_bound(min(clean), confidence):.1%} (one-sided {confidence:.0%})"
    return [f"0 of {min(clean)} boots leaves room for {room}."]


def _weak(c: Contrast, endpoint: Endpoint) -> bool:
    return c.endpoint == endpoint and c.p is not None and not c.supports and c.k_a + c.k_b > 0


def _between_boots(table: StratumTable, endpoint: Endpoint) -> list[str]:
    """Boots that agree inside themselves can still differ from each other."""
    found = []
    for cell in table.cells:
        for prompt in cell.prompts:
            counts = next(c for c in prompt.counts if c.endpoint == endpoint)
            if max(counts.distinct_cold, counts.distinct_warm) > 1:
                several = f"{counts.distinct_cold} distinct cold and {counts.distinct_warm} distinct warm responses"
                found.append(f"{cell.key} {prompt.prompt}: {several} over {counts.n} boots, so boots differ as well.")
    return found
