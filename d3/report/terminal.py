"""A certificate for a terminal: its tables and answers; nothing is said by colour alone. Pure."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from d3.report.answer import answers, cautions
from d3.report.tables import table
from d3.schema import Certificate
from d3.verdicts import WHAT


def terminal(certificate: Certificate) -> RenderableType:
    """The tables and answers for a terminal; nothing is said by colour alone."""
    parts: list[RenderableType] = []
    for stratum in certificate.strata:
        for endpoint in ("text", "logprobs"):
            header, rows = table(stratum, endpoint)
            shown = Table(title=f"{WHAT[endpoint]}, {stratum.stratum}: {stratum.verdict(endpoint).disposition}")
            for i, title in enumerate(header):
                shown.add_column(Text(title), justify="right" if i else "left")
            for row in rows:
                shown.add_row(*(Text(x) for x in row))
            parts.append(shown)
    parts += [Text(certificate.answer), *(Text(a.words) for a in answers(certificate))]
    parts += [Text(words) for words in cautions(certificate)]
    return Group(*parts)
