"""Which response came where: one letter per distinct response of a prompt, the same letter in every cell. Pure."""

from collections.abc import Mapping, Sequence

from d3.cells import key
from d3.classify import of_prompt, unusable, void_reason
from d3.record import Boot, Endpoint, Frozen
from d3.registration import Phase, Registration


class StripRow(Frozen):
    """One boot: the number of its response at every place of the request order, from 0; none where it is void."""

    boot: int
    responses: tuple[int, ...]
    void: str

    def letters(self) -> tuple[str, ...]:
        """The same as letters: A for the first response seen."""
        return tuple(letter(n) for n in self.responses)


class Strip(Frozen):
    """The counted boots of one cell."""

    cell: str
    rows: tuple[StripRow, ...]

    def calm(self) -> bool:
        """Whether every response of every boot is the same."""
        return len({n for row in self.rows for n in row.responses}) < 2

    def says(self) -> str:
        """The strip in words, for who cannot see it: rows that are alike are told once."""
        if not self.rows:
            return "no boot counts"
        seen: dict[str, int] = {}
        for row in self.rows:
            words = f"void ({row.void})" if row.void else " ".join(row.letters())
            seen[words] = seen.get(words, 0) + 1
        return "; ".join(f"{n} boot{'s' * (n > 1)} {words}" for words, n in seen.items())


class PromptStrips(Frozen):
    """One prompt at one endpoint over all cells of a stratum; numbers stand for the same response in every cell."""

    prompt: str
    prompt_tokens: int | None
    endpoint: Endpoint
    phases: tuple[Phase, ...]
    cells: tuple[Strip, ...]

    def calm(self) -> bool:
        """Whether no cell shows a difference."""
        return all(strip.calm() for strip in self.cells)

    def pattern(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """What each cell shows by itself, whichever responses they are: letters numbered anew in every cell."""
        return tuple(_anew(strip) for strip in self.cells)


def letter(number: int) -> str:
    """A to Z, then AA, AB and so on."""
    high, low = divmod(number, 26)
    return (letter(high - 1) if high else "") + chr(ord("A") + low)


def prompt_strips(
    registration: Registration, stratum: str, boots: Sequence[Boot], prompt: str, endpoint: Endpoint
) -> PromptStrips:
    """The strips of one prompt. `boots`: the counted ones of the stratum."""
    numbers: dict[str, int] = {}
    cells = []
    lengths = [r.prompt_tokens for b in boots for r in b.record.requests if r.prompt == prompt]
    for spec in (c for c in registration.cells if c.stratum == stratum):
        own = sorted((b for b in boots if b.record.cell == spec.cell), key=lambda b: b.record.boot)
        rows = tuple(_row(registration, boot, prompt, endpoint, numbers) for boot in own)
        cells.append(Strip(cell=key(spec), rows=rows))
    return PromptStrips(
        prompt=prompt,
        prompt_tokens=lengths[0] if lengths else None,
        endpoint=endpoint,
        phases=registration.protocol.phases,
        cells=tuple(cells),
    )


def told(
    registration: Registration, stratum: str, boots: Sequence[Boot]
) -> Mapping[Endpoint, tuple[PromptStrips, ...]]:
    """All prompts for bytes; for log-probabilities only those whose cells show another pattern than the bytes do."""
    text, logprobs = (
        [prompt_strips(registration, stratum, boots, p.id, endpoint) for p in registration.prompts]
        for endpoint in ("text", "logprobs")
    )
    other = [lp for t, lp in zip(text, logprobs, strict=True) if t.pattern() != lp.pattern()]
    return {"text": tuple(text), "logprobs": tuple(other)}


def _row(registration: Registration, boot: Boot, prompt: str, endpoint: Endpoint, numbers: dict[str, int]) -> StripRow:
    requests = of_prompt(boot.record, prompt)
    void = void_reason(registration, boot.record, prompt)
    void = void or unusable(endpoint, [boot.responses[r.response] for r in requests])
    hashes = [] if void else [r.endpoint_hash(endpoint) for r in requests]
    responses = tuple(numbers.setdefault(h, len(numbers)) for h in hashes)
    return StripRow(boot=boot.record.boot, responses=responses, void=void)


def _anew(strip: Strip) -> tuple[tuple[int, ...], ...]:
    numbers: dict[int, int] = {}
    return tuple(tuple(numbers.setdefault(n, len(numbers)) for n in row.responses) for row in strip.rows)
