"""From a registration to what one boot is asked: pure, so that a boot is a function of its plan."""

from collections.abc import Mapping
from typing import Any

from d3.errors import D3Error
from d3.record import BootPlan, Frozen, Launch, Message, RequestPlan, sha256
from d3.registration import CellSpec, Phase, Prompt, Registration, Slot, prompt_order, short
from d3.store import boot_slug

WARMUP = Message(role="user", content="Name three rivers of Europe.")


class Locations(Frozen):
    """This machine's paths: the engine's Python and the model's folder or name."""

    python: str
    model: str


def boot_plan(registration: Registration, slot: Slot, attempt: int, where: Locations) -> BootPlan:
    """The plan of one boot. Raises D3Error when the engine has no setting for a factor's level."""
    spec = registration.cell(slot.stratum, slot.cell)
    engine, model = spec.settings["engine"], spec.settings["model"]
    name = boot_slug(slot.stratum, slot.cell, slot.boot, attempt)
    return BootPlan(
        registration=registration.id(),
        boot_id=f"{short(registration.id())}/{name}",
        cell=slot.cell,
        stratum=slot.stratum,
        factors=spec.factors,
        boot=slot.boot,
        attempt=attempt,
        position=registration.order.index(slot),
        protocol=registration.protocol.name,
        engine=engine["name"],
        version_asked=engine["version"],
        backend_asked=engine["backend"],
        invariant_mode=engine["invariant_mode"],
        model=model["name"],
        model_digest=model["digest"],
        warmup=_warmup(spec),
        requests=_requests(registration, spec, slot.boot),
        launch=_launch(spec, where),
    )


def check_levels(registration: Registration) -> None:
    """Raises D3Error where an engine has no setting for a level of a cell: now, not when its first boot comes."""
    for spec in registration.cells:
        _launch(spec, Locations(python="", model=""))


def _requests(registration: Registration, spec: CellSpec, boot: int) -> tuple[RequestPlan, ...]:
    pairs = [
        (prompt, phase)
        for prompt in prompt_order(registration.prompts, boot, registration.seed)
        for phase in registration.protocol.phases
    ]
    return tuple(_request(registration, spec, index, prompt, phase) for index, (prompt, phase) in enumerate(pairs))


def _request(registration: Registration, spec: CellSpec, index: int, prompt: Prompt, phase: Phase) -> RequestPlan:
    salt = sha256(f"{registration.seed} {prompt.id} {phase.series}") if registration.protocol.salted else None
    return RequestPlan(
        index=index,
        prompt=prompt.id,
        phase=phase.name,
        expect=phase.expect,
        salt=salt,
        messages=prompt.messages,
        max_tokens=spec.settings["max_tokens"],
        temperature=spec.settings["temperature"],
        neighbours=tuple(
            Message(role="user", content=f"Tell me a story about the number {i + 1}.")
            for i in range(spec.settings["concurrency"])
        ),
    )


def _warmup(spec: CellSpec) -> RequestPlan | None:
    if not spec.settings["warmup"]:
        return None
    return RequestPlan(
        index=0, prompt="warmup", phase="warmup", expect="cold", salt=sha256("warmup"), messages=(WARMUP,),
        max_tokens=spec.settings["max_tokens"], temperature=0.0,
    )  # fmt: skip


def _launch(spec: CellSpec, where: Locations) -> Launch:
    engine = spec.settings["engine"]
    args, env = list(engine["args"]), dict(engine["env"])
    for factor, levels in engine["factors"].items():
        level = spec.factors.get(factor, _text(spec.settings.get(factor)))
        if level not in levels:
            raise D3Error(f"engine {engine['name']} has no setting for {factor}={level}",
                          f"its levels are: {', '.join(levels)}")  # fmt: skip
        args += levels[level].get("args", [])
        env |= levels[level].get("env", {})
    fill = {key: _text(value) for key, value in spec.settings.items() if not isinstance(value, dict | list)}
    fill["model"] = where.model
    return Launch(
        transport=engine["transport"],
        python=where.python,
        server=tuple(engine["server"]),
        args=tuple(_filled(word, fill) for word in args),
        env={key: _filled(value, fill) for key, value in sorted(env.items())},
        model_path=where.model,
        health=engine["health"],
        version_path=engine["version_path"],
        metrics_path=engine["metrics_path"],
        salt_field=engine["salt_field"],
        reset_path=engine["reset_path"],
        boot_timeout_s=engine["boot_timeout_s"],
        request_timeout_s=engine["request_timeout_s"],
    )


def _filled(word: str, fill: Mapping[str, str]) -> str:
    for key, value in fill.items():
        word = word.replace("{" + key + "}", value)
    return word


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
