# SPDX-License-Identifier: Apache-2.0
"""The masks that `stage` knows, held to vLLM's own classes: of a layer with any other every step is logged."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.config import ModelConfig
from vllm.model_executor.layers import attention as layer_classes
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention import attention as layer_module
from vllm.v1.attention.backend import subclass_attention_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nwor.vllm import masks, support
from tests.nwor.runners import gpu_layer, make_runner


@pytest.fixture(autouse=True)
def a_gpu_of_today(monkeypatch):
    """What a layer is asked about beside itself, where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def layer_of(name: str, **attributes) -> Attention:
    layer = gpu_layer(layer_class=getattr(layer_classes, name))
    vars(layer).update(attributes)
    return layer


FLASH = type("FlashAttentionBackend", (), {})


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (gpu_layer(), ""),
        (gpu_layer(layer_sliding_window=64, sliding_window=(63, 0)), ""),
        (gpu_layer("CPUAttentionBackendImpl", attn_backend=type("CPUAttentionBackend", (), {}), sliding_window=-1), ""),
        (layer_of("RSWAAttention", _rswa_window=64), "attention of class RSWAAttention"),
        (
            gpu_layer(attn_backend=subclass_attention_backend("ChunkedLocalAttention_64_", FLASH, object)),
            "the attention backend ChunkedLocalAttention_64_FlashAttentionBackend: stage knows ",
        ),
        (gpu_layer(use_mm_prefix=True), "multimodal prefixes that are attended to in both directions"),
        (gpu_layer(attn_type="encoder_decoder"), "attention of type encoder_decoder"),
        (gpu_layer("TritonAttentionImpl", chunk_lookback=-1, use_alibi_sqrt=False), ""),
        (
            gpu_layer("TritonAttentionImpl", chunk_lookback=0),
            "TritonAttentionImpl.chunk_lookback is 0, which stage does not",
        ),
        (
            gpu_layer("TritonAttentionImpl", use_alibi_sqrt=True),
            "TritonAttentionImpl.use_alibi_sqrt is True, which stage",
        ),
        (gpu_layer("TritonAttentionImpl", _set_kv_ptr_range=False), ""),
        (gpu_layer("FlashInferImpl", _multi_ctas_kv_counter_buffer=torch.ones(1)), ""),
        (gpu_layer(rolling=3), "FlashAttentionImpl.rolling, which stage does not know"),
        (gpu_layer(sliding_window=(63, 0)), "a cache of kind FullAttentionSpec("),
        (gpu_layer(layer_sliding_window=64), "a cache of kind SlidingWindowSpec("),
        (gpu_layer(layer_sliding_window=64, sliding_window=(63, 63)), "a cache of kind SlidingWindowSpec("),
        (gpu_layer(layer_sliding_window=64, sliding_window=(31, 0)), "a cache of kind SlidingWindowSpec("),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_masks_that_stage_does_not_know(layer, why, monkeypatch):
    """Look-back by chunks and windows that spare the prompt were taken for plain causal masks."""
    monkeypatch.setattr(layer_module, "_largest_kernel_block_within", lambda *arguments: 16)
    layer.attn_backend.customize_spec = lambda spec: spec
    layer.attn_backend.is_mla = lambda: False
    found = masks.unknown_mask(layer, make_runner().vllm_config)
    assert found.startswith(why) and bool(found) == bool(why)
    layers = {"a": gpu_layer(), "b": layer}
    assert support.why_not_attending(make_runner(), layers) == found
    assert support.why_unsupported(make_runner(), layers) == "", (
        "vLLM's own attention knows its masks: steps are logged"
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("backend", "AttentionImplBase"),
        ("backends/cpu_attn", "CPUAttentionBackendImpl"),
        ("backends/flash_attn", "FlashAttentionImpl"),
        ("backends/triton_attn", "TritonAttentionImpl"),
        ("backends/flashinfer", "FlashInferImpl"),
    ],
)
def test_what_vllms_implementations_carry_is_known(file, name):
    """Else a mode would refuse every model of that backend, by an attribute that this release of vLLM has added."""
    source = (Path(vllm.__file__).parent / "v1" / "attention" / f"{file}.py").read_text()
    [found] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    stored = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert stored and stored <= masks._KNOWN | masks._NEUTRAL.keys()
    backend = name.removesuffix("Impl").removesuffix("Backend") + "Backend"
    assert backend in {*masks.BACKENDS, "AttentionImplBaseBackend"}


def test_the_sources_of_masks_are_vllms():
    """The names that `masks` looks for must be those that vLLM gives: a renamed one would be passed over."""
    assert {"is_mm_prefix_lm", "rswa_window"} <= vars(ModelConfig).keys()
    source = inspect.getsource(Attention.__init__)
    for name in ("use_mm_prefix", "attn_backend", "attn_type", "head_size_v", "sliding_window"):
        assert f"self.{name} = " in source or f"self.{name}: " in source
    assert {"tokens_per_state", "non_causal", "attention_chunk_size", "sliding_window"} <= {
        field.name for field in fields(FullAttentionSpec)
    }
