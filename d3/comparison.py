"""Two certificates side by side: what appeared, went or changed, and what cannot be compared. Pure.

Rows are places: a stratum, a cell, a prompt and an endpoint. Strata are matched by name; where each side has just one
study stratum these two are matched whatever their names, so that an upgrade or another device can be compared. Sampled
strata (instrument controls) answer nothing and have no rows. Rates are compared by the test and at the confidence that
the old side registered, so that a new study cannot lower the bar.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

from d3.classify import classify
from d3.provenance import Fact, environment_facts, registered_facts
from d3.record import ENDPOINTS, Boot, Endpoint, Frozen, Message
from d3.registration import Registration
from d3.schema import Certificate, Stratum
from d3.statistics import compare_rates
from d3.table import CellResult, Counts, Kind
from d3.verdicts import Verdict

Change = Literal["same", "appeared", "went", "changed", "not_comparable"]
Responses = Literal["same", "other", "unknown"]

DIFFERS: tuple[Kind, ...] = ("cache", "boot", "unknown", "scattered")
# A rate may rise in all boots that differ, or, at the same number, towards the causes that speak against the cache.
RATES: tuple[tuple[Kind, ...], ...] = (DIFFERS, ("boot",), ("scattered",))


class Side(Frozen):
    """A certificate and the boots it was built from."""

    certificate: Certificate
    boots: tuple[Boot, ...]


class Evidence(Frozen):
    """What one side has at a place; `missing` says why nothing may be concluded there, empty where something may."""

    counts: Counts | None
    missing: str

    @property
    def n(self) -> int:
        """Valid boots; 0 where there is no evidence."""
        return 0 if self.missing or self.counts is None else self.counts.n

    def boots(self, kinds: Iterable[Kind] = DIFFERS) -> int:
        """In how many of the `n` boots the outcome was one of these kinds."""
        return sum(getattr(self.counts, kind) for kind in kinds) if self.n else 0

    def causes(self) -> tuple[Kind, ...]:
        """The kinds of difference that were seen."""
        return tuple(kind for kind in DIFFERS if self.boots([kind]))


class Row(Frozen):
    """One place on both sides.

    `change`: appeared, where no boot differed and now some do; went, the reverse; changed, where boots differ on both
    sides but for other causes, or at rates that the registered test tells apart; same, where nothing of that can be
    told. A boot differs when its first request does or its outcome is scattered. `p`: the two-sided p-value of the
    boots that differ, None where the sides are not comparable. `why`: how sure that is, or why there is nothing to
    compare. `responses`: whether both sides saw the same set of cold and the same set of warm responses.
    """

    stratum: str
    cell: str
    prompt: str
    endpoint: Endpoint
    old: Evidence
    new: Evidence
    change: Change
    p: float | None
    why: str
    responses: Responses


class VerdictChange(Frozen):
    """The reading and the disposition of a matched stratum at one endpoint, before and after."""

    stratum: str
    endpoint: Endpoint
    old_reading: str
    new_reading: str
    old_disposition: str
    new_disposition: str

    @property
    def changed(self) -> bool:
        """Whether another reading holds now."""
        return self.old_reading != self.new_reading


class Comparison(Frozen):
    """All that two certificates say about each other. `level`: a p-value up to it tells two rates apart.

    `note`: what was done to make them comparable, empty for nothing.
    """

    old: str
    new: str
    level: float
    test: str
    rows: tuple[Row, ...]
    verdicts: tuple[VerdictChange, ...]
    broken_controls: tuple[str, ...]
    environment: tuple[Fact, ...]
    registration: tuple[Fact, ...]
    note: str = ""

    def only(self, endpoints: Sequence[Endpoint]) -> "Comparison":
        """The same comparison at these endpoints alone."""
        rows = tuple(r for r in self.rows if r.endpoint in endpoints)
        verdicts = tuple(v for v in self.verdicts if v.endpoint in endpoints)
        return self.model_copy(update={"rows": rows, "verdicts": verdicts})


def compare(old: Side, new: Side) -> Comparison:
    """Every place of either side, matched; the order is the old side's, then what only the new one has."""
    pairs = list(_matched(old.certificate, new.certificate))
    seen = (_responses(old), _responses(new))
    return Comparison(
        old=old.certificate.digest,
        new=new.certificate.digest,
        level=1 - old.certificate.registration.confidence,
        test=old.certificate.registration.test,
        rows=tuple(row for pair in pairs for row in _rows(old.certificate, new.certificate, pair, seen)),
        verdicts=tuple(_verdict((a, b), a.verdict(e), b.verdict(e)) for a, b in pairs if a and b for e in ENDPOINTS),
        broken_controls=_broken(old.certificate, new.certificate),
        environment=environment_facts(old.certificate, new.certificate),
        registration=registered_facts(old.certificate.registration, new.certificate.registration),
    )


def p_value(old: Evidence, new: Evidence, kinds: Iterable[Kind], test: str) -> float | None:
    """The two-sided p-value that outcomes of these kinds are as frequent on both sides."""
    kinds = tuple(kinds)
    return compare_rates(old.boots(kinds), old.n, new.boots(kinds), new.n, test)


def told(p: float | None, level: float) -> bool:
    """Whether a p-value tells two rates apart."""
    return p is not None and p <= level


Pair = tuple[Stratum | None, Stratum | None]
Place = tuple[str, str, str, Endpoint]  # stratum, cell, prompt, endpoint
Seen = Mapping[Place, tuple[frozenset[str], frozenset[str]]]


def _matched(old: Certificate, new: Certificate) -> Iterator[Pair]:
    ours, theirs = ([s for s in c.strata if s.role == "study"] for c in (old, new))
    if len(ours) == len(theirs) == 1:
        yield ours[0], theirs[0]
        return
    named = {s.stratum: s for s in theirs}
    for stratum in ours:
        yield stratum, named.pop(stratum.stratum, None)
    for stratum in named.values():
        yield None, stratum


def _label(pair: Pair) -> str:
    return " -> ".join(dict.fromkeys(s.stratum for s in pair if s))


def _rows(old: Certificate, new: Certificate, pair: Pair, seen: tuple[Seen, Seen]) -> Iterator[Row]:
    level, test = 1 - old.registration.confidence, old.registration.test
    cells = dict.fromkeys(c.key for s in pair if s for c in s.cells)
    prompts = dict.fromkeys(p.prompt for s in pair if s for c in s.cells for p in c.prompts)
    for cell, prompt, endpoint in product(cells, prompts, ENDPOINTS):
        a, b = (evidence(s, _label(pair), cell, prompt, endpoint) for s in pair)
        why = missing(a, b) or _asked_otherwise(old.registration, new.registration, prompt)
        yield Row(
            stratum=_label(pair),
            cell=cell,
            prompt=prompt,
            endpoint=endpoint,
            old=a,
            new=b,
            change="not_comparable" if why else _change(a, b, level, test),
            p=None if why else p_value(a, b, DIFFERS, test),
            why=why or _how_sure(a, b, level, test),
            responses=_same_responses(old, new, pair, seen, (cell, prompt, endpoint)),
        )


def evidence(stratum: Stratum | None, name: str, cell: str, prompt: str, endpoint: Endpoint) -> Evidence:
    """What a stratum has at a place; `name`: what to call a stratum that is not there."""

    def without(missing: str, counts: Counts | None = None) -> Evidence:
        return Evidence(counts=counts, missing=missing)

    if stratum is None:
        return without(f"no stratum {name}")
    found = _cell(stratum, cell)
    if found is None:
        return without(f"no cell {cell}")
    counts = next((k for p in found.prompts if p.prompt == prompt for k in p.counts if k.endpoint == endpoint), None)
    if counts is None:
        return without(f"no prompt {prompt}")
    state = found.state(endpoint)
    if state.state in {"void", "unavailable"}:
        return without(f"{state.state}: {state.why}", counts)
    if not counts.n:
        return without(f"void: {next(iter(counts.void_reasons), 'no valid boot')}", counts)
    return Evidence(counts=counts, missing="")


def _cell(stratum: Stratum, key: str) -> CellResult | None:
    return next((c for c in stratum.cells if c.key == key), None)


def missing(old: Evidence, new: Evidence, names: tuple[str, str] = ("old", "new")) -> str:
    """Why two sides cannot be compared at a place, by their names; empty where they can."""
    if old.missing and old.missing == new.missing:
        return f"both: {old.missing}"
    return "; ".join(f"{name}: {e.missing}" for name, e in zip(names, (old, new), strict=True) if e.missing)


def _asked_otherwise(old: Registration, new: Registration, prompt: str) -> str:
    """Why the two sides did not ask the same at this prompt; empty when they did."""
    if old.protocol.phases != new.protocol.phases:
        return f"other request orders: {old.protocol.name} and {new.protocol.name}"
    return "" if _messages(old, prompt) == _messages(new, prompt) else "other messages under the same prompt id"


def _messages(registration: Registration, prompt: str) -> tuple[Message, ...] | None:
    return next((p.messages for p in registration.prompts if p.id == prompt), None)


def _change(old: Evidence, new: Evidence, level: float, test: str) -> Change:
    before, after = old.boots(), new.boots()
    if not before:
        return "appeared" if after else "same"
    if not after:
        return "went"
    moved = any(told(p_value(old, new, kinds, test), level) for kinds in RATES)
    return "changed" if moved or old.causes() != new.causes() else "same"


def _how_sure(old: Evidence, new: Evidence, level: float, test: str) -> str:
    """Whether the numbers of boots that differ can be told from chance, in words; empty where the rates are equal."""
    if old.boots() * new.n == new.boots() * old.n:
        return ""
    p = p_value(old, new, DIFFERS, test)
    if told(p, level):
        return f"told from chance (p = {p:.2g})"
    if not told(compare_rates(0, old.n, new.n, new.n, test), level):
        return f"too few boots: not even 0 of {old.n} against {new.n} of {new.n} is told from chance"
    return f"not told from chance (p = {p:.2g}); more boots would tell"


def _responses(side: Side) -> Seen:
    """The distinct cold and warm hashes of every place, over the counted boots."""
    certificate = side.certificate
    counted = {e.boot_id for e in certificate.boots if e.counted}
    keys = {(s.stratum, c.cell): c.key for s in certificate.strata for c in s.cells}
    found: dict[Place, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for boot in (b for b in side.boots if b.record.boot_id in counted):
        for o in classify(certificate.registration, boot):
            place = found[o.stratum, keys[o.stratum, o.cell], o.prompt, o.endpoint]
            place[0].update(o.hashes.get("cold", ()))
            place[1].update(o.hashes.get("warm", ()))
    return {place: (frozenset(cold), frozenset(warm)) for place, (cold, warm) in found.items() if cold or warm}


def _same_responses(
    old: Certificate, new: Certificate, pair: Pair, seen: tuple[Seen, Seen], where: tuple[str, str, Endpoint]
) -> Responses:
    a, b = (found.get((s.stratum, *where)) if s else None for s, found in zip(pair, seen, strict=True))
    if not a or not b or _messages(old.registration, where[1]) != _messages(new.registration, where[1]):
        return "unknown"
    return "same" if a == b else "other"


def _verdict(pair: Pair, old: Verdict, new: Verdict) -> VerdictChange:
    return VerdictChange(
        stratum=_label(pair),
        endpoint=old.endpoint,
        old_reading=old.reading,
        new_reading=new.reading,
        old_disposition=old.disposition,
        new_disposition=new.disposition,
    )


def _broken(old: Certificate, new: Certificate) -> tuple[str, ...]:
    """Controls that fail on the new side and did not on the old one."""
    before = {(c.kind, c.stratum) for c in old.controls if c.held is False}
    failed = [c for c in new.controls if c.held is False and (c.kind, c.stratum) not in before]
    return tuple(f"the {c.kind} control ({c.stratum}) fails: {c.words}" for c in failed)
