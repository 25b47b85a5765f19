"""What a boot was asked (`BootPlan`) and what it answered (`BootRecord`): models, hashing, canonical JSON. No I/O."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
ANY_VERSION = "any"  # asked of an endpoint that D3 did not start: whatever it reports is recorded

Status = Literal["valid", "void", "failed", "skipped", "stopped"]
Coldness = Literal["L0", "L1", "L2", "L3", "none"]
Start = Literal["plain", "standby", "fork"]
Expect = Literal["cold", "warm"]
Endpoint = Literal["text", "tokens", "logprobs"]
ENDPOINTS: tuple[Endpoint, ...] = ("text", "tokens", "logprobs")


class Frozen(BaseModel):
    """Base of everything that crosses a boundary: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal bytes (after RFC 8785); NaN is "NaN"."""
    dumped = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    try:
        return _canonical(dumped)
    except (TypeError, ValueError):  # a number that JSON has not, or a model inside: rare, and slower
        return _canonical(plain(dumped))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """A model as JSON values; JSON has no NaN and no infinity, so they become the strings that float() reads."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def sha256(data: str | bytes) -> str:
    """Hex SHA-256 of bytes, or of a string's UTF-8 bytes (lone surrogates pass through, as engines can emit them)."""
    return hashlib.sha256(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).hexdigest()


def hash_tokens(token_ids: Sequence[int]) -> str:
    """SHA-256 over token ids, written as decimal numbers joined by commas."""
    return sha256(",".join(str(t) for t in token_ids))


def hash_logprobs(logprobs: Sequence[float | None]) -> str:
    """SHA-256 over log-probabilities, exact to the bit: `float.hex`, with `null` and `nan` as words."""
    return sha256(",".join(_exact(x) for x in logprobs))


def _exact(x: float | None) -> str:
    if x is None:
        return "null"
    return "nan" if math.isnan(x) else float(x).hex()


class Message(Frozen):
    """One chat message."""

    role: str
    content: str


class RequestPlan(Frozen):
    """One request: `phase` is C1, W1 ... (cold, warm); requests of one prompt with one `salt` share cached blocks."""

    index: int
    prompt: str
    phase: str
    expect: Expect
    salt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float
    neighbours: tuple[Message, ...] = ()


class Reads(Frozen):
    """Where a server's replies say it: dotted paths into their JSON, `*` for every item of a list.

    `version` and `block_size` lie in the version page, the others in an answer; None where the engine never says it.
    """

    version: str = "version"
    block_size: str | None = None
    cached_tokens: str = "usage.prompt_tokens_details.cached_tokens"
    output_ids: str | None = "choices.0.token_ids"
    prompt_ids: str | None = "prompt_token_ids"


# What a chat request asks for beside its messages, its temperature and its length, in vLLM's words.
BODY: dict[str, Any] = {"model": "model", "logprobs": True, "top_logprobs": 2, "return_token_ids": True}


class Launch(Frozen):
    """How the engine process is started and asked; paths are this machine's, so none of this is registered.

    `body`: fields of every request; `block_size`: tokens per cached block where the engine does not say; `url`: an
    endpoint that runs already, and `key_env` the environment variable with its key; `compile_cache`: the folder of the
    cell's warmed compile cache, None (and left out of the JSON) where compile caches are off.
    """

    transport: Literal["worker", "server", "attach"]
    python: str
    server: tuple[str, ...]
    args: tuple[str, ...]
    env: dict[str, str]
    model_path: str
    health: str
    version_path: str
    metrics_path: str
    salt_field: str | None
    reset_path: str | None
    boot_timeout_s: float
    request_timeout_s: float
    body: dict[str, Any] = BODY
    reads: Reads = Reads()
    block_size: int | None = None
    url: str | None = None
    key_env: str | None = None
    compile_cache: str | None = Field(default=None, exclude_if=lambda value: value is None)


class Place(Frozen):
    """A boot's place in its study: which registration, cell and boot, and in the registered order."""

    schema_version: int = SCHEMA_VERSION
    registration: str
    boot_id: str
    cell: str
    stratum: str
    factors: dict[str, str]
    boot: int
    attempt: int
    position: int
    protocol: str
    model: str
    model_digest: str


class BootPlan(Place):
    """Everything one boot needs; `python -m d3.boot plan.json out/` turns it into a record, here or elsewhere.

    `at_once`: how many boots must run side by side on its device; `start`: how its process must be started;
    `unavailable`: why the engine has no such mode, so that nothing is booted. None, and left out of the JSON, where the
    study does not fix it, or the engine has the mode.
    """

    engine: str
    version_asked: str
    backend_asked: str | None
    invariant_mode: str
    at_once: int | None = Field(default=None, ge=1, exclude_if=lambda value: value is None)
    unavailable: str | None = Field(default=None, exclude_if=lambda value: value is None)
    start: Start | None = Field(default=None, exclude_if=lambda value: value is None)
    warmup: RequestPlan | None
    requests: tuple[RequestPlan, ...]
    launch: Launch


class Response(Frozen):
    """One completion. `logprobs` of the chosen tokens; `gaps`: top-1 minus top-2 log-probability, both per token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    gaps: tuple[float | None, ...]

    def key(self) -> str:
        """Identity of the response: SHA-256 over its three endpoint hashes."""
        return sha256(" ".join(self.hashes().values()))

    def hashes(self) -> dict[Endpoint, str]:
        """The SHA-256 of each endpoint."""
        return {
            "text": sha256(self.text),
            "tokens": hash_tokens(self.token_ids),
            "logprobs": hash_logprobs(self.logprobs),
        }


class Answer(Frozen):
    """What an engine returns for one request: the response, and what it says of its cache."""

    response: Response
    prompt_tokens: int
    prompt_sha256: str
    cached_tokens: int | None
    finish_reason: str
    running: int | None = None


class EngineFacts(Frozen):
    """What the engine says of itself once it is up; None where it says nothing."""

    version: str | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    attention_backend: str | None = None
    dtype: str | None = None
    device: str | None = None
    invariant_mode: str | None = None
    cache_config: dict[str, str] = {}
    environment: dict[str, str] = {}


class RequestRecord(Frozen):
    """One request as it ran; `response` is the key of a `Response` stored beside the record."""

    index: int
    prompt: str
    phase: str
    expect: Expect
    salt: str | None
    prompt_tokens: int
    prompt_sha256: str
    cached_tokens: int | None
    expected_cached: int | None
    finish_reason: str
    n_tokens: int
    text_sha256: str
    tokens_sha256: str
    logprobs_sha256: str
    response: str
    latency_s: float
    running: int | None

    def endpoint_hash(self, endpoint: Endpoint) -> str:
        """The hash that this endpoint compares."""
        return {"text": self.text_sha256, "tokens": self.tokens_sha256, "logprobs": self.logprobs_sha256}[endpoint]


class Check(Frozen):
    """A manipulation check with its evidence; `prompt` None means the whole boot."""

    name: str
    held: bool
    evidence: str
    prompt: str | None = None


class Failure(Frozen):
    """Why a boot has no full answer. `engine_error`: the engine itself refused or died, `line` in its own words."""

    stage: Literal["launch", "boot", "request", "stop"]
    kind: Literal["engine_error", "timeout", "bad_answer", "environment", "skipped", "interrupted"]
    line: str


class EngineRecord(Frozen):
    """Which engine ran, as asked and as reported; `command` and `body` have placeholders where a path stood.

    `body` is left out of the JSON where the engine is asked in vLLM's words.
    """

    name: str
    transport: str
    version_asked: str
    facts: EngineFacts
    command: tuple[str, ...]
    env: dict[str, str]
    body: dict[str, Any] = Field(default={}, exclude_if=lambda value: not value)


def _seconds() -> Any:
    return Field(default=None, exclude_if=lambda value: value is None)


class Phases(Frozen):
    """Seconds of an engine's start as its own process counted them; None, and left out of the JSON, where it did not.

    `python_s`: until its Python ran; `import_s`: importing the engine; `weights_s`: loading the model; `ready_s`: the
    rest, until the engine was ready. In a standby or a fork the first two were over before the boot began, or partly.
    `turn_s`: waiting while another boot's engine started on the same GPU.
    """

    python_s: float | None = _seconds()
    import_s: float | None = _seconds()
    weights_s: float | None = _seconds()
    ready_s: float | None = _seconds()
    turn_s: float | None = _seconds()


class Timings(Phases):
    """Seconds: `boot_s` start to ready, `requests_s` all requests, `stop_s` stop and reap, `total_s` all of the job."""

    boot_s: float
    requests_s: float
    stop_s: float
    total_s: float


class CacheState(Frozen):
    """The warmed compile cache of a boot's cell: SHA-256 of its files as sealed, and as the boot began and ended.

    `files` and `mib` (MiB): how much it holds at the boot's end; `rounds`: engines that filled it before it was sealed.
    """

    sealed: str
    before: str
    after: str
    files: int
    mib: float
    rounds: int


class BootRecord(Place):
    """One boot, whatever became of it. `start`: how its process started; left out of the JSON where it was plain.

    `compile_cache`: the state of the cell's warmed cache; None, and left out, where compile caches were off.
    """

    coldness: Coldness
    start: Start = Field(default="plain", exclude_if=lambda value: value == "plain")
    compile_cache: CacheState | None = Field(default=None, exclude_if=lambda value: value is None)
    engine: EngineRecord
    environment: dict[str, str]
    started_at: str
    timings: Timings
    requests: tuple[RequestRecord, ...]
    checks: tuple[Check, ...]
    status: Status
    reason: str
    failure: Failure | None = None
    leftovers: tuple[str, ...] = ()


class Boot(Frozen):
    """A record with its distinct responses by key: all that is known of one boot."""

    record: BootRecord
    responses: dict[str, Response]
