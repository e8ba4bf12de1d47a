# SPDX-License-Identifier: Apache-2.0
"""The operators of a step, bound once, beside the operators themselves; and what a commit publishes on the host.

Guards against: other rows than the operators', counts of another way, a call that reads or writes past what is bound.
"""

import re

import pytest
import torch
from devices import each_device
from torch import Tensor

from nwor import ops
from nwor.step import Step
from nwor_lab.operators.inputs import Pool, make_batch, make_targets, make_window
from tests.kernels.operators import changes, check

pytestmark = each_device
QUERIES, WIDTH, TOKENS = (4, 1, 3), 4, 16


class Bound:
    """A step of up to 5 requests over a pool of 3 layers; `again` makes one alike, of the same bytes."""

    def __init__(self, device: str, packed: bool = False, logged: bool = False) -> None:
        self.pool = Pool("LBHN", 3, 6, 2, 8, 32, device, 2 if packed else 0, mini_blocks=5)
        slots, num_drafts, staging_rows, page_slots = make_targets(5, WIDTH, TOKENS, device)
        self.counts = torch.tensor([[5, 7, 11, 13, 17, 0], [1, 2, 3, 4, 5, 0]], device=device)
        self.step = Step(
            pool=self.pool.pool, layer_offsets=self.pool.layer_offsets, cache_strides=self.pool.cache_strides,
            slots=slots, packing=self.pool.packing, rows=self.pool.rows, num_drafts=num_drafts,
            kept=torch.zeros_like(num_drafts), staging_rows=staging_rows, page_slots=page_slots,
            logged=torch.full((5, WIDTH), -1, device=device) if logged else None, counts=self.counts,
        )  # fmt: skip
        self.batch = make_batch(QUERIES, QUERIES, 48, device, padding=TOKENS - sum(QUERIES))

    def bytes(self) -> dict[str, Tensor]:
        return {name: given.clone() for name, given in self.step.tensors.items() if isinstance(given, Tensor)}

    def assert_as(self, before: dict[str, Tensor]) -> None:
        for name, found in self.bytes().items():
            assert torch.equal(found, before[name]), name


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_bound_step_is_its_operators(packed, logged, device):
    """Staged and logged, every tensor to the bit, with both ways' counts apart."""
    if packed and device == "cuda":
        pytest.skip("a packing describes vLLM's CPU caches")
    rejected = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    for way, restores in ((1, True),) if logged else ((0, False), (1, True)):  # nothing is staged beside such a log
        bound, plain = Bound(device, packed, logged), Bound(device, packed, logged)
        bound.step.open(*bound.batch, bound.counts[way], stages=not restores, logs=restores)
        bound.step.close(rejected, bound.counts[way], restores=restores)
        t, counts = plain.step.tensors, plain.counts[way]
        routes = (None, None) if restores else (t["staging_rows"], t["page_slots"])
        ops.open_window(*plain.batch, t["slots"], t["num_drafts"], *routes, counts)
        where = *plain.pool.arguments(t["slots"][:3])[:5], t["rows"]
        if restores:
            ops.log_all_layers(*where, t["logged"])
        decisions = t["num_drafts"][:3], rejected, t["kept"][:3], counts
        if restores:
            ops.restore_all_layers(*where, *decisions, t["logged"])
        else:
            ops.commit_all_layers(*where[:5], t["rows"], *decisions)
        bound.assert_as(plain.bytes())


@pytest.mark.parametrize("operator", ["commit_all_layers", "restore_all_layers"])
def test_what_a_commit_publishes(operator, device):
    """The counts as they are then, and what was kept of what was held; of 20 requests, over several thread blocks."""
    pool = Pool("LBNH", 2, 16, 2, 16, 16, device, mini_blocks=8)
    window = make_window([request % 5 for request in range(20)], [request % 3 for request in range(20)], 256, device)
    published = torch.full((6 + 24,), -9, pin_memory=device == "cuda")
    more = (None, published) if operator == "restore_all_layers" else (published,)
    for _ in range(2):
        check(operator, *pool.arguments(window[0]), *window[1:], pool.counts, *more)
    if device == "cuda":
        torch.cuda.synchronize()
    assert published[:6].tolist() == pool.counts.tolist() and published[26:].eq(-9).all()
    by_request = published[6:26].view(torch.int32).view(-1, 2).tolist()
    assert by_request == [list(pair) for pair in zip(window[3].tolist(), window[1].tolist(), strict=True)]


def test_a_step_publishes_the_counts_of_all_ways(device):
    bound = Bound(device)
    published = torch.zeros(12 + 5, dtype=torch.int64, pin_memory=device == "cuda")
    for way, restores in ((0, False), (1, True), (0, False)):
        bound.step.open(*bound.batch, bound.counts[way], stages=not restores, logs=restores)
        nothing = torch.zeros(3, dtype=torch.int32, device=device)
        bound.step.close(nothing, bound.counts[way], published, restores=restores)
        if device == "cuda":
            torch.cuda.synchronize()
        assert published[:12].tolist() == bound.counts.flatten().tolist()


@pytest.mark.parametrize("place", range(3), ids=["query_start_loc", "cu_num_logits", "slot_mapping"])
def test_a_batch_that_does_not_fit_changes_nothing(place, device):
    """Another dtype, too few requests or too many, more tokens than staging has room for, gaps; what is not refused is
    served as the operator serves it."""
    refused = 0
    for number in range(len([*changes(Bound(device).batch[place])])):
        bound, plain = Bound(device), Bound(device)
        batch = [*bound.batch]
        batch[place] = [*changes(batch[place])][number]
        try:
            bound.step.open(*batch, bound.counts[0], stages=True)
        except RuntimeError as error:
            assert re.search(r"contiguous|requests|staging_rows|cu_num_logits|\[", str(error)), error
            refused += 1
        else:
            names = "slots", "num_drafts", "staging_rows", "page_slots"
            flat = [given.flatten() for given in batch]
            ops.open_window(*flat, *(plain.step.tensors[name] for name in names), plain.counts[0])
        bound.assert_as(plain.bytes())
    assert refused >= 4


def test_sizes_are_checked_behind_a_call_that_fitted(device):
    """And what is remembered of calls does not grow with the tokens that they had."""
    bound = Bound(device)
    starts, logits, slots = bound.batch
    for tokens in range(sum(QUERIES), TOKENS + 1):
        bound.step.open(starts, logits, slots[:tokens], bound.counts[0], stages=True)
    assert len(bound.step._opened) == 1
    before = bound.bytes()
    for wrong in ((starts[:3], logits, slots), (starts, logits, slots.repeat(2))):
        with pytest.raises(RuntimeError, match=r"requests|staging_rows"):
            bound.step.open(*wrong, bound.counts[0], stages=True)
    bound.assert_as(before)


def test_a_verdict_that_does_not_fit_changes_nothing(device):
    bound = Bound(device)
    bound.step.open(*bound.batch, bound.counts[0], stages=True)
    before, rejected = bound.bytes(), torch.zeros(6, dtype=torch.int32, device=device)
    for wrong in (rejected, rejected[:3].long(), rejected[::2]):
        with pytest.raises(RuntimeError, match="num_rejected"):
            bound.step.close(wrong, bound.counts[0])
    with pytest.raises(RuntimeError, match="published"):
        bound.step.close(rejected[:3], bound.counts[0], torch.zeros(16, dtype=torch.int64))
    bound.assert_as(before)


def test_what_is_bound_is_checked_at_the_first_call(device):
    """By name, as the operators check it; a slot beyond the pool is an error of the loop, on a CPU alone."""
    bound = Bound(device)
    bound.step.tensors["num_drafts"] = bound.step.tensors["num_drafts"][:2]
    with pytest.raises(RuntimeError, match="num_drafts"):
        bound.step.open(*bound.batch, bound.counts[0])
    if device == "cuda":
        return
    beyond = Bound(device)
    starts, logits, slots = beyond.batch
    with pytest.raises(RuntimeError, match="slots"):
        beyond.step.open(starts, logits, slots + 10_000, beyond.counts[1], logs=True)
