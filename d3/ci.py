"""A comparison for machines: JUnit XML, and the workflow commands of GitHub Actions. Pure."""

import xml.etree.ElementTree as ET  # nosec B405 # only written here, never parsed

from d3.comparison import Comparison, Row
from d3.errors import printable
from d3.gate import NOTHING, Finding, findings, nothing_compared, sides, worse, worse_verdict
from d3.verdicts import WHAT

ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
SHOWN = 10  # GitHub shows so many annotations of one level per step; the rest is counted


def junit(comparison: Comparison) -> str:
    """One test case per place, per verdict, and one for the gate as a whole; a failure is what got worse.

    Form: testsuites / testsuite / testcase / failure or skipped, with the attributes that Jenkins' junit-10.xsd knows.
    """
    top = ET.Element("testsuites", name="d3")
    for stratum in dict.fromkeys(r.stratum for r in comparison.rows):
        suite = ET.SubElement(top, "testsuite", name=printable(stratum))
        for row in (r for r in comparison.rows if r.stratum == stratum):
            _row_case(suite, row, comparison)
    _verdict_cases(ET.SubElement(top, "testsuite", name="verdicts"), comparison)
    _general_cases(ET.SubElement(top, "testsuite", name="gate"), comparison)
    for suite in top:
        _count(suite, list(suite))
        suite.set("skipped", str(sum(case.find("skipped") is not None for case in suite)))
    _count(top, [case for suite in top for case in suite])
    ET.indent(top)
    return ET.tostring(top, encoding="unicode", xml_declaration=False) + "\n"


def annotations(comparison: Comparison) -> list[str]:
    """A workflow command per finding: `::error title=...::...`, at most ten of a level and one that counts the rest."""
    lines = []
    found = findings(comparison)
    for level in ("error", "warning", "notice"):
        own = [f for f in found if f.level == level]
        shown = own if len(own) <= SHOWN else own[: SHOWN - 1]
        lines += [_annotation(f) for f in shown]
        if len(own) > len(shown):
            more = f"{len(own) - len(shown)} more of this level; the step's log has all"
            lines.append(_annotation(Finding(level=own[0].level, where="more", message=more)))
    return lines


def _annotation(finding: Finding) -> str:
    title = _data(f"D3 {finding.where}").replace(":", "%3A").replace(",", "%2C")
    return f"::{finding.level} title={title}::{_data(finding.message)}"


def _data(text: str) -> str:
    """Escaped as the runner undoes it; other control characters as Python writes them."""
    return "".join(ESCAPED.get(c) or printable(c) for c in text)


def _row_case(suite: ET.Element, row: Row, comparison: Comparison) -> None:
    case = _case(suite, f"{row.stratum}.{row.cell}", f"{row.prompt} {row.endpoint}")
    why = worse(row, comparison)
    message = "; ".join(x for x in (why, sides(row), row.why) if x)
    if why:
        _outcome(case, "failure", message, row.change)
    elif row.change == "not_comparable":
        _outcome(case, "skipped", row.why)


def _verdict_cases(suite: ET.Element, comparison: Comparison) -> None:
    for v in comparison.verdicts:
        case = _case(suite, f"{v.stratum}.verdict", WHAT[v.endpoint])
        if worse_verdict(v):
            _outcome(case, "failure", f"{v.old_disposition} -> {v.new_disposition}", "verdict")


def _general_cases(suite: ET.Element, comparison: Comparison) -> None:
    case = _case(suite, "gate", "something could be compared")
    if nothing_compared(comparison):
        _outcome(case, "failure", NOTHING, "nothing")
    case = _case(suite, "gate", "no control broke")
    if comparison.broken_controls:
        _outcome(case, "failure", "; ".join(comparison.broken_controls), "control")


def _case(suite: ET.Element, group: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=printable(group), name=printable(name), time="0")


def _outcome(case: ET.Element, tag: str, message: str, kind: str = "") -> None:
    found = ET.SubElement(case, tag, {"message": printable(message)} | ({"type": kind} if kind else {}))
    if kind:
        found.text = printable(message)


def _count(element: ET.Element, cases: list[ET.Element]) -> None:
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(c.find("failure") is not None for c in cases)))
    element.set("errors", "0")
    element.set("time", "0")
