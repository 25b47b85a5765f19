"""D3's CPU mode: batch-invariant vLLM on the CPU, a plugin of vLLM's group `vllm.general_plugins`.

With D3_CPU_INVARIANT=1 a token is computed the same way whatever else is in its batch. What moves without it, and what
holds it still (csrc/cpu/cpu_attn_impl.hpp and dnnl_helper.cpp of vLLM; measured in docs/cpu_invariance.md):
* attention splits the keys of one-token queries over the threads: that is switched off;
* its key tile depends on its query tile, hence on query length and threads: queries go in as pieces of one kernel step;
* matrix kernels are chosen by the number of rows: rows are added up to a multiple of 8, which is probed at load time;
* AMX kernels depend on the number of rows whatever it is a multiple of: they are switched off.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

MODE = "D3's CPU mode"
TESTED_VLLM = ("0.32.0",)
TESTED_ISA = "vec"
ROWS = 8  # MaxQHeadNumPerIteration in csrc/cpu/cpu_attn_vec.hpp; and row counts that oneDNN treats alike
_seen: dict[str, Any] = {"builds": 0}
_probes: dict[tuple[int, int, str], list[int]] = {}


class CpuInvariantError(RuntimeError):
    """The mode was asked for and cannot hold here; vLLM's plugin loader lets it through, so the engine stops."""

    def __init__(self, message: str) -> None:
        super().__init__(f"d3 cpu_invariant: {message}")


@dataclass(frozen=True)
class ModeStatus:
    """What the mode did in this process: with `builds` (batches cut) above 0 it was in force, not only installed."""

    installed: bool = False
    vllm: str = ""
    isa: str = ""
    tile: int = 0
    builds: int = 0


def status() -> ModeStatus:
    """The state of the mode in this process; ask where the engine itself runs, after it has answered."""
    return ModeStatus(**_seen)


def tile_tokens(isa: str, heads: int, kv_heads: int) -> int:
    """Query tokens in one kernel step; with more, the key tile would depend on how full the query tile is."""
    group = heads // kv_heads
    return 1 if isa != TESTED_ISA else ROWS // group if ROWS % group == 0 else ROWS  # 1: a step of every kernel


def cut(starts: Sequence[int], kv_lens: Sequence[int], tile: int) -> Iterator[tuple[int, int, int]]:
    """Cut the requests' queries at absolute multiples of `tile`, into pieces (request, end in the batch, keys)."""
    for request, kv_len in enumerate(kv_lens):
        begin, end = starts[request], starts[request + 1]
        shift = kv_len - end  # a token's place in its request is its place in the batch, shifted
        while begin < end:
            begin = min(end, ((begin + shift) // tile + 1) * tile - shift)
            yield request, begin, begin + shift


def register() -> None:
    """Install the mode if it is asked for; vLLM calls this in each of its processes, through the entry point."""
    if os.environ.get("D3_CPU_INVARIANT") != "1" or "installed" in _seen:
        return
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if vllm.__version__.split("+")[0] not in TESTED_VLLM or current_platform.is_zen_cpu():
        raise CpuInvariantError(f"needs vLLM {TESTED_VLLM[-1]} without zentorch; this is vLLM {vllm.__version__}")
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    _without_amx()
    _wrap_linears()
    _wrap_attention()
    _seen.update(installed=True, vllm=str(vllm.__version__))


def _without_amx() -> None:
    """Have the kernels of a machine without AMX: with them a row depends on the number of rows, up to 168 of them."""
    import torch

    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.cpu._is_amx_tile_supported = lambda: False


def _expect(thing: Any, tested: str, first: int | None = None) -> None:
    if (found := " ".join([*signature(thing).parameters][:first])) != tested:
        raise CpuInvariantError(f"{thing.__qualname__} takes ({found}), not ({tested}) as when it was tested")


def _wrap_attention() -> None:
    from vllm import envs
    from vllm.v1.attention.backend import CommonAttentionMetadata as Metadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    original = Builder.build
    _expect(original, "self common_prefix_len common_attn_metadata fast_build")
    _expect(Metadata, "query_start_loc query_start_loc_cpu seq_lens num_reqs", 4)

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        meta = common_attn_metadata
        tile = _admit(self, meta, envs.VLLM_CPU_ATTN_SPLIT_KV)
        starts, lens = meta.query_start_loc[: meta.num_reqs + 1], meta.seq_lens[: meta.num_reqs]
        owners, ends, keys = zip(*cut(starts.tolist(), lens.tolist(), tile), strict=True)
        bounds, lens, table = starts.new_tensor([0, *ends]), lens.new_tensor(keys), meta.block_table_tensor[[*owners]]
        meta = meta.replace(num_reqs=len(ends), query_start_loc=bounds, seq_lens=lens, block_table_tensor=table)
        return original(self, common_prefix_len, meta, fast_build)

    Builder.build = build


def _admit(builder: Any, meta: Any, split_kv: bool) -> int:
    """Refuse a batch that the mode cannot hold still, and note it in the engine's log and the status; its tile size."""
    if meta.causal is not True or builder.is_cross_attention or builder.vllm_config.model_config.quantization:
        raise CpuInvariantError("only causal decoder attention and plain weights were tested")
    if split_kv:
        raise CpuInvariantError("VLLM_CPU_ATTN_SPLIT_KV was read before it could be switched off")
    if uneven := {shape: rows for shape, rows in _probes.items() if rows}:
        raise CpuInvariantError(f"on this CPU a matrix row depends on the number of rows: {uneven}")
    if not _seen["builds"]:
        print(f"d3 cpu_invariant: in force, attention kernel {builder.isa} (tested: {TESTED_ISA})", file=sys.stderr)
    tile = tile_tokens(builder.isa, builder.num_heads, builder.num_kv_heads)
    _seen.update(isa=builder.isa, tile=tile, builds=_seen["builds"] + 1)
    return tile


def _wrap_linears() -> None:
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    create, run = ops.create_onednn_mm, ops.onednn_mm
    _expect(create, "weight primitive_cache_size")
    _expect(run, "dnnl_handler x bias")

    def padded(dnnl_handler: Any, x: Any, bias: Any) -> Any:
        rows = x.reshape(-1, dnnl_handler.k)
        # Compiled code is traced once for all sizes and would freeze the branch, so there rows are always added.
        if not torch.compiler.is_compiling() and rows.shape[0] % ROWS == 0:
            return run(dnnl_handler, x, bias)
        full = run(dnnl_handler, torch.nn.functional.pad(rows, (0, 0, 0, ROWS - rows.shape[0] % ROWS)), bias)
        return full[: rows.shape[0]].reshape(*x.shape[:-1], dnnl_handler.n)

    def probed(weight: Any, primitive_cache_size: int = 128) -> Any:
        handler = create(weight, primitive_cache_size)
        shape = (handler.k, handler.n, str(weight.dtype))
        if shape not in _probes:  # vLLM catches what is raised here and falls back, so the first batch refuses instead
            x = torch.randn(256, handler.k, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
            rows = {n * ROWS: run(handler, x[: n * ROWS], None) for n in (32, 21, 13, 8, 5, 3, 2, 1)}
            _probes[shape] = [n for n in rows if not torch.equal(rows[n], rows[256][:n])]
        return handler

    ops.onednn_mm, ops.create_onednn_mm = padded, probed
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # AMX only; oneDNN takes these small weights instead
