"""Did the batch-invariant flag run, and did it change anything? (PROTOCOL, manipulation check 2.) Pure."""

from collections.abc import Mapping, Sequence

from d3.record import Endpoint
from d3.registration import CellSpec
from d3.table import Flag, Outcome, Selected

Place = tuple[str, str, Endpoint]
Outcomes = Mapping[Place, Sequence[Outcome]]


def twin(spec: CellSpec, specs: Sequence[CellSpec]) -> CellSpec | None:
    """The cell that differs from this one only in having the flag off."""
    wanted = {**spec.factors, "invariant": "0"}
    return next((c for c in specs if c.factors == wanted), None)


def refused(spec: CellSpec, specs: Sequence[CellSpec], chosen: Sequence[Selected]) -> str:
    """Why the flag could not be had: the engine has none, or in its own words, as it refused it.

    It refused the flag where no boot ran, none failed otherwise, and the twin ran.
    """
    if why := spec.unavailable():
        return f"the engine has no such mode: {why}"
    other = twin(spec, specs)
    if spec.factors["invariant"] == "0" or other is None:
        return ""
    own = [s.boot.record for s in chosen if s.boot.record.cell == spec.cell and s.boot.record.status != "stopped"]
    errors = [r.failure.line for r in own if r.failure and r.failure.kind == "engine_error"]
    skipped = sum(r.status == "skipped" or bool(r.failure and r.failure.kind == "skipped") for r in own)
    twin_ran = any(s.counted for s in chosen if s.boot.record.cell == other.cell)
    if not errors or len(errors) + skipped < len(own) or not twin_ran:
        return ""
    return f"the engine refused the flag in {len(errors)} boot{'s' * (len(errors) > 1)}: {errors[0]}"


def flag_state(specs: Sequence[CellSpec], chosen: Sequence[Selected], outcomes: Outcomes) -> Flag:
    """`inert` when every log-probability hash under the flag equals its twin's at the same prompt and cache state."""
    flagged = [(s, t) for s in specs if s.factors["invariant"] != "0" and (t := twin(s, specs))]
    if not flagged:
        return Flag(state="absent", why="no cell pair has the flag on and off")
    for spec, _ in flagged:
        if why := refused(spec, specs, chosen):
            return Flag(state="unavailable", why=why)
    same, changed = 0, 0
    for spec, other in flagged:
        for (cell, prompt, endpoint), group in outcomes.items():
            if cell != spec.cell or endpoint != "logprobs":
                continue
            for expect in ("cold", "warm"):
                mine = {h for o in group for h in o.hashes.get(expect, ())}
                its = {h for o in outcomes.get((other.cell, prompt, endpoint), ()) for h in o.hashes.get(expect, ())}
                if mine and its:
                    same, changed = same + (mine == its), changed + (mine != its)
    if changed:
        return Flag(state="works", why=f"log-probabilities changed in {changed} of {same + changed} comparisons")
    if same:
        return Flag(state="inert", why=f"the flag changed no log-probability in any of {same} comparisons")
    return Flag(state="unknown", why="no log-probabilities with the flag on and off to compare")
