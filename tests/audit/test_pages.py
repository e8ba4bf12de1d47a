# SPDX-License-Identifier: Apache-2.0
"""Which caches have a row for each slot, and which are left out and named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm_kv_audit.pages import find_pages

FullAttentionSpec = type("FullAttentionSpec", (), {"block_size": 16})


class DeepseekV32IndexerCache(nn.Module):
    """vLLM's by name, whose blocks hold all numbers and then all scales."""


def layer_of(stored: str = "auto", kind: type = Attention) -> nn.Module:
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    layer.kv_cache_dtype, layer.kv_cache = stored, torch.zeros(4, 2, 16, 144, dtype=torch.uint8, device="meta")
    return layer


def runner_of(**layers: nn.Module) -> SimpleNamespace:
    """A runner of one cache group, whose layers are the target's but for one that is named draft."""
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=FullAttentionSpec())
    target = nn.ModuleDict({name: layer for name, layer in layers.items() if name != "draft"})
    return SimpleNamespace(
        get_model=lambda: target,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
        block_tables=SimpleNamespace(block_sizes=[16]),
    )


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (layer_of("nvfp4"), "nvfp4"),
        (layer_of("nvfp4_4over6"), "nvfp4_4over6"),
        (layer_of("unheard_of"), "unheard_of"),
        (layer_of(kind=DeepseekV32IndexerCache), "DeepseekV32IndexerCache"),
    ],
)
def test_a_cache_whose_slots_may_be_scattered_is_left_out_and_named(layer, why):
    """A row of its view has bytes of many slots: each later write would be a finding."""
    pages, left = find_pages(runner_of(a=layer))
    assert not pages
    (line,) = left
    assert why in line and "(a)" in line


def test_a_cache_of_rows_is_audited_beside_it():
    pages, left = find_pages(runner_of(a=layer_of("fp8_per_token_head"), b=layer_of("nvfp4")))
    assert [list(each.names) for each in pages] == [["a"]] and len(left) == 1


def test_a_layer_that_is_no_module_of_the_target_is_the_drafters():
    """A drafter of the user's own has no list of them, and writes its rows when a step's rows have been marked."""
    pages, left = find_pages(runner_of(a=layer_of(), draft=layer_of()))
    assert [list(each.names) for each in pages] == [["a"]]
    assert left == ["1 layer (draft): the drafter's own"]
