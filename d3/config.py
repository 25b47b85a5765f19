"""The shape of a study's configuration: dataclasses that Hydra checks every key and type of `conf/` against."""

import re
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from d3.errors import D3Error


@dataclass
class Setting:
    """What one level of a factor adds to the engine's command line and environment."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class EngineConfig:
    """An engine as data: how to start it, what each factor maps to, where it reports about itself.

    `transport` worker: vLLM inside one child, over pipes; server: any OpenAI-compatible server on loopback.
    `args` and `server` may use {model}, {host}, {port} and {dtype}-like names of top-level keys.
    """

    name: str = MISSING
    distribution: str = MISSING
    version: str = MISSING
    transport: str = MISSING
    lock: str | None = None
    python: str | None = None
    server: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    factors: dict[str, dict[str, Setting]] = field(default_factory=dict)
    invariant_mode: str = "the engine's flag"
    backend: str | None = None
    health: str = "/health"
    version_path: str = "/version"
    metrics_path: str = "/metrics"
    salt_field: str | None = "cache_salt"
    reset_path: str | None = None
    min_memory_gb: float = 0.0
    boot_timeout_s: float = 300.0
    request_timeout_s: float = 180.0


@dataclass
class ModelConfig:
    """The model by its weights' digest. `package` ships it as `file`; `path` names a checkpoint elsewhere."""

    name: str = MISSING
    digest: str | None = None
    package: str | None = None
    file: str | None = None
    path: str | None = None


@dataclass
class MessageConfig:
    """One chat message."""

    role: str = "user"
    content: str = MISSING


@dataclass
class PromptConfig:
    """A prompt: its id and either `text` (one user message) or `messages`."""

    id: str = MISSING
    text: str | None = None
    messages: list[MessageConfig] = field(default_factory=list)


@dataclass
class PromptsConfig:
    """A named set of prompts."""

    name: str = MISSING
    items: list[PromptConfig] = field(default_factory=list)


@dataclass
class PhaseConfig:
    """One place in the request sequence."""

    name: str = MISSING
    series: int = MISSING
    expect: str = MISSING


@dataclass
class ProtocolConfig:
    """The request order inside a boot."""

    name: str = MISSING
    salted: bool = MISSING
    phases: list[PhaseConfig] = field(default_factory=list)


@dataclass
class ReadingConfig:
    """One pre-registered reading."""

    name: str = MISSING
    any_of: list[dict[str, list[str]]] = field(default_factory=list)
    disposition: str = MISSING
    says: str = MISSING


@dataclass
class ReadingsConfig:
    """The readings, in the order in which they are tried."""

    name: str = MISSING
    items: list[ReadingConfig] = field(default_factory=list)


@dataclass
class SourceConfig:
    """One source of prior art."""

    source: str = MISSING
    says: str = MISSING


@dataclass
class StudyConfig:
    """What the study is called and asks, and what was known before it."""

    name: str = MISSING
    question: str = MISSING
    prior_art_searched: str = ""
    prior_art: list[SourceConfig] = field(default_factory=list)


@dataclass
class Config:
    """All of it. The two factors first; every key below may be swept too, and then makes strata."""

    apc: bool = True
    invariant: int = 0
    boot: int = 0
    boots: int = 6
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    readings: ReadingsConfig = field(default_factory=ReadingsConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    seed: int = 0
    dtype: str = "bfloat16"
    eager: bool = True
    prefix_hash: str = "sha256"
    attention: str = "default"
    threads: int = 2
    temperature: float = 0.0
    max_tokens: int = 48
    warmup: bool = False
    concurrency: int = 0
    min_valid_boots: int | None = None
    max_attempts: int = 2
    tie_gap: float = 0.25
    confidence: float = 0.95
    test: str = "fisher"
    allow_large: bool = False
    plan_only: bool = False
    registration: str | None = None


LARGE_STUDY = 500


def register_schema() -> None:
    """Tell Hydra the schema; `conf/config.yaml` names it first in its defaults."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)


def label(key: str, value: Any) -> str:
    """A factor level as text: apc is on or off, other booleans true or false, numbers without decoration."""
    if isinstance(value, bool):
        return ("on" if value else "off") if key == "apc" else str(value).lower()
    return str(value)


def validate(cfg: Config) -> None:
    """Refuse a configuration that cannot be run as asked. Raises D3Error with the remedy."""
    problems = [
        (cfg.boots < 1, f"boots={cfg.boots}: a study needs at least one boot per cell", "say boots=6"),
        (cfg.invariant not in {0, 1}, f"invariant={cfg.invariant} is not a level", "use invariant=0, 1 or both: 0,1"),
        (cfg.temperature < 0, f"temperature={cfg.temperature} is negative", "the study uses temperature=0"),
        (cfg.max_tokens < 1, f"max_tokens={cfg.max_tokens} asks for no token", "say max_tokens=48"),
        (cfg.concurrency < 0, f"concurrency={cfg.concurrency} is negative", "it counts the neighbours of a request"),
        (cfg.test != "fisher", f"test={cfg.test} is not offered", "say test=fisher"),
        (not 0 < cfg.confidence < 1, f"confidence={cfg.confidence} is not between 0 and 1", "say confidence=0.95"),
        (cfg.engine.transport not in {"worker", "server"}, f"engine.transport={cfg.engine.transport} is not known",
         "use worker or server"),
        (not cfg.prompts.items, f"prompts={cfg.prompts.name} has no prompts", "give it items: [{id: ..., text: ...}]"),
        (cfg.max_attempts < 1, f"max_attempts={cfg.max_attempts} tries no boot", "say max_attempts=2"),
        (not 1 <= (cfg.boots if cfg.min_valid_boots is None else cfg.min_valid_boots) <= cfg.boots,
         f"min_valid_boots={cfg.min_valid_boots} is not between 1 and boots={cfg.boots}",
         "say how many boots must be valid"),
        (not cfg.protocol.phases, f"protocol={cfg.protocol.name} has no phases",
         "give it phases, as protocol=controlled has"),
    ]  # fmt: skip
    for wrong, message, remedy in problems:
        if wrong:
            raise D3Error(message, remedy)
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
        if not (prompt.text or any(m.content for m in prompt.messages)):
            raise D3Error(f"prompt {prompt.id} is empty", "give it a text or messages")
