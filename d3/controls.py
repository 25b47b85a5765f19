"""Controls that a study adds as strata of its own: one that must differ and one that must change nothing. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from d3.record import Endpoint, Frozen
from d3.registration import Registration
from d3.table import Outcome, StratumTable


class Control(Frozen):
    """`instrument` must differ, `negative` must change nothing; `held` None where there was too little to judge by."""

    kind: Literal["instrument", "negative"]
    stratum: str
    against: str | None
    held: bool | None
    words: str


def temperature(registration: Registration, stratum: str) -> float:
    """The highest temperature of a stratum's cells."""
    return max(float(c.settings.get("temperature", 0.0)) for c in registration.cells if c.stratum == stratum)


def controls(
    registration: Registration, tables: Sequence[StratumTable], outcomes: Sequence[Outcome]
) -> tuple[Control, ...]:
    """Every control that the registered strata make possible."""
    found = [_instrument(t, outcomes) for t in tables if temperature(registration, t.stratum) > 0]
    factors = {t.stratum: _other_factors(registration, t.stratum) for t in tables}
    for i, table in enumerate(tables):
        for base in tables[:i]:
            one, other = factors[base.stratum], factors[table.stratum]
            if {k for k in one if one[k] != other[k]} == {"prefix_hash"}:
                found.append(_negative(table, base, outcomes))
                break
    return tuple(found)


def _other_factors(registration: Registration, stratum: str) -> Mapping[str, str]:
    spec = next(c for c in registration.cells if c.stratum == stratum)
    return {k: v for k, v in spec.factors.items() if k not in {"apc", "invariant"}}


def _instrument(table: StratumTable, outcomes: Sequence[Outcome]) -> Control:
    seen = [o for o in outcomes if o.stratum == table.stratum and o.endpoint == "text" and o.kind != "void"]
    moved = {o.boot_id for o in seen if o.kind != "agree"}
    boots = {o.boot_id for o in seen}
    held = bool(moved) if boots else None
    words = f"sampled responses must differ inside a boot: they did in {len(moved)} of {len(boots)} boots"
    return Control(kind="instrument", stratum=table.stratum, against=None, held=held, words=words)


def _negative(table: StratumTable, base: StratumTable, outcomes: Sequence[Outcome]) -> Control:
    """Another hash of cached blocks must leave every response as it was, at every endpoint and cache state."""
    same, changed = 0, []
    ours, theirs = _hash_sets(table, outcomes), _hash_sets(base, outcomes)
    for place in sorted(ours.keys() & theirs.keys()):
        if ours[place] == theirs[place]:
            same += 1
        else:
            changed.append(" ".join(place))
    held = None if not same + len(changed) else not changed
    words = f"another block hash must change nothing: {same} of {same + len(changed)} sets of responses are the same"
    words += f"; the first that changed: {changed[0]}" if changed else ""
    return Control(kind="negative", stratum=table.stratum, against=base.stratum, held=held, words=words)


def _hash_sets(table: StratumTable, outcomes: Sequence[Outcome]) -> dict[tuple[str, str, Endpoint, str], set[str]]:
    found: dict[tuple[str, str, Endpoint, str], set[str]] = {}
    for o in (o for o in outcomes if o.stratum == table.stratum):
        for expect, hashes in o.hashes.items():
            found.setdefault((o.cell, o.prompt, o.endpoint, expect), set()).update(hashes)
    return found
