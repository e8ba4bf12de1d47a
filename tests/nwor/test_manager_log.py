# SPDX-License-Identifier: Apache-2.0
"""The log of mode ``cow``, which outlives its step: old bytes are logged once, and never kept too long."""

import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from devices import each_device

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm.initialize import keeps_blocks
from nwor.ways import log_rows_per_request
from tests.nwor.paged import Batch, Paged, write_rows
from tests.nwor.steps import DECODES, DRAFTS, REJECTED, Step

pytestmark = each_device


class Serving:
    """Requests that come, verify drafts and go under ``cow``, on few blocks that pass from one to the next."""

    def __init__(self, seed: int, device: str, k: int = 6) -> None:
        self.draw, self.k, self.device = random.Random(seed), k, device
        self.paged = Paged(block_size=16, num_blocks=8, device=device)
        self.manager = DraftCommitManager(CacheLayout.from_kv_caches(self.paged.targets()), "cow", 4, k, 64)
        self.free, self.names = list(range(8)), iter(range(1000))
        self.running: dict[str, tuple[list[int], int]] = {}  # blocks, and positions that are computed
        self.logged = 0

    def join(self) -> None:
        self.running[f"r{next(self.names)}"] = ([], 0)

    def leave(self, name: str) -> None:
        self.free += self.running.pop(name)[0]

    def preempt(self, name: str) -> None:
        """The request starts over under its name, and no step is without it."""
        self.free += self.running[name][0]
        self.running[name] = [], 0

    def step(self, k: int = 0) -> bool:
        """One step of all that run, prefill beside decodes; whether the pool is then as plain Python says.

        k: drafts of a decode; more than the manager's fall back, and vLLM's write leaves all of them.
        """
        k, queries, drafts, slots, rejected = k or self.k, [], [], [], []
        for name, (blocks, computed) in self.running.items():
            drafts.append(k if computed else 0)
            queries.append(1 + k if computed else self.draw.randint(1, 12))
            while len(blocks) * 16 < computed + queries[-1]:
                blocks.append(self.free.pop(self.draw.randrange(len(self.free))))
            slots += [blocks[at // 16] * 16 + at % 16 for at in range(computed, computed + queries[-1])]
            rejected.append(self.draw.randint(0, drafts[-1]))
            self.running[name] = blocks, computed + queries[-1] - rejected[-1]
        tensor = functools.partial(torch.tensor, device=self.device)
        starts = tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        logits = tensor([0, *itertools.accumulate(number + 1 for number in drafts)], dtype=torch.int32)
        mapping, expected = tensor(slots), self.paged.pool.clone()
        alone = sum(queries) == sum(drafts) + len(queries)
        rows = self.paged.new_rows(len(slots), self.draw.randrange(10**6))
        if any(drafts):
            requests = list(self.running) if alone else ()
            self.manager.begin(starts, logits, mapping, requests, windows_alone=alone, most_drafts=k)
            there, held = (set(slots.flatten().tolist()) for slots in (self.manager.logged, self.manager.slots))
            self.logged += len((there & held) - {-1})
        else:
            self.manager.write_all(mapping)
        for cache in self.paged.targets():
            write_rows(cache, mapping, rows, None)
        if any(drafts):
            self.manager.commit(tensor(rejected, dtype=torch.int32))
        kept = [
            slot if row < end - gone or held > self.k else -1
            for end, count, gone, held in zip(itertools.accumulate(queries), queries, rejected, drafts, strict=True)
            for row, slot in enumerate(slots[end - count : end], end - count)
        ]
        for cache in self.paged.targets(expected):
            write_rows(cache, torch.tensor(kept), rows, None)
        return torch.equal(self.paged.pool, expected)

    def serve(self, steps: int) -> bool:
        """Whether the pool was right after every step, while requests come and go."""
        right = True
        for _ in range(steps):
            for name, (_, computed) in list(self.running.items()):
                if computed > 40 or self.draw.random() < 0.1:
                    self.leave(name)
            while not self.running or (len(self.running) < 2 and self.draw.random() < 0.5):
                self.join()
            right &= self.step()
        return right


@pytest.mark.parametrize("seed", range(3))
def test_old_bytes_are_logged_once_and_are_right_whoever_has_the_block(seed, device):
    """Every byte after every step of requests that come, go and take over each other's blocks
    and rows of the batch."""
    serving = Serving(seed, device)
    assert serving.serve(60)
    assert serving.logged > 50, "rows that were in the log already"


@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_is_preempted_alone_is_logged_anew(seed, device):
    """It comes back under the same name, alone in the batch as before, with its blocks in another order."""
    serving = Serving(seed, device)
    serving.join()
    for _ in range(60):
        serving.preempt("r0")
        for _ in range(serving.draw.randint(2, 4)):
            assert serving.step()


def test_what_a_window_that_does_not_fit_has_left_is_not_taken_for_logged(device):
    """vLLM's own write serves it, over slots that the log holds, in a batch that never changes."""
    serving = Serving(0, device)
    serving.draw.randint = lambda least, most: most  # all is rejected: windows lie over each other
    serving.join(), serving.step()
    assert all(serving.step(serving.k + number % 2) for number in range(12))


def test_a_cancelled_step_is_logged_anew(device):
    serving = Serving(0, device)
    serving.join(), serving.step(), serving.step()
    manager, before = serving.manager, serving.paged.pool.clone()
    ((blocks, computed),) = serving.running.values()
    blocks += serving.free[:1]
    assert (manager.logged >= 0).any()
    slots = torch.tensor([blocks[at // 16] * 16 + at % 16 for at in range(computed, computed + 7)], device=device)
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    assert manager.begin(starts, starts, slots, list(serving.running), windows_alone=True)
    manager.cancel()
    assert torch.equal(serving.paged.pool, before)
    serving.free = serving.free[1:]
    serving.paged.pool.bitwise_not_()
    assert serving.step(), "another step of the same requests, on other bytes"


@pytest.mark.parametrize(("k", "rows"), [(1, 1), (5, 8), (8, 8), (9, 16), (17, 17)])
def test_rows_of_a_log(k, rows, device):
    """A power of two that divides a block of 16, or as many as there are drafts and no memory of the step before; under
    ``stage``, too, where attention cannot serve and every step is logged."""
    layout = CacheLayout.from_kv_caches(Paged(block_size=16, device=device).targets())
    assert log_rows_per_request(k, 16) == (rows if rows <= 16 else 0)
    for mode in ("cow", "stage"):
        manager = DraftCommitManager(layout, mode, 2, k, 64, attends=mode == "cow")
        assert (manager.logged is None) == (rows == 17)
        assert manager.rows.shape[1] == -(-2 * rows // 16)
    freed = DraftCommitManager(layout, "cow", 32, k, 64, keeps_blocks=False)
    assert freed.logged is None and freed.rows.shape[1] == 2 * k, "no log outlives a step: no row more than drafts"


def test_a_log_is_trusted_for_the_requests_that_it_was_made_for(device):
    """A runner may change the list of its requests in place, and give it again."""
    step, requests = Step("HND", "cow", device, Batch(DECODES, DRAFTS, device=device), max_drafts=4), list("abcde")
    for names in ("abcde", "vwxyz"):
        requests[:] = names
        batch = step.batch
        starts = torch.tensor(batch.query_start_loc, dtype=torch.int32, device=device)
        assert step.manager.begin(starts, starts, batch.slot_mapping, requests, windows_alone=True)
        held = step.manager.logged[step.manager.logged >= 0]
        assert held.numel() == 0, "what others left is not trusted"
        step.forward()
        step.commit(REJECTED["all rejected"])
        assert (step.manager.logged >= 0).any()


@pytest.mark.parametrize(
    ("kinds", "stay"),
    [
        (["FullAttentionSpec"], True),
        (["FullAttentionSpec", "MLAAttentionSpec"], True),
        (["SlidingWindowSpec"], False),
        (["FullAttentionSpec", "RSWASpec"], False),
    ],
)
def test_a_block_that_comes_back_to_its_request_is_logged_anew(kinds, stay, device):
    """A window moves on, and vLLM gives the block it left to the same request. A log that thinks the slot its own
    restores what lay there long ago; the batch never changes, so nothing else tells."""
    specs = {kind: type(kind, (), {})() for kind in kinds}
    keeps = keeps_blocks(SimpleNamespace(kv_cache_specs=specs) if len(kinds) > 1 else specs[kinds[0]])
    paged = Paged(device=device)
    manager = DraftCommitManager(CacheLayout.from_kv_caches(paged.targets()), "cow", 1, 3, 16, keeps_blocks=keeps)
    slots, count = (torch.tensor(numbers, device=device) for numbers in ([8, 9, 10, 11], [0, 4]))

    def step_restores() -> bool:
        """One window over the slots of block 2, all of its drafts rejected."""
        before = paged.pool.clone()
        manager.begin(count.int(), count.int(), slots, ["a"], windows_alone=True)
        for cache in paged.targets():
            cache[2, :, 1:] += 1
        manager.commit(torch.tensor([3], dtype=torch.int32, device=device))
        return torch.equal(paged.pool, before)

    assert step_restores()
    for cache in paged.targets():
        cache[2] += 7  # the block was another's meanwhile, or held other positions of this request's
    assert step_restores() is not stay
