"""A certificate for people as Markdown. Pure; everything shown is in the certificate."""

from collections.abc import Iterator, Sequence

from d3.contrasts import Contrast
from d3.price import words as cost_words
from d3.record import ENDPOINTS, Endpoint
from d3.report.again import steps
from d3.report.answer import answers, cautions
from d3.report.tables import COLD, counts_of, gaps, same, table
from d3.schema import Certificate, Stratum
from d3.table import CellResult, Pair
from d3.verdicts import WHAT


def markdown(certificate: Certificate, file: str = "FILE") -> str:
    """The whole report. `file`: the certificate's path as the reader should type it in the last line."""
    return "\n".join(_lines(certificate, file)) + "\n"


def _lines(c: Certificate, file: str) -> Iterator[str]:
    yield f"# {c.registration.question}"
    yield ""
    for answer in answers(c):
        yield from (f"**{escape(answer.words)}**", "")
    yield from (x for words in cautions(c) for x in (escape(words), ""))
    yield from (f"In the registered words: {escape(c.answer)}", "")
    logged = f"Registration `{c.registration_id[:12]}` logged {c.context.registered_at}"
    yield f"{logged}, first boot {c.first_boot_at or 'none'}."
    t = c.totals
    yield f"{t.counted} of {t.boots} boots counted, {t.requests} requests, {t.total_s:.0f} s."
    if c.cost and c.cost.usd is not None and c.context.price:
        yield f"Cost: {escape(cost_words(c.context.price, c.cost))}"
    for stratum in c.strata:
        yield from _stratum(c, stratum)
    yield from _section("Controls", [f"{k.kind} {k.stratum}: {_held(k.held)}; {k.words}" for k in c.controls])
    yield from _section("Checks", [_check(k.name, k.held, k.total, k.failures) for k in c.checks])
    lost = [f"{b.stratum} {b.cell} boot {b.boot} attempt {b.attempt}: {b.why_not}" for b in c.boots if not b.counted]
    yield from _section("Boots that do not count", lost)
    yield from _section("Varied", c.varied)
    # The engine's whole configuration is in the certificate; its command line is shown below.
    yield from _section("Held", [x for x in c.held if not x.startswith("engine.")])
    yield from _section("Neither varied nor held", c.neither)
    yield from _section("How cold the boots were", [f"{k}, {COLD.get(k, k)}: {n}" for k, n in c.coldness.items()])
    yield from _section("Engine and machine", [f"{k}: {v}" for k, v in c.environment.common.items()])
    yield from _section("Does not prove", c.limits)
    searched = f"Prior art (searched {c.registration.prior_art_searched})"
    yield from _section(searched, [f"{p.source}: {p.says}" for p in c.prior_art])
    yield from ("", "## Check it, run it again", "")
    for words, command in steps(c, file):
        yield from (escape(words), "", "```", command, "```", "")
    yield f"D3 {c.context.d3_version}, commit {c.context.git_commit or 'unknown'}, digest `{c.digest[:12]}`."


def _stratum(c: Certificate, stratum: Stratum) -> Iterator[str]:
    yield ""
    yield "## Result" if len(c.strata) == 1 else f"## Result: {escape(stratum.stratum)}"
    if stratum.role == "instrument":
        yield from ("", "Control stratum: sampled on purpose; its readings answer nothing.")
    alike = same(stratum, "text", "tokens")
    for endpoint in ENDPOINTS:
        if endpoint == "tokens" and alike:
            continue
        verdict = stratum.verdict(endpoint)
        what = "Bytes and tokens alike" if endpoint == "text" and alike else WHAT[endpoint].capitalize()
        yield from ("", f"### {what}: {verdict.disposition}", "")
        if c.answer != verdict.answer:
            yield from (escape(verdict.answer), "")
        yield from _table(stratum, endpoint)
        yield from _bullets([*_over_boots(stratum, endpoint), *verdict.notes])
        readings = [f"{'**' + r.name + '**' if r.held else r.name}: {r.why}" for r in verdict.readings]
        yield from _bullets(readings, "Readings, in the registered order; the first in bold decides")
        compared = [k for k in stratum.contrasts if k.endpoint == endpoint and (k.prompt is None or k.k_a + k.k_b > 0)]
        yield from _bullets([_contrast(k) for k in compared], "Contrasts")
    yield from ("", f"Flag: {stratum.flag.state}; {escape(stratum.flag.why)}.")
    if stratum.implementations:
        yield f"Batch-invariant mode in force: {', '.join(stratum.implementations)}."
    moved = [_pair(cell, p.prompt, d) for cell in stratum.cells for p in cell.prompts for d in p.divergences]
    yield from _bullets(moved, "Where responses part")


def _table(stratum: Stratum, endpoint: Endpoint) -> Iterator[str]:
    yield from markdown_table(*table(stratum, endpoint))
    yield from ("", "Boots where the first request differs and the rest agree, of valid boots, with the interval.")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:") -> Iterator[str]:
    """A table in Markdown, its texts escaped; `align`: the rule of every column but the first, numbers to the right."""
    yield f"| {' | '.join(escape(h) for h in header)} |"
    yield f"|---|{f'{align}|' * (len(header) - 1)}"
    yield from (f"| {' | '.join(escape(x) for x in row)} |" for row in rows)


def _over_boots(stratum: Stratum, endpoint: Endpoint) -> Iterator[str]:
    """Where the first request differs: the same two responses on every boot? Is the cold one the uncached one?"""
    for cell in stratum.cells:
        for prompt in cell.prompts:
            k = counts_of(prompt, endpoint)
            if k.k:
                equal = {True: "is", False: "is not", None: "cannot be compared with"}[k.cold_equals_off]
                several = f"{k.distinct_cold} distinct cold and {k.distinct_warm} distinct warm over {k.n} boots"
                yield f"{cell.key} {prompt.prompt}: {several}; the cold response {equal} the one without a cache"


def _contrast(k: Contrast) -> str:
    p = "no p" if k.p is None else f"p = {k.p:.2g}"
    speaks = f"; speaks for {', '.join(k.supports)}" if k.supports else ""
    where = k.prompt or "any prompt"
    return f"{where}: {k.a} {k.k_a} of {k.n_a} against {k.b} {k.k_b} of {k.n_b}, {p}: {k.words}{speaks}"


def _pair(cell: CellResult, prompt: str, pair: Pair) -> str:
    d = pair.divergence
    if d.position is not None:
        tokens = " against ".join("the end" if t is None else str(t) for t in (d.first_token, d.later_token))
        where = f"token {d.position} ({tokens}), {d.flip} flip, gaps {gaps(d)}"
    else:
        where = "no token differs" if d.first_tokens else "no token ids to compare"
    drift = "" if d.max_dlogprob is None else f"; before it, log-probabilities move by at most {d.max_dlogprob:.3g}"
    return (
        f"{cell.key} {prompt}, {pair.boots} boots, response {pair.first[:8]} against {pair.later[:8]}: {where}{drift}"
    )


def _check(name: str, held: int, total: int, failures: Sequence[str]) -> str:
    first = f"; {failures[0]}" if failures else ""
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{name}: held {held} of {total}{first}{more}"


def _held(held: bool | None) -> str:
    return {True: "held", False: "FAILED", None: "not judged"}[held]


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"## {title}", "", *(f"- {escape(line)}" for line in lines))


def _bullets(lines: Sequence[str], title: str = "") -> Iterator[str]:
    if lines:
        yield from (*(["", f"{title}:"] if title else []), "", *(f"- {escape(line)}" for line in lines))


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no table breaks, no HTML, one line; a held reading's stars stay."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
