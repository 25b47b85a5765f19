"""Where cold and warm answers part, by prompt length: points, thresholds, remainders after the cached blocks. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from d3.cells import key
from d3.classify import classify, of_prompt, unusable, void_reason
from d3.divergence import drift
from d3.record import ENDPOINTS, Boot, Endpoint, Frozen
from d3.registration import CellSpec, Registration
from d3.table import Outcome


class Point(Frozen):
    """Every counted answer at one prompt length (tokens), in one cell at one endpoint.

    A pair is a prompt and a boot. `parted` of the `answered` pairs have cold and warm answers that differ, and agree
    among themselves; `other` differ in another way; `void` pairs cannot answer. `hit`: the registered expected hit,
    tokens that a warm request finds cached where the cache is on. `first_token`: the largest |difference of
    log-probabilities| cold to warm at the first token of an answer (nats); None where it cannot be compared.
    """

    tokens: int
    hit: int | None
    prompts: int
    boots: int
    answered: int
    parted: int
    other: int
    void: int
    first_token: float | None

    @property
    def differ(self) -> int:
        """Pairs that do not agree, in whatever way."""
        return self.parted + self.other


class Threshold(Frozen):
    """What the points say of length; only lengths with an answer count.

    `first`: the shortest length at which any pair differs, None where none does; `clean`: the longest length below it,
    None where `first` is the shortest of all; `always`: the shortest length from which on every pair parted, None where
    the longest length does not; `below`, `above`: how many lengths lie below `first` and from `always` on.
    """

    first: int | None
    clean: int | None
    below: int
    always: int | None
    above: int


class Remainder(Frozen):
    """The pairs whose prompts leave `remainder` tokens to compute after the cached blocks, at `lengths` lengths."""

    remainder: int
    lengths: int
    answered: int
    parted: int
    other: int
    threshold: Threshold


class Series(Frozen):
    """One cell of one stratum, at endpoints that give the same points; these ascend in length."""

    stratum: str
    cell: str
    cached: bool
    endpoints: tuple[Endpoint, ...]
    points: tuple[Point, ...]

    @property
    def answered(self) -> tuple[Point, ...]:
        """The points with at least one answer."""
        return tuple(p for p in self.points if p.answered)


def series(registration: Registration, counted: Sequence[Boot]) -> tuple[Series, ...]:
    """Every cell and endpoint, stratum by stratum. `counted`: the boots whose answers count, of all strata."""
    found = []
    strata = list(dict.fromkeys(c.stratum for c in registration.cells))
    for spec in sorted(registration.cells, key=lambda c: strata.index(c.stratum)):
        own = [b for b in counted if (b.record.stratum, b.record.cell) == (spec.stratum, spec.cell)]
        if own:
            found += _cell(registration, spec, own)
    return tuple(found)


def _cell(registration: Registration, spec: CellSpec, boots: Sequence[Boot]) -> list[Series]:
    outcomes: dict[Endpoint, list[Outcome]] = defaultdict(list)
    for outcome in (o for boot in boots for o in classify(registration, boot)):
        outcomes[outcome.endpoint].append(outcome)
    sizes = prompt_sizes(boots)
    moved = _first_tokens(registration, boots)
    by_points: dict[tuple[Point, ...], list[Endpoint]] = defaultdict(list)
    for endpoint in ENDPOINTS:
        by_points[_points(outcomes[endpoint], sizes, moved)].append(endpoint)
    return [
        Series(
            stratum=spec.stratum,
            cell=key(spec),
            cached=spec.factors["apc"] == "on",
            endpoints=tuple(endpoints),
            points=points,
        )
        for points, endpoints in by_points.items()
    ]


def prompt_sizes(boots: Sequence[Boot]) -> dict[str, tuple[int, int | None]]:
    """Tokens and expected hit of every prompt that ran, by its id."""
    return {r.prompt: (r.prompt_tokens, r.expected_cached) for b in boots for r in b.record.requests}


def _points(
    outcomes: Sequence[Outcome], sizes: Mapping[str, tuple[int, int | None]], moved: Mapping[str, float]
) -> tuple[Point, ...]:
    known = sorted((o for o in outcomes if o.prompt in sizes), key=lambda o: sizes[o.prompt][0])
    return tuple(_point(list(own), sizes, moved) for _, own in groupby(known, lambda o: sizes[o.prompt][0]))


def _point(
    outcomes: Sequence[Outcome], sizes: Mapping[str, tuple[int, int | None]], moved: Mapping[str, float]
) -> Point:
    kinds = [o.kind for o in outcomes]
    prompts = dict.fromkeys(o.prompt for o in outcomes)
    tokens, hit = sizes[outcomes[0].prompt]
    return Point(
        tokens=tokens,
        hit=hit,
        prompts=len(prompts),
        boots=len({o.boot_id for o in outcomes}),
        answered=sum(k != "void" for k in kinds),
        parted=sum(k in {"cache", "unknown"} for k in kinds),
        other=sum(k in {"boot", "scattered"} for k in kinds),
        void=sum(k == "void" for k in kinds),
        first_token=max((moved[p] for p in prompts if p in moved), default=None),
    )


def _first_tokens(registration: Registration, boots: Sequence[Boot]) -> dict[str, float]:
    """Per prompt the largest |difference of log-probabilities| cold to warm at the first token, over its boots."""
    found: dict[str, float] = {}
    for boot in boots:
        for prompt in (p.id for p in registration.prompts):
            requests = of_prompt(boot.record, prompt)
            answers = {r.response: boot.responses[r.response] for r in requests}
            if void_reason(registration, boot.record, prompt) or unusable("logprobs", list(answers.values())):
                continue
            cold, warm = ({r.response for r in requests if r.expect == expect} for expect in ("cold", "warm"))
            firsts = [x for a in cold for b in warm for x in drift(answers[a], answers[b])[:1] if x is not None]
            if firsts:
                found[prompt] = max(*firsts, found.get(prompt, 0.0))
    return found


def threshold(points: Sequence[Point]) -> Threshold:
    """The thresholds of points that ascend in length."""
    tried = [p for p in points if p.answered]
    differing = [p.tokens for p in tried if p.differ]
    first = min(differing, default=None)
    below = [p.tokens for p in tried if first is not None and p.tokens < first]
    failing = [p.tokens for p in tried if p.parted < p.answered]
    above = [p.tokens for p in tried if not failing or p.tokens > failing[-1]]
    return Threshold(
        first=first,
        clean=max(below, default=None),
        below=len(below),
        always=min(above, default=None),
        above=len(above),
    )


def remainders(points: Sequence[Point], least: int) -> tuple[Remainder, ...]:
    """The points from `least` tokens on, by the tokens left after the cached blocks.

    Shorter lengths, where nothing parts whatever is left, would only thin out the counts.
    """
    groups: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        if point.answered and point.hit is not None and point.tokens >= least:
            groups[point.tokens - point.hit].append(point)
    return tuple(
        Remainder(
            remainder=left,
            lengths=len(own),
            answered=sum(p.answered for p in own),
            parted=sum(p.parted for p in own),
            other=sum(p.other for p in own),
            threshold=threshold(own),
        )
        for left, own in sorted(groups.items())
    )
