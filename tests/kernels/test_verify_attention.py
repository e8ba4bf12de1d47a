# SPDX-License-Identifier: Apache-2.0
"""The CPU's verify attention against float64 PyTorch, over poisoned pages and staging."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.attention import FP8, Problem, identity_packing

# Prefixes at, before and behind the edges of blocks of 16, with tails of all lengths the drafters have.
PREFIXES = (0, 1, 15, 16, 17, 37, 32, 64, 5)
TAILS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("identity", [True, False], ids=["rows as they are", "rows scattered"])
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype, kv_cache_dtype, heads, kv_heads, head_size, identity):
    """Every cache dtype; grouped heads; head sizes; any packing."""
    problem = Problem(
        PREFIXES,
        TAILS,
        dtype,
        kv_cache_dtype,
        heads,
        kv_heads,
        head_size,
        packing=identity_packing(16, 2 * head_size) if identity else None,
        k_scale=1.0 if kv_cache_dtype == "auto" else 0.75,
        v_scale=1.0 if kv_cache_dtype == "auto" else 1.5,
    )
    problem.check()


@pytest.mark.parametrize("sliding_window", [0, -1, 1, 2, 7, 16, 1000])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_softcap_and_sliding_window(softcap, sliding_window):
    """vLLM's -1 and our 0 are no window; one of w is the row's own position and the w - 1 before it."""
    Problem(PREFIXES, TAILS, softcap=softcap, sliding_window=sliding_window).check()


@pytest.mark.parametrize("sliding_window", [0, 7])
@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize(("alibi", "sinks"), [(True, False), (False, True), (True, True)])
def test_alibi_and_sinks(alibi, sinks, softcap, sliding_window):
    Problem(PREFIXES, TAILS, softcap=softcap, sliding_window=sliding_window, alibi=alibi, with_sinks=sinks).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_without_a_window_are_not_touched(dtype):
    """Prefill rows and plain decodes of a mixed batch are vLLM's: their output, and block table, are not ours."""
    problem = Problem((40, 0, 9, 33), (3, 20, 1, 5), dtype, windows=[True, False, False, True])
    problem.check()
    assert problem.output[3:24].isnan().all()
    assert not problem.output[:3].isnan().any()
    assert not problem.output[24:].isnan().any()


def test_no_window_at_all():
    problem = Problem((4, 0), (3, 2), windows=[False, False])
    assert problem.run().isnan().all()


def test_windows_lie_anywhere_in_staging():
    """Windows need not follow the batch's order, nor fill staging: `window_start` alone says where they are."""
    problem = Problem((20, 3, 16), (4, 2, 5))
    expected = problem.run().clone()
    whole = problem.staging.reshape(problem.staging.shape[0], 2, -1)[:, :, problem.packing.flatten().long()]
    whole = whole.view(problem.staging.shape).transpose(1, 2).flatten(0, 1)  # [rows, H, 2 * D], unpacked
    moved = [(25, 28), (0, 1), (12, 16)]
    problem.staging = problem.nan_cache(3)
    for (first, _), rows in zip(moved, whole[:8].split([3, 1, 4]), strict=True):
        for index, row in enumerate(rows):
            block, offset = divmod(first + index, 16)
            problem.staging[block].view(2, -1)[:, problem.packing[offset].long()] = row
    problem.window_start = torch.tensor([first for first, _ in moved], dtype=torch.int32)
    problem.output.fill_(float("nan"))
    assert torch.equal(problem.run(), expected)


def test_the_tail_is_seen():
    """The flaw that began it all: each row attends to the staged rows up to its own, and to none behind it."""
    problem = Problem((20,), (5,), packing=identity_packing(16, 64))
    expected = problem.run().clone()
    problem.staging[0, :, 2] += 1
    changed = (problem.run() != expected).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, True, True]
    problem.kv_cache[problem.block_table[0, 1], :, 4] += 1  # position 20: the row of the token sampled last
    assert (problem.run() != expected).flatten(1).any(1).all()


def test_blocks_of_all_layers_and_strided_tensors():
    """Pages with room for other layers between the blocks; output rows that are not dense."""
    problem = Problem((20, 33), (3, 4))
    expected = problem.run().clone()
    wide = torch.full((problem.kv_cache.shape[0], 3, *problem.kv_cache.shape[1:]), float("nan"))
    wide[:, 1] = problem.kv_cache
    problem.kv_cache = wide[:, 1]
    problem.output = torch.full((7, 2, *problem.output.shape[1:]), float("nan"))[:, 1]
    assert torch.equal(problem.run(), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    block_size=st.sampled_from([4, 16, 32]),
    sliding_window=st.sampled_from([0, 3, 20]),
    seed=st.integers(0, 99),
)
def test_any_batch(requests, block_size, sliding_window, seed):
    """Drawn prefixes, tails and batches with and without windows."""
    prefixes, tails, windows = zip(*requests, strict=True)
    Problem(prefixes, tails, block_size=block_size, windows=windows, sliding_window=sliding_window, seed=seed).check()


# -- wrong input -------------------------------------------------------------------------------------------------------


def nhd(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).view(torch.uint8)


# What is wrong of a problem, the change that makes it so, and the error.
WRONG = [
    ("query", lambda t: t.flatten(1), "query and output must be"),
    ("query", lambda t: t.mT.contiguous().mT, "head vectors must be dense"),
    ("query output", lambda t: t[:, :3], "3 query heads do not divide"),
    ("output", lambda t: t.flatten(1), "query and output must be"),
    ("output", lambda t: t[:-1], "output must have the shape and dtype of query"),
    ("output", lambda t: t.bfloat16(), "output must have the shape and dtype"),
    ("output", lambda t: t[:, :2], "output must have the shape and dtype"),
    ("output", lambda t: t.mT.contiguous().mT, "head vectors must be dense"),
    ("query output kv_cache staging", lambda t: t.double(), "query must be float32, float16 or bfloat16"),
    ("kv_cache", lambda t: t[None], "kv_cache and staging must be"),
    ("kv_cache", lambda t: t[..., :32], "kv_cache rows hold 32 elements"),
    ("kv_cache", nhd, "must hold each block and head as one dense"),
    ("kv_cache staging", lambda t: t.bfloat16(), "kv_cache must be uint8 .fp8. or query's dtype"),
    ("kv_cache staging", fp8, "auto is none of fp8"),
    ("staging", lambda t: t[0], "kv_cache and staging must be"),
    ("staging", lambda t: t[:, :1], "staging must have the heads"),
    ("staging", lambda t: t[:, :, :8], "staging must have the heads"),
    ("staging", lambda t: t.bfloat16(), "staging must have .* dtype of kv_cache"),
    ("staging", nhd, "must hold each block and head as one dense"),
    ("query_start_loc", lambda t: t.long(), "query_start_loc must be contiguous int32"),
    ("query_start_loc", lambda t: t[:-1], "query_start_loc has 2 elements, needs 3"),
    ("query_start_loc", lambda t: t - 1, "request 0: its rows do not fit"),
    ("query_start_loc", lambda t: t * 0, "request 0: its rows do not fit"),
    ("query_start_loc", lambda t: t + 1, "request 1: its rows do not fit"),
    ("seq_lens", lambda t: t.long(), "seq_lens must be contiguous int32"),
    ("seq_lens", lambda t: t[:1], "seq_lens has 1 elements, needs 2"),
    ("seq_lens", lambda t: t - 31, "request 1: its rows do not fit"),
    ("window_start", lambda t: t.long(), "window_start must be contiguous int32"),
    ("window_start", lambda t: t + 28, "request 1: its window leaves staging"),
    ("alibi_slopes", lambda t: torch.zeros(3), "alibi_slopes must be contiguous float32 .4."),
    ("alibi_slopes", lambda t: torch.zeros(4, 1), "alibi_slopes must be contiguous float32 .4."),
    ("sinks", lambda t: torch.zeros(4).bfloat16(), "sinks must be contiguous float32 .4."),
    ("sinks", lambda t: torch.zeros(8)[::2], "sinks must be contiguous float32 .4."),
    ("packing", lambda t: t.long(), "packing must be contiguous int32"),
    ("packing", lambda t: t[:8].contiguous(), "packing has 512 elements, needs 1024"),
    ("packing", lambda t: t + 1, "packing: place 1024 is not in a chunk"),
    ("packing", lambda t: t - 1, "packing: place -1 is not in a chunk"),
    ("block_table", lambda t: t.long(), "block_table must be int32"),
    ("block_table", lambda t: t[0], "block_table must be int32"),
    ("block_table", lambda t: t[:1], "block_table must be int32"),
    ("block_table", lambda t: t + 100, "request 0: block 1.. is not in the cache"),
    ("block_table", lambda t: t - 100, "request 0: block -.* is not in the cache"),
    ("block_table", lambda t: t[:, :1], "request 0: block_table is too short"),
]


@pytest.mark.parametrize(("names", "change", "message"), WRONG)
def test_wrong_input_is_refused(names, change, message):
    """Named in the error, before the first row of output is written."""
    problem = Problem((33, 30), (3, 4))
    for name in names.split():
        setattr(problem, name, change(getattr(problem, name)))
    refused(problem, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_size": 12}, "head size 12 is no multiple of 8"),
        ({"kv_cache_dtype": "fp8_e3m4"}, "fp8_e3m4 is none of fp8, fp8_e4m3, fp8_e5m2"),
    ],
)
def test_wrong_sizes_and_names_are_refused(options, message, monkeypatch):
    monkeypatch.setitem(FP8, "fp8_e3m4", torch.float8_e4m3fn)
    refused(Problem((33, 30), (3, 4), **options), message)


def refused(problem: Problem, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        problem.run()
    assert problem.output.isnan().all()
