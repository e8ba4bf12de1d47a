# SPDX-License-Identifier: Apache-2.0
"""Load format ``nwor_random`` for models that are a shape alone: weights at which every layer tells in the logits.

Why: those of vLLM's ``dummy`` format are all within 0.001 of 0, norms too, so that attention could be left out without
one greedy token changing: parity would say nothing.
How: a model loader of that name, registered as vLLM registers its own. Each matrix is drawn from a normal distribution
that keeps the size of what goes through it, but for two kinds: queries, keys and values are larger by `SHARPER`, so
that attention looks at some positions more than at others, and what a layer adds is smaller by the root of how many are
added, as in GPT-2, so that rounding does not grow from layer to layer. Norms are 1, biases 0, and attention sinks of
the size of scores. Over 32 layers in bf16 log-probabilities shift by at most 0.09 nats under ``stage``
(`data/recorded/gpu_direct.parquet`); with an injected fault, blind attention or a commit left out, they did by 0.14 to
0.59.
When it can go: when vLLM's dummy weights are initialised as a model's are.
"""

import functools
import math
import zlib
from typing import Any

FORMAT = "nwor_random"
ASKED = "NWOR_LAB_RANDOM_WEIGHTS"  # 1 lets the lab's plugin register it
SHARPER = 1.7


@functools.cache
def install() -> None:
    from torch import nn
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    class RandomWeights(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw(model, model_config.hf_text_config.num_hidden_layers)

    register_model_loader(FORMAT)(RandomWeights)


def draw(model: Any, num_layers: int) -> None:
    """Fill the parameters of this rank's part of `model`, of `num_layers`; ranks differ in what they do not share.

    Each matrix [out, in] has a generator of its own, seeded by its name and the model's class, so that no two layers
    are alike, nor the drafter's like the target's first.
    """
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear

    for path, module in model.named_modules():
        rank = 0 if isinstance(module, ReplicatedLinear) else get_tensor_model_parallel_rank()
        for name, weight in module.named_parameters(recurse=False):
            if not weight.is_floating_point():
                continue  # a table of ids
            if weight.dim() < 2 and name != "sinks":
                weight.data.fill_(0 if name == "bias" else 1)
                continue
            seed = zlib.crc32(f"{type(model).__name__} {path}.{name} of rank {rank}".encode())
            generator = torch.Generator(weight.device).manual_seed(seed)
            std = 1 if name == "sinks" else 1 / math.sqrt(getattr(module, "input_size", weight.shape[-1]))
            if isinstance(module, QKVParallelLinear):
                std *= SHARPER
            elif isinstance(module, RowParallelLinear):  # the last of attention and of the MLP: two a layer
                std /= math.sqrt(2 * num_layers)
            weight.data.normal_(std=std, generator=generator)
