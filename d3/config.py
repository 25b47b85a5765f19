"""The shape of a study's configuration: dataclasses that Hydra checks every key and type of `conf/` against."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from d3.record import BODY


@dataclass
class Setting:
    """What one level of a factor adds to the engine's command line, environment and requests.

    `unavailable` says why the engine has no such level: a cell with it is never booted.
    """

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    unavailable: str | None = None


@dataclass
class ReadsConfig:
    """Where a server's replies say it: dotted paths into their JSON, `*` for every item of a list."""

    version: str = "version"
    block_size: str | None = None
    cached_tokens: str = "usage.prompt_tokens_details.cached_tokens"
    output_ids: str | None = "choices.0.token_ids"
    prompt_ids: str | None = "prompt_token_ids"


@dataclass
class EngineConfig:
    """An engine as data: how to start it, what each factor maps to, where it reports about itself.

    `transport` worker: vLLM inside one child, over pipes; server: any OpenAI-compatible server on loopback; attach: one
    that is running already, at `url`.
    `args` and `server` may use {model}, {host}, {port} and {dtype}-like names of top-level keys.
    """

    name: str = MISSING
    distribution: str = MISSING
    version: str = MISSING
    transport: str = MISSING
    lock: str | None = None
    executable: str = "python"
    build_env: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    url: str | None = None
    key_env: str | None = None
    server: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=lambda: dict(BODY))
    factors: dict[str, dict[str, Setting]] = field(default_factory=dict)
    invariant_mode: str = "the engine's flag"
    backend: str | None = None
    health: str = "/health"
    version_path: str = "/version"
    metrics_path: str = "/metrics"
    reads: ReadsConfig = field(default_factory=ReadsConfig)
    block_size: int | None = None
    salt_field: str | None = "cache_salt"
    reset_path: str | None = None
    min_memory_gb: float = 0.0
    boot_timeout_s: float = 300.0
    request_timeout_s: float = 180.0


@dataclass
class ModelConfig:
    """The model by its weights' digest. `package` ships it as `file`; `path` names a checkpoint elsewhere.

    `convert` false: engines read the packaged file as it is.
    """

    name: str = MISSING
    digest: str | None = None
    package: str | None = None
    file: str | None = None
    convert: bool = True
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
class PriceConfig:
    """What a machine costs while it runs boots; never registered, as no result depends on it.

    `per` boot: every boot has a machine of its own; machine: all boots share one. `gpu`: part of its GPU's name.
    """

    name: str = "none"
    usd_per_hour: float | None = None
    per: str = "boot"
    gpu: str | None = None
    dated: str = ""
    source: str = ""


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
    at_once: int | None = None
    start: str = "auto"
    compile_cache: str = "off"
    min_valid_boots: int | None = None
    max_attempts: int = 2
    tie_gap: float = 0.25
    confidence: float = 0.95
    test: str = "fisher"
    allow_large: bool = False
    plan_only: bool = False
    dry_run: bool = False
    workers: int = 2
    price: PriceConfig = field(default_factory=PriceConfig)
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
