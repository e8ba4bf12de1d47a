# SPDX-License-Identifier: Apache-2.0
"""What `stage` takes of vLLM's GPU backends is there, in vLLM's own classes; FlashInfer and Triton are not.

FlashInfer's package is stood in for, so that vLLM's modules can be imported where there is no GPU.
"""

import importlib
import sys
from dataclasses import fields
from functools import wraps
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn

from nwor.vllm import attention_gpu, patch
from nwor.vllm.context import LayerContext

BACKENDS = "vllm.v1.attention.backends."
ABSENT = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
OF_A_BATCH = {"max_query_len", "query_start_loc", "seq_lens", "block_table"}
GIVEN = {
    "num_heads": 8,
    "head_size": 64,
    "scale": 0.125,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
}


@pytest.fixture
def stood_in(monkeypatch):
    """vLLM where FlashInfer can be imported; what was imported so is forgotten afterwards."""
    for name in ABSENT:
        module = MagicMock()
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    ours = ModuleType("nwor.attention.verify")
    monkeypatch.setitem(sys.modules, "nwor.attention.verify", ours)
    monkeypatch.delitem(sys.modules, BACKENDS + "flashinfer", raising=False)
    yield
    patch.undo_all()
    sys.modules.pop(BACKENDS + "flashinfer", None)


def layer_of(backend: str, implementation: str) -> SimpleNamespace:
    """An attention layer whose backend is vLLM's own class, not initialised."""
    found = getattr(importlib.import_module(BACKENDS + backend), implementation)
    return SimpleNamespace(impl=object.__new__(found))


@pytest.mark.parametrize(
    ("backend", "implementation", "more"),
    [
        ("flash_attn", "FlashAttentionImpl", set()),
        ("triton_attn", "TritonAttentionImpl", set()),
        ("flashinfer", "FlashInferImpl", {"FlashInferMetadataBuilder.build"}),
    ],
)
def test_every_hook_on_a_gpu_fits_the_installed_vllm(stood_in, backend, implementation, more):
    """The signatures are those that `patch.wrap` is given; of a backend that is not in use nothing is imported."""
    layer = layer_of(backend, implementation)
    attention_gpu.install([layer, layer])
    assert {*patch.wrapped()} == {f"{implementation}.{name}" for name in ("do_kv_cache_update", "forward")} | more
    assert implementation in attention_gpu.SERVED
    assert (BACKENDS + "flashinfer" in sys.modules) == (backend == "flashinfer")


def test_another_signature_is_refused(stood_in, monkeypatch):
    layer = layer_of("flashinfer", "FlashInferImpl")
    builder = sys.modules[BACKENDS + "flashinfer"].FlashInferMetadataBuilder
    monkeypatch.setattr(builder, "build", lambda self, common_attn_metadata: None)
    with pytest.raises(patch.IncompatibleVLLM, match="FlashInferMetadataBuilder.build"):
        attention_gpu.install([layer])


@pytest.mark.parametrize("metadata", [flash_attn.FlashAttentionMetadata, triton_attn.TritonAttentionMetadata])
def test_metadata_describes_the_batch(metadata):
    assert {field.name for field in fields(metadata)} >= OF_A_BATCH


def flashinfers(batch, monkeypatch) -> object:
    """What FlashInfer's builder makes of a batch for a capture, by vLLM's own way to `build`; its planning left out."""
    module = sys.modules[BACKENDS + "flashinfer"]

    @wraps(module.FlashInferMetadataBuilder.build)
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return object.__new__(module.FlashInferMetadata)

    monkeypatch.setattr(module.FlashInferMetadataBuilder, "build", build)
    attention_gpu.install([layer_of("flashinfer", "FlashInferImpl")])
    return object.__new__(module.FlashInferMetadataBuilder).build_for_cudagraph_capture(batch)


@pytest.mark.parametrize("is_open", [True, False], ids=["a window", "a capture"])
def test_flashinfers_own_objects(stood_in, monkeypatch, is_open):
    """As vLLM makes them, they are what the hooks look for: these let our attention take the whole batch."""
    from nwor.attention import verify

    calls = []
    made = lambda **fixed: lambda *step: calls.append((fixed, *step))
    monkeypatch.setattr(verify, "LayerAttention", made, raising=False)
    module = importlib.import_module(BACKENDS + "flashinfer")
    monkeypatch.setattr(module, "can_use_trtllm_attention", lambda *arguments, **more: False)
    described = {"max_query_len": 4, "query_start_loc": 1, "seq_lens": torch.zeros(2), "block_table_tensor": 2}
    assert {field.name for field in fields(CommonAttentionMetadata)} >= described.keys()
    assert not {field.name for field in fields(module.FlashInferMetadata)} & OF_A_BATCH, "vLLM has them itself now"
    metadata = flashinfers(SimpleNamespace(**described), monkeypatch)
    impl = module.FlashInferImpl(**GIVEN, kv_cache_dtype="bfloat16")
    manager = SimpleNamespace(
        max_query_len=5, serves_attention=is_open, is_dummy_or_capture=not is_open, attends=True,
        page_slots=torch.zeros(8), staging_rows=None, attention=None,
        staging_of=lambda index: None, mark_staged=lambda index: calls.append(index),
    )  # fmt: skip
    scale = torch.ones(1)
    layer = SimpleNamespace(impl=impl, layer_name="layers.0", _q_scale=scale, _k_scale=scale, _v_scale=scale)
    layer.nwor = LayerContext(manager, 3)
    assert attention_gpu.cannot_attend(layer) == ""
    monkeypatch.setattr(attention_gpu, "attention_metadata", lambda layer_name: metadata)
    rows, slots = torch.zeros(8, 2, 64), torch.zeros(8, dtype=torch.int64)
    impl.do_kv_cache_update(layer, rows, rows, None, slots)  # would fail on this cache, were it vLLM's
    output = torch.zeros(8, 8, 64)
    assert impl.forward(layer, output, rows, rows, None, metadata, output) is output
    (asked, *_, starts, lengths, table, slots), index = calls
    assert index == 3 and (asked["softcap"], asked["sliding_window"], asked["scale"]) == (0.0, 0, 0.125)
    assert (starts, table, asked["max_query_len"]) == (1, 2, 5) and slots is manager.page_slots
    assert lengths is described["seq_lens"] and asked["kv_cache_dtype"] == "auto"
