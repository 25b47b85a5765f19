"""The pretend engine behind the worker transport: `python fake_worker.py` speaks the JSON lines of `d3/worker.py`.

`D3_FAKE_DO` in the environment names ways to misbehave: those of `fake_engine`, and some of a broken protocol.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fake_engine import Engine

sys.path.append(str(Path(__file__).parent.parent))
from d3.worker import fork

BEGAN = time.monotonic()
BROKEN = {
    "noise": "this is no JSON",
    "a_number": "42",
    "no_op": "{}",
    "bad_facts": '{"op": "facts", "facts": {"speed": 1}}',
}


def facts(engine: Engine) -> dict[str, object]:
    model = engine.model
    said = {
        "version": engine.version,
        "block_size": model.block_size,
        "prefix_caching": model.apc,
        "attention_backend": "FAKE_ATTN",
        "invariant_mode": "the fake's mode" if model.invariant else "off",
    }
    return {"op": "facts", "weights_s": 0.25, "facts": said}


def answer(engine: Engine, request: dict[str, object]) -> dict[str, object]:
    ids = engine.model.tokens(request["messages"])  # type: ignore[arg-type]
    cached = engine.model.cached(ids, str(request["salt"] or ""))
    chosen, logprobs, gaps = engine.model.answer(ids, cached)
    return {
        "op": "answer",
        "text": " ".join(map(str, chosen)),
        "token_ids": chosen,
        "logprobs": logprobs,
        "gaps": gaps,
        "prompt_tokens": len(ids),
        "prompt_sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest(),
        "cached_tokens": cached,
        "finish_reason": "length",
        "running": 1,
    }


def main() -> None:
    ways = os.environ.get("D3_FAKE_DO", "")
    engine = None
    for line in os.fdopen(0, closefd=False):
        request = json.loads(line)
        if request["op"] == "import":
            device = "CUDA device 0 has a context" if ways == "touch_the_device" else ""
            print(json.dumps({"op": "imported", "began": BEGAN, "import_s": 0.5, "device": device}), flush=True)
        elif request["op"] == "fork":
            reply = fork(request)
            if reply is None:
                return main()
            print(json.dumps(reply), flush=True)
        elif ways in BROKEN:
            print(BROKEN[ways], flush=True)
        elif ways == "raise":
            print(json.dumps({"op": "error", "line": "RuntimeError: the engine core failed"}), flush=True)
        elif ways == "die_but_leave_the_pipe_open":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            print("SystemError: core dumped", file=sys.stderr, flush=True)
            os._exit(1)
        elif request["op"] == "start":
            engine = Engine([*request["args"], "--do", ways])
            engine.boot()
            print(json.dumps(facts(engine)), flush=True)
        elif engine is not None:
            engine.before_answer()
            print(json.dumps(answer(engine, request)), flush=True)


if __name__ == "__main__":
    main()
