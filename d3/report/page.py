"""A certificate as one HTML page that needs nothing else: no script, no font, no network. Pure."""

from collections import Counter, defaultdict

from jinja2 import Environment, PackageLoader, StrictUndefined

from d3.record import Endpoint, Frozen
from d3.report.again import steps
from d3.report.answer import SETTING, answers, cautions
from d3.report.evidence import Evidence
from d3.report.figures import NAMES, Plot, plots
from d3.report.numbers import drifts, parts
from d3.report.strips import PromptStrips, letter, told
from d3.report.tables import COLD, WIDE, Grid, count, grid, interval, stories
from d3.report.texts import Difference, differences, printable
from d3.schema import Certificate, Stratum
from d3.verdicts import WHAT, Verdict


class Story(Frozen):
    """One table of the first screen: the endpoints it stands for, and their verdict."""

    name: str
    grid: Grid
    verdict: Verdict


class Strips(Frozen):
    """The strips of one endpoint: those that are open, and those of many prompts that show no difference."""

    endpoint: Endpoint
    what: str
    shown: tuple[PromptStrips, ...]
    folded: tuple[PromptStrips, ...]


class StratumView(Frozen):
    """Everything that the page shows of one stratum."""

    stratum: Stratum
    stories: tuple[Story, ...]
    strips: tuple[Strips, ...]
    plots: tuple[Plot, ...]
    differences: tuple[Difference, ...]
    more: int

    def endpoints(self) -> set[Endpoint]:
        """The endpoints that the stories stand for, one for each story."""
        return {story.verdict.endpoint for story in self.stories}


class CheckView(Frozen):
    """One check with every distinct evidence and the number of times it was given."""

    name: str
    held: int
    total: int
    failures: tuple[str, ...]
    evidence: tuple[tuple[str, int], ...]


def page(evidence: Evidence, file: str) -> str:
    """The whole page. `file`: the certificate's path as the reader should type it."""
    certificate = evidence.certificate
    environment = Environment(
        loader=PackageLoader("d3.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, interval=interval, letter=letter)
    text = environment.get_template("page.html.j2").render(
        c=certificate,
        file=file,
        answers=answers(certificate),
        cautions=cautions(certificate),
        strata=[_stratum(evidence, s) for s in certificate.strata],
        checks=_checks(evidence),
        differing={d.name: d.values for d in certificate.environment.differing},
        steps=steps(certificate, file),
        cold=COLD,
        names=NAMES,
        setting=SETTING,
        what=WHAT,
        repeats=" ".join(p.name for p in certificate.registration.protocol.phases),
        gaps=_gaps(certificate),
    )
    return printable(text)


def _stratum(evidence: Evidence, stratum: Stratum) -> StratumView:
    registration, boots = evidence.certificate.registration, evidence.counted(stratum.stratum)
    strips = []
    for endpoint, found in told(registration, stratum.stratum, boots).items():
        many = len(registration.prompts) > WIDE
        shown = [p for p in found if not (many and p.calm())]
        folded = [p for p in found if many and p.calm()]
        if found:
            strips.append(Strips(endpoint=endpoint, what=WHAT[endpoint], shown=tuple(shown), folded=tuple(folded)))
    pairs, more = differences(stratum, boots)
    return StratumView(
        stratum=stratum,
        stories=tuple(
            Story(name=name, grid=grid(stratum, endpoint), verdict=stratum.verdict(endpoint))
            for endpoint, name in stories(stratum)
        ),
        strips=tuple(strips),
        plots=tuple(
            plots(drifts(registration, stratum.stratum, boots), parts(stratum), registration.tie_gap) if boots else ()
        ),
        differences=tuple(pairs),
        more=more,
    )


def _checks(evidence: Evidence) -> list[CheckView]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for boot in evidence.boots:
        for check in boot.record.checks:
            words = f"{check.prompt}: {check.evidence}" if check.prompt else check.evidence
            found[check.name][words] += 1
    return [
        CheckView(
            name=c.name,
            held=c.held,
            total=c.total,
            failures=c.failures,
            evidence=tuple(sorted(found[c.name].items())),
        )
        for c in evidence.certificate.checks
    ]


def _gaps(certificate: Certificate) -> set[int]:
    """The places in the request order at which another cache salt begins."""
    series = [p.series for p in certificate.registration.protocol.phases]
    return {i for i in range(1, len(series)) if series[i] != series[i - 1]}
