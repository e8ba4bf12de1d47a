# SPDX-License-Identifier: Apache-2.0
"""The masks that `stage` knows, held to vLLM's own classes: of a layer with any other every step is logged."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nwor.vllm import masks


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
