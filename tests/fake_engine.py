"""A pretend engine: an OpenAI-compatible chat server with a simulated prefix cache, and ways to misbehave.

Its answers depend on the cache as a real engine's may: with the cache on and the invariant mode off, a long prompt's
warm answer ends in another token than its cold one. `--do` takes words of `WAYS`; `--switch FILE` is read at every
step and adds more, so that a test can change an engine's behaviour while its command line stays the same.

`--dialect` speaks as another engine does: its pages, its words on the command line and in requests, what it leaves out.
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
    "ignore_cache_flag", "ignore_invariant", "other_bytes", "die_in_answer", "drip", "no_answer", "more_tokens",
    "longer_prompt", "other_prompt", "short_context", "tell_key", "flag_drops_cache", "ignore_reset",
    "compile_anew", "compile_late",
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

    def reset(self) -> None:
        """Empty the cache."""
        self.blocks.clear()

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
        parser.add_argument("--dialect", choices=("vllm", "llama_cpp", "sglang", "transformers"), default="vllm")
        self.options, others = parser.parse_known_args(arguments)
        assert self.options.dialect != "vllm" or not others, others
        off = self.options.apc == "off" or "--disable-radix-cache" in others
        invariant = (self.options.invariant == "1" or "--enable-deterministic-inference" in others) and not self.does(
            "ignore_invariant"
        )
        apc = (not off or self.does("ignore_cache_flag")) and not (invariant and self.does("flag_drops_cache"))
        self.reports_cache = self.options.dialect != "sglang" or "--enable-cache-report" in others
        self.model = Model(
            apc, invariant, 1 if self.options.dialect == "llama_cpp" else 16, 5 * self.does("other_bytes")
        )
        self.asked: set[tuple[str, tuple[int, ...]]] = set()
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
        if (says := Path(f"{self.options.switch}.says")).exists():
            print(says.read_text(), file=sys.stderr, flush=True)
        if self.does("tell_key"):
            print(f"ValueError: my key is {os.environ['VLLM_API_KEY']}", file=sys.stderr, flush=True)
            sys.exit(1)
        if self.does("die_in_boot"):
            print(f"ERROR 01-31 core.py:1] {BOOT_ERROR}", file=sys.stderr)
            sys.exit(1)
        if self.does("hang_in_boot"):
            time.sleep(600)
        if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            self.compile(Path(folder))
        if self.does("orphan"):
            subprocess.Popen([sys.executable, "-S", __file__, "orphan"], start_new_session=True)
            while not segment(os.getpid()).exists():
                time.sleep(0.01)

    def compile(self, folder: Path) -> None:
        """Leave a compiled kernel in the cache; another one at every start, or at the third, where that is asked."""
        starts = folder.parent.with_suffix(".starts")
        folder.mkdir(parents=True, exist_ok=True)
        with starts.open("a") as file:
            file.write("one\n")
        (folder / "kernel.lock").touch()
        (folder / "kernel").write_text(f"{self.options.apc} {self.options.invariant}")
        number = len(starts.read_text().splitlines())
        if self.does("compile_anew") or (self.does("compile_late") and number == 3):
            (folder / f"kernel-{number}").write_text("another")

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
            "/props": json.dumps({"build_info": self.engine.version}),
            "/server_info": json.dumps({"version": self.engine.version, "page_size": model.block_size}),
            "/version": json.dumps({"version": self.engine.version}),
            "/metrics": "# HELP vllm:cache_config_info\nvllm:cache_config_info"
            f'{{block_size="{model.block_size}",enable_prefix_caching="{model.apc}",other="x"}} 1.0\n',
        }
        known = {"vllm": {"/version", "/metrics"}, "llama_cpp": {"/props"}, "sglang": {"/server_info"}}
        shown = {"/health", *known.get(self.engine.options.dialect, ())}
        page = pages.get(self.path) if self.path in shown else None
        self.reply(404 if page is None else 200, (page or "").encode())

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        does = self.engine.does
        if self.path in {"/slots/0?action=erase", "/flush_cache"}:
            if not does("ignore_reset"):
                self.engine.model.reset()
            return self.reply(200, b"{}")
        body = json.loads(raw)
        self.engine.before_answer()
        odd = {"return_token_ids", "cache_salt"} & set(body) if self.engine.options.dialect == "transformers" else None
        long = does("short_context") and len(self.engine.model.tokens(body["messages"])) > 1000
        refusals = {
            500: does("http_500") and "out of luck",
            429: does("http_429") and "too many requests",
            400: long and "This model's maximum context length is 1000 tokens.",
            422: odd and f"unexpected fields: {odd}",
        }
        for status, why in refusals.items():
            if why:
                return self.reply(status, json.dumps({"error": why}).encode())
        raw = json.dumps(self.chat(body)).encode()
        if does("drip"):
            return self.drip()
        if does("not_json"):
            return self.reply(200, raw[: len(raw) // 2])
        if does("half_json"):
            self.close_connection = True
            return self.reply(200, raw[: len(raw) // 2], len(raw))
        if does("die_in_answer"):
            self.reply(200, raw[: len(raw) // 2], len(raw))
            self.wfile.flush()
            os._exit(3)
        return self.reply(200, raw)

    def chat(self, body: dict[str, object]) -> Reply:
        model, does, dialect = self.engine.model, self.engine.does, self.engine.options.dialect
        if "cache_prompt" in body:
            model.apc = bool(body["cache_prompt"])
        ids = model.tokens(body["messages"])  # type: ignore[arg-type]
        salt = str(body.get("cache_salt", ""))
        cached = model.cached(ids, salt)
        seen = (salt, tuple(ids)) in self.engine.asked
        self.engine.asked.add((salt, tuple(ids)))
        if does("longer_prompt") and seen:
            ids = [*ids, 7]
        if does("other_prompt") and seen:
            ids = [*ids[:-1], 7]
        chosen, logprobs, gaps = model.answer(ids, cached)
        if does("more_tokens"):
            chosen, logprobs, gaps = chosen * 30, logprobs * 30, gaps * 30
        if does("no_answer"):
            chosen, logprobs, gaps = [], [], []
        if does("nan_logprobs"):
            logprobs[1] = float("nan")
        steps = [
            {"id": t, "token": str(t), "logprob": p, "top_logprobs": [{"logprob": p}, {"logprob": p - g}]}
            for t, p, g in zip(chosen, logprobs, gaps, strict=True)
        ]
        choice: Reply = {
            "message": {"role": "assistant", "content": " ".join(map(str, chosen))},
            "logprobs": None if does("no_logprobs") else {"content": steps},
            "token_ids": chosen,
            "finish_reason": "length",
        }
        usage: Reply = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        reply: Reply = {"usage": usage, "prompt_token_ids": ids}
        if dialect != "vllm":
            del choice["token_ids"], reply["prompt_token_ids"]
        if dialect == "sglang":
            choice |= {"response_token_ids": chosen, "prompt_token_ids": ids}
        if dialect == "transformers":
            del choice["logprobs"]
        if dialect == "transformers" or not self.engine.reports_cache:
            del usage["prompt_tokens_details"]
        reply["choices"] = [] if does("no_choices") else [None if does("null_choice") else choice]
        return reply

    def drip(self) -> None:
        """An answer whose pieces keep coming, so that no single wait is long."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        for _ in range(6000):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.1)

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
