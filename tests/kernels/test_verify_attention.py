# SPDX-License-Identifier: Apache-2.0
"""The CPU's verify attention against float64 PyTorch, over poisoned pages and staging."""

import re
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor import ops
from tests.kernels.operators import changes
from tests.lab.attention import FP8, Problem, identity_packing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Prefixes at, before and behind the edges of blocks of 16, with tails of all lengths the drafters have.
BATCH = tuple(zip((0, 1, 15, 16, 17, 37, 32, 64, 5), range(1, 10), 9 * (True,), strict=True))
BATCHES = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data(), batch=st.just(BATCH) | BATCHES, masked=st.booleans(), seed=st.integers(0, 99))
def test_against_float64(data, batch, masked, seed):
    """Every cache dtype, grouped heads, head sizes, packings and masks; requests with windows, and others, which
    are vLLM's: neither their output nor their block table is ours.

    vLLM's -1 and our 0 are no sliding window; one of w is the row's own position and the w - 1 before it. What no row
    sees is NaN or infinity, and its blocks are not in the table.
    """
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    requests, windows = [one[:2] for one in batch], [one[2] for one in batch]
    cache, head_size, block_size = draw("auto", *FP8), draw(8, 64, 128), draw(4, 16, 32)
    heads, kv_heads = draw((4, 2), (2, 2), (8, 1), (6, 3), (7, 1))
    scales = {} if cache == "auto" else {"k_scale": 0.75, "v_scale": 1.5}
    masks = {
        "softcap": draw(0.0, 0.5, 30.0),
        "sliding_window": draw(0, -1, 1, 2, 7, 16, 1000),
        "alibi": draw(False, True),
        "with_sinks": draw(False, True),
    }
    Problem(
        requests, draw(*DTYPES), cache, heads, kv_heads, head_size, block_size, windows=windows, seed=seed,
        poison=draw(nan, inf),
        packing=identity_packing(block_size, 2 * head_size) if draw(True, False) else None,
        **scales, **(masks if masked else {}),
    ).check()  # fmt: skip


def test_windows_lie_anywhere_in_staging():
    """Windows need not follow the batch's order, nor fill staging: `window_start` alone says where they are."""
    problem = Problem(((20, 4), (3, 2), (16, 5)))
    expected = problem.run().clone()
    whole = problem.staging.reshape(problem.staging.shape[0], 2, -1)[:, :, problem.packing.flatten().long()]
    whole = whole.view(problem.staging.shape).transpose(1, 2).flatten(0, 1)  # [rows, H, 2 * D], unpacked
    moved = [(25, 28), (0, 1), (12, 16)]
    problem.staging = problem.poisoned(3)
    for (first, _), rows in zip(moved, whole[:8].split([3, 1, 4]), strict=True):
        for index, row in enumerate(rows):
            block, offset = divmod(first + index, 16)
            problem.staging[block].view(2, -1)[:, problem.packing[offset].long()] = row
    problem.window_start = torch.tensor([first for first, _ in moved], dtype=torch.int32)
    problem.output.fill_(float("nan"))
    assert torch.equal(problem.run(), expected)


def test_the_tail_is_seen():
    """The flaw that began it all: each row attends to the staged rows up to its own, and to none behind it."""
    problem = Problem(((20, 5),), packing=identity_packing(16, 64))
    expected = problem.run().clone()
    problem.staging[0, :, 2] += 1
    changed = (problem.run() != expected).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, True, True]
    problem.kv_cache[problem.block_table[0, 1], :, 4] += 1  # position 20: the row of the token sampled last
    assert (problem.run() != expected).flatten(1).any(1).all()


def test_blocks_of_all_layers_and_strided_tensors():
    """Pages with room for other layers between the blocks; output rows that are not dense."""
    problem = Problem(((20, 3), (33, 4)))
    expected = problem.run().clone()
    wide = torch.full((problem.kv_cache.shape[0], 3, *problem.kv_cache.shape[1:]), float("nan"))
    wide[:, 1] = problem.kv_cache
    problem.kv_cache = wide[:, 1]
    problem.output = torch.full((7, 2, *problem.output.shape[1:]), float("nan"))[:, 1]
    assert torch.equal(problem.run(), expected)


# -- wrong input -------------------------------------------------------------------------------------------------------

NAMES = ops.OPERATORS["verify_attention"]


def problem(cache: str = "auto") -> Problem:
    return Problem(((33, 3), (30, 4)), kv_cache_dtype=cache, alibi=True, with_sinks=True)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("name", [name for name in NAMES if torch.is_tensor(vars(problem()).get(name))])
def test_other_shapes_dtypes_and_strides(name, cache):
    """Refused before the first row of output is written, or nothing changes: what is longer is not read to its end."""
    expected, refused = problem(cache).run(), 0
    for number in range(len([*changes(getattr(problem(cache), name))])):
        changed = problem(cache)
        change = [*changes(getattr(changed, name))][number]
        setattr(changed, name, change)
        try:
            found = changed.run()
        except RuntimeError as error:
            assert re.search(rf"request|dense|{'|'.join(NAMES)}", str(error)), error
            assert changed.output.isnan().all()
            refused += 1
        else:  # an expanded tensor has other numbers, and these two say how many requests and elements there are
            other_numbers = 0 in change.stride() or name in ("window_start", "packing")
            assert other_numbers or torch.equal(found.flatten()[: expected.numel()], expected.flatten())
    assert refused >= 2


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("query_start_loc", lambda t: t - 1, "request 0"),
        ("query_start_loc", lambda t: t * 0, "request 0"),
        ("query_start_loc", lambda t: t + 1, "request 1"),
        ("seq_lens", lambda t: t - 31, "request 1"),
        ("window_start", lambda t: t + 28, "request 1"),
        ("packing", lambda t: t + 1, "packing"),
        ("packing", lambda t: t - 1, "packing"),
        ("block_table", lambda t: t + 100, "request 0"),
        ("block_table", lambda t: t - 100, "request 0"),
        ("kv_cache_dtype", lambda _: "fp8_e3m4", "fp8_e3m4"),
        ("kv_cache_dtype", lambda _: "auto", "dtype"),
    ],
)
def test_wrong_values_are_refused(name, change, word):
    changed = problem("fp8" if name == "kv_cache_dtype" else "auto")
    setattr(changed, name, change(getattr(changed, name)))
    with pytest.raises(RuntimeError, match=word):
        changed.run()
    assert changed.output.isnan().all()


@pytest.mark.parametrize("sizes", [{"head_size": 12}, {"num_heads": 3}])
def test_sizes_that_are_not_served(sizes):
    with pytest.raises(RuntimeError, match=r"head size|divide"):
        Problem(((33, 3), (30, 4)), **sizes).run()
