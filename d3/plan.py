"""From a registration to what one boot is asked: pure, so that a boot is a function of its plan."""

from collections.abc import Mapping
from typing import Any

from d3.errors import D3Error
from d3.record import BODY, BootPlan, Frozen, Launch, Message, RequestPlan, sha256
from d3.registration import CellSpec, Phase, Prompt, Registration, Slot, prompt_order, short
from d3.store import boot_slug, slug

WARMUP = Message(role="user", content="Name three rivers of Europe.")


class Locations(Frozen):
    """This machine's paths: the engine's Python and the model's folder or name.

    `key_env`: the environment variable with the key of an endpoint that D3 does not start; `caches`: the folder for the
    cells' warmed compile caches.
    """

    python: str
    model: str
    key_env: str | None = None
    caches: str = ""


class Planner:
    """Plans of one study's boots; its id and order are worked out once."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.id = registration.id()
        self.positions = {slot: i for i, slot in enumerate(registration.order)}

    def plan(self, slot: Slot, attempt: int, where: Locations) -> BootPlan:
        """The plan of one boot. Raises D3Error when the engine has no setting for a factor's level."""
        spec = self.registration.cell(slot.stratum, slot.cell)
        engine, model = spec.settings["engine"], spec.settings["model"]
        name = boot_slug(slot.stratum, slot.cell, slot.boot, attempt)
        return BootPlan(
            registration=self.id,
            boot_id=f"{short(self.id)}/{name}",
            cell=slot.cell,
            stratum=slot.stratum,
            factors=spec.factors,
            boot=slot.boot,
            attempt=attempt,
            position=self.positions[slot],
            protocol=self.registration.protocol.name,
            engine=engine["name"],
            version_asked=engine["version"],
            backend_asked=engine["backend"],
            invariant_mode=engine["invariant_mode"],
            model=model["name"],
            model_digest=model["digest"],
            at_once=spec.settings.get("at_once"),
            unavailable=spec.unavailable() or None,
            start=spec.settings.get("start"),
            warmup=_warmup(spec),
            requests=_requests(self.registration, spec, slot.boot),
            launch=_launch(spec, where),
        )


def boot_plan(registration: Registration, slot: Slot, attempt: int, where: Locations) -> BootPlan:
    """The plan of one boot. Raises D3Error when the engine has no setting for a factor's level."""
    return Planner(registration).plan(slot, attempt, where)


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
    args, env, body = list(engine["args"]), dict(engine["env"]), dict(engine.get("body", BODY))
    for factor, levels in engine["factors"].items():
        level = spec.factors.get(factor, _text(spec.settings.get(factor)))
        if level not in levels:
            raise D3Error(f"engine {engine['name']} has no setting for {factor}={level}",
                          f"its levels are: {', '.join(levels)}")  # fmt: skip
        if (why := levels[level].get("unavailable")) and not spec.unavailable():
            raise D3Error(f"engine {engine['name']} has no {factor}={level}: {why}", "leave that level out")
        args += levels[level].get("args", [])
        env |= levels[level].get("env", {})
        body |= levels[level].get("body", {})
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
        body={key: _filled(value, fill) for key, value in body.items() if value is not None},
        key_env=where.key_env,
        compile_cache=_cache(spec, where),
        **{key: engine[key] for key in ("reads", "block_size", "url") if key in engine},
    )


def _cache(spec: CellSpec, where: Locations) -> str | None:
    if spec.settings.get("compile_cache") != "warmed":
        return None
    return f"{where.caches}/{slug(spec.stratum)}__{slug(spec.cell)}"


def _filled(word: Any, fill: Mapping[str, str]) -> Any:
    """A word of a command line, or a value of a request, with its places filled in."""
    if not isinstance(word, str):
        return word
    for key, value in fill.items():
        word = word.replace("{" + key + "}", value)
    return word


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
