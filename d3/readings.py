"""The pre-registered readings: the first that holds is the verdict, and anything else is unexplained."""

from collections.abc import Mapping, Sequence

from d3.record import Frozen
from d3.registration import ReadingSpec

UNEXPLAINED = "unexplained"


class Evaluated(Frozen):
    """One reading, whether it holds, and why."""

    name: str
    held: bool
    why: str
    disposition: str
    says: str


def evaluate(specs: Sequence[ReadingSpec], states: Mapping[str, str]) -> tuple[Evaluated, ...]:
    """Every reading against the states of one stratum and endpoint: cells as `on/0`, and `flag`; others are absent.

    All are evaluated, not only up to the first that holds, so that a reader sees how near the others were.
    """
    return tuple(_evaluate(spec, states) for spec in specs)


def first_held(evaluated: Sequence[Evaluated]) -> Evaluated:
    """The reading that decides; `unexplained` where none holds, which is never rounded to a neighbour."""
    nothing = Evaluated(
        name=UNEXPLAINED,
        held=True,
        why="none of the registered readings holds",
        disposition="UNEXPLAINED",
        says="What was seen fits none of the registered readings.",
    )
    return next((e for e in evaluated if e.held), nothing)


def _evaluate(spec: ReadingSpec, states: Mapping[str, str]) -> Evaluated:
    misses = []
    for clause in spec.any_of:
        # Sorted: a registration that was read from a file has its keys in another order, and must read the same.
        state = {where: states.get(where, "absent") for where in sorted(clause, key=_place)}
        wrong = [f"{w} is {is_}, needed {' or '.join(clause[w])}" for w, is_ in state.items() if is_ not in clause[w]]
        if not wrong:
            return _result(spec, True, ", ".join(f"{where} is {is_}" for where, is_ in state.items()))
        misses.append(" and ".join(wrong))
    return _result(spec, False, "; ".join(misses))


def _place(where: str) -> tuple[str, bool]:
    """on/0, off/0, on/1, off/1, flag."""
    apc, _, invariant = where.partition("/")
    return invariant or "flag", apc != "on"


def _result(spec: ReadingSpec, held: bool, why: str) -> Evaluated:
    return Evaluated(name=spec.name, held=held, why=why, disposition=spec.disposition, says=spec.says)
