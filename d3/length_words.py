"""Prompt lengths as Markdown: thresholds, what they suggest, and the numbers by length. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from d3.length_leads import TESTS, finest, leads, many
from d3.length_table import Point, Series, remainders, threshold
from d3.registration import Registration, short
from d3.report.markdown import escape, markdown_table
from d3.statistics import null_bound
from d3.verdicts import WHAT


def markdown(registration: Registration, found: Sequence[Series], file: str, plots: Mapping[str, str]) -> str:
    """The whole text. `file`: the certificate as a reader names it; `plots`: the picture of each stratum."""
    return "\n".join(_lines(registration, found, file, plots)) + "\n"


def _lines(registration: Registration, found: Sequence[Series], file: str, plots: Mapping[str, str]) -> Iterator[str]:
    yield f"# At which prompt lengths cold and warm answers part: {escape(registration.study)}"
    yield ""
    yield _scope(registration, found, file)
    yield ""
    yield "## Thresholds"
    yield ""
    header = ("cell", "compared by", "no divergence", "every prompt parts")
    for stratum in dict.fromkeys(s.stratum for s in found):
        yield from () if stratum == "base" else (f"{escape(stratum)}:", "")
        own = [s for s in found if s.stratum == stratum]
        rows = [[s.cell, named(s), no_divergence(s.points), always(s.points)] for s in own]
        yield from markdown_table(header, rows, align="---")
        yield ""
    yield from _caution(registration.confidence, found)
    yield "## What this suggests"
    yield ""
    yield from _suggestions(found)
    for stratum in dict.fromkeys(s.stratum for s in found):
        yield from _stratum(stratum, [s for s in found if s.stratum == stratum], plots)


def named(one: Series) -> str:
    """The endpoints of a series in words."""
    *others, last = (WHAT[e] for e in one.endpoints)
    return f"{', '.join(others)} and {last}" if others else last


def no_divergence(points: Sequence[Point]) -> str:
    """Up to where nothing differs: 'none below 257 tokens (33 lengths) in 2 prompts per length and 2 boots'."""
    tried = [p for p in points if p.answered]
    if not tried:
        return "no answer at any length"
    t = threshold(points)
    if t.first is None:
        span = f"none from {tried[0].tokens} to {tried[-1].tokens} tokens ({many(len(tried), 'length')})"
        return f"{span} in {_tried(tried)}"
    if t.clean is None:
        return f"at the shortest length already, {t.first} tokens"
    below = [p for p in tried if p.tokens < t.first]
    return f"none below {t.first} tokens ({many(t.below, 'length')}) in {_tried(below)}"


def always(points: Sequence[Point]) -> str:
    """From where on every prompt parts in every boot."""
    t = threshold(points)
    if t.first is None:
        return "at no length"
    return "from no length on" if t.always is None else f"from {t.always} tokens on ({many(t.above, 'length')})"


def _tried(points: Sequence[Point]) -> str:
    """'2 prompts per length and 2 boots', as ranges where lengths differ."""
    return f"{_range([p.prompts for p in points], 'prompt')} per length and {_range([p.boots for p in points], 'boot')}"


def _range(values: Sequence[int], noun: str) -> str:
    low, high = min(values), max(values)
    return many(low, noun) if low == high else f"{low} to {high} {noun}s"


def _scope(registration: Registration, found: Sequence[Series], file: str) -> str:
    lengths = sorted({p.tokens for s in found for p in s.points})
    longest = max((c.settings.get("max_tokens", 0) for c in registration.cells), default=0)
    return (
        f"Made from `{file}`, registration `{short(registration.id())}`: {many(len(lengths), 'prompt length')} from "
        f"{lengths[0]} to {lengths[-1]} tokens, answers of at most {many(longest, 'token')}. A prompt parts in a boot "
        "where its cold answers agree, its warm ones agree, and the two differ. A threshold holds for the lengths that "
        "were run; of those between it says nothing."
    )


def _caution(confidence: float, found: Sequence[Series]) -> Iterator[str]:
    boots = min((p.boots for s in found for p in s.points), default=0)
    if boots:
        yield (
            f"- No divergence is a bound, not a proof: 0 of {many(boots, 'boot')} leaves room for a true rate of up "
            f"to {null_bound(boots, confidence):.0%} at a prompt (one-sided {confidence:.0%})."
        )
    if any(_later_in_tokens(found, s) for s in found):
        yield (
            "- A token differs only where two candidates nearly tie, so the thresholds of bytes and tokens hang on "
            "these prompts' words; those of log-probabilities are nearer to what the engine computes."
        )
    if void := sorted({p.tokens for s in found for p in s.points if not p.answered}):
        at = ", ".join(map(str, void))
        yield f"- No answer at {at} tokens: too short to hit a cached block, or another check failed."
    if any(p.other for s in found for p in s.points):
        yield "- A pair that differs otherwise has cold or warm answers that do not agree among themselves."
    yield ""


def _later_in_tokens(found: Sequence[Series], one: Series) -> bool:
    """Whether this cell's log-probabilities part at a shorter length than its tokens."""
    first = threshold(one.points).first
    if "logprobs" not in one.endpoints or first is None:
        return False
    twins = [s for s in found if (s.stratum, s.cell) == (one.stratum, one.cell) and "tokens" in s.endpoints]
    return any((t := threshold(s.points).first) is None or t > first for s in twins)


def _suggestions(found: Sequence[Series]) -> Iterator[str]:
    said = [(s, lead) for s in finest(found) if (lead := " ".join(leads(s)))]
    if not said:
        yield "Nothing differs at any length, so there is no threshold to explain."
        yield ""
        return
    yield "Leads to a mechanism, computed from the counts. None of them shows a cause."
    yield ""
    for one, lead in said:
        where = one.cell if one.stratum == "base" else f"{escape(one.stratum)}, {one.cell}"
        yield f"- {where}, {named(one)}: {lead}"
    yield ""
    yield TESTS


def _stratum(stratum: str, found: Sequence[Series], plots: Mapping[str, str]) -> Iterator[str]:
    yield f"## By length{'' if stratum == 'base' else f': {escape(stratum)}'}"
    yield ""
    yield f"![For every cell and prompt length, whether cold and warm answers agree or part]({plots[stratum]})"
    yield ""
    for cell in dict.fromkeys(s.cell for s in found):
        own = [s for s in found if s.cell == cell]
        firsts = [t.first for s in own if (t := threshold(s.points)).first is not None]
        if not firsts:
            yield f"{cell}: {'; '.join(f'{no_divergence(s.points)}, by {named(s)}' for s in own)}."
            yield ""
            continue
        yield f"### {cell}"
        yield ""
        yield "Pairs of prompt and boot that part, of those with an answer."
        yield ""
        yield from _by_length(own)
        yield ""
        if own[0].cached:
            yield from _by_remainder(own, min(firsts))


def _by_length(own: Sequence[Series]) -> Iterator[str]:
    """The series of one cell, a row per length."""
    rows = []
    for together in zip(*(s.points for s in own), strict=True):
        p = together[0]
        hit = p.hit if own[0].cached else 0
        sizes = [str(p.tokens), "?" if hit is None else str(hit), "?" if hit is None else str(p.tokens - hit)]
        moved = "" if p.first_token is None else f"{p.first_token:.3g}"
        rows.append([*sizes, *(_share(q.parted, q.other, q.answered) for q in together), moved])
    names = [f"part by {named(s)}" for s in own]
    header = ("tokens", "cached when warm", "left", *names, "max |Δ log-probability| of the first token")
    yield from markdown_table(header, rows)


def _by_remainder(own: Sequence[Series], least: int) -> Iterator[str]:
    """The series of one cell, a row per remainder, over the lengths from `least` tokens on."""
    groups = [{g.remainder: g for g in remainders(s.points, least)} for s in own]
    lefts = sorted({left for one in groups for left in one})
    if not lefts:
        return
    yield f"From {least} tokens on, by the tokens left after the cached blocks, all that a warm request computes:"
    yield ""
    rows = []
    for left in lefts:
        here = [one.get(left) for one in groups]
        shares = [_share(g.parted, g.other, g.answered) if g else "void" for g in here]
        shortest = [str(g.threshold.first or "none") if g else "void" for g in here]
        rows.append([str(left), str(max(g.lengths for g in here if g)), *shares, *shortest])
    names = [f"{what} by {named(s)}" for what in ("part", "shortest that differs") for s in own]
    yield from markdown_table(("tokens left", "lengths", *names), rows)
    yield ""


def _share(parted: int, other: int, answered: int) -> str:
    """'3 / 4', and what differs in another way."""
    if not answered:
        return "void"
    return f"{parted} / {answered}" + (f", {other} otherwise" if other else "")
