"""A pretend engine: an OpenAI-compatible chat server with a simulated prefix cache, and ways to misbehave.

Its answers depend on the cache as a real engine's may: with the cache on and the invariant mode off, a long prompt's
warm answer ends in another token than its cold one. `--do` takes words of `WAYS`; `--switch FILE` is read at every
step and adds more, so that a test can change an engine's behaviour while its command line stays the same.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WAYS = (
    "die_in_boot", "die_with_flag", "die_quietly", "hang_in_boot", "hang_in_request", "http_500", "http_429",
    "half_json", "not_json", "no_choices", "null_choice", "nan_logprobs", "no_logprobs", "other_version", "orphan",
    "ignore_cache_flag", "ignore_invariant", "other_bytes",
)  # fmt: skip
FLAG_ERROR = "TypeError: 'function' object is not subscriptable"
BOOT_ERROR = "ValueError: no available memory for the cache blocks"
TEMPLATE = (1, 2, 3, 4)
LONG = 60

Reply = dict[str, object]


class Model:
    """Tokens, a prefix cache in blocks, and answers that follow from both."""

    def __init__(self, apc: bool, invariant: bool, block_size: int, offset: int = 0) -> None:
        self.apc, self.invariant, self.block_size, self.offset = apc, invariant, block_size, offset
        self.blocks: set[tuple[str, tuple[int, ...]]] = set()

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat template's tokens, then one per word."""
        return [*TEMPLATE, *(zlib.crc32(w.encode()) % 50_000 for m in messages for w in m["content"].split())]

    def cached(self, ids: list[int], salt: str) -> int:
        """How many tokens the cache holds of this prompt; then all its full blocks are put there."""
        prefixes = [tuple(ids[:end]) for end in range(self.block_size, len(ids) + 1, self.block_size)]
        usable = [p for p in prefixes if len(p) < len(ids)]
        hit = next((len(p) for p in reversed(usable) if (salt, p) in self.blocks), 0)
        self.blocks |= {(salt, p) for p in prefixes}
        return hit if self.apc else 0

    def answer(self, ids: list[int], cached: int) -> tuple[list[int], list[float], list[float]]:
        """Token ids, log-probabilities and top-2 gaps."""
        moved = bool(cached) and not self.invariant and len(ids) > LONG
        shift = 0.001 if self.invariant else 0.0
        first = sum(ids) % 1000 + self.offset
        chosen = [first, first + 1, first + 2, first + (9 if moved else 3)]
        logprobs = [-0.125 - shift, -0.25 - shift - moved * 1e-3, -0.5 - shift, -0.75 - shift]
        return chosen, logprobs, [2.0, 1.5, 1.0, 0.0625]


class Engine:
    """The options, the model, and whether a way to misbehave is asked for now."""

    def __init__(self, arguments: list[str]) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=0)
        parser.add_argument("--model", default="")
        parser.add_argument("--apc", default="on")
        parser.add_argument("--invariant", default="0")
        parser.add_argument("--do", default="")
        parser.add_argument("--switch", default="")
        self.options = parser.parse_args(arguments)
        apc = self.options.apc == "on" or self.does("ignore_cache_flag")
        invariant = self.options.invariant == "1" and not self.does("ignore_invariant")
        self.model = Model(apc, invariant, 16, 5 * self.does("other_bytes"))
        self.version = "9.9" if self.does("other_version") else "1.0"

    def does(self, way: str) -> bool:
        """Whether this way to misbehave is asked for."""
        assert way in WAYS, way
        words = self.options.do.replace(",", " ").split()
        if self.options.switch and (switch := Path(self.options.switch)).exists():
            words += switch.read_text().split()
        unknown = set(words) - set(WAYS)
        assert not unknown, unknown
        return way in words

    def boot(self) -> None:
        """What an engine may do instead of becoming ready."""
        if self.does("die_in_boot"):
            print(f"ERROR 01-31 core.py:1] {BOOT_ERROR}", file=sys.stderr)
            sys.exit(1)
        if self.does("hang_in_boot"):
            time.sleep(600)
        if self.does("orphan"):
            subprocess.Popen([sys.executable, "-S", __file__, "orphan"], start_new_session=True)
            while not segment(os.getpid()).exists():
                time.sleep(0.01)

    def before_answer(self) -> None:
        """What an engine may do instead of answering."""
        if self.does("die_with_flag") and self.model.invariant:
            print(FLAG_ERROR, file=sys.stderr, flush=True)
            os._exit(1)
        if self.does("die_quietly"):
            os._exit(3)
        if self.does("hang_in_request"):
            time.sleep(600)


def segment(pid: int) -> Path:
    """The shared memory that the engine of this process id leaves behind."""
    return Path(f"/dev/shm/d3-fake-{pid}")  # noqa: S108


def orphan() -> None:
    """A process in a session of its own that holds shared memory and never ends by itself."""
    with segment(os.getppid()).open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    """Health, version, metrics and chat completions."""

    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        model = self.engine.model
        pages = {
            "/health": "",
            "/version": json.dumps({"version": self.engine.version}),
            "/metrics": "# HELP vllm:cache_config_info\nvllm:cache_config_info"
            f'{{block_size="{model.block_size}",enable_prefix_caching="{model.apc}",other="x"}} 1.0\n',
        }
        page = pages.get(self.path)
        self.reply(404 if page is None else 200, (page or "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        does = self.engine.does
        self.engine.before_answer()
        if does("http_500"):
            return self.reply(500, b'{"error": "out of luck"}')
        if does("http_429"):
            return self.reply(429, b'{"error": "too many requests"}')
        raw = json.dumps(self.chat(body)).encode()
        if does("not_json"):
            return self.reply(200, raw[: len(raw) // 2])
        if does("half_json"):
            self.close_connection = True
            return self.reply(200, raw[: len(raw) // 2], len(raw))
        return self.reply(200, raw)

    def chat(self, body: dict[str, object]) -> Reply:
        model, does = self.engine.model, self.engine.does
        ids = model.tokens(body["messages"])  # type: ignore[arg-type]
        cached = model.cached(ids, str(body.get("cache_salt", "")))
        chosen, logprobs, gaps = model.answer(ids, cached)
        if does("nan_logprobs"):
            logprobs[1] = float("nan")
        steps = [
            {"token": str(t), "logprob": p, "top_logprobs": [{"logprob": p}, {"logprob": p - g}]}
            for t, p, g in zip(chosen, logprobs, gaps, strict=True)
        ]
        choice: Reply = {
            "message": {"role": "assistant", "content": " ".join(map(str, chosen))},
            "logprobs": None if does("no_logprobs") else {"content": steps},
            "token_ids": chosen,
            "finish_reason": "length",
        }
        choices = [] if does("no_choices") else [None if does("null_choice") else choice]
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        return {"choices": choices, "usage": usage, "prompt_token_ids": ids}

    def reply(self, status: int, raw: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw) if length is None else length))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """The engine's log holds its errors only."""


def main() -> None:
    if sys.argv[1:] == ["orphan"]:
        return orphan()
    engine = Engine(sys.argv[1:])
    engine.boot()
    Handler.engine = engine
    ThreadingHTTPServer((engine.options.host, engine.options.port), Handler).serve_forever()
    return None


if __name__ == "__main__":
    main()
