"""What a certificate does not prove, computed from what ran; and what was varied, held, or neither. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from d3.record import Boot, Frozen
from d3.registration import Registration
from d3.statistics import null_bound

OWN_MODE = "D3's"  # how EngineFacts.invariant_mode begins where the mode is D3's own and not the engine's flag
ATTACHED = (
    "D3 did not boot the engine: what is counted as one boot is one visit to a running endpoint, which says nothing of "
    "boots, of its weights and flags, or of what else it was asked meanwhile."
)
UNCONTROLLED = ("clock speed and temperature of the processor", "other load on the machine", "addresses in memory")


class Difference(Frozen):
    """A fact that was not the same in all counted boots: how many boots had which value."""

    name: str
    values: dict[str, int]


class Environment(Frozen):
    """Facts of engine and machine: those that all counted boots share, once, and those that differ."""

    common: dict[str, str]
    differing: tuple[Difference, ...]


def facts(boot: Boot) -> dict[str, str]:
    """What engine and machine said in one boot, as flat text."""
    record, engine = boot.record, boot.record.engine
    own = engine.facts.model_dump(mode="json", exclude={"cache_config", "environment"})
    flat = {"name": engine.name, "transport": engine.transport, "version_asked": engine.version_asked}
    flat |= {k: str(v) for k, v in own.items() if v is not None}
    flat |= {f"cache.{k}": v for k, v in engine.facts.cache_config.items()}
    flat |= {f"env.{k}": v for k, v in engine.env.items()}
    flat |= {f"body.{k}": str(v) for k, v in engine.body.items()}
    flat["command"] = " ".join(engine.command)
    found = {f"engine.{k}": v for k, v in flat.items()}
    found |= {f"engine.environment.{k}": v for k, v in engine.facts.environment.items()}
    found |= {f"machine.{k}": v for k, v in record.environment.items()}
    return found | {"model": record.model, "model_digest": record.model_digest}


def environment(boots: Sequence[Boot]) -> Environment:
    """The facts of the counted boots; one that a boot does not state counts as a value of its own."""
    values: dict[str, Counter[str]] = defaultdict(Counter)
    every = [facts(b) for b in boots]
    if any(b.record.start != "plain" for b in boots):  # certificates of before there were other ways do not state it
        every = [{**one, "start": b.record.start} for one, b in zip(every, boots, strict=True)]
    for name in sorted({k for one in every for k in one}):
        values[name].update(one.get(name, "not stated") for one in every)
    return Environment(
        common={k: next(iter(v)) for k, v in values.items() if len(v) == 1},
        differing=tuple(Difference(name=k, values=dict(sorted(v.items()))) for k, v in values.items() if len(v) > 1),
    )


def varied(registration: Registration) -> tuple[str, ...]:
    """The swept keys that had more than one level."""
    return tuple(f"{k}: {', '.join(v)}" for k, v in sorted(registration.axes.items()) if len(v) > 1)


def held(registration: Registration) -> tuple[str, ...]:
    """The registered settings that were the same in every cell."""
    first, *rest = [flat("", c.settings) for c in registration.cells]
    return tuple(f"{k}={v}" for k, v in sorted(first.items()) if all(other.get(k) == v for other in rest))


def neither(registration: Registration, found: Environment) -> tuple[str, ...]:
    """What moved without being a factor, and what D3 never controls. What a factor maps to is not listed."""
    swept = {k for k, v in registration.axes.items() if len(v) > 1}
    mapped = {"engine.command", "engine.invariant_mode", "engine.prefix_caching", "engine.cache.enable_prefix_caching"}
    mapped |= {"machine.boots_at_once"} if "at_once" in swept else set()
    moved = [
        f"{d.name}: {', '.join(d.values)}"
        for d in found.differing
        if d.name not in mapped
        and not d.name.startswith(("engine.env.", "engine.body."))
        and d.name.split(".")[-1] not in swept
    ]
    return (*moved, *UNCONTROLLED)


def flat(path: str, value: object) -> dict[str, str]:
    """A nested setting as dotted names with text; a list is one text."""
    if isinstance(value, dict):
        return {p: x for k, v in value.items() for p, x in flat(f"{path}.{k}".strip("."), v).items()}
    if isinstance(value, list | tuple) and not value:
        return {}
    if isinstance(value, list | tuple):
        return {path: " ".join(str(v) for v in value)}
    return {path: str(value).lower() if isinstance(value, bool) else str(value)}


def implementations(boots: Sequence[Boot]) -> tuple[str, ...]:
    """Which batch-invariant mode the flagged boots had, in the engine's own word."""
    flagged = [b.record.engine.facts.invariant_mode for b in boots if b.record.factors["invariant"] != "0"]
    return tuple(sorted({mode or "not reported" for mode in flagged}))


def limits(registration: Registration, boots: Sequence[Boot]) -> tuple[str, ...]:
    """The lines of 'does not prove', each from what ran."""
    if not boots:
        return ("No boot counts, so nothing is shown.",)
    records = [b.record for b in boots]
    models = sorted({r.model for r in records})
    engines = sorted({f"{r.engine.name} {r.engine.facts.version or r.engine.version_asked}" for r in records})
    devices = sorted({_device(b) for b in boots})
    attached = any(r.coldness == "none" for r in records)
    return (
        f"{_many(models, 'model', 'models')}: {', '.join(models)}. Another model may differ.",
        f"{_many(engines, 'pinned engine', 'pinned engines')}: {', '.join(engines)}. Kernel- and version-specific.",
        f"{_many(devices, 'kind of device', 'kinds of device')}: {', '.join(devices)}.",
        _concurrency(registration),
        ATTACHED if attached else _bound(registration, boots),
        _prompts(registration, boots),
        _flag(boots),
        *_protocol(registration),
    )


def _many(items: Sequence[str], one: str, several: str) -> str:
    return f"One {one}" if len(items) == 1 else f"{len(items)} {several}"


def _device(boot: Boot) -> str:
    where = {**boot.record.environment, **boot.record.engine.facts.environment}
    device = boot.record.engine.facts.device or "unknown device"
    return where.get("gpu", device) if device == "cuda" else where.get("cpu", device) if device == "cpu" else device


def _concurrency(registration: Registration) -> str:
    levels = sorted({int(c.settings.get("concurrency", 0)) for c in registration.cells})
    if levels == [0]:
        return (
            "Serialised requests only; batch composition, which the invariant flag is documented for, was not varied."
        )
    return f"Concurrency only as varied here: {', '.join(map(str, levels))} neighbours beside each request."


def _bound(registration: Registration, boots: Sequence[Boot]) -> str:
    per_cell = Counter((b.record.stratum, b.record.cell) for b in boots)
    least = min(per_cell[c.stratum, c.cell] for c in registration.cells if per_cell[c.stratum, c.cell])
    bound = null_bound(least, registration.confidence)
    room = f"a true rate of up to {bound:.1%} (one-sided {registration.confidence:.0%})"
    boot = "boot bounds" if least == 1 else "boots bound"
    return f"{least} {boot} a frequent effect in a cell, not a rare one: 0 of {least} leaves room for {room}."


def _prompts(registration: Registration, boots: Sequence[Boot]) -> str:
    lengths = sorted({r.prompt_tokens for b in boots for r in b.record.requests})
    n = len(registration.prompts)
    span = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    answers = sorted({str(c.settings["max_tokens"]) for c in registration.cells if "max_tokens" in c.settings})
    most = f", answers of at most {' or '.join(answers)} tokens" if answers else ""
    return f"{n} prompt{'s' * (n > 1)} of {span} tokens{most}; dependence on the prompt or its length is not shown."


def _flag(boots: Sequence[Boot]) -> str:
    modes = implementations(boots)
    if not modes:
        return "The batch-invariant mode was in force in no counted boot, so nothing is said of it."
    if any(m.startswith(OWN_MODE) for m in modes):
        return f"The batch-invariant mode was {' and '.join(modes)}: nothing here is about vLLM's own flag."
    return f"The batch-invariant mode was {' and '.join(modes)}: nothing here is about another implementation of it."


def _protocol(registration: Registration) -> tuple[str, ...]:
    if sum(p.expect == "cold" for p in registration.protocol.phases) > 1:
        return ()
    return (
        "One cold request per boot: a cold cache and a fresh boot are told apart only by the cells without a cache.",
    )
