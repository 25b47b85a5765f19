"""From boots to the table: which boots count, and a table per stratum (PROTOCOL, From boots to a table). Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

import pandas as pd

from d3.cells import KindCounts, StratumBoots
from d3.classify import check_boot, classify, why_not_counted
from d3.errors import D3Error
from d3.record import ENDPOINTS, Boot, BootRecord, canonical_json
from d3.registration import Registration, differences, short
from d3.table import KINDS, Analysis, Outcome, Selected, StratumTable

KEY = ["stratum", "cell", "prompt", "endpoint"]


def analyse(
    registration: Registration, boots: Sequence[Boot], known: Mapping[str, Registration] | None = None
) -> Analysis:
    """The table of these boots, in whatever order they come.

    `known`: other registrations by id, to say in what they differ. Raises D3Error where boots do not belong together.
    """
    chosen = select(registration, boots, known or {})
    counted = [s.boot for s in chosen if s.counted]
    outcomes = tuple(o for boot in counted for o in classify(registration, boot))
    strata = dict.fromkeys(c.stratum for c in registration.cells)
    kinds = count_kinds(registration, outcomes)
    tables = tuple(_table(registration, name, chosen, outcomes, kinds) for name in strata)
    return Analysis(selected=chosen, outcomes=outcomes, strata=tables)


def _table(
    registration: Registration, stratum: str, chosen: Sequence[Selected], outcomes: Sequence[Outcome], kinds: KindCounts
) -> StratumTable:
    own = [s for s in chosen if s.boot.record.stratum == stratum]
    mixed = mixed_facts([s.boot for s in own if s.counted])
    return StratumBoots(registration, stratum, own, [o for o in outcomes if o.stratum == stratum], kinds, mixed).table()


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Outcomes as a frame, one row per boot, prompt and endpoint, for grouping and plots."""
    columns = ["boot_id", *KEY, "kind", "why"]
    rows = [[getattr(o, c) for c in columns] for o in outcomes]
    # As objects: pandas' own strings refuse the lone surrogates that an engine's words may hold.
    return pd.DataFrame(rows, columns=columns, dtype=object)


def count_kinds(registration: Registration, outcomes: Sequence[Outcome]) -> KindCounts:
    """How many counted boots had each kind of outcome, for every registered cell, prompt and endpoint."""
    places = [(c.stratum, c.cell, p.id, e) for c in registration.cells for p in registration.prompts for e in ENDPOINTS]
    seen = frame(outcomes).groupby([*KEY, "kind"]).size().unstack("kind") if outcomes else pd.DataFrame()
    index = pd.MultiIndex.from_tuples(places, names=KEY)
    table = seen.reindex(index=index, columns=pd.Index(KINDS)).fillna(0).astype(int)
    rows = table.to_numpy().tolist()
    return {place: dict(zip(KINDS, row, strict=True)) for place, row in zip(places, rows, strict=True)}


def select(
    registration: Registration, boots: Sequence[Boot], known: Mapping[str, Registration]
) -> tuple[Selected, ...]:
    """Every distinct boot in the order of its place; of the attempts at one place the first valid one counts."""
    _refuse_mixture(registration, boots, known)
    distinct: dict[str, Boot] = {}
    for boot in boots:
        check_boot(registration, boot)
        same = distinct.setdefault(boot.record.boot_id, boot)
        if same is not boot and canonical_json(same) != canonical_json(boot):
            raise D3Error(f"two different boots have the id {boot.record.boot_id}", "keep the one that ran")
    chosen = []
    in_order = sorted(distinct.values(), key=lambda b: _place(b.record))
    for place, attempts in groupby(in_order, lambda b: _place(b.record)[:3]):
        numbers: set[int] = set()
        taken = ""
        for boot in attempts:
            if boot.record.attempt in numbers:
                where = f"boot {place[2]} of {place[0]} {place[1]}"
                raise D3Error(f"two boots are attempt {boot.record.attempt} at {where}", "keep the one that ran")
            numbers.add(boot.record.attempt)
            why = why_not_counted(registration, boot.record) or taken
            chosen.append(Selected(boot=boot, counted=not why, why=why))
            taken = taken or ("" if why else f"attempt {boot.record.attempt} counts already")
    return tuple(chosen)


def _place(record: BootRecord) -> tuple[str, str, int, int, str]:
    return record.stratum, record.cell, record.boot, record.attempt, record.boot_id


def _refuse_mixture(registration: Registration, boots: Sequence[Boot], known: Mapping[str, Registration]) -> None:
    own = registration.id()
    others = Counter(b.record.registration for b in boots if b.record.registration != own)
    if not others:
        return
    words = []
    for other, n in sorted(others.items()):
        paths = f", differs in {', '.join(differences(registration, known[other]))}" if other in known else ""
        words.append(f"{short(other)} ({n} boot{'s' * (n > 1)}{paths})")
    raise D3Error(f"boots of other registrations than {short(own)}: {'; '.join(words)}", "certify each study by itself")


def mixed_facts(boots: Sequence[Boot]) -> str:
    """What should be one and the same in all counted boots of a stratum but is not; empty when all is well."""
    facts: dict[str, set[str]] = defaultdict(set)
    for record in (b.record for b in boots):
        facts["engine version"].add(str(record.engine.facts.version))
        facts["attention backend"].add(str(record.engine.facts.attention_backend))
        facts["dtype"].add(str(record.engine.facts.dtype))
        facts["model digest"].add(record.model_digest)
        for r in record.requests:
            facts[f"rendered prompt {r.prompt}"].add(r.prompt_sha256)
    return "; ".join(f"{name} differs between boots: {', '.join(sorted(v))}" for name, v in facts.items() if len(v) > 1)
