"""The `server` transport: any server that speaks the OpenAI chat API, started by us on a free loopback port."""

import json
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from d3.engine import EngineFailure, died, environment, last_words, launched
from d3.process import LOOK_S, ChildDied
from d3.record import Answer, BootPlan, EngineFacts, Failure, Message, RequestPlan, Response, hash_tokens, sha256

HOST = "127.0.0.1"
ENDING_S = 2.0


class ServerEngine:
    """Any server that speaks the OpenAI chat API, on a free loopback port."""

    def __init__(self, plan: BootPlan, log: Path) -> None:
        self.plan = plan
        self.port = free_port()
        fill = {"{host}": HOST, "{port}": str(self.port)}
        server = [fill.get(word, word) for word in plan.launch.server]
        # trust_env off: a proxy from the environment must not stand between us and loopback
        self.http = httpx.Client(
            base_url=f"http://{HOST}:{self.port}", timeout=plan.launch.request_timeout_s, trust_env=False
        )
        self.child = launched([plan.launch.python, *server, *plan.launch.args], environment(plan), log, piped=False)

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
        """Send one chat request (its neighbours beside it) and read the whole answer."""
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
            "model": "model",
            "messages": [m.model_dump() for m in messages],
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            **salted,
        }

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            reply = self.http.post("/v1/chat/completions", json=body)
        except httpx.TimeoutException as error:
            line = f"no answer within {self.plan.launch.request_timeout_s:.0f} s"
            raise EngineFailure(Failure(stage="request", kind="timeout", line=line)) from error
        except httpx.HTTPError as error:
            if self.child.ended_within(ENDING_S):
                raise EngineFailure(died("request", self.child.log, ChildDied(self.child.returncode()))) from error
            line = f"the answer broke off: {type(error).__name__}: {error}"
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error
        if reply.status_code != httpx.codes.OK:
            busy = reply.status_code in {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}
            said = " ".join(f"HTTP {reply.status_code}: {reply.text[:200]}".split())
            line = said if busy else last_words(self.child.log, said)
            raise EngineFailure(Failure(stage="request", kind="environment" if busy else "engine_error", line=line))
        try:
            parsed: dict[str, Any] = reply.json()
            return parsed
        except ValueError as error:
            line = f"the answer is no JSON: {error}"
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error

    def _answer(self, reply: dict[str, Any], together: int) -> Answer:
        try:
            choice, usage = reply["choices"][0], reply["usage"]
            steps = (choice.get("logprobs") or {}).get("content") or []
            tops = [sorted((t["logprob"] for t in s.get("top_logprobs") or []), reverse=True) for s in steps]
            text = choice["message"]["content"] or ""
            ids = reply.get("prompt_token_ids")
            return Answer(
                response=Response(
                    text=text,
                    token_ids=tuple(choice.get("token_ids") or ()),
                    logprobs=tuple(s["logprob"] for s in steps),
                    gaps=tuple(t[0] - t[1] if len(t) > 1 else None for t in tops),
                ),
                prompt_tokens=usage["prompt_tokens"],
                prompt_sha256=hash_tokens(ids) if ids else sha256(""),
                cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                finish_reason=choice.get("finish_reason") or "",
                running=together,
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValidationError) as error:
            line = f"the answer lacks what was asked: {type(error).__name__}: {error}".splitlines()[0]
            raise EngineFailure(Failure(stage="request", kind="bad_answer", line=line)) from error

    def _facts(self) -> EngineFacts:
        version = self._get(self.plan.launch.version_path)
        config = cache_config(self._get(self.plan.launch.metrics_path))
        caching = config.get("enable_prefix_caching")
        size = config.get("block_size", "")
        return EngineFacts(
            version=_version(version),
            block_size=int(size) if size.isdigit() else None,
            prefix_caching=None if caching is None else caching == "True",
            attention_backend=_backend_in_log(self.child.log),
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


def _version(page: str) -> str | None:
    try:
        return str(json.loads(page)["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _backend_in_log(log: Path) -> str | None:
    """The attention backend as vLLM's log names it; a server has no page for it."""
    found = re.findall(
        r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", log.read_text(errors="replace")
    )
    return found[-1] if found else None
