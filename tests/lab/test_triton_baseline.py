# SPDX-License-Identifier: Apache-2.0
"""The microbenchmark's Triton baseline is called as vLLM's backend calls it, with what it splits a context with."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is no baseline")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention

from nwor_lab.microbench.inputs import AttentionCase, AttentionShape, split_scratch

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize(("kv_heads", "batch"), [(32, 4), (8, 16), (1, 128)])
def test_scratch_is_that_of_vllms_backend(kv_heads, batch, head_size):
    """A batch at which vLLM still splits; 0.32 makes scratch for the largest such batch, 0.33 for the engine's."""
    shape = AttentionShape(32, kv_heads, batch, 512, k=0, head_size=head_size)
    ours, theirs = split_scratch(shape, CPU), scratch_of_vllm(shape)
    for name, value in ours.items():
        same = value.shape == theirs[name].shape if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name
    assert split_scratch(AttentionShape(32, 8, 64, 512, k=3), CPU)["softmax_segm_max"].shape == (64, 32, 16)


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_the_baseline_is_given_it(monkeypatch, cache):
    """Each argument is one that vLLM's function has."""
    case, given = object.__new__(AttentionCase), []
    case.shape, case.fp8 = AttentionShape(8, 2, 2, 64, cache=cache, k=3), cache == "fp8"
    case.kv_cache = torch.zeros(8, 2, 16, 256, dtype=torch.uint8 if case.fp8 else torch.bfloat16).transpose(1, 2)
    case.one, case.block_table = torch.ones(1), torch.zeros(2, 4)
    case.query = case.key = case.value = case.slots = case.output = case.query_start_loc = case.seq_lens = None
    case.scale = 1.0
    known = inspect.signature(triton_unified_attention.unified_attention)
    monkeypatch.setattr(triton_reshape_and_cache_flash, "triton_reshape_and_cache_flash", lambda *arguments: None)
    monkeypatch.setattr(triton_unified_attention, "unified_attention", lambda **values: given.append(values))
    case.triton()()
    [values] = given
    known.bind(**values)
    assert values["seq_threshold_3D"] == 64 and values["softmax_segm_output"].shape == (8, 8, 16, 128)
