"""The draft of a comment on vLLM issue 40896, from certificates alone. Pure; D3 has no code that posts it."""

from collections.abc import Iterator, Sequence

from d3.record import Endpoint
from d3.report.again import study_command, verify_command
from d3.report.answer import answers, cautions
from d3.report.markdown import escape, markdown_table
from d3.report.tables import WIDE, cell_name, count, counts_of, gaps, stories, table
from d3.schema import Certificate, Stratum
from d3.table import CellResult, PromptResult

ISSUE = "vLLM issue #40896"
PINS = (
    "engine.name",
    "engine.version",
    "engine.attention_backend",
    "engine.dtype",
    "engine.block_size",
    "engine.environment.torch",
    "engine.environment.cuda",
    "engine.environment.gpu",
    "machine.cpu",
    "machine.gpu",
    "machine.driver",
    "machine.boots_at_once",
    "model",
    "model_digest",
)


def post(certificates: Sequence[tuple[Certificate, str]]) -> str:
    """The draft as Markdown. `certificates`: each with its file's path as a reader in the project folder types it."""
    return "\n".join(_lines(certificates)) + "\n"


def _lines(certificates: Sequence[tuple[Certificate, str]]) -> Iterator[str]:
    yield f"Draft. Owner-gated: a comment on {ISSUE}, to be posted by the owner of D3 or not at all; D3 posts nothing."
    yield from ("", "---", "", "**" + escape(certificates[0][0].registration.question) + "**", "")
    yield "A controlled, pre-registered 2x2: prefix caching x batch-invariant mode, several cold boots per cell."
    for certificate, file in certificates:
        yield from _study(certificate, file)
    yield from ("", "### Method", "", *_method([c for c, _ in certificates]))
    yield from ("", "### What this does not prove")
    for certificate, _ in certificates:
        yield from ("", f"{escape(_engine(certificate))}:", "", *(f"- {escape(x)}" for x in certificate.limits))
    yield from ("", "### Run it again", "")
    for certificate, file in certificates:
        prompts = f"{len(certificate.registration.prompts)} prompts of its registration"
        yield from (
            f"{escape(_engine(certificate))}: recompute every number from the recorded boots, without an engine:",
            "",
        )
        yield from ("```", verify_command(file), "```", "", f"Run the study itself, with the {prompts}:", "")
        yield from ("```", study_command(certificate.registration), "```", "")
    searched = {c.registration.prior_art_searched for c, _ in certificates}
    yield from (f"### Prior art (searched {', '.join(sorted(searched))})", "")
    art = dict.fromkeys(p for c, _ in certificates for p in c.prior_art)
    yield from (f"- {escape(p.source)}: {escape(p.says)}" for p in art)


def _study(c: Certificate, file: str) -> Iterator[str]:
    yield from ("", f"### {escape(_engine(c))}", "")
    for answer in answers(c):
        yield from (f"**{answer.disposition}.** {escape(answer.words)}", "")
    yield from (line for words in cautions(c) for line in (escape(words), ""))
    for stratum in (s for s in c.strata if s.role == "study"):
        name = f", {stratum.stratum}" if len(c.strata) > 1 else ""
        yield from (f"Boots whose first request differs while the rest agree, of valid boots{escape(name)}:", "")
        yield from (_whole(stratum) if len(stratum.cells[0].prompts) <= WIDE else _short(stratum))
        yield ""
        yield from _parts(stratum)
    pins = [f"{k.removeprefix('engine.')} {v}" for k, v in c.environment.common.items() if k in PINS]
    pins += [
        f"{d.name.removeprefix('engine.')} {' or '.join(d.values)}" for d in c.environment.differing if d.name in PINS
    ]
    yield f"Pins: {escape(', '.join(pins))}."
    yield f"Registered {c.context.registered_at}, first boot {c.first_boot_at or 'none'}."
    yield f"Registration `{c.registration_id[:12]}`, certificate `{file}`, digest `{c.digest[:12]}`."


def _engine(c: Certificate) -> str:
    common = c.environment.common
    machine = common.get("machine.gpu") or common.get("machine.cpu", "a machine not named")
    engine = f"{common.get('engine.name', 'engine')} {common.get('engine.version', 'of no reported version')}"
    return f"{engine}, {common.get('model', 'several models')}, {machine}"


def _whole(stratum: Stratum) -> Iterator[str]:
    """The seed's own table, once for every story that the endpoints tell."""
    for endpoint, name in stories(stratum):
        header, rows = table(stratum, endpoint)
        yield from markdown_table([name, *header[1:]], rows)


def _short(stratum: Stratum) -> Iterator[str]:
    """Many prompts: how many of them differ in each cell, and which."""
    told = stories(stratum)
    rows = [[cell_name(cell), *(_prompts(cell, endpoint) for endpoint, _ in told)] for cell in stratum.cells]
    yield from markdown_table(["cell", *(name for _, name in told)], rows)


def _prompts(cell: CellResult, endpoint: Endpoint) -> str:
    moved = [p for p in cell.prompts if counts_of(p, endpoint).k + counts_of(p, endpoint).scattered]
    found = f"{len(moved)} of {len(cell.prompts)} prompts"
    counts = dict.fromkeys(count(counts_of(p, endpoint)) for p in moved or cell.prompts)
    names = f": {', '.join(_name(p) for p in moved)}" if moved else ""
    if len(moved) > WIDE:
        lengths = sorted(p.prompt_tokens or 0 for p in moved)
        names = f": prompts of {lengths[0]} to {lengths[-1]} tokens"
    return f"{found}, each {' or '.join(counts)}{names}"


def _name(p: PromptResult) -> str:
    return f"{p.prompt} ({p.prompt_tokens or '?'} tokens)"


def _parts(stratum: Stratum) -> Iterator[str]:
    """Where tokens part, and how far log-probabilities move where none does."""
    pairs = [(cell, p, d) for cell in stratum.cells for p in cell.prompts for d in p.divergences]
    lines = []
    for cell, p, pair in pairs:
        d = pair.divergence
        if d.position is not None:
            lines.append(f"{cell.key} {p.prompt}: token {d.position}, {d.flip} flip (top-2 gaps {gaps(d)})")
    if lines:
        yield from (f"Where tokens part (cells as APC/invariant): {escape('; '.join(lines))}.", "")
    still = [d.divergence.max_dlogprob for _, _, d in pairs if d.divergence.max_dlogprob is not None]
    if still:
        yield from (f"Before that, or where no token differs, log-probabilities move by up to {max(still):.3g}.", "")


def _method(certificates: Sequence[Certificate]) -> Iterator[str]:
    """Five lines."""
    first = certificates[0].registration
    boots = " or ".join(str(n) for n in dict.fromkeys(c.registration.boots for c in certificates))
    orders = dict.fromkeys(" ".join(p.name for p in c.registration.protocol.phases) for c in certificates)
    yield "1. The whole study (cells, prompts, readings, pins, seeds) is registered and hashed before the first boot."
    yield f"2. {boots} fresh engine processes per cell in randomised blocks; the boot is the statistical unit."
    yield f"3. Each boot answers every prompt in the order {' or '.join(orders)} (C cold, W warm), one at a time."
    yield "4. A boot counts only if cached tokens, flag, version and model were as its cell says; otherwise it is void."
    yield (
        f"5. Counts have a {first.confidence:.0%} Clopper-Pearson interval; the verdict is the first pre-registered "
        "reading that holds."
    )
