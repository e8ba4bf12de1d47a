# SPDX-License-Identifier: Apache-2.0
"""The repaired expansion of vLLM's CPU sampler: each request's value, once for each of its tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to repair")

from nwor.vllm import patch
from nwor.vllm.workarounds import cpu_sampling

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.sampled_from([0, 1, 2, 5]), st.integers(0, 5)), min_size=1, max_size=6),
    replaced=st.sampled_from([(0, 0), (0, 1), (2, 7)]),
    dtype=st.sampled_from(DTYPES),
)
def test_expansion_against_a_plain_loop(requests, replaced, dtype):
    """Requests without tokens have none; a replaced value is replaced, and every other kept as it is."""
    values = [value + (0.25 if dtype.is_floating_point and value == 5 else 0) for value, _ in requests]
    counts = torch.tensor([count for _, count in requests])
    expected = [
        replaced[1] if value == replaced[0] else value
        for value, (_, count) in zip(values, requests, strict=True)
        for _ in range(count)
    ]
    x = torch.tensor(values, dtype=dtype)
    found = cpu_sampling.expand_batch_to_tokens(x, counts.cumsum(0).int(), len(expected), *replaced)
    assert found.dtype == dtype
    assert found.tolist() == expected


def test_the_sampler_calls_the_repaired_one():
    """Through the very name vLLM's sampler looks up, with the example of its docstring; and it comes off again."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.expand_batch_to_tokens
    cpu_sampling.install()
    try:
        x, ends = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 5, 6], dtype=torch.int32)
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
        assert torch.equal(found, torch.tensor([0.7, 0.7, 1, 1, 1, 1.3]))
    finally:
        patch.undo_all()
    assert rejection_sampler.expand_batch_to_tokens is original
