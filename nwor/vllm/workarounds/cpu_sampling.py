# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's CPU sampler: sampling with speculative decoding gets the temperature it was asked for.

Why: on the CPU vLLM 0.32 and 0.33 expand per-request values to rows by an operator that knows int64 alone, so a
float temperature is cut to a whole number and written to a copy that is dropped; logits are then divided by whatever
memory held. Greedy decoding is not affected.
How: the same expansion in torch.
When it can go: when `vllm.utils.cpu_triton_utils._expand_kernel_impl` takes floats.
"""

import torch
from torch import Tensor

from nwor.vllm.patch import wrap


def install() -> None:
    from vllm.v1.sample import rejection_sampler

    wrap(rejection_sampler, "expand_batch_to_tokens", lambda original: expand_batch_to_tokens)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """As vLLM's own: each request's value, of any dtype, for each of its tokens."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
