"""D3's CPU mode: batch-invariant vLLM on the CPU, as a plugin of vLLM's group `vllm.general_plugins`.

With D3_CPU_INVARIANT=1 each row of a batch is computed the same way whatever else is in the batch. What moves otherwise
(csrc/cpu/cpu_attn_impl.hpp of vLLM; docs/cpu_invariance.md has the measurements), and what holds it still:

* attention splits the keys of a one-token query over the threads: splitting is switched off;
* attention sizes its key tile by the query tile, hence by query length and threads: queries are handed over in pieces
  of one kernel step, cut at absolute multiples of it;
* oneDNN has another kernel for a matrix of one row: one row runs as two;
* small weights take a kernel that chooses by rows (AMX machines only): they take oneDNN, which is probed when it loads.

It refuses, with one line, what it was not tested with. At module level it needs the standard library only.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, NamedTuple

MODE = "D3's CPU mode"
SWITCH = "D3_CPU_INVARIANT"
TESTED_VLLM = ("0.32.0",)
TESTED_ISA = ("vec",)
KERNEL_ROWS = {"vec": 8, "vec16": 16, "amx": 32}  # MaxQHeadNumPerIteration in csrc/cpu/cpu_attn_<isa>.hpp
PROBE_ROWS = (2, 3, 8, 17, 33, 64, 128)


class CpuInvariantError(RuntimeError):
    """The mode was asked for and cannot hold here; vLLM's plugin loader lets it through, so the engine stops."""

    def __init__(self, message: str) -> None:
        super().__init__(f"d3 cpu_invariant: {message}")


@dataclass(frozen=True)
class ModeStatus:
    """What the mode did in this process: with builds above 0 it was in force, not only installed."""

    mode: str
    asked: bool
    installed: bool
    vllm: str
    isa: str
    isa_tested: bool
    tile: int
    builds: int
    linears: int


class Piece(NamedTuple):
    """A run of query tokens handed to the kernel as a request of its own."""

    request: int
    query_end: int
    kv_len: int


_seen: dict[str, Any] = {"installed": False, "vllm": "", "isa": "", "tile": 0, "builds": 0, "linears": 0}
_unstable: list[str] = []
_probed: set[tuple[int, int, str]] = set()


def status() -> ModeStatus:
    """The state of the mode in this process; call it where the engine runs, after it has answered."""
    return ModeStatus(MODE, asked(), isa_tested=_seen["isa"] in TESTED_ISA, **_seen)


def asked() -> bool:
    """Whether the environment asks for the mode. Anything but 0 and 1 is an error, not a guess."""
    value = os.environ.get(SWITCH, "0")
    if value not in {"", "0", "1"}:
        raise CpuInvariantError(f"{SWITCH}={value} is neither 0 nor 1")
    return value == "1"


def tile_tokens(isa: str, heads: int, kv_heads: int) -> int:
    """Query tokens in one step of the kernel: more, and its key tile depends on how full the query tile is."""
    group = heads // kv_heads
    if isa not in KERNEL_ROWS:
        return max(1, 8 // group)
    rows = KERNEL_ROWS[isa]
    return rows // group if rows % group == 0 else rows


def cut(starts: Sequence[int], kv_lens: Sequence[int], tile: int) -> list[Piece]:
    """Cut each request's query where its tokens' absolute positions are multiples of `tile`."""
    pieces: list[Piece] = []
    for request, kv_len in enumerate(kv_lens):
        begin, end = starts[request], starts[request + 1]
        shift = kv_len - end  # position of a token in its request = index in the batch + shift
        while begin < end:
            stop = min(end, ((begin + shift) // tile + 1) * tile - shift)
            pieces.append(Piece(request, stop, stop + shift))
            begin = stop
    return pieces


def register() -> None:
    """vLLM calls this in each of its processes, by way of the entry point `d3_cpu_invariant`."""
    if not asked() or _seen["installed"]:
        return
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    version = str(vllm.__version__)
    if version.split("+")[0] not in TESTED_VLLM:
        raise CpuInvariantError(f"tested with vLLM {', '.join(TESTED_VLLM)}, not with {version}")
    if current_platform.is_zen_cpu():
        raise CpuInvariantError("not tested with zentorch's kernels; uninstall zentorch")
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    _wrap_linears()
    _wrap_attention()
    _seen.update(installed=True, vllm=version)


def _expect(function: Callable[..., Any], *names: str) -> None:
    found = tuple(signature(function).parameters)
    if found != names:
        raise CpuInvariantError(f"{function.__qualname__} takes {found}, not {names}: another vLLM than was tested")


def _wrap_attention() -> None:
    import torch
    from vllm import envs
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    original = Builder.build
    _expect(original, "self", "common_prefix_len", "common_attn_metadata", "fast_build")
    used = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "max_query_len", "block_table_tensor"}
    if missing := used - {field.name for field in fields(CommonAttentionMetadata)}:
        raise CpuInvariantError(f"CommonAttentionMetadata lacks {sorted(missing)}: another vLLM than was tested")

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        meta = common_attn_metadata
        if not _seen["builds"]:
            _admit(self, envs.VLLM_CPU_ATTN_SPLIT_KV)
        if meta.causal is not True or self.is_cross_attention or self.is_encoder_only_attention:
            raise CpuInvariantError("only causal decoder attention was tested")
        tile = tile_tokens(self.isa, self.num_heads, self.num_kv_heads)
        starts = meta.query_start_loc[: meta.num_reqs + 1].tolist()
        pieces = cut(starts, meta.seq_lens[: meta.num_reqs].tolist(), tile)
        ends = torch.tensor([0, *(p.query_end for p in pieces)], dtype=meta.query_start_loc.dtype)
        meta = meta.replace(
            num_reqs=len(pieces),
            query_start_loc=ends,
            query_start_loc_cpu=ends,
            seq_lens=torch.tensor([p.kv_len for p in pieces], dtype=meta.seq_lens.dtype),
            max_query_len=min(meta.max_query_len, tile),
            block_table_tensor=meta.block_table_tensor[[p.request for p in pieces]],
        )
        _seen.update(isa=self.isa, tile=tile, builds=_seen["builds"] + 1)
        return original(self, common_prefix_len, meta, fast_build)

    Builder.build = build


def _admit(builder: Any, split_kv: bool) -> None:
    """Before the first batch: refuse what the mode cannot hold still, and leave a line in the engine's log."""
    if split_kv:
        raise CpuInvariantError("VLLM_CPU_ATTN_SPLIT_KV was read before this plugin could switch it off")
    if builder.vllm_config.model_config.quantization:
        raise CpuInvariantError("quantised weights were not tested")
    if _unstable:
        raise CpuInvariantError(f"this CPU's matrix kernels depend on the batch: {'; '.join(_unstable)}")
    note = "" if builder.isa in TESTED_ISA else f" (not tested; {', '.join(TESTED_ISA)} was)"
    print(f"d3 cpu_invariant: in force, vLLM {_seen['vllm']}, attention {builder.isa}{note}", file=sys.stderr)


def _wrap_linears() -> None:
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    create, run = ops.create_onednn_mm, ops.onednn_mm
    _expect(create, "weight", "primitive_cache_size")
    _expect(run, "dnnl_handler", "x", "bias")
    _expect(utils.check_cpu_sgl_kernel, "n", "k", "dtype")

    def two_rows(dnnl_handler: Any, x: Any, bias: Any) -> Any:
        # Compiled code is traced once for all sizes, so there the row is always added; a branch would be frozen.
        if not torch.compiler.is_compiling() and x.numel() != dnnl_handler.k:
            return run(dnnl_handler, x, bias)
        rows = x.reshape(-1, dnnl_handler.k)
        return run(dnnl_handler, torch.cat([rows, rows[-1:]]), bias)[:-1].reshape(*x.shape[:-1], dnnl_handler.n)

    def probed(weight: Any, primitive_cache_size: int = 128) -> Any:
        handler = create(weight, primitive_cache_size)
        shape = (handler.k, handler.n, str(weight.dtype))
        _seen["linears"] += 1
        if shape not in _probed:
            _probed.add(shape)
            x = torch.randn(PROBE_ROWS[-1], handler.k, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
            whole = run(handler, x, None)
            uneven = [rows for rows in PROBE_ROWS if not torch.equal(run(handler, x[:rows], None), whole[:rows])]
            # vLLM takes an exception here for "no oneDNN" and falls back, so the first batch raises it instead.
            _unstable.extend([f"{shape} at {uneven} rows"] if uneven else [])
        return handler

    ops.onednn_mm, ops.create_onednn_mm = two_rows, probed
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
