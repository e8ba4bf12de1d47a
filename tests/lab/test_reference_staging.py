# SPDX-License-Identifier: Apache-2.0
"""`StagingBuffer`: what is staged, counted, committed and written through."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nwor_lab.model.traffic import Shape
from nwor_lab.reference import PagedCache, StagingBuffer, make_policy
from tests.lab.reference_models import fresh_rows, make_case, paged, run_step

SHAPE = Shape(num_layers=3, num_kv_heads=2, head_size=8, cache_bytes=4)
MIXED = [(7, 3, 0), (0, 0, 6), (12, 2, 0), (5, 4, 0)]
"""`(num_computed, drafts, prefill rows)`: a prefill between requests of different lengths."""


def rows_of(cache: PagedCache, layers: int, tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [fresh_rows(cache, tokens, generator) for _ in range(layers)]


def window(tokens: int, layers: int = 3):
    """A buffer with an open window, its cache, the slots and each layer's rows."""
    cache, (slots,) = paged(replace(SHAPE, num_layers=layers), torch.float32, [(0, tokens)])
    buffer = StagingBuffer(cache.layers, 64, cache.traffic)
    buffer.finish_warm_up()
    buffer.begin(slots, torch.arange(tokens))
    return buffer, cache, slots, rows_of(cache, layers, tokens)


def expect(cache: PagedCache, before: torch.Tensor, rows, slots, kept) -> None:
    """Every layer holds its own rows at the kept slots and nothing else has changed."""
    for number, (context, (key, value)) in enumerate(zip(cache.layers.values(), rows, strict=True)):
        for got, want in zip(context.load(slots[kept]), context.encode(key[kept], value[kept]), strict=True):
            assert torch.equal(got, want), f"layer {number}"
    assert cache.changed_bytes(before, slots[kept]) == 0


# -- the buffer -------------------------------------------------------------------------------------------------


def test_commit_writes_every_layer_at_the_windows_slots():
    """No commit at all, a commit to one layer, layer index always 0."""
    buffer, cache, slots, rows = window(5)
    before = cache.pool.clone()
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.stage(context, torch.arange(5), key, value)
    assert torch.equal(cache.pool, before)
    kept = torch.tensor([True, True, False, True, False])
    buffer.commit(kept)
    expect(cache, before, rows, slots, kept)
    assert buffer.state == "direct"


def test_tokens_may_be_staged_out_of_order_and_in_parts():
    buffer, cache, slots, rows = window(6)
    before = cache.pool.clone()
    orders = ([5, 0, 3], [1, 4, 2]), ([2], [0, 1, 3, 4, 5]), ([5, 4, 3, 2, 1, 0],)
    for context, (key, value), order in zip(cache.layers.values(), rows, orders, strict=True):
        for part in map(torch.tensor, order):
            buffer.stage(context, part, key[part], value[part])
    for layer, (key, value) in enumerate(rows):
        index = torch.tensor([4, 1, 5])
        tail = buffer.tail(layer, index, torch.float32)
        assert torch.equal(tail[0], key[index]) and torch.equal(tail[1], value[index])
    kept = torch.arange(6) < 4
    buffer.commit(kept)
    expect(cache, before, rows, slots, kept)


def test_a_window_keeps_the_slots_it_began_with():
    """The drafter computes its slots into the same tensor before the window is over."""
    buffer, cache, slots, rows = window(5)
    buffer.cancel()
    before, live = cache.pool.clone(), slots.clone()
    buffer.begin(live, torch.arange(5))
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.stage(context, torch.arange(5), key, value)
        live.copy_(slots.roll(1))
    kept = torch.arange(5) < 3
    buffer.commit(kept)
    expect(cache, before, rows, slots, kept)


def test_a_new_layer_does_not_clear_the_token_mask():
    """Staging reset by every layer."""
    buffer, cache, _, rows = window(4, layers=2)
    buffer.stage(cache.layers[0], torch.arange(4), *rows[0])
    buffer.stage(cache.layers[1], torch.tensor([2]), rows[1][0][2:3], rows[1][1][2:3])
    assert buffer.token_mask.all()
    assert buffer.entries[0].present.all()


def test_stage_operations_and_unique_tokens_are_two_counts():
    """40 layers of 48 tokens are 1,920 operations on 48 tokens."""
    buffer, cache, _, rows = window(48, layers=40)
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.stage(context, torch.arange(48), key, value)
    assert (buffer.stage_operations, int(buffer.token_mask.sum())) == (1920, 48)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failing_layer_restores_every_layer(layer, monkeypatch):
    """All or nothing; the commit that asked for it then writes the kept rows directly."""
    buffer, cache, slots, rows = window(5)
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.stage(context, torch.arange(5), key, value)
    before, kept = cache.pool.clone(), torch.arange(5) < 3
    works = buffer.copy_layer

    def half_way(entry, kept):
        works(entry, kept)
        if entry.context.layer == layer:
            raise RuntimeError("kernel broken on purpose")

    monkeypatch.setattr(buffer, "copy_layer", half_way)
    with pytest.raises(RuntimeError, match="on purpose"):
        buffer.copy_to_pages(kept)
    assert torch.equal(cache.pool, before)
    buffer.commit(kept)
    expect(cache, before, rows, slots, kept)
    assert "commit" not in cache.traffic
    assert (buffer.counts.fallbacks, buffer.counts.windows, buffer.state) == (1, 0, "direct")


@pytest.mark.parametrize("missing", ["a layer", "a token"])
def test_an_incomplete_window_is_not_committed(missing):
    buffer, cache, _, rows = window(5)
    for context in list(cache.layers.values())[: 2 if missing == "a layer" else 3]:
        count = 4 if missing == "a token" and context.layer == 1 else 5
        key, value = rows[context.layer]
        buffer.stage(context, torch.arange(count), key[:count], value[:count])
    before = cache.pool.clone()
    with pytest.raises(RuntimeError, match=r"layers \[0, 1\] staged|layer 1 staged 4 of 5"):
        buffer.copy_to_pages(torch.ones(5, dtype=torch.bool))
    assert torch.equal(cache.pool, before)


def test_wrong_calls_are_errors_and_change_nothing():
    buffer, cache, slots, rows = window(4)
    context, (key, value) = cache.layers[0], rows[0]
    before = cache.pool.clone()
    with pytest.raises(RuntimeError, match="commit or cancel"):
        buffer.begin(slots, torch.arange(4))
    with pytest.raises(IndexError, match="window of 4"):
        buffer.stage(context, torch.tensor([1, 4]), key[:2], value[:2])
    with pytest.raises(IndexError, match="twice"):
        buffer.stage(context, torch.tensor([1, 1]), key[:2], value[:2])
    with pytest.raises(ValueError, match="layer 0: key"):
        buffer.stage(context, torch.arange(4), key[:, :1], value[:, :1])
    with pytest.raises(TypeError, match="convert them first"):
        buffer.stage(context, torch.arange(4), key.half(), value.half())
    assert not buffer.token_mask.any() and not buffer.entries and not buffer.stage_operations
    buffer.stage(context, torch.arange(4), key, value)
    with pytest.raises(IndexError, match="twice"):
        buffer.stage(context, torch.arange(4), value, key)
    buffer.cancel()
    with pytest.raises(RuntimeError, match="begin one"):
        buffer.stage(context, torch.arange(4), key, value)
    assert torch.equal(cache.pool, before)


# -- the layer context ------------------------------------------------------------------------------------------


def test_each_commit_uses_its_own_layers_scale():
    """What a commit needs of a layer travels with the layer's rows."""
    shape = replace(SHAPE, cache_bytes=1)
    cache, (slots,) = paged(shape, torch.float8_e4m3fn, [(0, 5)])
    twin, _ = paged(shape, torch.float8_e4m3fn, [(0, 5)])
    buffer = StagingBuffer(cache.layers, 8)
    buffer.finish_warm_up()
    buffer.begin(slots, torch.arange(5))
    for layer, (key, value) in enumerate(rows_of(cache, 3, 5)):
        scales = {"k_scale": 0.5 * 2**layer, "v_scale": 0.03 * 3**layer}
        buffer.stage(replace(cache.layers[layer], **scales), torch.arange(5), key, value)
        replace(twin.layers[layer], **scales).write(key, value, slots)
    assert not torch.equal(cache.pool, twin.pool)
    buffer.commit(torch.ones(5, dtype=torch.bool))
    assert torch.equal(cache.pool, twin.pool)


# -- a batch of verifies and prefills -----------------------------------------------------------------------


def batch_case(capacity: int = 64, *, ready: bool = True):
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    buffer = StagingBuffer(cache.layers, capacity, cache.traffic)
    if ready:
        buffer.finish_warm_up()
    return buffer, cache, batch, rows_of(cache, 3, len(batch.slot_mapping))


def write_all_layers(buffer, cache, batch, rows) -> None:
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.write(context, key, value, batch.slot_mapping)


def test_a_window_holds_drafts_back_and_lets_a_prefill_through():
    """A chunk of prefill in the same batch is never staged and never rejected."""
    buffer, cache, batch, rows = batch_case()
    before = cache.pool.clone()
    assert buffer.begin(batch.slot_mapping, batch.window_rows) and buffer.state == "staging"
    write_all_layers(buffer, cache, batch, rows)
    prefill = batch.num_drafts[batch.row_request] == 0
    expect(cache, before, rows, batch.slot_mapping, prefill)

    kept = batch.kept(torch.tensor([2, 0, 0, 4]))
    buffer.commit(kept)
    expect(cache, before, rows, batch.slot_mapping, kept)
    counts = buffer.counts
    assert (counts.windows, counts.stage_operations, counts.staged_tokens) == (1, 3 * 12, 12)
    assert (counts.committed_tokens, counts.rejected_tokens, counts.fallbacks) == (6, 6, 0)
    assert buffer.state == "direct"


def test_warm_up_is_neither_staged_nor_counted():
    buffer, cache, batch, rows = batch_case(ready=False)
    before = cache.pool.clone()
    assert not buffer.begin(batch.slot_mapping, batch.window_rows)
    write_all_layers(buffer, cache, batch, rows)
    expect(cache, before, rows, batch.slot_mapping, torch.ones(18, dtype=torch.bool))
    buffer.commit(batch.kept(torch.tensor([1, 0, 1, 1])))
    assert buffer.counts == type(buffer.counts)()
    buffer.finish_warm_up()
    assert buffer.begin(batch.slot_mapping, batch.window_rows)


def test_fake_tensors_are_neither_written_nor_staged():
    buffer, cache, batch, rows = batch_case()
    buffer.begin(batch.slot_mapping, batch.window_rows)
    before = cache.pool.clone()
    with FakeTensorMode():
        fake = torch.empty(18, 2, 8)
    buffer.write(cache.layers[0], fake, fake, batch.slot_mapping)
    meta = torch.empty(18, 2, 8, device="meta")
    buffer.write(cache.layers[0], meta, meta, batch.slot_mapping)
    assert torch.equal(cache.pool, before) and not buffer.entries
    write_all_layers(buffer, cache, batch, rows)
    buffer.commit(torch.ones(18, dtype=torch.bool))
    expect(cache, before, rows, batch.slot_mapping, torch.ones(18, dtype=torch.bool))
    with FakeTensorMode():
        assert not buffer.begin(torch.empty(18, dtype=torch.int64), batch.window_rows)


@pytest.mark.parametrize("mode", ["blind", "stage"])
def test_overflow_takes_the_real_write(mode):
    """More drafts than the buffer holds; neither an overrun nor a skipped write."""
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    vanilla, _ = make_case(SHAPE, torch.float32, MIXED)
    policy = make_policy(mode, cache, capacity={"blind": 11, "stage": 8}[mode])
    got = run_step(policy, batch, [1, 0, 0, 2])
    want = run_step(make_policy("off", vanilla), batch, [1, 0, 0, 2])
    assert torch.equal(cache.pool, vanilla.pool)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert (policy.counts.fallbacks, policy.counts.windows, policy.counts.staged_tokens) == (1, 0, 0)
    assert isinstance(policy.buffer.last_error, OverflowError)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_error_while_staging_loses_no_token(layer, monkeypatch):
    """Layers staged before are written through, the rest of the window is direct, attention is right."""
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    vanilla, _ = make_case(SHAPE, torch.float32, MIXED)
    policy = make_policy("stage", cache)
    works = policy.buffer.stage

    def broken(context, *args):
        if context.layer == layer:
            raise RuntimeError("kernel broken on purpose")
        works(context, *args)

    monkeypatch.setattr(policy.buffer, "stage", broken)
    got = run_step(policy, batch, [1, 0, 0, 2])
    want = run_step(make_policy("off", vanilla), batch, [1, 0, 0, 2])
    assert torch.equal(cache.pool, vanilla.pool)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert (policy.counts.fallbacks, policy.counts.windows) == (1, 0)
    assert "on purpose" in str(policy.buffer.last_error)


def test_a_broken_commit_is_written_through_at_the_right_rows(monkeypatch):
    """The fallback used indices of the window where it needed those of the batch."""
    buffer, cache, batch, rows = batch_case()
    before = cache.pool.clone()
    buffer.begin(batch.slot_mapping, batch.window_rows)
    write_all_layers(buffer, cache, batch, rows)
    monkeypatch.setattr(buffer, "copy_layer", lambda *_: 1 / 0)
    kept = batch.kept(torch.tensor([2, 0, 0, 4]))
    buffer.commit(kept)
    expect(cache, before, rows, batch.slot_mapping, kept)
    assert (buffer.counts.fallbacks, buffer.counts.windows) == (1, 0)
    monkeypatch.undo()
    assert buffer.begin(batch.slot_mapping, batch.window_rows)


def test_a_layer_with_slots_of_its_own_falls_back():
    """Per-layer slots were the first great bug."""
    buffer, cache, batch, rows = batch_case()
    buffer.begin(batch.slot_mapping, batch.window_rows)
    buffer.write(cache.layers[0], *rows[0], batch.slot_mapping)
    buffer.write(cache.layers[1], *rows[1], batch.slot_mapping.roll(1))
    assert buffer.counts.fallbacks == 1
    assert "other slots" in str(buffer.last_error)


def test_a_window_is_begun_once():
    """A second begin is refused and the window before it is still whole."""
    buffer, cache, batch, rows = batch_case()
    before = cache.pool.clone()
    buffer.begin(batch.slot_mapping, batch.window_rows)
    buffer.write(cache.layers[0], *rows[0], batch.slot_mapping)
    with pytest.raises(RuntimeError, match="commit or cancel"):
        buffer.begin(batch.slot_mapping, batch.window_rows)
    for layer in (1, 2):
        buffer.write(cache.layers[layer], *rows[layer], batch.slot_mapping)
    buffer.commit(torch.ones(18, dtype=torch.bool))
    expect(cache, before, rows, batch.slot_mapping, torch.ones(18, dtype=torch.bool))


def test_a_wrong_mask_is_an_error_and_the_window_stays_open():
    buffer, cache, batch, rows = batch_case()
    before = cache.pool.clone()
    buffer.begin(batch.slot_mapping, batch.window_rows)
    write_all_layers(buffer, cache, batch, rows)
    for bad in (torch.ones(12, dtype=torch.bool), torch.ones(18, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"not bool \[18\]"):
            buffer.commit(bad)
    kept = batch.kept(torch.tensor([2, 0, 0, 4]))
    buffer.commit(kept)
    expect(cache, before, rows, batch.slot_mapping, kept)


def test_padding_is_skipped():
    """A slot of -1 is skipped, staged or not."""
    buffer, cache, batch, rows = batch_case()
    before = cache.pool.clone()
    slots = batch.slot_mapping.clone()
    slots[[2, 6, 17]] = -1
    buffer.begin(slots, batch.window_rows)
    for context, (key, value) in zip(cache.layers.values(), rows, strict=True):
        buffer.write(context, key, value, slots)
    buffer.commit(torch.ones(18, dtype=torch.bool))
    expect(cache, before, rows, batch.slot_mapping, slots >= 0)
    assert (buffer.counts.staged_tokens, buffer.counts.fallbacks) == (10, 0)


def test_a_drafters_layer_is_written_at_once_in_the_middle_of_a_window():
    """The drafter's layers follow the target's in numbering and are part of no commit."""
    buffer, cache, batch, rows = batch_case()
    draft = PagedCache(replace(SHAPE, num_layers=1), cache.num_blocks, cache.block_size, first_layer=3)
    buffer.begin(batch.slot_mapping, batch.window_rows)
    write_all_layers(buffer, cache, batch, rows)
    buffer.write(draft.layers[3], *rows[0], batch.slot_mapping)
    key, value = draft.layers[3].read(batch.slot_mapping, torch.float32)
    assert torch.equal(key, rows[0][0]) and torch.equal(value, rows[0][1])
    buffer.commit(torch.ones(18, dtype=torch.bool))
    assert buffer.counts.fallbacks == 0 and buffer.counts.stage_operations == 3 * 12


# -- the pages ------------------------------------------------------------------------------------------------------


def test_slots_follow_the_block_table():
    cache = PagedCache(SHAPE, 8, 4)
    table = torch.tensor([5, 2, 7])
    assert cache.slots(table, torch.tensor([0, 3, 4, 11])).tolist() == [20, 23, 8, 31]
    with pytest.raises(IndexError, match="beyond the 3 blocks"):
        cache.slots(table, torch.tensor([12]))


def test_a_write_skips_padding_and_refuses_other_slots():
    cache = PagedCache(SHAPE, 8, 4)
    key, value = rows_of(cache, 1, 3)[0]
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
    cache = PagedCache(replace(SHAPE, cache_bytes=1), 2, 4, dtype, scale=0.5)
    key = torch.tensor([0.25, -1e9, 1e9, 3.0]).repeat(1, 2, 2)
    cache.layers[0].write(key, key, torch.tensor([3]))
    limit = torch.finfo(dtype).max
    got, _ = cache.layers[0].read(torch.tensor([3]), torch.float32)
    assert got[0, 0, :4].tolist() == [0.25, -limit / 2, limit / 2, 3.0]
