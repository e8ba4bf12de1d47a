# SPDX-License-Identifier: Apache-2.0
"""`StagingBuffer`, `KVCacheInterceptor` and the pages under them: what is staged, counted and committed."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nwor_lab.cost.traffic import Shape
from nwor_lab.reference.cache import LayerContext, PagedCache
from nwor_lab.reference.policies import BlindStaging, make_policy
from nwor_lab.reference.staging import Counts, StagingBuffer
from tests.lab.reference_models import fresh_rows, make_case, run_step

SHAPE = Shape(num_layers=3, num_kv_heads=2, head_size=8, cache_bytes=4)
MIXED = [(7, 3, 0), (0, 0, 6), (12, 2, 0), (5, 4, 0)]
"""`(num_computed, drafts, prefill rows)`: a prefill between requests of different lengths, 18 rows in all."""
DECIDED = torch.tensor([2, 0, 0, 4])
"""Rejected drafts: 6 of the window's 12 rows are kept."""
NONE, EVERY = torch.zeros(4, dtype=torch.int64), torch.ones(18, dtype=torch.bool)


class Case:
    """An interceptor over the mixed batch, and keys and values of each layer."""

    def __init__(self, shape: Shape = SHAPE, dtype: torch.dtype = torch.float32) -> None:
        self.cache, self.batch = make_case(shape, dtype, MIXED)
        self.before = self.cache.pool.clone()
        self.policy = BlindStaging(self.cache, 64)
        self.policy.ready = True
        generator = torch.Generator().manual_seed(0)
        self.rows = [fresh_rows(self.cache, 18, generator) for _ in range(shape.num_layers)]
        self.kept = self.batch.kept(DECIDED)
        self.in_window = self.batch.num_drafts[self.batch.row_request] > 0

    def open(self, *layers: int) -> None:
        """Begin, and write all rows of the batch, in some layers or in all."""
        self.policy.begin(self.batch)
        for layer in layers or self.cache.layers:
            self.policy.stage(layer, *self.rows[layer])

    def expect(self, kept: torch.Tensor) -> None:
        """Every layer holds its own rows at the kept slots, and nothing else has changed."""
        slots = self.batch.slot_mapping[kept]
        for (layer, context), (key, value) in zip(self.cache.layers.items(), self.rows, strict=True):
            assert torch.equal(context.load(slots), context.encode(key[kept], value[kept])), f"layer {layer}"
        assert self.cache.changed_bytes(self.before, slots) == 0

    def fell_back(self) -> bool:
        counts = self.policy.counts
        return (counts.fallbacks, counts.windows, counts.staged_tokens) == (1, 0, 0)


def fail_once(layer: int, monkeypatch) -> None:
    """A layer's store does its work and then breaks, once."""
    works, left = LayerContext.store, [1]

    def half_way(context, *args):
        works(context, *args)
        if context.layer == layer and left:
            left.pop()
            raise RuntimeError("kernel broken on purpose")

    monkeypatch.setattr(LayerContext, "store", half_way)


# -- a window -------------------------------------------------------------------------------------------------------


def test_a_window_holds_drafts_back_and_lets_a_prefill_through():
    """No layer is committed alone, none into another's pages. Operations are layers x tokens, tokens are tokens."""
    case = Case(replace(SHAPE, num_layers=40))
    case.open()
    assert case.policy.state == "staging"
    case.expect(~case.in_window)
    with pytest.raises(RuntimeError, match="open"):
        case.policy.begin(case.batch)
    case.policy.commit(DECIDED)
    case.expect(case.kept)
    assert case.policy.counts == Counts(1, 40 * 12, 12, 6, 6)
    assert case.policy.state == "direct"


def test_tokens_may_be_staged_out_of_order_and_in_parts():
    """A new layer does not clear the token mask, once its own parts come."""
    case = Case()
    window = case.batch.window_rows
    buffer = StagingBuffer(case.batch.slot_mapping[window])
    parts = [[[*range(12)][::-1]], [[5, 0, 3], [1, 4, 2, *range(6, 12)]], [[2], [*range(2), *range(3, 12)]]]
    for layer, context in case.cache.layers.items():
        for tokens in map(torch.tensor, parts[layer]):
            buffer.stage(context, tokens, *(rows[window[tokens]] for rows in case.rows[layer]))
            assert buffer.token_mask.all() and buffer.entries[0].present.all()
    index = torch.tensor([4, 1, 5])
    for layer, rows in enumerate(case.rows):
        assert torch.equal(buffer.tail(layer, index, torch.float32), torch.stack(rows)[:, window[index]])
    buffer.commit(case.kept[window], case.cache.layers)
    case.expect(case.kept & case.in_window)


def test_a_window_keeps_the_slots_it_began_with():
    """The drafter computes its slots into the same tensor before the window is over."""
    case = Case()
    case.open()
    slots = case.batch.slot_mapping.clone()
    case.batch.slot_mapping.copy_(slots.roll(1))
    case.policy.commit(DECIDED)
    case.batch.slot_mapping.copy_(slots)
    case.expect(case.kept)


def test_each_commit_uses_its_own_layers_scale():
    """What a commit needs of a layer travels with the layer's rows."""
    shape = replace(SHAPE, cache_bytes=1)
    case, twin = Case(shape, torch.float8_e4m3fn), Case(shape, torch.float8_e4m3fn)
    for each in (case, twin):
        for layer, context in each.cache.layers.items():
            each.cache.layers[layer] = replace(context, k_scale=0.5 * 2**layer, v_scale=0.03 * 3**layer)
    twin.policy.ready = False  # written at once
    case.open()
    twin.open()
    assert not torch.equal(case.cache.pool, twin.cache.pool)
    case.policy.commit(NONE)
    assert torch.equal(case.cache.pool, twin.cache.pool)


def test_padding_is_skipped():
    """A slot of -1 is skipped, staged or not."""
    case = Case()
    case.batch.slot_mapping[[2, 6, 17]] = -1
    case.open()
    case.policy.commit(NONE)
    case.expect(case.batch.slot_mapping >= 0)
    assert (case.policy.counts.staged_tokens, case.policy.counts.fallbacks) == (10, 0)


def test_warm_up_is_neither_staged_nor_counted():
    case = Case()
    case.policy.ready = False
    case.open()
    assert case.policy.state == "direct"
    case.expect(EVERY)
    case.policy.commit(DECIDED)
    assert case.policy.counts == Counts()


def test_fake_tensors_are_neither_written_nor_staged():
    case = Case()
    with FakeTensorMode():
        fake, slots = torch.empty(18, 2, 8), torch.empty(18, dtype=torch.int64)
    case.policy.begin(replace(case.batch, slot_mapping=slots))
    assert case.policy.state == "direct"
    case.policy.begin(case.batch)
    for tensor in (fake, torch.empty(18, 2, 8, device="meta")):
        case.policy.stage(0, tensor, tensor)
    assert torch.equal(case.cache.pool, case.before) and not case.policy.buffer.entries


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_failing_layer_restores_every_layer(monkeypatch):
    """All or nothing; a commit that fails then writes the kept rows directly, at rows of the batch, not the window."""
    case = Case()
    case.open()
    held, kept = case.cache.pool.clone(), case.kept[case.batch.window_rows]
    with monkeypatch.context() as broken:
        fail_once(2, broken)
        with pytest.raises(RuntimeError, match="purpose"):
            case.policy.buffer.commit(kept, case.cache.layers)
    assert torch.equal(case.cache.pool, held)
    fail_once(2, monkeypatch)
    case.policy.commit(DECIDED)
    case.expect(case.kept)
    assert "commit" not in case.cache.traffic and case.fell_back() and case.policy.state == "direct"
    case.policy.begin(case.batch)


def test_a_window_that_lacks_a_layer_or_a_token_is_written_through():
    case = Case()
    case.open(0, 1)
    for missing in ("a layer", "a token"):
        if missing == "a token":
            rows = (each[case.batch.window_rows[:11]] for each in case.rows[2])
            case.policy.buffer.stage(case.cache.layers[2], torch.arange(11), *rows)
        held = case.cache.pool.clone()
        with pytest.raises(RuntimeError, match="layer 2"):
            case.policy.buffer.commit(torch.ones(12, dtype=torch.bool), case.cache.layers)
        assert torch.equal(case.cache.pool, held), missing
    case.policy.commit(DECIDED)
    assert case.fell_back()


@pytest.mark.parametrize(
    ("mode", "capacity", "says"), [("blind", 11, "holds 11"), ("stage", 8, "holds 8"), ("stage", 64, "purpose")]
)
def test_more_drafts_than_it_holds_or_a_layer_that_cannot_stage(mode, capacity, says, monkeypatch):
    """Layers staged before are written through, the rest of the window is direct: vanilla's pages and attention."""
    works = StagingBuffer.stage

    def broken(buffer, context, *args):
        if context.layer == 1:
            raise RuntimeError("kernel broken on purpose")
        works(buffer, context, *args)

    monkeypatch.setattr(StagingBuffer, "stage", broken)
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    vanilla, _ = make_case(SHAPE, torch.float32, MIXED)
    policy = make_policy(mode, cache, capacity=capacity)
    got, want = (run_step(each, batch, [1, 0, 0, 2]) for each in (policy, make_policy("off", vanilla)))
    assert torch.equal(cache.pool, vanilla.pool) and all(map(torch.equal, got, want))
    assert (policy.counts.fallbacks, policy.counts.windows, policy.counts.staged_tokens) == (1, 0, 0)
    assert says in str(policy.last_error)


# -- the pages ------------------------------------------------------------------------------------------------------


def test_fp8_divides_by_the_scale_and_saturates():
    dtype = torch.float8_e4m3fn
    layer = replace(PagedCache(1, 2, 8, 2, 4, dtype).layers[0], k_scale=0.5, v_scale=0.25)
    key = torch.tensor([0.25, -1e9, 1e9, 3.0]).repeat(1, 2, 2)
    layer.write(key, key, torch.tensor([3]))
    limit = torch.finfo(dtype).max
    keys, values = layer.read(torch.tensor([3]), torch.float32)[:, 0, 0, :4].tolist()
    assert keys == [0.25, -limit / 2, limit / 2, 3.0] and values == [0.25, -limit / 4, limit / 4, 3.0]
