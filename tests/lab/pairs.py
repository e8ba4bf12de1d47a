# SPDX-License-Identifier: Apache-2.0
"""A tiny target and EAGLE head for the tests of the pair, of its recipe and of the reference model."""

import csv
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nwor_lab.pair.model import ATTENTION, EagleHead

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def small_pair(seed: int = 0, bias: bool = False) -> tuple[LlamaForCausalLM, EagleHead]:
    torch.manual_seed(seed)
    options = {"tie_word_embeddings": True, "initializer_range": 0.2, "attn_implementation": ATTENTION}
    target = LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=2, **options)).requires_grad_(False)
    return target, EagleHead(LlamaConfig(**SMALL, num_hidden_layers=1), target, bias=bias)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    return list(csv.DictReader(path.read_text().splitlines()))
