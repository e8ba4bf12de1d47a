# SPDX-License-Identifier: Apache-2.0
"""Models of several cache groups, on stand-ins: what is in a group, whose slots open its window, and what counts."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")


from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm.context import (
    ServedGroup,
    context_of,
    set_served_groups,
)
from nwor.vllm.initialize import keeps_blocks
from nwor.vllm.self_check import attend
from tests.nwor.paged import Paged


@pytest.mark.parametrize(
    ("kind", "stay"),
    [
        ("FullAttentionSpec", True),
        ("MLAAttentionSpec", True),
        ("SlidingWindowSpec", False),
        ("RSWASpec", False),
        ("MambaSpec", False),
    ],
)
def test_windows_give_blocks_back_while_a_request_runs(kind, stay):
    """A log that outlives its step would hold what another request, or this one, has written there since."""
    spec = type(kind, (), {})()
    assert keeps_blocks(spec) is stay
    assert keeps_blocks(SimpleNamespace(kv_cache_specs={"a": spec, "b": spec})) is stay


HELD = {0: {9, 10, 17}, 2: {29, 30, 25}}  # slots by group


class TwoGroups:
    """Groups 0 and 2 of two layers each, with slots of their own; requests with 2 drafts, 1 and none."""

    starts = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    logits = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    slots = torch.tensor([[8, 9, 10, 16, 17, 20], [0, 0, 0, 0, 0, 0], [28, 29, 30, 24, 25, 4]])

    def __init__(self, mode: str, windows_alone: bool = True) -> None:
        self.paged = {0: Paged(), 2: Paged()}
        layouts = {index: CacheLayout.from_kv_caches(paged.targets()[:2]) for index, paged in self.paged.items()}
        self.layers = {index: [SimpleNamespace(), SimpleNamespace()] for index in layouts}
        managers = {index: DraftCommitManager(layout, mode, 4, 2, 16) for index, layout in layouts.items()}
        managers[0].counters.add_layers(layouts[2])
        self.runner = SimpleNamespace()
        set_served_groups(self.runner, [ServedGroup(i, self.layers[i], manager) for i, manager in managers.items()])
        self.context = context_of(self.runner)
        self.context.windows_alone = windows_alone

    def begin(self, slots) -> None:
        self.context.begin(self.starts, self.logits, slots, 2)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_each_window_opens_on_its_own_groups_slots(mode):
    made = TwoGroups(mode)
    made.begin(made.slots)
    for group in made.context.groups:
        found = group.manager.slots[group.manager.slots >= 0]
        assert set(found.tolist()) == HELD[group.index] and group.manager.is_open
        assert all(layer.nwor.manager is group.manager for layer in group.layers)
    made.context.cancel()
    assert not any(group.manager.is_open for group in made.context.groups)
    made.context.write_all(made.slots)
    if mode == "stage":
        for group in made.context.groups:
            assert group.manager.page_slots[:6].tolist() == made.slots[group.index].tolist()
    set_served_groups(made.runner, ())
    assert made.context.manager is None
    assert all(layer.nwor is None for layers in made.layers.values() for layer in layers)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_slots_are_those_of_this_step_wherever_they_lie(mode):
    """vLLM's tensor is one, and another where it moved or where the batch is padded to more tokens."""
    made = TwoGroups(mode)
    moved, padded = made.slots + 1, torch.nn.functional.pad(made.slots + 2, (0, 2), value=-1)
    for slots, by in ((made.slots, 0), (moved, 1), (padded, 2), (made.slots, 0), (padded[:, :7], 2)):
        made.begin(slots)
        for group in made.context.groups:
            found = group.manager.slots[group.manager.slots >= 0]
            assert set(found.tolist()) == {slot + by for slot in HELD[group.index]}
        made.context.cancel()


@pytest.mark.parametrize("stay", [True, False])
def test_a_block_that_comes_back_to_its_request_is_logged_anew(stay):
    """A window moves on, and vLLM gives the block it left to the same request. A log that thinks the slot its own
    restores what lay there long ago; the batch never changes, so nothing else tells."""
    paged = Paged()
    layout = CacheLayout.from_kv_caches(paged.targets())
    manager = DraftCommitManager(layout, "cow", 1, 3, 16, keeps_blocks=stay)
    pool = layout.pool.view(torch.uint8)

    def step(slots: list[int], rejected: int) -> bool:
        """One window over `slots`; returns whether the pages are as they were where all drafts are rejected."""
        count = torch.tensor([0, len(slots)], dtype=torch.int32)
        before = pool.clone()
        manager.begin(count, count, torch.tensor(slots), ["a"], windows_alone=True)
        for cache in paged.targets():
            for slot in slots[1:]:
                cache[slot // layout.block_size, :, slot % layout.block_size] += 1
        manager.commit(torch.tensor([rejected], dtype=torch.int32))
        return torch.equal(pool, before)

    assert layout.block_size == 4
    assert step([8, 9, 10, 11], 3), "slots 9 to 11 are logged, and restored"
    for cache in paged.targets():
        cache[2] += 7  # the block was another's meanwhile, or held other positions of this request's
    assert step([8, 9, 10, 11], 3) is not stay


def test_the_plain_attention_has_slopes_and_sinks():
    """What the check at start-up compares with, beside a loop."""
    generator = torch.Generator().manual_seed(0)
    query, rows = (
        torch.randn(2, 4, 8, generator=generator).double(),
        torch.randn(7, 2, 16, generator=generator).double(),
    )
    slopes, sinks = torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    found = attend(query, rows, 5, 0.3, alibi_slopes=slopes, sinks=sinks)
    for row in range(2):
        for head in range(4):
            keys, values = rows[: 6 + row, head // 2].chunk(2, dim=-1)
            scores = keys @ query[row, head] * 0.3 + slopes[head].double() * (torch.arange(6 + row) - 5 - row)
            weights = scores.exp() / (scores.exp().sum() + sinks[head].double().exp())
            assert torch.allclose(found[row, head], weights @ values)
