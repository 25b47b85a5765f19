"""The strata of one certificate that differ in a single key, place by place: are the responses the same? Pure.

It answers whether a condition that should change nothing did change nothing (boots side by side on one GPU, the way a
boot starts), and where one that may change something did (neighbours in the batch, another version of the engine). The
first registered level of the key is the baseline. A place is a cell, a prompt and an endpoint; it is the same where the
boots of both levels show the same set of cold responses and the same set of warm ones.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from d3.classify import classify, of_prompt
from d3.comparison import Responses, Side, evidence, missing
from d3.divergence import Divergence, diverge
from d3.errors import D3Error
from d3.record import ENDPOINTS, Endpoint, Expect, Frozen, Response
from d3.registration import STUDY_FACTORS, stratum_name
from d3.schema import Stratum

EXPECTS: tuple[Expect, ...] = ("cold", "warm")


class Parting(Frozen):
    """Where the responses of one cache state part: the requests that gave them, and how they do.

    `character`: the first character that differs, from 0; None where the texts are equal.
    """

    expect: Expect
    base_phase: str
    phase: str
    divergence: Divergence
    character: int | None


class Spot(Frozen):
    """One place at both levels.

    `why`: why it cannot be compared, where `responses` is unknown. `lost`: whether only one of the levels was measured.
    `varies`: whether the boots of one level alone show several cold or several warm responses, so that a difference may
    be theirs and not the key's. `partings`: one per cache state whose responses are not the same.
    """

    cell: str
    prompt: str
    endpoint: Endpoint
    responses: Responses
    why: str
    lost: bool
    varies: bool
    partings: tuple[Parting, ...]


class Pairing(Frozen):
    """Two levels of a key in strata alike but for it; `stratum` names what they share, `base` where that is nothing."""

    key: str
    base: str
    level: str
    stratum: str
    base_boots: int
    boots: int
    spots: tuple[Spot, ...]

    def compared(self) -> tuple[Spot, ...]:
        """The places that were measured at both levels."""
        return tuple(s for s in self.spots if s.responses != "unknown")

    def differing(self) -> tuple[Spot, ...]:
        """The places with other responses."""
        return tuple(s for s in self.spots if s.responses == "other")

    def same(self) -> bool:
        """Whether all places are the same: none differs, none was measured at one level alone, and there is one."""
        return bool(self.compared()) and not self.differing() and not any(s.lost for s in self.spots)


class Across(Frozen):
    """All levels of a key against its first one."""

    key: str
    pairings: tuple[Pairing, ...]

    def only(self, endpoints: Sequence[Endpoint]) -> "Across":
        """The same at these endpoints alone."""
        pairings = [
            p.model_copy(update={"spots": tuple(s for s in p.spots if s.endpoint in endpoints)}) for p in self.pairings
        ]
        return self.model_copy(update={"pairings": tuple(pairings)})

    def same(self) -> bool:
        """Whether no level changed any response."""
        return all(p.same() for p in self.pairings)


def across(side: Side, key: str) -> Across:
    """Compare the strata of `side` over the levels of `key`. Raises D3Error where it has no two levels to compare."""
    axes = side.certificate.registration.axes
    levels = axes.get(key, ())
    if key in STUDY_FACTORS:
        raise D3Error(f"{key} makes the cells of a stratum, not strata", "their table is the certificate's own report")
    if len(levels) < 2:
        others = [k for k, v in axes.items() if len(v) > 1 and k not in STUDY_FACTORS]
        known = f"name one of: {', '.join(others)}" if others else f"sweep it in a study, such as {key}=A,B"
        raise D3Error(f"{key} was not swept in this study", known)
    heard = _heard(side)
    strata = {s.stratum: s for s in side.certificate.strata if s.role == "study"}
    alike: dict[str, dict[str, Stratum]] = defaultdict(dict)
    for stratum in strata.values():
        rest = {k: v for k, v in stratum.settings.items() if k != key}
        alike[stratum_name(rest)][stratum.settings[key]] = stratum
    pairings = [
        Pairing(
            key=key,
            base=levels[0],
            level=level,
            stratum=rest,
            base_boots=_boots(found[levels[0]]),
            boots=_boots(found[level]),
            spots=tuple(_spots(found[levels[0]], found[level], heard, side.certificate.registration.tie_gap)),
        )
        for rest, found in alike.items()
        for level in levels[1:]
        if levels[0] in found and level in found
    ]
    if not pairings:
        raise D3Error(f"no two levels of {key} have a stratum that can be compared",
                      "sampled strata (temperature above 0) answer nothing")  # fmt: skip
    return Across(key=key, pairings=tuple(pairings))


Place = tuple[str, str, str, Endpoint]  # stratum, cell, prompt, endpoint
Heard = Mapping[
    Expect, Mapping[str, tuple[str, Response]]
]  # by cache state and hash: who gave it first, and the response
NOTHING: Heard = {"cold": {}, "warm": {}}


def _heard(side: Side) -> dict[Place, Heard]:
    """Every distinct response of every place over the counted boots, in the order in which they ran."""
    certificate = side.certificate
    counted = {e.boot_id for e in certificate.boots if e.counted}
    keys = {(s.stratum, c.cell): c.key for s in certificate.strata for c in s.cells}
    found: dict[Place, dict[Expect, dict[str, tuple[str, Response]]]] = {}
    boots = [b for b in side.boots if b.record.boot_id in counted]
    for boot in sorted(boots, key=lambda b: (b.record.position, b.record.attempt)):
        for o in (o for o in classify(certificate.registration, boot) if o.kind != "void"):
            place = found.setdefault(
                (o.stratum, keys[o.stratum, o.cell], o.prompt, o.endpoint), {"cold": {}, "warm": {}}
            )
            for r in of_prompt(boot.record, o.prompt):
                who = f"{r.phase} of boot {boot.record.boot}"
                place[r.expect].setdefault(r.endpoint_hash(o.endpoint), (who, boot.responses[r.response]))
    return dict(found)


def _boots(stratum: Stratum) -> int:
    return sum(cell.boots for cell in stratum.cells)


def _spots(base: Stratum, other: Stratum, heard: Mapping[Place, Heard], tie_gap: float) -> Iterator[Spot]:
    cells = dict.fromkeys(c.key for s in (base, other) for c in s.cells)
    prompts = dict.fromkeys(p.prompt for s in (base, other) for c in s.cells for p in c.prompts)
    for cell, prompt, endpoint in product(cells, prompts, ENDPOINTS):
        a, b = (evidence(s, s.stratum, cell, prompt, endpoint) for s in (base, other))
        one, two = (heard.get((s.stratum, cell, prompt, endpoint), NOTHING) for s in (base, other))
        why = missing(a, b, (base.stratum, other.stratum))
        partings = () if why else tuple(_partings(one, two, endpoint, tie_gap))
        yield Spot(
            cell=cell,
            prompt=prompt,
            endpoint=endpoint,
            responses="unknown" if why else "other" if partings else "same",
            why=why,
            lost=bool(a.missing) != bool(b.missing),
            varies=any(len(answers) > 1 for answers in (*one.values(), *two.values())),
            partings=partings,
        )


def _partings(base: Heard, other: Heard, endpoint: Endpoint, tie_gap: float) -> Iterator[Parting]:
    for expect in EXPECTS:
        one, two = base[expect], other[expect]
        if one.keys() == two.keys():
            continue
        new = next((h for h in two if h not in one), None)
        gone = next((h for h in one if h not in two), None)
        a = one[gone] if gone else next(iter(one.values()))  # at least one of the two is there, as the sets differ
        b = two[new] if new else next(iter(two.values()))
        yield Parting(
            expect=expect,
            base_phase=a[0],
            phase=b[0],
            divergence=diverge(a[1], b[1], tie_gap),
            character=_character(a[1].text, b[1].text),
        )


def _character(a: str, b: str) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
