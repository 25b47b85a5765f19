"""Whether a composed configuration can be run as asked; refused in one line before anything is registered. Pure."""

import re
from urllib.parse import urlsplit

from d3.config import Config, EngineConfig, Setting
from d3.errors import D3Error

SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
FORKABLE = ("vllm-cpu",)  # engines that run on the CPU alone


def _levels(engine: EngineConfig) -> list[Setting]:
    """What an engine's factors set; nested so deep, Hydra checks no types. Raises D3Error for another shape."""
    found = []
    for factor, levels in engine.factors.items():
        for name, level in (levels or {}).items():
            setting = vars(level) if isinstance(level, Setting) else level or {}
            shape = {"args": list, "env": dict, "body": dict, "unavailable": str}
            if not isinstance(setting, dict) or any(not isinstance(v, shape.get(k, ())) for k, v in setting.items()):
                raise D3Error(
                    f"engine.factors.{factor}.{name} is no setting",
                    "give it args: [...], env: {...} and body: {...}, or unavailable: why",
                )
            found.append(Setting(args=setting.get("args", []), env=setting.get("env", {})))
    return found


def _check_engine(engine: EngineConfig) -> None:
    settings = [Setting(args=[*engine.server, *engine.args], env=engine.env), *_levels(engine)]
    for setting in settings:
        if any(not isinstance(word, str) for word in (*setting.args, *setting.env.values())):
            raise D3Error(f"engine {engine.name} has a word among server, args and env that is no text", "quote it")
        for key in filter(SECRET.search, setting.env):
            raise D3Error(f"engine.env.{key} would be registered and published with the certificate",
                          "leave it out; give the engine its secrets in a file of its own")  # fmt: skip


def encodable(text: str) -> bool:
    """Whether UTF-8 can write this text: half of an emoji's pair, alone, it cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def validate(cfg: Config) -> None:
    """Refuse a configuration that cannot be run as asked. Raises D3Error with the remedy."""
    problems = [
        (cfg.boots < 1, f"boots={cfg.boots}: a study needs at least one boot per cell", "say boots=6"),
        (cfg.invariant not in {0, 1}, f"invariant={cfg.invariant} is not a level", "use invariant=0, 1 or both: 0,1"),
        (cfg.temperature < 0, f"temperature={cfg.temperature} is negative", "the study uses temperature=0"),
        (cfg.max_tokens < 1, f"max_tokens={cfg.max_tokens} asks for no token", "say max_tokens=48"),
        (cfg.concurrency < 0, f"concurrency={cfg.concurrency} is negative", "it counts the neighbours of a request"),
        (cfg.at_once is not None and cfg.at_once < 1, f"at_once={cfg.at_once} runs no boot",
         "it counts the boots that run side by side on one device: 1 is one after the other"),
        (cfg.start == "snapshot", "start=snapshot is refused: boots out of one snapshot (coldness L3) are copies of "
         "one image, and that copies agree is no evidence", "say start=standby: its boots are still boots"),
        (cfg.start not in {"auto", "plain", "standby", "fork", "snapshot"}, f"start={cfg.start} is not known",
         "use auto, plain, standby or fork"),
        (cfg.start in {"standby", "fork"} and cfg.engine.transport != "worker",
         f"start={cfg.start}: an engine behind engine.transport={cfg.engine.transport} starts its own processes",
         "use engine.transport=worker, or start=plain"),
        (cfg.start == "fork" and cfg.engine.distribution not in FORKABLE,
         f"start=fork: {cfg.engine.distribution} may hold a device, which no fork survives",
         f"fork an engine of {', '.join(FORKABLE)}, or say start=standby"),
        (cfg.compile_cache not in {"off", "warmed"}, f"compile_cache={cfg.compile_cache} is not known",
         "use off or warmed"),
        (cfg.compile_cache == "warmed" and not cfg.engine.distribution.startswith("vllm"),
         f"compile_cache=warmed: D3 does not know the compile caches of engine {cfg.engine.name}",
         "leave it out, or use vLLM"),
        (cfg.test != "fisher", f"test={cfg.test} is not offered", "say test=fisher"),
        (not 0 < cfg.confidence < 1, f"confidence={cfg.confidence} is not between 0 and 1", "say confidence=0.95"),
        (cfg.engine.transport not in {"worker", "server", "attach"},
         f"engine.transport={cfg.engine.transport} is not known", "use worker, server or attach"),
        *_attached(cfg),
        (cfg.concurrency > 0 and cfg.engine.salt_field is None,
         f"concurrency={cfg.concurrency} needs a cache salt, which engine {cfg.engine.name} has not",
         "leave concurrency out: neighbours would share the cache that is measured"),
        (not cfg.prompts.items, f"prompts={cfg.prompts.name} has no prompts", "give it items: [{id: ..., text: ...}]"),
        (cfg.max_attempts < 1, f"max_attempts={cfg.max_attempts} tries no boot", "say max_attempts=2"),
        (not 1 <= (cfg.boots if cfg.min_valid_boots is None else cfg.min_valid_boots) <= cfg.boots,
         f"min_valid_boots={cfg.min_valid_boots} is not between 1 and boots={cfg.boots}",
         "say how many boots must be valid"),
        (cfg.workers < 1, f"workers={cfg.workers} run no boot", "say workers=1 or more"),
        (cfg.price.per not in {"boot", "machine"}, f"price.per={cfg.price.per} is not known", "use boot or machine"),
        (cfg.price.usd_per_hour is not None
         and not (cfg.price.usd_per_hour >= 0 and cfg.price.dated and cfg.price.source),
         f"price={cfg.price.name} is not a price of at least 0 with its date and source",
         "give it usd_per_hour, dated and source"),
        (not cfg.protocol.phases, f"protocol={cfg.protocol.name} has no phases",
         "give it phases, as protocol=controlled has"),
    ]  # fmt: skip
    for wrong, message, remedy in problems:
        if wrong:
            raise D3Error(message, remedy)
    _check_engine(cfg.engine)
    for phase in cfg.protocol.phases:
        if phase.expect not in {"cold", "warm"}:
            raise D3Error(
                f"phase {phase.name} of protocol={cfg.protocol.name} expects {phase.expect}", "say cold or warm"
            )
    ids = [p.id for p in cfg.prompts.items]
    if len(set(ids)) < len(ids):
        raise D3Error(f"prompts={cfg.prompts.name} has two prompts of the same id", "give each prompt its own id")
    for prompt in cfg.prompts.items:
        if not re.fullmatch(r"[\w.-]{1,100}", prompt.id, re.ASCII):  # it names parameters, metrics and columns
            raise D3Error(
                f"prompt id {prompt.id!r} is not a name",
                "use letters, digits, dots, dashes and underscores, 100 at most",
            )
        if any(not encodable(text) for text in (prompt.text or "", *(m.content for m in prompt.messages))):
            raise D3Error(f"prompt {prompt.id} holds half of a character (a lone surrogate), which UTF-8 cannot write",
                          "write the character itself, or leave it out")  # fmt: skip
        if not (prompt.text or any(m.content for m in prompt.messages)):
            raise D3Error(f"prompt {prompt.id} is empty", "give it a text or messages")


def _attached(cfg: Config) -> list[tuple[bool, str, str]]:
    """What an endpoint that D3 did not start cannot do: (whether it is asked for, the problem, the remedy)."""
    if cfg.engine.transport != "attach":
        return []
    wrong = url_problem(cfg.engine.url)
    return [
        (bool(wrong), wrong, "say engine.url=http://127.0.0.1:8000"),
        (not cfg.apc or cfg.invariant != 0,
         "D3 did not start this endpoint, so it can switch neither its cache nor its batch-invariant mode",
         "leave apc and invariant out, or let D3 start the engine"),
        (cfg.boots != 1, f"boots={cfg.boots}: an endpoint that D3 did not start is not booted again", "say boots=1"),
    ]  # fmt: skip


def url_problem(url: str | None) -> str:
    """What is wrong with an endpoint's address; empty when it can be asked."""
    parts = urlsplit(url or "")
    if not url:
        return "engine.url names no endpoint"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return f"engine.url={url} is no http address"
    if parts.username or parts.password or parts.query:
        return "engine.url holds a name, a password or a query, and would be recorded"
    return ""
