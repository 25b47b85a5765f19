"""A vLLM engine on the CPU in a child process, asked by prompt length, that can say which operation moved.

For measuring D3's CPU mode (`bench_invariant`, tests/slow). The engine's Python runs this module as the child: its side
(`serve`) needs the standard library and vLLM only.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ANSWER_S = 600.0
BLOCK = 32
SETTINGS = {"block_size": BLOCK, "max_model_len": 2048, "max_num_seqs": 32, "enforce_eager": True, "seed": 0,
            "enable_prefix_caching": True, "generation_config": "vllm"}  # fmt: skip
HELD = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
# Older machines' kernels, on a newer one: what vLLM's library choice asks torch, and what oneDNN and torch read.
KERNELS = {
    "native": ((), {}),
    "avx512": (("_is_avx512_bf16_supported",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "avx2": (("_is_avx512_bf16_supported", "_is_avx512_supported"),
             {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """One answer: its tokens and their log-probabilities, and how many prompt tokens came from the cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Probe:
    """A vLLM engine in a child process, asked by prompt length; a new salt makes a request cold."""

    def __init__(
        self, python: str, invariant: bool, threads: int = 2, kernels: str = "native", **settings: Any
    ) -> None:
        from d3.process import Child
        from d3.store import root

        absent, isa = KERNELS[kernels]
        path = os.pathsep.join(filter(None, [str(root()), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **HELD, **isa, "D3_CPU_INVARIANT": str(int(invariant)), "OMP_NUM_THREADS": str(threads),
               "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}  # fmt: skip
        self._log = Path(tempfile.mkstemp(prefix="d3-probe-", suffix=".log")[1])
        self._child = Child([python, "-m", "d3.invariant_probe"], env, self._log, cwd=root())
        self._salts = 0
        start = {"settings": {**SETTINGS, **settings}, "text": long_text(), "absent": absent}
        self.status: dict[str, Any] = self._call(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        self._log.unlink(missing_ok=True)

    def salt(self) -> str:
        """A cache salt that was not used before."""
        self._salts += 1
        return f"salt-{self._salts}"

    def ask(self, lengths: Sequence[int], salts: Sequence[str], tokens: int) -> tuple[list[Reply], float]:
        """Prompts of these lengths as one batch, and the seconds they took; the mode's status is refreshed."""
        reply = self._call({"lengths": lengths, "salts": salts, "tokens": tokens})
        self.status = reply["status"]
        return [Reply(tuple(t), tuple(p), c) for t, p, c in reply["answers"]], reply["seconds"]

    def layers(self, length: int) -> list[str]:
        """The operations whose output differs cold to warm although their input is equal, in order of execution."""
        keep = length - (length - 1) // BLOCK * BLOCK
        differing: list[str] = self._call({"layers": length, "keep": keep, "salt": self.salt()})
        return differing

    def _call(self, message: Mapping[str, Any]) -> Any:
        from d3.errors import D3Error
        from d3.process import ChildDied

        try:
            self._child.send(json.dumps(message))
            return json.loads(self._child.receive(ANSWER_S))
        except ChildDied as error:
            words = [w for w in self._log.read_text(errors="replace").splitlines() if "Error" in w] or [str(error)]
            raise D3Error(f"the engine ended: {words[-1].strip()}", "see the engine's environment") from error


def long_text() -> str:
    """English prose: the pilot's prompts, one after the other, and again."""
    from omegaconf import OmegaConf

    from d3.store import root

    items = OmegaConf.select(OmegaConf.load(root() / "conf" / "prompts" / "pilot.yaml"), "items")
    return "\n\n".join(item["text"] for item in items) * 3


def serve() -> None:
    """The engine's side: JSON lines on the real standard output, everything else to the log."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    import torch

    for feature in first["absent"]:
        setattr(torch.cpu, feature, lambda: False)
    from vllm import LLM

    from d3.cpu_invariant import status

    llm = LLM(**first["settings"])
    reply: Any = vars(status())
    while True:
        print(json.dumps(reply), file=out, flush=True)
        if not (line := sys.stdin.readline()):
            return
        job = json.loads(line)
        if "layers" in job:
            reply = _differing(llm, _prompt(llm, first["text"], job["layers"], job["salt"]), job["keep"])
            continue
        prompts = [_prompt(llm, first["text"], n, s) for n, s in zip(job["lengths"], job["salts"], strict=True)]
        began = time.perf_counter()
        answers = _generate(llm, prompts, job["tokens"])
        reply = {"answers": answers, "seconds": time.perf_counter() - began, "status": vars(status())}


def _prompt(llm: Any, text: str, length: int, salt: str) -> dict[str, Any]:
    """Exactly `length` tokens: the text, cut, in the chat template (without it, where it alone would be longer)."""
    tokenizer = llm.get_tokenizer()
    message = [{"role": "user", "content": "Say what this is about.\n\n@"}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after, body = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (*chat.rsplit("@", 1), text))
    room = length - len(before) - len(after)
    return {"prompt_token_ids": before + body[:room] + after if room > 0 else body[:length], "cache_salt": salt}


def _generate(llm: Any, prompts: list[dict[str, Any]], tokens: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
    found = [(o, o.outputs[0]) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    return [(list(c.token_ids), [step[t].logprob for step, t in zip(c.logprobs, c.token_ids, strict=True)],
             o.num_cached_tokens) for o, c in found]  # fmt: skip


def _differing(llm: Any, prompt: dict[str, Any], keep: int) -> list[str]:
    """Hook every leaf module and every attention, run cold and warm, and compare the last `keep` rows of each."""
    import torch

    before: dict[str, list[Any]] = {}
    after: dict[str, list[Any]] = {}

    def note(rows: dict[str, list[Any]], name: str, tensors: Any) -> None:
        group = tensors if isinstance(tensors, tuple) else (tensors,)
        rows[name] = [x[-keep:].clone() for x in group if isinstance(x, torch.Tensor)]

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    handles = []
    for path, module in model.named_modules():
        if not list(module.children()) or type(module).__name__ == "Attention":
            name = f"{path} ({type(module).__name__})"
            # Inputs before the call: some operations write their result over them.
            handles.append(module.register_forward_pre_hook(lambda _, inputs, n=name: note(before, n, inputs)))
            handles.append(module.register_forward_hook(lambda _, __, output, n=name: note(after, n, output)))
    runs = []
    for _ in ("cold", "warm"):
        _generate(llm, [prompt], 1)
        runs.append((dict(before), dict(after)))
    for handle in handles:
        handle.remove()

    def moved(part: int, name: str) -> bool:
        return not all(torch.equal(x, y) for x, y in zip(runs[0][part][name], runs[1][part][name], strict=True))

    return [name for name in after if moved(1, name) and not moved(0, name)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the child; a person only reads its help."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.invariant_probe",
        description="vLLM in one child process, spoken to in JSON lines over its pipes, to measure D3's CPU mode.",
        epilog="python -m d3.bench_invariant starts it.",
    )
    parser.parse_args(argv)
    if sys.stdin.isatty():
        print("error: this waits for JSON lines, not for a person; run: python -m d3.bench_invariant", file=sys.stderr)
        return 2
    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
