# SPDX-License-Identifier: Apache-2.0
"""Which caches have a row for each slot, and which are left out and named."""

from types import SimpleNamespace

import pytest
import torch
from vllm_kv_audit.pages import find_pages

FullAttentionSpec = type("FullAttentionSpec", (), {"block_size": 16})


def runner_of(**stored: str) -> SimpleNamespace:
    """A runner of one cache group, whose layers store these types."""
    layers = {
        name: SimpleNamespace(kv_cache=torch.zeros(4, 2, 16, 144, dtype=torch.uint8, device="meta"), kv_cache_dtype=of)
        for name, of in stored.items()
    }
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=FullAttentionSpec())
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
        block_tables=SimpleNamespace(block_sizes=[16]),
    )


@pytest.mark.parametrize("stored", ["nvfp4", "nvfp4_4over6"])
def test_a_cache_whose_slots_are_scattered_is_left_out_and_named(stored):
    """A row of its view has bytes of many slots: each later write would be a finding."""
    pages, left = find_pages(runner_of(a=stored))
    assert not pages
    (line,) = left
    assert stored in line and "(a)" in line


def test_a_cache_of_rows_is_audited_beside_it():
    pages, left = find_pages(runner_of(a="fp8_per_token_head", b="nvfp4"))
    assert [list(each.names) for each in pages] == [["a"]] and len(left) == 1
