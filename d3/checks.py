"""Manipulation checks of one boot (PROTOCOL): did the factors do what the cell says? Pure; evidence in words."""

from collections.abc import Mapping, Sequence

from d3.record import ANY_VERSION, BootPlan, CacheState, Check, EngineFacts, RequestRecord, Start


def expected_hit(prompt_tokens: int, block_size: int | None) -> int | None:
    """Tokens that a warm request of n prompt tokens finds cached: floor((n-1)/B)*B; the last is always computed."""
    return None if not block_size else (prompt_tokens - 1) // block_size * block_size


def evaluate(
    plan: BootPlan,
    facts: EngineFacts,
    requests: Sequence[RequestRecord],
    machine: Mapping[str, str],
    start: Start = "plain",
) -> tuple[Check, ...]:
    """All checks of a boot that ran: the boot's own first, then the cache check of each prompt.

    `machine`: the facts of the machine, as the boot records them; `start`: how its process was started.
    """
    own = [
        _version(plan, facts),
        _backend(plan, facts),
        _caching(plan, facts),
        _flag(plan, facts),
        _serial(plan, requests),
        *_at_once(plan, machine),
        *_start(plan, start),
        *_compile_cache(plan, facts),
    ]
    prompts = dict.fromkeys(r.prompt for r in requests)
    return (*own, *(_cache(plan, p, [r for r in requests if r.prompt == p]) for p in prompts))


def _version(plan: BootPlan, facts: EngineFacts) -> Check:
    reported = facts.version or "nothing"
    return Check(
        name="pin",
        held=plan.version_asked in {ANY_VERSION, reported.split("+")[0]},
        evidence=f"asked for version {plan.version_asked}, the engine reports {reported}",
    )


def _backend(plan: BootPlan, facts: EngineFacts) -> Check:
    wanted, got = plan.backend_asked, facts.attention_backend
    return Check(
        name="backend",
        held=wanted is None or wanted == got,
        evidence=f"attention backend {got or 'not reported'}" + (f", asked for {wanted}" if wanted else ""),
    )


def _caching(plan: BootPlan, facts: EngineFacts) -> Check:
    """The engine's own word on the cache: some releases switch it off under the flag, with one warning line."""
    wanted = plan.factors.get("apc") == "on"
    return Check(
        name="cache_setting",
        held=facts.prefix_caching is None or facts.prefix_caching == wanted,
        evidence=f"prefix caching asked {'on' if wanted else 'off'}, the engine says {_word(facts.prefix_caching)}",
    )


def _word(value: bool | None) -> str:
    return "nothing" if value is None else "on" if value else "off"


def _flag(plan: BootPlan, facts: EngineFacts) -> Check:
    wanted = plan.invariant_mode if plan.factors.get("invariant") != "0" else "off"
    return Check(
        name="flag",
        held=facts.invariant_mode is None or facts.invariant_mode == wanted,
        evidence=f"batch-invariant mode asked: {wanted}; in force: {facts.invariant_mode or 'not reported'}",
    )


def _serial(plan: BootPlan, requests: Sequence[RequestRecord]) -> Check:
    wanted = 1 + max((len(r.neighbours) for r in plan.requests), default=0)
    seen = max((r.running for r in requests if r.running is not None), default=None)
    return Check(
        name="serial",
        held=seen is None or seen <= wanted,
        evidence=f"at most {seen if seen is not None else 'an unknown number of'} requests together, planned {wanted}",
    )


def _at_once(plan: BootPlan, machine: Mapping[str, str]) -> tuple[Check, ...]:
    """Only where the study fixes how many boots share the device; a record from before it did has no such check."""
    if plan.at_once is None:
        return ()
    seen = machine.get("boots_at_once")
    evidence = f"{seen or 'an unknown number of'} boots side by side, registered {plan.at_once}"
    return (Check(name="at_once", held=seen == str(plan.at_once), evidence=evidence),)


def _start(plan: BootPlan, start: Start) -> tuple[Check, ...]:
    """Where the study fixes it, and where a process is older than its boot: with a device at 'go' the boot failed."""
    if plan.start is None and start == "plain":
        return ()
    words = {
        "plain": "a new process at the boot's start",
        "standby": "a new process of its own that had only imported; no device was initialised at its start",
        "fork": "a fork of a process that had only imported; no device was initialised at its start",
    }
    registered = f", registered {plan.start}" if plan.start else ""
    held = start == plan.start or (plan.start is None and start != "fork")
    return (Check(name="start", held=held, evidence=f"{start}{registered}: {words[start]}"),)


def _compile_cache(plan: BootPlan, facts: EngineFacts) -> tuple[Check, ...]:
    """Off, unless the registered settings of the engine switch it on; one that says nothing has no such check."""
    seen = facts.environment.get("compile_cache")
    if seen is None:
        return ()
    asked = plan.launch.compile_cache is not None or plan.launch.env.get("VLLM_DISABLE_COMPILE_CACHE") == "0"
    wanted = "on" if asked else "off"
    return (Check(name="compile_cache", held=seen == wanted, evidence=f"compile cache asked {wanted}, is {seen}"),)


def warmed(plan: BootPlan, cache: CacheState | None) -> tuple[Check, ...]:
    """The check of a warmed compile cache: at the boot's start and end the same files as when it was sealed.

    Only where the study registered such a cache.
    """
    if plan.launch.compile_cache is None:
        return ()
    if cache is None:
        return (Check(name="cache_state", held=False, evidence="nobody looked after the compile cache"),)
    at = {"sealed": cache.sealed, "at the start": cache.before, "at the end": cache.after}
    seen = ", ".join(f"{value[:12]} {when}" for when, value in at.items())
    evidence = f"compile cache of this cell: {seen}; {cache.files} files, {cache.mib} MiB"
    return (Check(name="cache_state", held=len(set(at.values())) == 1, evidence=evidence),)


def _cache(plan: BootPlan, prompt: str, requests: Sequence[RequestRecord]) -> Check:
    """Cached tokens of every request of one prompt against what its phase should find."""
    on = plan.factors.get("apc") == "on"
    lengths = {r.prompt_tokens for r in requests}
    wanted = [r.expected_cached if on and r.expect == "warm" else 0 for r in requests]
    seen = [r.cached_tokens for r in requests]
    pairs = ", ".join(f"{r.phase} {_n(s)}/{_n(w)}" for r, s, w in zip(requests, seen, wanted, strict=True))
    evidence = f"{requests[0].prompt_tokens} prompt tokens; cached/expected: {pairs}"
    if any(s is None for s in seen):
        return Check(
            name="cache", held=False, prompt=prompt, evidence=f"the engine reports no cached tokens; {evidence}"
        )
    if len(lengths) > 1:
        return Check(name="cache", held=False, prompt=prompt, evidence=f"prompt lengths differ: {sorted(lengths)}")
    if len({r.prompt_sha256 for r in requests}) > 1:
        other = "the engine made other tokens of the same prompt"
        return Check(name="cache", held=False, prompt=prompt, evidence=f"{other}; {evidence}")
    if any(r.expected_cached in {0, None} for r in requests):
        short = f"the prompt is too short to hit a block, or the block size is unknown; {evidence}"
        return Check(name="cache", held=False, prompt=prompt, evidence=short)
    return Check(name="cache", held=seen == wanted, prompt=prompt, evidence=evidence)


def _n(value: int | None) -> str:
    return "?" if value is None else str(value)
