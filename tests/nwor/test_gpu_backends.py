# SPDX-License-Identifier: Apache-2.0
"""What `stage` takes of vLLM's GPU backends is there, in vLLM's own classes; FlashInfer and Triton are not.

FlashInfer's package is stood in for, so that vLLM's modules can be imported where there is no GPU.
"""

import importlib
import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn

from nwor.vllm import attention_gpu, patch

BACKENDS = "vllm.v1.attention.backends."
ABSENT = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
OF_A_BATCH = {"max_query_len", "query_start_loc", "seq_lens", "block_table"}


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
    assert (BACKENDS + "flashinfer" in sys.modules) == (backend == "flashinfer")


@pytest.mark.parametrize("metadata", [flash_attn.FlashAttentionMetadata, triton_attn.TritonAttentionMetadata])
def test_metadata_describes_the_batch(metadata):
    assert {field.name for field in fields(metadata)} >= OF_A_BATCH


def test_flashinfers_metadata_is_described_where_it_is_built(stood_in, monkeypatch):
    """vLLM's own has none of it, and its builder makes it of a batch that does."""
    module = importlib.import_module(BACKENDS + "flashinfer")
    described = {"max_query_len": 4, "query_start_loc": 1, "seq_lens": 2, "block_table_tensor": 3}
    assert {field.name for field in fields(CommonAttentionMetadata)} >= described.keys()
    assert not {field.name for field in fields(module.FlashInferMetadata)} & OF_A_BATCH, "vLLM has them itself now"
    build = attention_gpu._make_build(lambda self, prefix, batch, fast: object.__new__(module.FlashInferMetadata))
    assert vars(build(None, 0, SimpleNamespace(**described))) == {
        "max_query_len": 4, "query_start_loc": 1, "seq_lens": 2, "block_table": 3,
    }  # fmt: skip
