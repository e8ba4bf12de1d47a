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
    sharing_layers,
    target_groups,
    target_layers,
)
from nwor.vllm.initialize import keeps_blocks
from nwor.vllm.self_check import attend
from tests.nwor.paged import Paged
from tests.nwor.runners import SHARING, gpu_layer, groups_of, make_runner


def test_a_layer_that_shares_a_cache_is_no_target_layer():
    """Nor is one of the drafter's, whatever it reads."""
    context = {"a": gpu_layer(), "b": gpu_layer(), "draft": gpu_layer(kv_sharing_target_layer_name="b")}
    made = make_runner(**SHARING)
    made.compilation_config.static_forward_context |= context
    assert [*target_layers(made)] == ["a", "b"] and sharing_layers(made) == {"reader"}
    assert target_groups(made, target_layers(made)) == {0: [context["a"], context["b"]]}


def test_each_cache_group_has_its_own_layers():
    layers = {name: gpu_layer() for name in "abc"}
    made = make_runner(kv_cache_config=groups_of(["draft"], ["c", "a"], ["b"]))
    assert target_groups(made, layers) == {1: [layers["a"], layers["c"]], 2: [layers["b"]]}


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

    def step(self, slots) -> None:
        """One step in which every layer of both groups goes through its manager."""
        self.begin(slots)
        for group in self.context.groups:
            for index in range(2):
                if group.manager.serves_attention:
                    group.manager.stage(index, lambda cache, to: None, None, slots[group.index])
        self.context.commit(torch.tensor([1, 0, 0], dtype=torch.int32))


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("by_index", [True, False], ids=["as V1 has them", "as V2 has them"])
def test_each_window_opens_on_its_own_groups_slots(mode, by_index):
    made = TwoGroups(mode)
    made.begin({0: made.slots[0], 2: made.slots[2]} if by_index else made.slots)
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


@pytest.mark.parametrize(("mode", "staged"), [("cow", False), ("stage", False), ("stage", True)])
def test_a_token_counts_once_and_its_bytes_in_every_group(mode, staged):
    made = TwoGroups(mode, windows_alone=staged)
    made.step(made.slots)
    counters = made.context.manager.counters.read()
    assert (counters.windows, counters.staged_tokens, counters.rejected_tokens) == (2, 3, 1)
    assert counters.stage_operations == 4 * 3
    assert (counters.staged_steps, counters.logged_steps) == (staged, not staged)
    row = 4 * made.context.manager.layout.slot_bytes
    copied = 2 if staged else 4  # kept drafts to their pages; all to the log, and the rejected one back
    assert (counters.bytes_written, counters.bytes_avoided) == ((5 + copied) * row, -2 * copied * row)


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


def test_a_group_that_fails_leaves_no_window_open():
    made = TwoGroups("stage")
    made.begin(made.slots)
    with pytest.raises(RuntimeError, match="staged nothing"):
        made.context.commit(torch.zeros(3, dtype=torch.int32))
    made.context.cancel()
    assert not any(group.manager.is_open for group in made.context.groups)


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
