"""The pure parts of D3's CPU mode, and its wrapping of a vLLM made of stand-ins."""

import os
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3 import cpu_invariant as mode


class Vector(list):  # type: ignore[type-arg]
    """As much of a tensor as the mode uses."""

    def __getitem__(self, key: Any) -> Any:
        return Vector(list.__getitem__(self, i) for i in key) if isinstance(key, list) else Vector.of(self, key)

    @staticmethod
    def of(values: "Vector", key: Any) -> Any:
        found = list.__getitem__(values, key)
        return Vector(found) if isinstance(key, slice) else found

    def tolist(self) -> list[Any]:
        return list(self)

    def new_tensor(self, values: Any) -> "Vector":
        return Vector(values)


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Vector
    query_start_loc_cpu: Vector
    seq_lens: Vector
    num_reqs: int
    block_table_tensor: Vector
    causal: Any = True

    def replace(self, **changes: Any) -> "CommonAttentionMetadata":
        return replace(self, **changes)


class Builder:
    isa, num_heads, num_kv_heads, is_cross_attention = "vec", 9, 3, False
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for the parts of vLLM that are wrapped; a test changes one of them and registers."""
    monkeypatch.setattr(mode, "_seen", {"builds": 0})
    monkeypatch.setattr(mode, "_probes", {})
    monkeypatch.setenv("D3_CPU_INVARIANT", "1")
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")

    def create_onednn_mm(weight: Any, primitive_cache_size: int = 128) -> Any: ...

    def onednn_mm(dnnl_handler: Any, x: Any, bias: Any) -> Any: ...

    builder = type("CPUAttentionMetadataBuilder", (Builder,), {"build": Builder.build})
    parts = SimpleNamespace(
        platform=SimpleNamespace(is_cpu=lambda: True, is_zen_cpu=lambda: False),
        top=module("vllm", __version__="0.32.0"), builder=builder, envs=SimpleNamespace(VLLM_CPU_ATTN_SPLIT_KV=False),
        ops=SimpleNamespace(create_onednn_mm=create_onednn_mm, onednn_mm=onednn_mm),
        utils=SimpleNamespace(check_cpu_sgl_kernel=lambda n, k, dtype: True),
        cpu=SimpleNamespace(_is_amx_tile_supported=lambda: True),
    )  # fmt: skip
    parts.top.envs, parts.top._custom_ops = parts.envs, parts.ops
    attention = "vllm.v1.attention"
    modules = {
        "torch": module("torch", cpu=parts.cpu), "vllm": parts.top,
        "vllm.platforms": module("platforms", current_platform=parts.platform),
        "vllm.model_executor": module("model_executor"),
        "vllm.model_executor.layers": module("layers", utils=parts.utils),
        "vllm.v1": module("v1"), attention: module("attention"), f"{attention}.backends": module("backends"),
        f"{attention}.backend": module("backend", CommonAttentionMetadata=CommonAttentionMetadata),
        f"{attention}.backends.cpu_attn": module("cpu_attn", CPUAttentionMetadataBuilder=builder),
    }  # fmt: skip
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    return parts


def batch(**changes: Any) -> CommonAttentionMetadata:
    """One request with 20 new tokens after 30 computed ones, and one that decodes its 41st."""
    starts = Vector([0, 20, 21])
    plain = CommonAttentionMetadata(starts, starts, Vector([50, 41]), 2, Vector(["blocks of 0", "blocks of 1"]))
    return replace(plain, **changes)


requests = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=5)


@given(requests, st.sampled_from([1, 2, 4, 8, 16]))
def test_pieces_cover_each_token_once_and_end_at_absolute_multiples(queries: list[tuple[int, int]], tile: int) -> None:
    starts = [0]
    for new, _ in queries:
        starts.append(starts[-1] + new)
    kv_lens = [new + computed for new, computed in queries]
    pieces = list(mode.cut(starts, kv_lens, tile))
    begins = [0, *(end for _, end, _ in pieces)]
    assert begins[-1] == starts[-1]
    for begin, (request, end, keys) in zip(begins, pieces, strict=False):
        assert 0 < end - begin <= tile
        assert starts[request] <= begin < end <= starts[request + 1]
        assert keys == end - starts[request] + queries[request][1]
        assert keys % tile == 0 or end == starts[request + 1]
        assert (keys - 1) // tile == (keys - (end - begin)) // tile


@given(st.integers(1, 300), st.integers(0, 299), st.sampled_from([2, 8]))
def test_a_token_meets_the_same_tile_cold_and_warm(length: int, cached: int, tile: int) -> None:
    cached = min(cached, length - 1)
    cold = {keys for _, _, keys in mode.cut([0, length], [length], tile)}
    warm = {keys for _, _, keys in mode.cut([0, length - cached], [length], tile)}
    assert warm <= cold


@pytest.mark.parametrize(
    ("isa", "heads", "kv_heads", "tile"),
    [("vec", 9, 3, 8), ("vec", 8, 8, 8), ("vec", 32, 8, 2), ("vec", 64, 8, 1), ("vec", 32, 2, 8), ("amx", 32, 8, 1)],
)
def test_a_tile_is_one_step_of_the_kernel(isa: str, heads: int, kv_heads: int, tile: int) -> None:
    assert mode.tile_tokens(isa, heads, kv_heads) == tile


@pytest.mark.parametrize("value", [None, "", "0"])
def test_not_asked_for_touches_nothing(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("D3_CPU_INVARIANT")
    if value is not None:
        monkeypatch.setenv("D3_CPU_INVARIANT", value)
    monkeypatch.delitem(sys.modules, "vllm")
    mode.register()
    assert vllm.builder.build is Builder.build
    assert not mode.status().installed


def test_another_platform_is_left_to_vllm(vllm: SimpleNamespace) -> None:
    vllm.platform.is_cpu = lambda: False
    mode.register()
    assert vllm.builder.build is Builder.build
    assert not mode.status().installed


def test_a_batch_is_handed_over_in_pieces_and_counted(vllm: SimpleNamespace) -> None:
    mode.register()
    mode.register()  # vLLM may load plugins more than once
    assert mode.status() == mode.ModeStatus(installed=True, vllm="0.32.0")
    built = vllm.builder().build(0, batch())
    assert built.query_start_loc == [0, 2, 10, 18, 20, 21]
    assert built.seq_lens == [32, 40, 48, 50, 41]
    assert built.block_table_tensor == ["blocks of 0"] * 4 + ["blocks of 1"]
    assert built.num_reqs == 5
    assert mode.status() == mode.ModeStatus(installed=True, vllm="0.32.0", isa="vec", tile=8, builds=1)


def test_splitting_and_row_choosing_kernels_are_off(vllm: SimpleNamespace) -> None:
    mode.register()
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert vllm.utils.check_cpu_sgl_kernel(16, 64, "bfloat16") is False


def test_amx_is_off_in_attention_and_in_matrix_products(vllm: SimpleNamespace) -> None:
    mode.register()
    assert not vllm.cpu._is_amx_tile_supported()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_kernels_of_an_older_machine_stay_those_that_were_asked_for(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    mode.register()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0"])
def test_another_version_is_refused(vllm: SimpleNamespace, version: str) -> None:
    vllm.top.__version__ = version
    with pytest.raises(mode.CpuInvariantError, match=r"^d3 cpu_invariant: needs vLLM 0\.32\.0 .* " + version):
        mode.register()


def test_a_build_tag_is_no_other_version(vllm: SimpleNamespace) -> None:
    vllm.top.__version__ = "0.32.0+cpu"
    mode.register()
    assert mode.status().vllm == "0.32.0+cpu"


def test_zentorch_is_refused(vllm: SimpleNamespace) -> None:
    vllm.platform.is_zen_cpu = lambda: True
    with pytest.raises(mode.CpuInvariantError, match="without zentorch"):
        mode.register()


def test_another_shape_is_refused(vllm: SimpleNamespace) -> None:
    vllm.builder.build = lambda self, prefix, metadata: None
    with pytest.raises(mode.CpuInvariantError, match=r"^d3 cpu_invariant: .* takes \(self prefix metadata\), not"):
        mode.register()


def test_another_linear_is_refused(vllm: SimpleNamespace) -> None:
    vllm.ops.onednn_mm = lambda handler, x, bias, scale: None
    with pytest.raises(mode.CpuInvariantError, match=r"not \(dnnl_handler x bias\)"):
        mode.register()


def test_what_was_not_tested_is_refused_at_the_first_batch(vllm: SimpleNamespace) -> None:
    mode.register()
    with pytest.raises(mode.CpuInvariantError, match="only causal decoder attention"):
        vllm.builder().build(0, batch(causal=False))
    quantised = vllm.builder()
    quantised.vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8"))
    with pytest.raises(mode.CpuInvariantError, match="plain weights"):
        quantised.build(0, batch())


def test_an_environment_read_too_early_is_refused(vllm: SimpleNamespace) -> None:
    vllm.envs.VLLM_CPU_ATTN_SPLIT_KV = True
    mode.register()
    with pytest.raises(mode.CpuInvariantError, match="VLLM_CPU_ATTN_SPLIT_KV was read before"):
        vllm.builder().build(0, batch())


def test_an_uneven_matrix_kernel_is_refused(vllm: SimpleNamespace) -> None:
    mode.register()
    mode._probes[(1536, 576, "bfloat16")] = [3]
    with pytest.raises(mode.CpuInvariantError, match="a matrix row depends on the number of rows"):
        vllm.builder().build(0, batch())
    assert mode.status().builds == 0
