# SPDX-License-Identifier: Apache-2.0
"""The microbenchmark's baselines are called as vLLM's backends call them: FlashAttention, version 2 too, and Triton."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is no baseline")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention

from nwor_lab.gpu.attention_case import AttentionCase, AttentionShape, split_scratch
from nwor_lab.gpu.timer import empty

CPU = torch.device("cpu")


def case(cache: str = "bf16") -> AttentionCase:
    """One that a CPU has room for, as far as the baselines look at it."""
    made = object.__new__(AttentionCase)
    made.shape, made.fp8, made.scale = AttentionShape(8, 2, 2, 64, cache, k=3), cache == "fp8", 1.0
    made.kv_cache = torch.zeros(8, 2, 16, 256, dtype=torch.uint8 if made.fp8 else torch.bfloat16)
    made.one, made.block_table, made.query = torch.ones(1), torch.zeros(2, 4), torch.zeros(8, 8, 128)
    made.key = made.value = made.slots = made.output = made.query_start_loc = made.seq_lens = None
    return made


@pytest.fixture
def interface(monkeypatch):
    """vLLM's own file of FlashAttention, which can be read without the compiled extensions that its package wants."""
    path = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", module)
    monkeypatch.setattr(module, "is_fa_version_supported", lambda version: True)
    monkeypatch.setattr(module, "get_scheduler_metadata", lambda **values: "a schedule")
    for name in ("nwor", "triton"):
        monkeypatch.setattr(AttentionCase, name, lambda case: empty)
    monkeypatch.setattr(AttentionCase, "write", lambda case: None)
    return module


@pytest.mark.parametrize("unsupported", [2, 3])
def test_each_version_is_given_what_it_takes(interface, monkeypatch, unsupported):
    """Where there is no FlashAttention 3, `flash` is version 2 as well, as in vLLM."""
    given, known = [], inspect.signature(interface.flash_attn_varlen_func)
    monkeypatch.setattr(interface, "flash_attn_varlen_func", lambda **values: given.append(values))
    if unsupported == 3:
        monkeypatch.setattr(interface, "is_fa_version_supported", lambda version: version == 2)
    calls = case().calls()
    for name in ("flash", "flash 8", "flash2"):
        calls[name]()
    for values in given:
        known.bind(**values)
        assert values["block_table"].shape == (2, 4) and values["max_seqlen_k"] == 64 and values["causal"]
    named = [(values["fa_version"], values["num_splits"], values["scheduler_metadata"]) for values in given]
    flash = [(2, 0, None)] * 2 if unsupported == 3 else [(3, 32, "a schedule"), (3, 8, None)]
    assert named == [*flash, (2, 0, None)]


def scratch_of_vllm(shape: AttentionShape) -> dict[str, object]:
    """What vLLM's own backend makes for an engine of this batch, which decodes."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, static_forward_context={}),
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: shape.heads,
            get_num_kv_heads=lambda parallel: shape.kv_heads,
            get_head_size=lambda: shape.head_size,
            rswa_window=None,
        ),
        parallel_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=shape.batch),
    )
    spec = SimpleNamespace(
        block_size=16, head_size=shape.head_size, num_kv_heads=shape.kv_heads, kv_quant_mode=0, dtype=torch.bfloat16
    )
    builder = TritonAttentionMetadataBuilder(spec, ["layer"], config, CPU)
    return {name: getattr(builder, name) for name in split_scratch(shape, CPU)}


@pytest.mark.parametrize(("kv_heads", "batch", "head_size"), [(32, 4, 64), (8, 16, 96), (1, 128, 128)])
def test_scratch_is_that_of_vllms_backend(kv_heads, batch, head_size):
    """A batch at which vLLM still splits; 0.32 makes scratch for the largest such batch, 0.33 for the engine's."""
    shape = AttentionShape(32, kv_heads, batch, 512, k=0, head_size=head_size)
    ours, theirs = split_scratch(shape, CPU), scratch_of_vllm(shape)
    for name, value in ours.items():
        same = value.shape == theirs[name].shape if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name
    assert split_scratch(AttentionShape(32, 8, 64, 512, k=3), CPU)["softmax_segm_max"].shape == (64, 32, 16)


def test_tritons_is_given_it(monkeypatch):
    """Each argument is one that vLLM's function has."""
    given, known = [], inspect.signature(triton_unified_attention.unified_attention)
    monkeypatch.setattr(triton_reshape_and_cache_flash, "triton_reshape_and_cache_flash", lambda *arguments: None)
    monkeypatch.setattr(triton_unified_attention, "unified_attention", lambda **values: given.append(values))
    case("fp8").triton()()
    [values] = given
    known.bind(**values)
    assert values["seq_threshold_3D"] == 64 and values["softmax_segm_output"].shape == (8, 8, 16, 128)
