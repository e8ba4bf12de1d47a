# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: graphs, streams, devices, far offsets, values the host does not see."""

import subprocess

import pytest
import torch

from nwor import ops
from nwor_lab.operators import reference
from nwor_lab.operators.inputs import (
    Pool,
    calls,
    make_cache,
    make_staging,
    make_vectors,
    make_window,
    poison,
)
from nwor_lab.operators.reference import Twins
from tests.kernels.operators import check

pytestmark = pytest.mark.gpu


class Step:
    """A call of every operator on persistent tensors; `refill` gives each of them other contents in place."""

    def __init__(self, device: str = "cuda") -> None:
        self.device, self.calls = device, self.drawn(0, device)

    @staticmethod
    def drawn(seed: int, device: str) -> list[tuple[str, tuple]]:
        found = calls(device, seed, tokens=9, layout="vllm NHD", order="LBNH")
        cow = calls(device, seed, stages=False)["open_window"]
        return [*found.items(), ("open_window", cow)]

    def run(self) -> None:
        for operator, args in self.calls:
            getattr(ops, operator)(*args)

    def refill(self, seed: int) -> None:
        for (_, args), (_, others) in zip(self.calls, self.drawn(seed, self.device), strict=True):
            for arg, other in zip(args, others, strict=True):
                if isinstance(arg, torch.Tensor):
                    arg.copy_(other)

    def expect(self) -> Twins:
        """What plain Python makes of the contents now."""
        twins = Twins()
        for operator, args in self.calls:
            reference.run(operator, [twins.copy(arg) for arg in args], "cuda")
        return twins

    def no_slots(self) -> None:
        """As vLLM captures: with every slot -1."""
        for operator, args in self.calls:
            for name, arg in zip(ops.OPERATORS[operator], args, strict=False):
                if name in ("slots", "slot_mapping"):
                    arg.fill_(-1)


def test_graph_replays_follow_the_live_tensors():
    """Replays with other slots, masks, counts, scales and contents than at capture."""
    step = Step()
    step.refill(1)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    step.no_slots()
    with torch.cuda.graph(graph):
        step.run()
    for seed in range(2, 8):
        step.refill(seed)
        expected = step.expect()
        graph.replay()
        torch.cuda.synchronize()
        expected.assert_equal(f"replay {seed}")


def test_nothing_is_allocated_and_nobody_waits():
    """A step under torch's sync guard, with torch's and the driver's memory as before."""
    step = Step()
    step.run()
    torch.cuda.synchronize()
    allocations, free = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert torch.cuda.mem_get_info()[0] == free


def test_launches_do_not_wait_for_the_stream():
    """A step returns while the stream is still held up."""
    step = Step()
    step.run()
    torch.cuda.synchronize()
    started, finished = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    started.record()
    step.run()
    finished.record()
    assert not started.query(), "the step waited for the kernel before it"
    torch.cuda.synchronize()
    assert finished.query()


def test_runs_on_the_current_stream():
    """A step on another stream comes after what that stream does, and the default stream does not hold it up."""
    step, stream = Step(), torch.cuda.Stream()
    step.refill(3)
    expected = step.expect()
    key, live = step.calls[1][1][0], step.calls[1][1][0].clone()  # of `stage_kv_cache`
    key.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        key.copy_(live)
        step.run()
    torch.cuda.synchronize()
    expected.assert_equal("on a stream of its own")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_the_tensors_device_need_not_be_the_current_one():
    """Tensors of device 1 while device 0 is current, and two devices in turn."""
    for current in (0, 1):
        with torch.cuda.device(current):
            for home in ("cuda:1", "cuda:0"):
                step = Step(home)
                expected = step.expect()
                step.run()
                torch.cuda.synchronize(home)
                expected.assert_equal(f"{home} while {current} is current")
                assert torch.cuda.current_device() == current


def test_offsets_beyond_two_billion_elements():
    """Caches of 2^32 bytes; the first and the last slots, per layer and in a pool of all layers."""
    block_size, heads, head_size = 16, 8, 128
    blocks = 2**32 // (block_size * heads * head_size) + 1  # uint8: bytes are elements
    key, value = make_vectors("packed", 4, heads, head_size, torch.bfloat16, "cuda")
    last = blocks * block_size - 1
    slots = torch.tensor([last, 0, last - 17, -1], device="cuda")
    mask = torch.tensor([True, True, False, True], device="cuda")
    caches = [torch.zeros(blocks, block_size, heads, head_size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    small = [torch.zeros(3, block_size, heads, head_size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    offset = (blocks - 3) * block_size  # the same blocks, seen from the first of the last three
    near = torch.where(slots >= offset, slots - offset, -1)
    log = make_staging(4, heads, head_size, torch.uint8, "cuda")[:2]
    ops.commit_draft_layer(key, value, *caches, slots, mask, "fp8")
    check("commit_draft_layer", key, value, *small, near, mask, "fp8", None, None)
    for cache, expected in zip(caches, small, strict=True):
        assert torch.equal(cache[-3:], expected)
        assert cache[0, 0].any() and not cache[0, 1:].any() and not cache[1:-3].any()
    ops.log_cache_slots(*caches, slots, *log)
    assert torch.equal(log[0][0], caches[0][-1, -1]) and torch.equal(log[1][1], caches[1][0, 0])

    pool = caches[0].view(-1)
    strides = (block_size * heads * head_size, head_size, heads * head_size)
    offsets = torch.tensor([0, 4096], device="cuda")
    rows = poison((2, 1, heads, block_size, head_size), torch.uint8, "cuda", 3)
    far = torch.tensor([[last - 64]], device="cuda")
    num_drafts, rejected, kept = torch.tensor([[1], [0], [0]], dtype=torch.int32, device="cuda")
    counts = torch.zeros(6, dtype=torch.int64, device="cuda")
    ops.commit_all_layers(pool, offsets, strides, far, None, rows, num_drafts, rejected, kept, counts)
    block, at = divmod(last - 64, block_size)
    for layer in range(2):
        first = block * strides[0] + at * strides[2] + int(offsets[layer])
        assert torch.equal(pool[first : first + head_size], rows[layer, 0, 0, 0])


def test_values_that_the_host_does_not_see_are_skipped():
    """A slot beyond the cache, a batch out of order and too long an accepted_len write nothing out of place."""
    key, value = make_vectors("packed", 3, 2, 8, torch.float32, "cuda")
    caches = make_cache("NHD", 4, 4, 2, 8, torch.float32, "cuda")
    mask = torch.ones(3, dtype=torch.bool, device="cuda")
    slots = torch.tensor([16, 2**40, 2**62], device="cuda")
    staging = make_staging(3, 2, 8, torch.float32, "cuda")
    before = Twins(*caches)
    ops.commit_draft_layer(key, value, *caches, slots, mask)
    ops.restore_rejected_drafts(*staging[:2], slots, ~mask, *caches)
    ops.stage_kv_cache(key, value, slots, *staging)
    ops.commit_staged_kv_cache(*staging, *caches, torch.tensor([3], device="cuda"))
    before.assert_equal("slots beyond the cache")

    staging[2].copy_(torch.tensor([1, 2, 3]))
    staging[3].copy_(torch.tensor([2, 0]))
    expected = Twins(*staging, *caches)
    reference.run("commit_staged_kv_cache", [*expected.copies, torch.tensor([2])], "cuda")
    ops.commit_staged_kv_cache(*staging, *caches, torch.tensor([99], device="cuda"))
    expected.assert_equal("accepted_len beyond the staged rows")

    pool = Pool("LBHN", 2, 4, 2, 4, 16, "cuda")
    before = Twins(pool.pool)
    beyond = torch.tensor([[16 * 2, 2**40, 2**62]], device="cuda")
    num_drafts, rejected, kept = torch.tensor([[3], [0], [0]], dtype=torch.int32, device="cuda")
    ops.log_all_layers(*pool.arguments(beyond))
    ops.commit_all_layers(*pool.arguments(beyond), num_drafts, rejected, kept, pool.counts)
    before.assert_equal("slots beyond the pool")


@pytest.mark.parametrize(
    "starts", [[0, 5, 3, 9], [0, -4, 2, 6], [0, 3, 900, 2**31 - 1], [-(2**31), 2**31 - 1, 0, 5], [7, 7, 7, 7]]
)
def test_batches_that_make_no_sense(starts):
    """Queries that end before they start or beyond the batch are not held, and nothing outside is read or written."""
    room = torch.full((64,), -5, dtype=torch.int64, device="cuda")  # what lies around the targets
    slots, staging_rows, page_slots = room[8:20].view(3, 4), room[24:36], room[40:52]
    drafts_and_around = torch.full((5,), -5, dtype=torch.int32, device="cuda")
    num_drafts = drafts_and_around[1:4]
    for logits in ([0, 3, 6, 9], [4, 2, 2**31 - 1, -(2**31)]):
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device="cuda")
        cu_num_logits = torch.tensor(logits, dtype=torch.int32, device="cuda")
        slot_mapping = torch.arange(100, 109, device="cuda")
        counts = torch.zeros(6, dtype=torch.int64, device="cuda")
        for staging in ((staging_rows, page_slots), (None, None)):
            ops.open_window(query_start_loc, cu_num_logits, slot_mapping, slots, num_drafts, *staging, counts)
            torch.cuda.synchronize()
            written = torch.cat([slots.flatten(), page_slots])
            assert set(written.tolist()) <= {-1, *range(100, 109)}
            assert set(staging_rows.tolist()) <= {-1, *range(12)} and set(num_drafts.tolist()) <= set(range(5))
            assert drafts_and_around[[0, 4]].eq(-5).all()
            assert {int(number) for gap in (room[:8], room[20:24], room[36:40], room[52:]) for number in gap} == {-5}


def test_pools_of_too_many_slots_are_refused():
    """Slots are divided in 32 bits; a pool that would need more is an error, before anything is launched."""
    pool = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    rows = torch.full((1, 1, 1, 16, 16), 7, dtype=torch.uint8, device="cuda")
    offsets, slots = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([[3]], device="cuda")
    with pytest.raises(RuntimeError, match="fewer"):
        ops.log_all_layers(pool, offsets, (1, 16, 16), slots, None, rows)
    assert bool((rows == 7).all())


def test_blocks_of_any_size_and_more_requests_than_a_warp_has_lanes():
    """Block sizes that are no power of two, far slots, and windows of 1, 32, 33 and 100 requests."""
    for block_size, requests in ((1, 1), (3, 32), (7, 33), (528, 100)):
        queries = [1 + request % 3 for request in range(requests)]
        blocks = 4 * (sum(queries) // block_size + 2)
        pool = Pool("LBHN", 2, blocks, 2, block_size, 16, "cuda", mini_blocks=3 * requests // block_size + 2)
        rejected = [request % 4 for request in range(requests)]
        slots, *decisions = make_window(queries, rejected, blocks * block_size, "cuda", requests)
        check("log_all_layers", *pool.arguments(slots))
        check("commit_all_layers", *pool.arguments(slots), *decisions, pool.counts)
        check("restore_all_layers", *pool.arguments(slots), *decisions, pool.counts)


def test_what_is_linked_statically_stays_inside():
    """A libstdc++ or cudart of our own that showed would mix with those of the process: refusals crashed that way."""
    command = ["nm", "--dynamic", "--defined-only", str(ops.library())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = [line.split()[-2:] for line in lines]
    assert any("log_all_layers" in name for _, name in symbols)
    inside = ("cuda", "__cuda", "_ZNSt", "_ZNKSt", "_ZSt")
    assert [name for kind, name in symbols if kind in "TDBR" and name.startswith(inside)] == []
