"""The numbers behind the plots: how far log-probabilities move from cold to warm, and where responses part. Pure."""

from collections.abc import Sequence
from itertools import product, zip_longest

from d3.cells import key
from d3.classify import of_prompt, unusable, void_reason
from d3.divergence import Flip, diverge, drift
from d3.record import Boot, Frozen
from d3.registration import Registration
from d3.schema import Stratum


class Drift(Frozen):
    """One cell and prompt: the largest |difference of log-probabilities| cold to warm over its boots, per token.

    `parts_at`: the first token that differs in some boot, from 0; beyond it the texts are no longer the same.
    """

    cell: str
    prompt: str
    prompt_tokens: int
    boots: int
    by_token: tuple[float, ...]
    parts_at: int | None

    @property
    def largest(self) -> float:
        """The largest over all tokens."""
        return max(self.by_token, default=0.0)


class Part(Frozen):
    """Where the tokens of a pair of responses part: `gap` is the larger of the two top-2 gaps there."""

    cell: str
    prompt: str
    boots: int
    position: int
    gap: float | None
    before: float | None
    flip: Flip


def drifts(registration: Registration, stratum: str, boots: Sequence[Boot]) -> tuple[Drift, ...]:
    """Every cell and prompt that has log-probabilities to compare. `boots`: the counted ones of the stratum."""
    found = []
    for spec, prompt in product([c for c in registration.cells if c.stratum == stratum], registration.prompts):
        own = [b for b in boots if b.record.cell == spec.cell]
        one = _drift(registration, key(spec), prompt.id, own)
        found += [one] if one else []
    return tuple(found)


def _drift(registration: Registration, cell: str, prompt: str, boots: Sequence[Boot]) -> Drift | None:
    largest: list[float] = []
    parts: list[int] = []
    seen: set[tuple[str, str]] = set()
    used = []
    for boot in boots:
        requests = of_prompt(boot.record, prompt)
        answers = [boot.responses[key] for key in dict.fromkeys(r.response for r in requests)]
        if void_reason(registration, boot.record, prompt) or unusable("logprobs", answers):
            continue
        used.append(requests[0].prompt_tokens)
        cold, warm = ({r.response for r in requests if r.expect == expect} for expect in ("cold", "warm"))
        pairs = set(product(cold, warm)) - seen  # most boots have the same ones
        seen |= pairs
        for one, other in sorted(pairs):
            a, b = boot.responses[one], boot.responses[other]
            largest = [max(x or 0.0, y or 0.0) for x, y in zip_longest(largest, drift(a, b), fillvalue=0.0)]
            position = diverge(a, b, registration.tie_gap).position
            parts += [] if position is None else [position]
    if not used:
        return None
    return Drift(
        cell=cell,
        prompt=prompt,
        prompt_tokens=used[0],
        boots=len(used),
        by_token=tuple(largest),
        parts_at=min(parts, default=None),
    )


def parts(stratum: Stratum) -> tuple[Part, ...]:
    """Every pair of responses of the certificate whose tokens part, as the certificate says."""
    found = []
    for cell, prompt in ((c, p) for c in stratum.cells for p in c.prompts):
        for pair in prompt.divergences:
            d = pair.divergence
            if d.position is not None:
                gaps = [g for g in (d.first_gap, d.later_gap) if g is not None]
                found.append(
                    Part(
                        cell=cell.key,
                        prompt=prompt.prompt,
                        boots=pair.boots,
                        position=d.position,
                        gap=max(gaps, default=None),
                        before=d.max_dlogprob,
                        flip=d.flip,
                    )
                )
    return tuple(found)
