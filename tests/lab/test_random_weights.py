# SPDX-License-Identifier: Apache-2.0
"""Random weights of a shape, on vLLM's own layers: their sizes, and what differs between layers, models and ranks."""

import math

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from nwor_lab.engines.random_weights import SHARPER, draw

NUM_LAYERS, WIDTH, RANKS = 8, 256, 2


class Target(nn.Module):
    """One rank's part of two layers, a norm, an embedding and a table of ids, as vLLM's models name and shard them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.qkv_proj = linear(QKVParallelLinear, 3 * WIDTH // RANKS, WIDTH)
            layer.o_proj = linear(RowParallelLinear, WIDTH, WIDTH // RANKS, WIDTH)
            layer.gate_up_proj = linear(MergedColumnParallelLinear, 2 * WIDTH // RANKS, WIDTH)
            layer.norm = nn.RMSNorm(WIDTH)
        self.fc = linear(ReplicatedLinear, WIDTH, 2 * WIDTH)
        self.fc.bias = nn.Parameter(torch.full((WIDTH,), 7.0))
        self.embed_tokens = nn.Embedding(512, WIDTH)
        self.ids = nn.Parameter(torch.arange(512), requires_grad=False)


class Head(Target):
    pass


def linear(kind: type[nn.Module], rows: int, columns: int, input_size: int = 0) -> nn.Module:
    """A linear layer of vLLM's with this rank's weight [rows, columns], made without its process groups."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight, layer.input_size = nn.Parameter(torch.empty(rows, columns)), input_size or columns
    return layer


@pytest.fixture
def drawn(monkeypatch):
    def draw_one(kind: type[nn.Module] = Target, rank: int = 0) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: rank)
        model = kind()
        draw(model, NUM_LAYERS)
        return {name: weight.detach() for name, weight in model.named_parameters()}

    return draw_one


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("layers.0.qkv_proj.weight", SHARPER / math.sqrt(WIDTH)),
        ("layers.0.gate_up_proj.weight", 1 / math.sqrt(WIDTH)),
        ("fc.weight", 1 / math.sqrt(2 * WIDTH)),
        ("embed_tokens.weight", 1 / math.sqrt(WIDTH)),
        # Summed over ranks: of the whole width, not of this rank's part; and two additions a layer.
        ("layers.0.o_proj.weight", 1 / math.sqrt(WIDTH * 2 * NUM_LAYERS)),
    ],
)
def test_a_matrix_keeps_the_size_of_what_goes_through_it(drawn, name, std):
    assert float(drawn()[name].std()) == pytest.approx(std, rel=0.02)


def test_norms_biases_and_ids_are_no_matrices(drawn):
    found = drawn()
    assert (found["layers.1.norm.weight"] == 1).all() and (found["fc.bias"] == 0).all()
    assert found["ids"].tolist() == list(range(512))


def test_no_two_matrices_are_alike_and_all_are_drawn_again(drawn):
    """A drafter like the target's first layer, or layers like each other, would hide one that is left out."""
    target, again, head, other = drawn(), drawn(), drawn(Head), drawn(rank=1)
    matrices = [name for name, weight in target.items() if weight.is_floating_point() and weight.dim() == 2]
    assert all(target[name].equal(again[name]) for name in target)
    assert not any(target[name].equal(head[name]) for name in matrices)
    assert not any(
        target[f"layers.0.{kind}.weight"].equal(target[f"layers.1.{kind}.weight"]) for kind in ("qkv_proj", "o_proj")
    )
    shared = [name for name in matrices if target[name].equal(other[name])]
    assert shared == ["fc.weight"], "what all ranks hold is the same on all, and nothing else is"
