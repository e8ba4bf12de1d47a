# SPDX-License-Identifier: Apache-2.0
"""R17: what `stage` takes of vLLM's GPU backends is there, in vLLM's own classes; FlashInfer, aiter and Triton are not.

Their packages are stood in for, so that vLLM's modules can be imported where there is no GPU.
"""

import importlib
import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

import vllm.utils.flashinfer
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, rocm_attn, triton_attn

from nwor.vllm import gpu, patch

BACKENDS = "vllm.v1.attention.backends."
ABSENT = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
ABSENT += ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.unified_attention", "vllm.platforms.rocm")
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
    """vLLM as on a GPU with FlashInfer, or on ROCm; what was imported so is forgotten afterwards."""
    for name in ABSENT:
        module = MagicMock()
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    ours = ModuleType("nwor.gpu_attention")
    ours.verify_attention = lambda *arguments, **more: None
    monkeypatch.setitem(sys.modules, "nwor.gpu_attention", ours)
    for backend in ("flashinfer", "rocm_aiter_unified_attn"):
        monkeypatch.delitem(sys.modules, BACKENDS + backend, raising=False)
    monkeypatch.setattr(vllm.utils.flashinfer, "has_flashinfer", lambda: True)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    yield
    patch.undo_all()
    for backend in ("flashinfer", "rocm_aiter_unified_attn"):
        sys.modules.pop(BACKENDS + backend, None)


@pytest.mark.parametrize(
    ("flashinfer", "rocm", "more"),
    [
        (False, False, set()),
        (True, False, {"FlashInferImpl", "FlashInferMetadataBuilder"}),
        (False, True, {"RocmAiterUnifiedAttentionImpl"}),
    ],
)
def test_every_hook_on_a_gpu_fits_the_installed_vllm(stood_in, monkeypatch, flashinfer, rocm, more):
    """The signatures are those that `patch.wrap` is given; what this machine could not choose is not imported."""
    monkeypatch.setattr(vllm.utils.flashinfer, "has_flashinfer", lambda: flashinfer)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: rocm)
    gpu.install()
    assert {name.partition(".")[0] for name in patch.wrapped()} == {"FlashAttentionImpl", "TritonAttentionImpl"} | more
    assert {name.partition(".")[0] for name in patch.wrapped()} - {"FlashInferMetadataBuilder"} <= {*gpu.SERVED}
    imported = {backend for backend in ("flashinfer", "rocm_aiter_unified_attn") if BACKENDS + backend in sys.modules}
    assert ("flashinfer" in imported, "rocm_aiter_unified_attn" in imported) == (flashinfer, rocm)


def test_another_signature_is_refused(stood_in, monkeypatch):
    builder = importlib.import_module(BACKENDS + "flashinfer").FlashInferMetadataBuilder
    monkeypatch.setattr(builder, "build", lambda self, common_attn_metadata: None)
    with pytest.raises(patch.IncompatibleVLLM, match=r"FlashInferMetadataBuilder.build takes"):
        gpu.install()


@pytest.mark.parametrize(
    "metadata",
    [flash_attn.FlashAttentionMetadata, triton_attn.TritonAttentionMetadata, rocm_attn.RocmAttentionMetadata],
)
def test_metadata_describes_the_batch(metadata):
    """The last is also that of ROCm AITER's unified attention."""
    assert {field.name for field in fields(metadata)} >= OF_A_BATCH


def test_flashinfers_metadata_is_given_the_description(stood_in):
    """Its own fields tell prefill from decode; what vLLM's builder makes of the batch stays as it is."""
    described = OF_A_BATCH - {"block_table"} | {"block_table_tensor"}
    assert {field.name for field in fields(CommonAttentionMetadata)} >= described
    module = importlib.import_module(BACKENDS + "flashinfer")
    assert not {field.name for field in fields(module.FlashInferMetadata)} & OF_A_BATCH, "vLLM has them itself now"
    batch = SimpleNamespace(**{name: object() for name in described})
    made = object.__new__(module.FlashInferMetadata)
    asked = []
    build = gpu._make_build(lambda self, *arguments: asked.append(arguments) or made)
    assert build(None, common_prefix_len=0, common_attn_metadata=batch) is made
    assert asked == [(0, batch, False)]
    assert {name: getattr(made, name) for name in OF_A_BATCH - {"block_table"}} == {
        name: getattr(batch, name) for name in OF_A_BATCH - {"block_table"}
    }
    assert made.block_table is batch.block_table_tensor


@pytest.mark.parametrize(
    ("backend", "name"),
    [("flashinfer", "FlashInferImpl"), ("rocm_aiter_unified_attn", "RocmAiterUnifiedAttentionImpl")],
)
def test_a_backend_that_was_never_run_here(stood_in, monkeypatch, backend, name):
    """Its own object, as vLLM makes it, is what the hooks look for: they let our attention take the whole batch."""
    from nwor import gpu_attention

    calls = []
    monkeypatch.setattr(gpu_attention, "verify_attention", lambda *arguments, **more: calls.append(more))
    gpu.install()
    module = sys.modules[BACKENDS + backend]
    monkeypatch.setattr(module, "can_use_trtllm_attention", lambda *arguments, **more: False, raising=False)
    impl = getattr(module, name)(**GIVEN, kv_cache_dtype="auto")
    manager = SimpleNamespace(
        width=4, is_open=True, aside={}, rehearsing=False, page_slots=None, staging_rows=None, attention=None,
        staged=lambda index: None, mark_staged=lambda index: calls.append(index),
    )  # fmt: skip
    scale = torch.ones(1)
    layer = SimpleNamespace(impl=impl, layer_name="layers.0", _q_scale=scale, _k_scale=scale, _v_scale=scale)
    layer.nwor = SimpleNamespace(manager=manager, index=3)
    assert gpu.cannot_attend(layer) == ""
    metadata = SimpleNamespace(max_query_len=4, query_start_loc=1, seq_lens=torch.zeros(2), block_table=2)
    monkeypatch.setattr(gpu, "attention_metadata", lambda layer_name: metadata)
    rows, slots = torch.zeros(8, 2, 64), torch.zeros(8, dtype=torch.int64)
    impl.do_kv_cache_update(layer, rows, rows, None, slots)  # would fail on this cache, were it vLLM's
    output = torch.zeros(8, 8, 64)
    assert impl.forward(layer, output, rows, rows, None, metadata, output) is output
    asked, index = calls
    assert index == 3 and (asked["softcap"], asked["sliding_window"], asked["scale"]) == (0.0, 0, 0.125)
    assert (asked["query_start_loc"], asked["block_table"], asked["max_query_len"]) == (1, 2, 4)


def test_a_cache_of_another_fp8_is_vllms(stood_in, monkeypatch):
    """Some ROCm chips store numbers that our kernel would misread."""
    impl = SimpleNamespace(attn_type="decoder", head_size=64, kv_cache_dtype="fp8", alibi_slopes=None, sinks=None)
    named = type("RocmAiterUnifiedAttentionImpl", (), vars(impl))()
    layer = SimpleNamespace(impl=named, _k_scale=torch.ones(1), _v_scale=torch.ones(1))
    assert gpu.cannot_attend(layer) == ""
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda self: True)
    assert gpu.cannot_attend(layer) == "a cache of fp8 fnuz"
