"""What an engine can do for a study, read from one boot with cold and warm requests. Pure."""

from collections.abc import Callable, Sequence

from d3.record import Boot, Frozen, RequestRecord, sha256
from d3.registration import CellSpec


class Capability(Frozen):
    """One thing that a study asks of an engine; without a needed one, no boot of it would be valid."""

    name: str
    has: bool
    needed: bool
    evidence: str


def capabilities(spec: CellSpec, boot: Boot) -> tuple[Capability, ...]:
    """What the boot of this cell showed, the needed things first. Where the engine gave no answer, only why."""
    record, facts = boot.record, boot.record.engine.facts
    if record.failure:
        return (Capability(name="answers", has=False, needed=True, evidence=record.reason),)
    engine, requests, answers = spec.settings["engine"], record.requests, list(boot.responses.values())
    declared = "" if engine.get("block_size") is None else ", as its YAML says"
    pin = next((c for c in record.checks if c.name == "pin"), None)

    def row(name: str, has: bool, evidence: str, needed: bool = True) -> Capability:
        return Capability(name=name, has=has, needed=needed, evidence=evidence)

    return (
        row("answers", True, f"{len(requests)} requests, started in {record.timings.boot_s:.1f} s"),
        row("version", bool(pin and pin.held), pin.evidence if pin else "not checked"),
        row("block size", facts.block_size is not None, f"{facts.block_size or 'unknown'}{declared}"),
        row("cached tokens", all(r.cached_tokens is not None for r in requests), _seen(requests)),
        row("warm hits", _as_expected(requests, "warm", lambda r: r.expected_cached), "as many tokens as expected"),
        row("cold again", _as_expected(requests, "cold", lambda _: 0), _cold_by(engine)),
        _level(spec, "apc", "cache switch", ("on", "off"), needed=True),
        row("token ids", all(r.n_tokens for r in requests), "without: no verdict on tokens", needed=False),
        row("log-probabilities", all(a.logprobs for a in answers), "without: no verdict on them", needed=False),
        row("prompt ids", all(r.prompt_sha256 != sha256("") for r in requests),
            "without: a changed prompt is seen by its length alone", needed=False),
        _level(spec, "invariant", "invariant mode", ("0", "1"), needed=False),
    )  # fmt: skip


def studied(found: Sequence[Capability]) -> bool:
    """Whether a study can be run: nothing needed is missing."""
    return all(c.has for c in found if c.needed)


def _seen(requests: Sequence[RequestRecord]) -> str:
    """Cached tokens of the longest prompt, request by request."""
    longest = max(requests, key=lambda r: r.prompt_tokens)
    mine = [r for r in requests if r.prompt == longest.prompt]
    words = ", ".join(f"{r.phase} {'?' if r.cached_tokens is None else r.cached_tokens}" for r in mine)
    return f"of {longest.prompt_tokens} prompt tokens: {words}"


def _as_expected(requests: Sequence[RequestRecord], expect: str, wanted: Callable[[RequestRecord], int | None]) -> bool:
    """Whether every such request found what it should. A prompt that can hit no block says nothing."""
    mine = [r for r in requests if r.expect == expect and r.expected_cached]
    return bool(mine) and all(r.cached_tokens == wanted(r) for r in mine)


def _cold_by(engine: dict[str, object]) -> str:
    if engine["salt_field"]:
        return f"by salt: {engine['salt_field']}"
    return f"by reset: POST {engine['reset_path']}" if engine["reset_path"] else "neither salt nor reset in its YAML"


def _level(spec: CellSpec, factor: str, name: str, levels: Sequence[str], needed: bool) -> Capability:
    """Whether the engine's YAML has these levels of a factor. Only the first was booted."""
    known = spec.settings["engine"]["factors"].get(factor, {})
    whys = {w: known[w].get("unavailable") if w in known else "no such level in its YAML" for w in levels}
    why = next((why for why in whys.values() if why), "")
    last = known.get(levels[-1], {})
    words = [*last.get("args", ()), *(f"{k}={v}" for part in ("env", "body") for k, v in last.get(part, {}).items())]
    says = f"{factor}={levels[-1]}: {' '.join(words) or 'nothing added'} (not booted here)"
    return Capability(name=name, has=not why, needed=needed, evidence=why or says)
