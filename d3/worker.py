"""vLLM inside one child: run by the engine's own Python, spoken to in JSON lines over its standard pipes.

Imports nothing of D3 but the CPU plugin's status, and nothing outside the standard library and vLLM: it runs in an
environment of its own. In: {"op": "import" | "start" | "ask" | "fork" | "stop", ...}. Out: {"op": "imported" |
"facts" | "answer" | "forked" | "error", ...}. One that has only imported touches no device; "start" or "fork" is next.
"""

import os
import sys

# This folder holds modules named like the standard library's (statistics); as a script's folder it would come first.
sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(os.path.realpath(__file__))]

import argparse
import contextlib
import ctypes
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

BEGAN = time.monotonic()
Operation = Callable[[dict[str, Any]], dict[str, Any] | None]


def main(argv: list[str] | None = None) -> int:
    """Serve one engine until `stop` or the end of the input; only protocol lines reach the real standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.worker",
        description="vLLM in one child process, spoken to in JSON lines over its pipes. D3 starts it for every boot.",
        epilog="To run a boot by hand: python -m d3 apc=on invariant=0, or python -m d3.boot --help.",
    )
    parser.parse_args(argv)
    if sys.stdin.isatty():
        print("error: this waits for JSON lines from D3, not for a person; see: python -m d3.worker --help",
              file=sys.stderr)  # fmt: skip
        return 2
    serve(Worker())
    return 0


def serve(worker: "Worker") -> None:
    """Answer requests until the end of the input, on the standard streams as they are now; a fork begins here anew."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass") as out, open(0, closefd=False) as requests:
        os.dup2(2, 1)
        answer: dict[str, Operation] = {
            "import": worker.import_engine, "start": worker.start, "ask": worker.ask, "fork": fork_engine,
        }  # fmt: skip
        for line in requests:
            request = json.loads(line)
            if request["op"] == "stop":
                return
            try:
                reply = answer[request["op"]](request)
            except BaseException as error:  # the engine may raise anything; the parent needs its words
                traceback.print_exc()
                reply = {"op": "error", "line": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
            if reply is None:
                break
            out.write(json.dumps(reply) + "\n")
            out.flush()
        else:
            return
    serve(worker)


class Worker:
    """One vLLM engine and its request loop."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.import_s: float | None = None
        self.batch = 0
        self.count = 0

    def import_engine(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Import all that `start` uses, once; reply when Python ran, how long it took, and what a device has of it."""
        if self.import_s is None:
            began = time.monotonic()
            import vllm.engine.arg_utils
            import vllm.entrypoints.llm
            import vllm.utils.argparse_utils  # noqa: F401

            self.import_s = time.monotonic() - began
        return {"op": "imported", "began": BEGAN, "import_s": self.import_s, "device": touched()}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the engine from vLLM's own command-line flags; reply with what it says of itself."""
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        known = parser.parse_args(request["args"])
        arguments = EngineArgs.from_cli_args(known)
        with _timed_loading() as loading:
            self.llm = LLM(**{**vars(arguments), "disable_log_stats": False})
        self._watch_batches()
        return {"op": "facts", "weights_s": sum(loading) if loading else None, "facts": self._facts()}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request, its neighbours in the same batch; reply with tokens, log-probabilities and cached tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=request["temperature"], max_tokens=request["max_tokens"], logprobs=2)
        self.batch = 0
        prompts = [self._prompt(request["messages"], request["salt"])]
        prompts += [self._prompt([m], f"neighbour-{self.count}-{i}") for i, m in enumerate(request["neighbours"])]
        self.count += 1
        result = self.llm.generate(prompts, sampling, use_tqdm=False)[0]
        _still_invariant()
        completion = result.outputs[0]
        chosen, gaps = _logprobs(completion)
        return {
            "op": "answer",
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "logprobs": chosen,
            "gaps": gaps,
            "prompt_tokens": len(result.prompt_token_ids),
            "prompt_sha256": hashlib.sha256(",".join(map(str, result.prompt_token_ids)).encode()).hexdigest(),
            "cached_tokens": result.num_cached_tokens,
            "finish_reason": completion.finish_reason or "",
            "running": self.batch or None,
        }

    def _prompt(self, messages: list[dict[str, str]], salt: str | None) -> dict[str, Any]:
        ids = self.llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
        return {"prompt_token_ids": list(ids), **({"cache_salt": salt} if salt else {})}

    def _watch_batches(self) -> None:
        """Record the largest number of requests that one step runs together."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.batch = max(self.batch, len(output.num_scheduled_tokens))
            return output

        scheduler.schedule = watched

    def _facts(self) -> dict[str, Any]:
        import torch
        import vllm
        from vllm.platforms import current_platform

        config = self.llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        backends = sorted(
            {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        )
        cuda = torch.version.cuda if torch.cuda.is_available() else None
        environment = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "torch_threads": str(torch.get_num_threads()),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cuda": str(cuda or "none"),
            "compile_cache": _compile_cache(),
            "compile_mode": str(config.compilation_config.mode),
            "max_model_len": str(config.model_config.max_model_len),
        }
        if cuda:
            environment["gpu"] = torch.cuda.get_device_name()
            environment["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        return {
            "version": vllm.__version__,
            "block_size": config.cache_config.block_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "attention_backend": ",".join(backends) or None,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
            "invariant_mode": _invariant_mode(current_platform.is_cpu()),
            "cache_config": {
                "block_size": str(config.cache_config.block_size),
                "enable_prefix_caching": str(config.cache_config.enable_prefix_caching),
                "prefix_caching_hash_algo": str(config.cache_config.prefix_caching_hash_algo),
                "num_gpu_blocks": str(config.cache_config.num_gpu_blocks),
            },
            "environment": environment,
        }


def touched() -> str:
    """What a device has of this process so far, in words; empty: nothing. Asks a driver only where it is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch.cuda is initialised"
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return ""
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:  # not initialised: no device can have a context
        return ""
    for device in range(count.value):
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if active.value:
            return f"CUDA device {device} has a context"
    return ""


def fork_engine(request: dict[str, Any]) -> dict[str, Any] | None:
    """Fork this process, which has only imported. Raises where it has, or will have, more than the CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or touched():
        raise RuntimeError(f"an engine on {current_platform.device_name} cannot be forked")
    return fork(request)


def fork(request: dict[str, Any]) -> dict[str, Any] | None:
    """None in the fork, whose standard streams and folder are then those of the request.

    It is an orphan at once, so that D3, which adopts orphans, is its parent. `threads`: those that ran on through the
    fork, and that the fork therefore lacks; libraries end theirs before one.
    """
    reading, writing = os.pipe()
    if (middle := os.fork()) == 0:
        try:
            if os.fork():
                os._exit(0)
            _leave(request)
            os.write(writing, str(os.getpid()).encode())  # only now may D3 close the ends that this one opened
            os.close(reading)
            os.close(writing)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # never back into the loop of the process that it was
        return None
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(middle, 0)
    if not said:
        raise RuntimeError("the fork ended at once; its own error is in the log")
    return {"op": "forked", "pid": int(said), "threads": len(os.listdir("/proc/self/task")) - 1}


def _leave(request: dict[str, Any]) -> None:
    """Be a session of its own on the named streams: ends of D3's pipes, opened by their names under /proc; its log."""
    os.setsid()
    for number, way in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(request["streams"][number], way)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["folder"])


@contextlib.contextmanager
def _timed_loading() -> Iterator[list[float]]:
    """The seconds of every call of vLLM's model loader inside; nothing where this vLLM has none of that name."""
    seconds: list[float] = []
    loader: Any = None
    with contextlib.suppress(ImportError):
        from vllm.model_executor.model_loader import base_loader

        loader = base_loader.BaseModelLoader
    load: Any = getattr(loader, "load_model", None)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        loaded = load(*args, **kwargs)
        seconds.append(time.monotonic() - began)
        return loaded

    if load:
        loader.load_model = timed
    yield seconds
    if load:
        loader.load_model = load


def _compile_cache() -> str:
    """Whether vLLM or Inductor may read what another boot compiled, by the word of both."""
    from torch._inductor import config
    from vllm import envs

    return "off" if envs.VLLM_DISABLE_COMPILE_CACHE and config.force_disable_caches else "on"


def _invariant_mode(cpu: bool) -> str:
    """Which batch-invariant implementation is in force, asked of the code that does it."""
    if os.environ.get("D3_CPU_INVARIANT") == "1" and cpu:
        from d3.cpu_invariant import MODE, status

        return MODE if status().installed else "asked for but not installed"
    return "vLLM's flag" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else "off"


def _still_invariant() -> None:
    """Raise where D3's CPU mode was asked for and has cut no batch: installed is not yet in force."""
    if os.environ.get("D3_CPU_INVARIANT") == "1":
        from d3.cpu_invariant import MODE, status

        if status().installed and not status().builds:
            raise RuntimeError(f"{MODE} was asked for and is not in force")


def _logprobs(completion: Any) -> tuple[list[float | None], list[float | None]]:
    """Chosen log-probabilities and top-2 gaps, one per token; None where the engine gives none."""
    chosen: list[float | None] = []
    gaps: list[float | None] = []
    for token, step in zip(completion.token_ids, completion.logprobs or [], strict=False):
        chosen.append(step[token].logprob if token in step else None)
        top = sorted((entry.logprob for entry in step.values()), reverse=True)
        gaps.append(top[0] - top[1] if len(top) > 1 else None)
    return chosen, gaps


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        sys.exit(main())
