# SPDX-License-Identifier: Apache-2.0
"""`StagingBuffer` and the pages under it: what is staged, counted, committed and written through."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nwor_lab.model.traffic import Shape
from nwor_lab.reference.cache import LayerContext, PagedCache
from nwor_lab.reference.policies import make_policy
from nwor_lab.reference.staging import StagingBuffer
from tests.lab.reference_models import fresh_rows, make_case, run_step

SHAPE = Shape(num_layers=3, num_kv_heads=2, head_size=8, cache_bytes=4)
MIXED = [(7, 3, 0), (0, 0, 6), (12, 2, 0), (5, 4, 0)]
"""`(num_computed, drafts, prefill rows)`: a prefill between requests of different lengths, 18 rows in all."""
WINDOW = torch.arange(12)
"""Token indices of its window."""
DECIDED = torch.tensor([2, 0, 0, 4])
"""Rejected drafts: 6 of the window's 12 rows are kept."""
EVERY = torch.ones(18, dtype=torch.bool)


class Case:
    """A buffer over the mixed batch, and keys and values of each layer."""

    def __init__(self, shape: Shape = SHAPE, dtype: torch.dtype = torch.float32, *, ready: bool = True) -> None:
        self.cache, self.batch = make_case(shape, dtype, MIXED)
        self.slots, self.before = self.batch.slot_mapping, self.cache.pool.clone()
        self.buffer = StagingBuffer(self.cache.layers, 64, self.cache.traffic)
        generator = torch.Generator().manual_seed(0)
        self.rows = [fresh_rows(self.cache, 18, generator) for _ in range(shape.num_layers)]
        self.kept = self.batch.kept(DECIDED)
        if ready:
            self.buffer.finish_warm_up()

    def begin(self) -> bool:
        return self.buffer.begin(self.slots, self.batch.window_rows)

    def write(self, *layers: int) -> None:
        """All rows of the batch, in some layers or in all."""
        for layer in layers or self.cache.layers:
            self.buffer.write(self.cache.layers[layer], *self.rows[layer], self.slots)

    def stage(self, layer: int, tokens: torch.Tensor = WINDOW) -> None:
        """Tokens of the window alone."""
        key, value = (rows[self.batch.window_rows[tokens]] for rows in self.rows[layer])
        self.buffer.stage(self.cache.layers[layer], tokens, key, value)

    def expect(self, kept: torch.Tensor) -> None:
        """Every layer holds its own rows at the kept slots, and nothing else has changed."""
        slots = self.batch.slot_mapping[kept]
        for (layer, context), (key, value) in zip(self.cache.layers.items(), self.rows, strict=True):
            assert torch.equal(context.load(slots), context.encode(key[kept], value[kept])), f"layer {layer}"
        assert self.cache.changed_bytes(self.before, slots) == 0

    def fell_back(self) -> bool:
        counts = self.buffer.counts
        return (counts.fallbacks, counts.windows, counts.staged_tokens) == (1, 0, 0)


def fail_at(layer: int, monkeypatch, name: str) -> None:
    """A method of a layer's context does its work and then breaks, once."""
    works, left = getattr(LayerContext, name), [1]

    def half_way(context, *args):
        done = works(context, *args)
        if context.layer == layer and left:
            left.pop()
            raise RuntimeError("kernel broken on purpose")
        return done

    monkeypatch.setattr(LayerContext, name, half_way)


# -- a window -------------------------------------------------------------------------------------------------------


def test_a_window_holds_drafts_back_and_lets_a_prefill_through():
    """No layer is committed alone, none into another's pages; a prefill in the same batch is never staged."""
    case = Case()
    assert case.begin() and case.buffer.state == "staging"
    case.write()
    case.expect(case.batch.num_drafts[case.batch.row_request] == 0)
    case.buffer.commit(case.kept)
    case.expect(case.kept)
    counts = case.buffer.counts
    assert (counts.windows, counts.stage_operations, counts.staged_tokens) == (1, 3 * 12, 12)
    assert (counts.committed_tokens, counts.rejected_tokens, counts.fallbacks) == (6, 6, 0)
    assert case.buffer.state == "direct"


def test_tokens_may_be_staged_out_of_order_and_in_parts():
    case = Case()
    case.begin()
    for layer, parts in enumerate(
        ([[5, 0, 3], [1, 4, 2, *range(6, 12)]], [[2], [*range(2), *range(3, 12)]], [[*range(12)][::-1]])
    ):
        for part in parts:
            case.stage(layer, torch.tensor(part))
    index = torch.tensor([4, 1, 5])
    for layer, rows in enumerate(case.rows):
        assert torch.equal(
            case.buffer.tail(layer, index, torch.float32), torch.stack(rows)[:, case.batch.window_rows[index]]
        )
    case.buffer.commit(case.kept)
    prefill = case.batch.num_drafts[case.batch.row_request] == 0
    case.expect(case.kept & ~prefill)


def test_a_window_keeps_the_slots_it_began_with():
    """The drafter computes its slots into the same tensor before the window is over."""
    case = Case()
    case.slots = case.batch.slot_mapping.clone()
    case.begin()
    case.write()
    case.slots.copy_(case.slots.roll(1))
    case.buffer.commit(case.kept)
    case.expect(case.kept)


def test_a_new_layer_does_not_clear_the_token_mask():
    """Staging reset by every layer."""
    case = Case()
    case.begin()
    case.stage(0)
    case.stage(1, torch.tensor([2]))
    assert case.buffer.token_mask.all() and case.buffer.entries[0].present.all()


def test_stage_operations_and_unique_tokens_are_two_counts():
    """40 layers of 12 tokens are 480 operations on 12 tokens."""
    case = Case(replace(SHAPE, num_layers=40))
    case.begin()
    case.write()
    assert (case.buffer.stage_operations, int(case.buffer.token_mask.sum())) == (480, 12)


def test_each_commit_uses_its_own_layers_scale():
    """What a commit needs of a layer travels with the layer's rows."""
    shape = replace(SHAPE, cache_bytes=1)
    case, twin = Case(shape, torch.float8_e4m3fn), Case(shape, torch.float8_e4m3fn)
    case.begin()
    for each in (case, twin):
        for layer, context in each.cache.layers.items():
            each.cache.layers[layer] = replace(context, k_scale=0.5 * 2**layer, v_scale=0.03 * 3**layer)
    case.write()
    twin.write()
    assert not torch.equal(case.cache.pool, twin.cache.pool)
    case.buffer.commit(EVERY)
    assert torch.equal(case.cache.pool, twin.cache.pool)


def test_padding_is_skipped():
    """A slot of -1 is skipped, staged or not."""
    case = Case()
    case.slots = case.batch.slot_mapping.index_fill(0, torch.tensor([2, 6, 17]), -1)
    case.begin()
    case.write()
    case.buffer.commit(EVERY)
    case.expect(case.slots >= 0)
    assert (case.buffer.counts.staged_tokens, case.buffer.counts.fallbacks) == (10, 0)


def test_a_drafters_layer_is_written_at_once_in_the_middle_of_a_window():
    """The drafter's layers follow the target's in numbering and are part of no commit."""
    case = Case()
    draft = PagedCache(replace(SHAPE, num_layers=1), case.cache.num_blocks, case.cache.block_size, first_layer=3)
    case.begin()
    case.write()
    case.buffer.write(draft.layers[3], *case.rows[0], case.slots)
    assert torch.equal(draft.layers[3].read(case.slots, torch.float32), torch.stack(case.rows[0]))
    case.buffer.commit(EVERY)
    assert case.buffer.counts.fallbacks == 0 and case.buffer.counts.stage_operations == 3 * 12


# -- what is not a window -------------------------------------------------------------------------------------------


def test_warm_up_is_neither_staged_nor_counted():
    case = Case(ready=False)
    assert not case.begin()
    case.write()
    case.expect(EVERY)
    case.buffer.commit(case.kept)
    assert case.buffer.counts == type(case.buffer.counts)()
    case.buffer.finish_warm_up()
    assert case.begin()


def test_fake_tensors_are_neither_written_nor_staged():
    case = Case()
    case.begin()
    with FakeTensorMode():
        fake = torch.empty(18, 2, 8)
    for tensor in (fake, torch.empty(18, 2, 8, device="meta")):
        case.buffer.write(case.cache.layers[0], tensor, tensor, case.slots)
    assert torch.equal(case.cache.pool, case.before) and not case.buffer.entries
    case.write()
    case.buffer.commit(EVERY)
    case.expect(EVERY)
    with FakeTensorMode():
        assert not case.buffer.begin(torch.empty(18, dtype=torch.int64), case.batch.window_rows)


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failing_layer_restores_every_layer(layer, monkeypatch):
    """All or nothing; a commit that fails then writes the kept rows directly, at rows of the batch, not the window."""
    case = Case()
    case.begin()
    case.write()
    held, kept = case.cache.pool.clone(), case.kept[case.batch.window_rows]
    with monkeypatch.context() as broken:
        fail_at(layer, broken, "store")
        with pytest.raises(RuntimeError, match="on purpose"):
            case.buffer.copy_to_pages(kept)
    assert torch.equal(case.cache.pool, held)
    fail_at(layer, monkeypatch, "store")
    case.buffer.commit(case.kept)
    case.expect(case.kept)
    assert "commit" not in case.cache.traffic and case.fell_back() and case.buffer.state == "direct"
    assert case.begin()


@pytest.mark.parametrize(
    ("missing", "said"), [("a layer", r"layers \[0, 1\] staged"), ("a token", "layer 2 staged 11 of 12")]
)
def test_an_incomplete_window_is_not_committed(missing, said):
    case = Case()
    case.begin()
    case.write(0, 1)
    if missing == "a token":
        case.stage(2, WINDOW[:-1])
    held = case.cache.pool.clone()
    with pytest.raises(RuntimeError, match=said):
        case.buffer.copy_to_pages(torch.ones(12, dtype=torch.bool))
    assert torch.equal(case.cache.pool, held)


@pytest.mark.parametrize("mode", ["blind", "stage"])
def test_overflow_takes_the_real_write(mode):
    """More drafts than the buffer holds; neither an overrun nor a skipped write."""
    policy = expect_vanillas_step(mode, {"blind": 11, "stage": 8}[mode])
    assert isinstance(policy.buffer.last_error, OverflowError)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_error_while_staging_loses_no_token(layer, monkeypatch):
    """Layers staged before are written through, the rest of the window is direct, attention is right."""
    works = StagingBuffer.stage

    def broken(buffer, context, *args):
        if context.layer == layer:
            raise RuntimeError("kernel broken on purpose")
        works(buffer, context, *args)

    monkeypatch.setattr(StagingBuffer, "stage", broken)
    assert "on purpose" in str(expect_vanillas_step("stage", 64).buffer.last_error)


def expect_vanillas_step(mode: str, capacity: int):
    """A step under `mode` that falls back leaves vanilla's pages and has its attention."""
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    vanilla, _ = make_case(SHAPE, torch.float32, MIXED)
    policy = make_policy(mode, cache, capacity=capacity)
    got, want = (run_step(each, batch, [1, 0, 0, 2]) for each in (policy, make_policy("off", vanilla)))
    assert torch.equal(cache.pool, vanilla.pool) and all(map(torch.equal, got, want))
    assert (policy.counts.fallbacks, policy.counts.windows, policy.counts.staged_tokens) == (1, 0, 0)
    return policy


def test_a_layer_with_slots_of_its_own_falls_back():
    """Per-layer slots were the first great bug."""
    case = Case()
    case.begin()
    case.write(0)
    case.buffer.write(case.cache.layers[1], *case.rows[1], case.slots.roll(1))
    assert case.fell_back() and "other slots" in str(case.buffer.last_error)


def test_wrong_calls_are_errors_and_change_nothing():
    """A second begin, tokens that are none, rows that do not fit, a wrong mask: the window is whole afterwards."""
    case = Case()
    case.begin()
    buffer, context, (key, value) = case.buffer, case.cache.layers[0], (rows[:2] for rows in case.rows[0])
    with pytest.raises(RuntimeError, match="commit or cancel"):
        case.begin()
    two = torch.arange(2)
    for error, said, tokens, keys, values in (
        (IndexError, "window of 12", torch.tensor([1, 12]), key, value),
        (IndexError, "twice", torch.tensor([1, 1]), key, value),
        (ValueError, "layer 0: key", two, key[:, :1], value[:, :1]),
        (TypeError, "convert them first", two, key.half(), value.half()),
    ):
        with pytest.raises(error, match=said):
            buffer.stage(context, tokens, keys, values)
    assert not buffer.token_mask.any() and not buffer.entries and not buffer.stage_operations
    case.write()
    with pytest.raises(IndexError, match="twice"):
        case.stage(0)
    for bad in (torch.ones(12, dtype=torch.bool), torch.ones(18, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"not bool \[18\]"):
            buffer.commit(bad)
    buffer.commit(case.kept)
    case.expect(case.kept)
    with pytest.raises(RuntimeError, match="begin one"):
        case.stage(0)


# -- the pages ------------------------------------------------------------------------------------------------------


def test_slots_follow_the_block_table():
    cache = PagedCache(SHAPE, 8, 4)
    table = torch.tensor([5, 2, 7])
    assert cache.slots(table, torch.tensor([0, 3, 4, 11])).tolist() == [20, 23, 8, 31]
    with pytest.raises(IndexError, match="beyond the 3 blocks"):
        cache.slots(table, torch.tensor([12]))


def test_a_write_skips_padding_and_refuses_other_slots():
    cache = PagedCache(SHAPE, 8, 4)
    key, value = fresh_rows(cache, 3, torch.Generator().manual_seed(0))
    before = cache.pool.clone()
    with pytest.raises(IndexError, match=r"0\.\.32 reach out of a cache of 32"):
        cache.layers[1].write(key, value, torch.tensor([0, 3, 32]))
    assert torch.equal(cache.pool, before)
    cache.layers[1].write(key, value, torch.tensor([9, -1, 30]))
    assert cache.traffic["write"].written == 2 * cache.layers[1].row_bytes
    cache.pool[1] = before[1]
    assert torch.equal(cache.pool, before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_divides_by_the_scale_and_saturates(dtype):
    layer = replace(PagedCache(replace(SHAPE, cache_bytes=1), 2, 4, dtype).layers[0], k_scale=0.5, v_scale=0.5)
    key = torch.tensor([0.25, -1e9, 1e9, 3.0]).repeat(1, 2, 2)
    layer.write(key, key, torch.tensor([3]))
    limit = torch.finfo(dtype).max
    got = layer.read(torch.tensor([3]), torch.float32)[0]
    assert got[0, 0, :4].tolist() == [0.25, -limit / 2, limit / 2, 3.0]
