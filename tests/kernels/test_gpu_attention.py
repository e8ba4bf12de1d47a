# SPDX-License-Identifier: Apache-2.0
"""The GPU's verify attention against float64 PyTorch, over poisoned pages and staging.

Runs on an NVIDIA GPU, or anywhere with Triton's interpreter (``TRITON_INTERPRET=1``), as `make test` does.
"""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.devices import A100, L40S, limit
from tests.kernels.windows import DEVICE, DTYPE, INTERPRETED, MARKS, RAGGED, SPLIT, Windows, relative

# isort: split
from nwor.attention import kernel
from nwor.attention.configs import HEAD_SIZES, Config
from nwor.attention.verify import verify_attention

pytestmark = MARKS
on_gpu = pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")

KEYS_PER_WARP = Config(tile=64, splits=3, min_tiles_per_split=1, keys_per_warp=True)
CONFIGS = [Config(tile=32), SPLIT, KEYS_PER_WARP]
DRAWN = 32 if INTERPRETED else 120


@settings(max_examples=DRAWN, deadline=None, derandomize=True)
@given(data=st.data())
def test_drawn_shapes_and_masks(data):
    """Ragged, padded and prefill requests, some longer than the bound; head sizes, groups, block sizes, dtypes, caches
    and masks in any combination; fp8 queries beside fp8 caches; rows held, written and dropped; each power of 2 of
    splits, which is a kernel of its own, more of them than have keys, and none. What no row sees, and whatever lay in
    staging and in the slots of the rows, is NaN or infinity: in memory that vLLM hands out again it may be anything."""
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    heads, kv_heads = draw((2, 2), (4, 2), (4, 1), (8, 1), (7, 1), (16, 16), (16, 2))  # 16 heads: a block's size
    requests = draw(RAGGED, ((40, 9), (0, 1), (33, 4)), ((20, 2), (0, 0), (70, 12), (5, 6)), ((0, 0), (0, 0)))
    splits = draw(2, 3, 5, 8)
    if long := draw(False, False, True):
        heads, kv_heads, requests, splits = 4, 1, ((64 * 20, 9), (0, 2), (40, 1)), draw(16, 33, 64)
    cache, mask, dtype = draw("auto", "fp8", "fp8_e5m2"), draw("", "alibi", "with_sinks"), draw(DTYPE, torch.float16)
    split = Config(tile=32, splits=splits, min_tiles_per_split=1)
    Windows(
        requests, dtype, cache, heads, kv_heads, draw(*HEAD_SIZES), draw(16, 32, 64), layout=draw("NHD", "HND"),
        query_fp8=cache != "auto" and draw(True, False), max_query_len=draw(9, 9, 5, 2),
        destinations=draw("hpn", "h", "p", "n"), config=split if long else draw(CONFIGS[0], split, KEYS_PER_WARP),
        softcap=draw(0.0, 2.0), sliding_window=draw(0, -1, 1, 2, 7, 40, 1000), poison=draw(nan, inf),
        **({mask: True} if mask else {}),
    ).check()  # fmt: skip


def test_windows_larger_than_a_tile_of_rows():
    """20 rows of 8 query heads make two tiles of rows; the tail is stored once all the same."""
    requests = ((70, 20), (0, 20), (5, 3))
    problem = Windows(requests, num_heads=8, num_kv_heads=1, max_query_len=20, config=SPLIT)
    problem.check()


def test_values_that_saturate_and_nan():
    """The tail's bytes are vLLM's for every value there is, NaN and infinity included."""
    for kv_cache_dtype in ("fp8", "fp8_e5m2"):
        problem = Windows(((20, 9), (3, 4)), kv_cache_dtype=kv_cache_dtype, scales={"k_scale": 0.3, "v_scale": 7.0})
        values = torch.randint(-(2**15), 2**15, problem.qkv.shape, generator=problem.generator).to(torch.int16)
        problem.qkv[:, problem.num_heads :] = values.view(DTYPE)[:, problem.num_heads :]
        problem.to_device()
        _, kv_cache, staging = problem.expected()
        verify_attention(**problem.arguments())
        assert torch.equal(problem.kv_cache.cpu().contiguous(), kv_cache.contiguous())
        assert torch.equal(problem.staging.cpu().contiguous(), staging.contiguous())


def test_heads_further_apart_than_an_int32_counts():
    """Two heads of a page lie 2^31 elements apart: read and stored in the right place, not around the corner."""
    heads, head_size, n, apart = 3, 64, 16, 2**30 + 2**10
    memory = torch.empty(heads * apart, dtype=DTYPE, device=DEVICE)  # untouched pages of memory cost nothing on a CPU

    def spread(cache: Tensor) -> Tensor:
        strides = n * 2 * head_size, apart, 2 * head_size, 1
        return torch.as_strided(memory, cache.shape, strides).copy_(cache)

    problem = Windows(
        ((20, 3), (5, 9)), num_heads=3, num_kv_heads=heads, head_size=head_size, destinations="p", config=Config()
    )
    output, kv_cache, _ = problem.to_device().expected()
    problem.kv_cache = spread(problem.kv_cache)
    verify_attention(**problem.arguments())
    assert relative(problem.output.cpu(), output) < 4e-3
    assert torch.equal(problem.kv_cache.cpu().contiguous().view(torch.int16), kv_cache.contiguous().view(torch.int16))


@pytest.mark.parametrize(("prefix", "shares"), [(128, 1), (160, 1), (224, 1), (256, 2), (300, 2), (384, 3), (1000, 3)])
def test_a_prefix_is_cut_only_where_each_share_is_worth_it(prefix, shares):
    """A prefix a tile longer than one share takes is no reason for a second: its sums would cost more than it saves."""
    config = Config(tile=32, splits=3, min_tiles_per_split=4)
    problem = Windows(((prefix, 9),), num_heads=1, num_kv_heads=1, config=config).to_device()
    problem.workspace.softmax.fill_(float("nan"))
    problem.check()
    left = problem.workspace.softmax[: 3 * 9, 1].view(3, 9).isfinite().all(dim=1)
    assert left.sum() == (shares if shares > 1 else 0)


def test_tuned_configuration():
    """Without a configuration of its own a call takes a tuned one, and fewer splits where the workspace is small."""
    problem = Windows(((300, 9), (280, 3)))
    problem.check()
    problem = Windows(((300, 9), (280, 3)), config=Config(tile=32, splits=40))
    whole, room = problem.workspace.partials.fill_(float("nan")), 5 * 2 * problem.num_heads * problem.max_query_len
    problem.workspace.partials = whole[:room]
    problem.check()
    assert whole[room:].isnan().all()
    assert not whole[room // 2 :].isnan().all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"head_size": 80}, "head size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"max_query_len": 10}, "workspace"),
        ({"k_scale": torch.ones(2)}, "k_scale"),
        ({"v_scale": None}, "v_scale"),
        ({"seq_lens": torch.zeros(8, dtype=torch.int64)}, "seq_lens"),
        ({"page_slots": torch.zeros(3, dtype=torch.int64)}, "page_slots"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
    ],
)
def test_wrong_input_is_refused(change, complaint):
    """The tensor is named, and nothing is touched."""
    change = dict(change)
    problem = Windows(kv_cache_dtype="fp8", head_size=change.pop("head_size", 64)).to_device()
    before = [tensor.cpu().clone() for tensor in (problem.kv_cache, problem.staging)]
    change = {name: new.to(DEVICE) if isinstance(new, Tensor) else new for name, new in change.items()}
    with pytest.raises(ValueError, match=complaint):
        verify_attention(**problem.arguments() | change)
    assert problem.output.isnan().all()
    assert torch.equal(problem.kv_cache.cpu(), before[0])
    assert torch.equal(problem.staging.cpu(), before[1])


# -- what only a GPU shows -------------------------------------------------------------------------------------------

LONG = ((0, 9), (1, 1), (511, 9), (2048, 5), (8192, 9), (32768, 9), (700, 0), (4097, 2))


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (32, 4)])
def test_long_contexts_no_worse_than_flash_attention(heads, kv_heads, kv_cache_dtype):
    """Contexts to 32k with the tuned configuration; the error is no larger than FlashAttention 3's, nor are bytes
    other than vLLM's own writer's."""
    flash = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    custom_ops = pytest.importorskip("vllm._custom_ops")
    problem = Windows(
        LONG, num_heads=heads, num_kv_heads=kv_heads, head_size=128, kv_cache_dtype=kv_cache_dtype, destinations="h",
        scales={"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}, query_fp8=kv_cache_dtype == "fp8",
    )  # fmt: skip
    ours = problem.check()
    written = problem.kv_cache.clone()
    ones = torch.ones(1, device=DEVICE)
    keys, values = written.transpose(1, 2).split(128, -1)
    slots = problem.page_slots[: len(problem.query)]
    custom_ops.reshape_and_cache_flash(problem.key, problem.value, keys, values, slots, kv_cache_dtype, ones, ones)
    if problem.fp8:
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    rows = problem.staging_rows[: len(problem.query)]
    flat = written.transpose(1, 2).flatten(0, 1), problem.staging.transpose(1, 2).flatten(0, 1)
    bits = torch.uint8 if problem.fp8 else torch.int16
    assert torch.equal(flat[0].view(bits)[slots], flat[1].view(bits)[rows])
    theirs = flash.flash_attn_varlen_func(
        q=problem.q_read.to(DEVICE) if problem.query_fp8 else problem.query.contiguous(), k=keys, v=values,
        cu_seqlens_q=problem.query_start_loc, max_seqlen_q=9, seqused_k=problem.seq_lens,
        max_seqlen_k=int(problem.seq_lens.max()), softmax_scale=problem.scale, causal=True,
        block_table=problem.block_table.clamp(max=len(written) - 1), fa_version=3,
    )  # fmt: skip
    wanted = problem.expected()[0]
    assert ours <= 1.02 * relative(theirs.cpu().to(problem.dtype), wanted)


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("query", [9, 49])
@pytest.mark.parametrize("device", [A100, L40S], ids=lambda device: device.name)
def test_within_the_limits_of_a_smaller_device(device, query, kv_cache_dtype, monkeypatch):
    """What is chosen for it is exact, on whatever GPU is there, and takes no more shared memory than it has."""
    limit(device, monkeypatch)
    taken, run = [], kernel.verify_windows.run
    monkeypatch.setattr(
        kernel.verify_windows, "run", lambda *args, **named: taken.append(run(*args, **named).metadata.shared)
    )
    for heads, kv_heads, head_size in ((32, 8, 128), (8, 8, 64), (16, 2, 256)):
        Windows(
            ((511, query), (8192, query), (0, 3), (700, 0)), num_heads=heads, num_kv_heads=kv_heads,
            head_size=head_size, max_query_len=query, kv_cache_dtype=kv_cache_dtype,
        ).check()  # fmt: skip
    assert len(taken) == 3 and max(taken) <= device.shared_memory


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_one_graph_replayed_on_other_lengths(kv_cache_dtype):
    """A captured launch follows lengths, table, slots and rows as they are at replay."""
    problem = Windows(((0, 9),) * 8, head_size=128, kv_cache_dtype=kv_cache_dtype, config=Config(splits=4)).to_device()
    problem.kv_cache = problem.poisoned(400).to(DEVICE)
    problem.block_table = torch.zeros(8, 64, dtype=torch.int32, device=DEVICE)
    arguments = problem.arguments()
    verify_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(**arguments)
    live = ("qkv", "kv_cache", "output", "query_start_loc", "seq_lens", "page_slots", "staging", "staging_rows")
    lengths = torch.Generator().manual_seed(3)
    for seed in range(1, 9):
        requests = [
            (int(torch.randint(0, 700, (), generator=lengths)), int(torch.randint(0, 10, (), generator=lengths)))
            for _ in range(8)
        ]
        other = replace(problem, requests=requests, seed=seed)
        for name in live:
            source, target = getattr(other, name), getattr(problem, name)
            target[: len(source)].copy_(source)
        problem.block_table[:, : other.block_table.shape[1]].copy_(other.block_table)
        output, kv_cache, staging = other.expected()
        problem.output.fill_(float("nan"))
        graph.replay()
        for name in live:
            setattr(other, name, getattr(problem, name)[: len(getattr(other, name))])
        other.workspace = problem.workspace
        other.compare(output, kv_cache, staging)


@on_gpu
def test_splits_that_meet_and_that_do_not_in_one_workspace():
    """Whatever a launch leaves of its arrivals, the next one's splits wait for each other, however many there are:
    the sign of a window's word turns when they met, and only then."""
    prefixes, kv_heads = (900, 31, 0, 300, 64, 700), 2
    problem = Windows(tuple((prefix, 9) for prefix in prefixes), head_size=128, num_kv_heads=kv_heads).to_device()
    workspace = problem.workspace
    most = workspace.device.multiprocessors // (len(prefixes) * kv_heads)
    words = workspace.arrivals[: len(prefixes) * kv_heads, 1]
    words[::3] = -(2**31)
    for splits in (2, 5, most, 4 * most, 3, most + 1, most):
        problem = replace(problem, config=Config(tile=32, splits=splits))
        problem.workspace, before = workspace, words.clone()
        problem.check()
        turned = (words ^ before < 0).view(-1, kv_heads).tolist()
        assert turned == [[splits <= most and prefix > 32] * kv_heads for prefix in prefixes]


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_splits_side_by_side_meet(kv_cache_dtype):
    """Two on each multiprocessor wait for each other, which one alone could not hold; launch after launch."""
    prefixes, kv_heads = (9000, 31, 300, 5000), 2
    problem = Windows(tuple((prefix, 9) for prefix in prefixes), head_size=128, num_kv_heads=kv_heads, num_heads=8,
                      kv_cache_dtype=kv_cache_dtype).to_device()  # fmt: skip
    workspace = problem.workspace
    most = workspace.device.multiprocessors // (len(prefixes) * kv_heads)
    words = workspace.arrivals[: len(prefixes) * kv_heads, 1]
    for _ in range(3):
        problem = replace(problem, config=Config(tile=64, splits=2 * most, side_by_side=2))
        problem.workspace, before = workspace, words.clone()
        problem.check()
        turned = (words ^ before < 0).view(-1, kv_heads).tolist()
        assert turned == [[prefix > 64] * kv_heads for prefix in prefixes]


@on_gpu
def test_tiles_without_rows_have_nothing_to_do():
    """The tile that a short window does not reach ends at once: its splits do not even meet."""
    requests, config = ((300, 2), (300, 20)), Config(tile=32, splits=4)
    problem = Windows(requests, num_heads=16, max_query_len=20, config=config).to_device()
    problem.check()
    met = (problem.workspace.arrivals[: 2 * 2 * 2, 1] < 0).view(2, 2, 2).tolist()
    assert met == [[[True, False]] * 2, [[True] * 2] * 2]


@on_gpu
def test_nothing_is_allocated_and_nobody_waits():
    problem = Windows(head_size=128).to_device()
    arguments = problem.arguments()
    verify_attention(**arguments)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_attention(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
