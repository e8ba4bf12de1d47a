# SPDX-License-Identifier: Apache-2.0
"""Load format ``nwor_random`` for models that are a shape alone: weights at which every layer tells in the logits.

Why: those of vLLM's ``dummy`` format are all within 0.001 of 0, norms too, so that attention could be left out without
one greedy token changing: parity would say nothing.
How: a model loader of that name, registered as vLLM registers its own. Each matrix is drawn from a normal distribution
that keeps the size of what goes through it, queries, keys and values at twice that, so that attention looks at some
positions more than at others. Norms are 1 and biases 0.
When it can go: when vLLM's dummy weights are initialised as a model's are.
"""

import functools
import math
import zlib
from typing import Any

FORMAT = "nwor_random"


@functools.cache
def install() -> None:
    from torch import nn
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    class RandomWeights(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw(model)

    register_model_loader(FORMAT)(RandomWeights)


def draw(model: Any) -> None:
    """Fill the parameters of this rank's part of `model`; ranks differ in what they do not share.

    Each matrix [out, in] has a generator of its own, seeded by its name, so that no two layers are alike.
    """
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import ReplicatedLinear

    for path, module in model.named_modules():
        rank = 0 if isinstance(module, ReplicatedLinear) else get_tensor_model_parallel_rank()
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2:
                weight.data.fill_(0 if name == "bias" else 1)
                continue
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{path}.{name} of rank {rank}".encode()))
            weight.data.normal_(std=(2 if "qkv" in path else 1) / math.sqrt(weight.shape[-1]), generator=generator)
