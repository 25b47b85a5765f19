"""One stratum's boots on their way to a table: counts per cell, prompt and endpoint, and the state of each cell. Pure.

A cell's state at an endpoint is the strongest statement that all of its counted boots allow, and hides no worse sign:
  void         too few boots or answers to say anything        unavailable  the engine refused the flag in every boot
  scattered    some boot differs in no explained way, or the cell shows cache and boot causes side by side
  boot_state   some first request differs where a second cold one does not, and no boot shows anything else
  diverges     some first request differs by cache state (with one cold request: by an unknown cause), nothing else
  agrees       every response is the same in every counted boot
A prompt that no boot with the cache on can use (too short, never cold) is left out and named. A prompt that one cell
cannot use voids that cell if it differs in another: no cell may look clean for want of the prompt that differs. One
that was answered, but without the numbers that an endpoint compares, voids its cell at that endpoint.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from d3.classify import of_prompt
from d3.divergence import diverge
from d3.flag import Place, flag_state, refused
from d3.record import ENDPOINTS, Boot, Endpoint
from d3.registration import CellSpec, Registration
from d3.statistics import clopper_pearson, null_bound
from d3.table import (
    FIRST_DIFFERS,
    KINDS,
    CellResult,
    CellState,
    Counts,
    Excluded,
    Kind,
    Outcome,
    Pair,
    PromptResult,
    Selected,
    State,
    StratumTable,
)

WORDS: dict[Kind, str] = {
    "agree": "agree",
    "cache": "cold differs from warm",
    "boot": "only the first after boot differs",
    "unknown": "first differs",
    "scattered": "scattered",
}

KindCounts = Mapping[tuple[str, str, str, Endpoint], Mapping[Kind, int]]


@dataclass(frozen=True)
class StratumBoots:
    """The boots of one stratum with their outcomes and `kinds` counted; `mixed` says why they may not be compared."""

    registration: Registration
    stratum: str
    chosen: Sequence[Selected]
    outcomes: Sequence[Outcome]
    kinds: KindCounts
    mixed: str

    @cached_property
    def specs(self) -> list[CellSpec]:
        """The registered cells."""
        return [c for c in self.registration.cells if c.stratum == self.stratum]

    @cached_property
    def prompts(self) -> list[str]:
        """The registered prompts."""
        return [p.id for p in self.registration.prompts]

    @cached_property
    def at(self) -> Mapping[Place, list[Outcome]]:
        """Outcomes by cell, prompt and endpoint; an empty list where no boot counted."""
        cells = [c.cell for c in self.specs]
        found: dict[Place, list[Outcome]] = {place: [] for place in product(cells, self.prompts, ENDPOINTS)}
        for o in self.outcomes:
            found[o.cell, o.prompt, o.endpoint].append(o)
        return found

    @cached_property
    def excluded(self) -> tuple[Excluded, ...]:
        """Prompts that no counted boot with the cache on could use (in a study without such cells: no boot at all)."""
        on = [c.cell for c in self.specs if c.factors["apc"] == "on"] or [c.cell for c in self.specs]
        found = []
        for endpoint, prompt in product(ENDPOINTS, self.prompts):
            reasons = [o.why for cell in on for o in self.at[cell, prompt, endpoint] if o.kind == "void"]
            if reasons and not any(self._n(cell, prompt, "text") for cell in on):
                found.append(Excluded(prompt=prompt, endpoint=endpoint, why=reasons[0]))
        return tuple(found)

    def table(self) -> StratumTable:
        """The finished table."""
        cells = tuple(self._cell(spec) for spec in self.specs)
        flag = flag_state(self.specs, self.chosen, self.at)
        return StratumTable(stratum=self.stratum, cells=cells, flag=flag, excluded=self.excluded)

    def _kinds(self, cell: str, prompt: str, endpoint: Endpoint) -> Mapping[Kind, int]:
        return self.kinds[self.stratum, cell, prompt, endpoint]

    def _n(self, cell: str, prompt: str, endpoint: Endpoint) -> int:
        return sum(n for kind, n in self._kinds(cell, prompt, endpoint).items() if kind != "void")

    def _counted(self, cell: str) -> list[Boot]:
        return [s.boot for s in self.chosen if s.counted and s.boot.record.cell == cell]

    def _cell(self, spec: CellSpec) -> CellResult:
        boots = self._counted(spec.cell)
        return CellResult(
            key=key(spec),
            cell=spec.cell,
            factors=spec.factors,
            boots=len(boots),
            attempts=sum(s.boot.record.cell == spec.cell for s in self.chosen),
            states=tuple(self._state(spec, e) for e in ENDPOINTS),
            prompts=tuple(self._prompt(spec, p, boots) for p in self.prompts),
        )

    def _state(self, spec: CellSpec, endpoint: Endpoint) -> CellState:
        def state(name: State, why: str) -> CellState:
            return CellState(endpoint=endpoint, state=name, why=why)

        if why := refused(spec, self.specs, self.chosen):
            return state("unavailable", why)
        if why := self.mixed or self._void(spec.cell, endpoint):
            return state("void", why)
        seen = {k: sum(self._kinds(spec.cell, p, endpoint)[k] for p in self.prompts) for k in KINDS}
        words = ", ".join(f"{seen[k]} {WORDS[k]}" for k in KINDS if k != "void" and seen[k])
        causes = {k for k in FIRST_DIFFERS if seen[k]}
        if seen["scattered"] or len(causes) > 1:
            return state("scattered", words)
        if causes:
            return state("boot_state" if causes == {"boot"} else "diverges", words)
        return state("agrees", words)

    def _void(self, cell: str, endpoint: Endpoint) -> str:
        """Why nothing may be concluded from this cell; empty when something may."""
        least, have = self.registration.min_valid_boots, len(self._counted(cell))
        if have < least:
            return f"{have} valid boot{'s' * (have != 1)}, {least} registered"
        excluded = {e.prompt for e in self.excluded if e.endpoint == endpoint}
        n = {p: self._n(cell, p, endpoint) for p in self.prompts}
        if not any(n.values()):
            whys = [o.why for p in self.prompts for o in self.at[cell, p, endpoint]]
            return f"every prompt is void: {next(iter(whys), 'no boot')}"
        for prompt in (p for p in self.prompts if p not in excluded and n[p] < least):
            if n[prompt]:
                return f"prompt {prompt} has {n[prompt]} valid boot{'s' * (n[prompt] != 1)}, {least} registered"
            if self._n(cell, prompt, "text"):  # it was asked and answered, but this endpoint was lost: a fault
                return f"prompt {prompt} has no usable answer: {self.at[cell, prompt, endpoint][0].why}"
            for other in (c for c in self.specs if c.cell != cell):
                if any(o.kind not in {"agree", "void"} for o in self.at[other.cell, prompt, endpoint]):
                    return f"prompt {prompt} has no valid boot here and differs in {key(other)}"
        return ""

    def _prompt(self, spec: CellSpec, prompt: str, boots: Sequence[Boot]) -> PromptResult:
        requests = [r for b in boots for r in of_prompt(b.record, prompt)]
        return PromptResult(
            prompt=prompt,
            prompt_tokens=requests[0].prompt_tokens if requests else None,
            counts=tuple(self._counts(spec, prompt, e) for e in ENDPOINTS),
            divergences=pairs(boots, prompt, self.registration.tie_gap),
        )

    def _counts(self, spec: CellSpec, prompt: str, endpoint: Endpoint) -> Counts:
        kinds = self._kinds(spec.cell, prompt, endpoint)
        k, n = sum(kinds[c] for c in FIRST_DIFFERS), self._n(spec.cell, prompt, endpoint)
        own = self.at[spec.cell, prompt, endpoint]
        cold, warm = self._hashes([spec], prompt, endpoint)
        off = [c for c in self.specs if key(c) == f"off/{spec.factors['invariant']}"]
        uncached = frozenset().union(*self._hashes(off, prompt, endpoint))
        comparable = spec.factors["apc"] == "on" and cold and uncached
        confidence = self.registration.confidence
        return Counts(
            endpoint=endpoint,
            n=n,
            k=k,
            agree=kinds["agree"],
            cache=kinds["cache"],
            boot=kinds["boot"],
            unknown=kinds["unknown"],
            scattered=kinds["scattered"],
            void=kinds["void"],
            interval=clopper_pearson(k, n, confidence),
            null_bound=None if k else null_bound(n, confidence),
            distinct_cold=len(cold),
            distinct_warm=len(warm),
            cold_equals_off=cold == uncached if comparable else None,
            void_reasons=tuple(sorted({o.why for o in own if o.why})),
        )

    def _hashes(
        self, specs: Sequence[CellSpec], prompt: str, endpoint: Endpoint
    ) -> tuple[frozenset[str], frozenset[str]]:
        """All cold and all warm hashes of these cells, over their counted boots."""
        group = [o for c in specs for o in self.at[c.cell, prompt, endpoint]]
        cold, warm = (frozenset(h for o in group for h in o.hashes.get(x, ())) for x in ("cold", "warm"))
        return cold, warm


def key(spec: CellSpec) -> str:
    """A cell as the readings name it: on/0."""
    return f"{spec.factors['apc']}/{spec.factors['invariant']}"


def pairs(boots: Sequence[Boot], prompt: str, tie_gap: float) -> tuple[Pair, ...]:
    """Every distinct pair of a boot's first response and another one of the same boot, with the number of its boots."""
    seen: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], Boot] = {}
    for boot in boots:
        keys = list(dict.fromkeys(r.response for r in of_prompt(boot.record, prompt)))
        for later in keys[1:]:
            seen[keys[0], later] += 1
            examples[keys[0], later] = boot
    found = []
    for (first, later), boots_seen in sorted(seen.items()):
        responses = examples[first, later].responses
        parted = diverge(responses[first], responses[later], tie_gap)
        found.append(Pair(first=first, later=later, boots=boots_seen, divergence=parted))
    return tuple(found)
