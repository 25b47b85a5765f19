"""The `server` transport: any server that speaks the OpenAI chat API, started by us on a free loopback port."""

import json
import re
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from d3.engine import UNREADABLE, EngineFailure, died, environment, last_words, launched
from d3.process import LOOK_S, ChildDied
from d3.record import (
    Answer,
    BootPlan,
    EngineFacts,
    Failure,
    Message,
    Phases,
    RequestPlan,
    Response,
    hash_tokens,
    sha256,
)

HOST = "127.0.0.1"
ENDING_S = 2.0
KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")  # where servers read the key that they ask of their callers


class ServerEngine:
    """Any server that speaks the OpenAI chat API, on a free loopback port."""

    def __init__(self, plan: BootPlan, log: Path) -> None:
        self.plan = plan
        self.phases = Phases()
        self.port = free_port()
        fill = {"{host}": HOST, "{port}": str(self.port)}
        server = [fill.get(word, word) for word in plan.launch.server]
        key = secrets.token_urlsafe(32)  # of this boot alone: no other program of this machine can use its engine
        # trust_env off: a proxy from the environment must not stand between us and loopback
        self.http = httpx.Client(
            base_url=f"http://{HOST}:{self.port}", timeout=plan.launch.request_timeout_s, trust_env=False,
            headers={"Authorization": f"Bearer {key}"},
        )  # fmt: skip
        self.hidden: tuple[str, ...] = (key,)
        self.log = log
        env = {**environment(plan), **dict.fromkeys(KEY_VARIABLES, key)}
        self.child = launched([plan.launch.python, *server, *plan.launch.args], env, log, piped=False)

    def start(self) -> EngineFacts:
        """Wait for the health page, then read version and metrics."""
        deadline = time.monotonic() + self.plan.launch.boot_timeout_s
        while not self._healthy():
            if not self.child.alive():
                raise EngineFailure(died("boot", self.child.log, ChildDied(self.child.returncode())))
            if time.monotonic() > deadline:
                line = f"not healthy within {self.plan.launch.boot_timeout_s:.0f} s"
                raise EngineFailure(Failure(stage="boot", kind="timeout", line=line))
            self.child.remember(LOOK_S)
            time.sleep(0.1)
        if not self.child.listens(self.port):
            line = f"another process answers on port {self.port}; run again, D3 will take another port"
            raise EngineFailure(Failure(stage="boot", kind="environment", line=line))
        return self._facts()

    def ask(self, request: RequestPlan) -> Answer:
        """Send one chat request (its neighbours beside it) and read the whole answer.

        Without a cache salt, the engine's cache is emptied before each cold request of a protocol that has salts.
        """
        launch = self.plan.launch
        if request.salt and request.expect == "cold" and launch.reset_path and not launch.salt_field:
            self._send(launch.reset_path, None)
        with ThreadPoolExecutor(max(1, len(request.neighbours))) as pool:
            beside = [
                pool.submit(self._post, self._body([m], f"neighbour-{request.index}-{i}", request))
                for i, m in enumerate(request.neighbours)
            ]
            reply = self._post(self._body(request.messages, request.salt, request))
            for neighbour in beside:
                neighbour.result()
        return self._answer(reply, len(beside) + 1)

    def stop(self) -> tuple[str, ...]:
        """End the server and all it started."""
        self.http.close()
        return self.child.stop()

    def _ended(self) -> Failure | None:
        """How the server ended, if it did."""
        if not self.child.ended_within(ENDING_S):
            return None
        return died("request", self.log, ChildDied(self.child.returncode()))

    def _in_its_words(self, said: str) -> str:
        """The error in the server's log, if there is one; else what it `said` in its reply."""
        return last_words(self.log, said)

    def _healthy(self) -> bool:
        try:
            return self.http.get(self.plan.launch.health, timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _body(
        self, messages: tuple[Message, ...] | list[Message], salt: str | None, request: RequestPlan
    ) -> dict[str, Any]:
        salted = {self.plan.launch.salt_field: salt} if salt and self.plan.launch.salt_field else {}
        return {
            "messages": [m.model_dump() for m in messages],
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            **self.plan.launch.body,
            **salted,
        }

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        raw = self._send("/v1/chat/completions", body)
        try:
            parsed: dict[str, Any] = json.loads(raw)
            return parsed
        except UNREADABLE as error:
            line = f"the answer is no JSON: {error}"
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error

    def _send(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            status, raw = self._sent(path, body)
        except httpx.TimeoutException as error:
            line = f"no answer within {self.plan.launch.request_timeout_s:.0f} s"
            raise EngineFailure(Failure(stage="request", kind="timeout", line=line)) from error
        except httpx.HTTPError as error:
            if ended := self._ended():
                raise EngineFailure(ended) from error
            line = f"the answer broke off: {type(error).__name__}: {error}"
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error
        if status != httpx.codes.OK:
            busy = status in {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}
            said = f"HTTP {status}: {raw[:200].decode(errors='replace')}"
            # Of a request that it refuses (4xx) the server says why; of its own errors the log says more.
            line = said if busy or status < httpx.codes.INTERNAL_SERVER_ERROR else self._in_its_words(said)
            raise EngineFailure(Failure(stage="request", kind="environment" if busy else "engine_error", line=line))
        return raw

    def _sent(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Status and body, the whole of it within the deadline: httpx's own holds between two pieces of an answer."""
        deadline = time.monotonic() + self.plan.launch.request_timeout_s
        raw = bytearray()
        with self.http.stream("POST", path, json=body) as reply:
            for piece in reply.iter_bytes():
                raw += piece
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("an answer in pieces without end")
        return reply.status_code, bytes(raw)

    def _answer(self, reply: dict[str, Any], together: int) -> Answer:
        try:
            choice, usage = reply["choices"][0], reply["usage"]
            steps = (choice.get("logprobs") or {}).get("content") or []
            tops = [sorted((t["logprob"] for t in s.get("top_logprobs") or []), reverse=True) for s in steps]
            text = choice["message"]["content"] or ""
            reads = self.plan.launch.reads
            ids = pick(reply, reads.prompt_ids)
            return Answer(
                response=Response(
                    text=text,
                    token_ids=tuple(pick(reply, reads.output_ids) or ()),
                    logprobs=tuple(s["logprob"] for s in steps),
                    gaps=tuple(t[0] - t[1] if len(t) > 1 else None for t in tops),
                ),
                prompt_tokens=usage["prompt_tokens"],
                prompt_sha256=hash_tokens(ids) if ids else sha256(""),
                cached_tokens=pick(reply, reads.cached_tokens),
                finish_reason=choice.get("finish_reason") or "",
                running=together,
            )
        except (*UNREADABLE, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            line = f"the answer lacks what was asked: {type(error).__name__}: {error}".splitlines()[0]
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error

    def _facts(self) -> EngineFacts:
        launch = self.plan.launch
        page = json_of(self._get(launch.version_path))
        version = pick(page, launch.reads.version)
        config = cache_config(self._get(launch.metrics_path))
        caching = config.get("enable_prefix_caching")
        size = str(config.get("block_size") or pick(page, launch.reads.block_size) or launch.block_size)
        return EngineFacts(
            version=None if version is None else str(version),
            block_size=int(size) if re.fullmatch(r"[0-9]{1,9}", size) else None,
            prefix_caching=None if caching is None else caching == "True",
            attention_backend=_backend_in_log(self.log),
            invariant_mode=None,
            cache_config=config,
        )

    def _get(self, path: str) -> str:
        try:
            reply = self.http.get(path, timeout=10)
        except httpx.HTTPError:
            return ""
        return reply.text if reply.status_code == httpx.codes.OK else ""


def cache_config(metrics: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` in a metrics page, those that bear on the cache; {} without it."""
    kept = ("block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "num_gpu_blocks", "num_cpu_blocks")
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return {k: v for k, v in re.findall(r'(\w+)="([^"]*)"', line) if k in kept}
    return {}


def free_port() -> int:
    """A loopback port that nobody listens on now; the server's own bind decides."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def pick(value: Any, path: str | None) -> Any:
    """What lies at a dotted path of a JSON value, `*` for every item of a list; None where it is not there."""
    head, _, rest = (path or "").partition(".")
    if head == "*" and isinstance(value, list):
        items = [pick(item, rest) if rest else item for item in value]
        return None if None in items else items
    if isinstance(value, dict):
        found = value.get(head)
    elif isinstance(value, list) and head.isdecimal() and int(head) < len(value):
        found = value[int(head)]
    else:
        return None
    return pick(found, rest) if rest else found


def json_of(page: str) -> Any:
    """A page's JSON; None where it is none."""
    try:
        return json.loads(page)
    except UNREADABLE:
        return None


def _backend_in_log(log: Path) -> str | None:
    """The attention backend as vLLM's log names it; a server has no page for it."""
    if not log.exists():
        return None
    found = re.findall(
        r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", log.read_text(errors="replace")
    )
    return found[-1] if found else None
