# SPDX-License-Identifier: Apache-2.0
"""`DraftCommitManager` against a copy of the pool written by plain Python, every byte compared."""

import pytest
import torch
from devices import each_device
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nwor.counters import Counters
from tests.nwor.paged import MEMORY, Batch
from tests.nwor.steps import DECODES, DRAFTS, QUERIES, REJECTED, Step, memory, ways

pytestmark = each_device


@memory
def test_direct_writes_every_row_at_once(kind, device):
    """The control holds nothing and counts nothing; a layer that did not go through its hook still stops the commit."""
    step = Step(kind, "direct", device)
    assert step.begin() and step.manager.serves_attention
    step.forward()
    step.expect(list(range(step.batch.num_tokens)))
    step.assert_pool()
    step.commit(REJECTED["some rejected"])
    step.assert_pool()
    assert step.manager.counters.read() == Counters() and step.manager.rows.numel() == 0
    step.begin()
    step.forward_layer(0)
    with pytest.raises(RuntimeError, match=r"target layers \[1, 2\] staged nothing"):
        step.commit(REJECTED["some rejected"])


@pytest.mark.parametrize("layers", [0, 2])
@memory
@ways
def test_cancel_leaves_everything_as_it_was(way, kind, layers, device):
    """Cancelled before, between or behind the layers, no held row is left, and the slots are vLLM's again."""
    step = Step(kind, way, device)
    step.begin()
    for layer in range(layers):
        step.forward_layer(layer)
    step.manager.cancel()
    held = step.batch.held()
    step.expect([row for row in range(step.batch.num_tokens) if row not in held], tuple(range(layers)))
    step.assert_pool()
    assert not step.manager.is_open
    assert step.manager.counters.read() == Counters(cancelled=1)
    step.manager.cancel()
    assert step.manager.counters.read() == Counters(cancelled=1), "nothing is open: nothing to cancel"


def test_slots_that_are_not_the_windows_are_refused(device):
    """A copy, or those of another cache group: the rows that wait beside the cache have slots of their own."""
    step = Step("HND", "staged", device)
    step.begin()
    step.batch.slot_mapping = step.batch.slot_mapping.clone()
    with pytest.raises(RuntimeError, match="another"):
        step.forward_layer(0)


@ways
def test_a_layer_that_did_not_stage_stops_the_commit(way, device):
    """Its rows would be lost; cow needs no hook in any layer and goes on."""
    step = Step("HND", way, device)
    step.begin()
    step.forward_layer(0)
    step.forward_layer(2)
    if way != "staged":
        step.commit(REJECTED["none rejected"])
        step.expect(list(range(step.batch.num_tokens)), (0, 2))
    else:
        with pytest.raises(RuntimeError, match=r"\[1\]"):
            step.commit(REJECTED["none rejected"])
        free = [row for row in range(step.batch.num_tokens) if row not in step.batch.held()]
        step.expect(free, (0, 2))
        assert step.manager.counters.read().cancelled == 1
    step.assert_pool()
    assert step.begin(), "the next window is not hindered"


@ways
def test_calls_out_of_order(way, device):
    """A dummy run in an open window forgot its rows without a word; a commit without one ended in an assertion."""
    step = Step("HND", way, device)
    manager = step.manager
    with pytest.raises(RuntimeError, match="no window is open"):
        manager.commit(torch.zeros(1, dtype=torch.int32, device=device))
    assert step.begin()
    held = None if manager.staging_rows is None else manager.staging_rows.clone()
    for call in (step.begin, manager.hold_nothing, lambda: manager.write_all(step.batch.slot_mapping)):
        with pytest.raises(RuntimeError, match="a window is open"):
            call()
    assert manager.is_open and not manager.is_dummy_or_capture
    assert held is None or torch.equal(manager.staging_rows, held)
    manager.cancel()
    manager.hold_nothing()
    step.assert_pool()


@ways
def test_a_request_with_more_drafts_than_the_capacity_is_vllms_own(way, device, caplog):
    """Counted, said once, and the real write is not skipped; of the others every row is served."""
    step = Step("HND", way, device, max_drafts=2)  # request 1 has three
    assert step.begin() and not step.manager.serves_attention, "no window that the attention would leave alone"
    step.forward()
    step.commit((0, 1, 0, 1, 1))
    first = step.batch.query_start_loc[1]
    step.expect([*range(first, first + 4), *step.batch.kept((0, 0, 0, 1, 1))])
    step.assert_pool()
    counters = step.manager.counters.read()
    assert (counters.fallbacks, counters.windows, counters.staged_tokens) == (1, 2, 3)
    step.begin()
    assert len([line for line in caplog.messages if "does not fit" in line]) == 1


@ways
def test_published_counts_are_of_their_commit(way, device):
    """Two steps late, as vLLM reads them: no later commit has changed them, in vLLM's inference mode and out of it.

    What is overtaken by then says so, and nothing is allocated for it.
    """
    risen = {"some rejected": (4, 2, 3), "none rejected": (6, 0, 3)}
    step, under_way, totals = Step("HND", way, device), [], [0, 0, 0]  # committed, rejected, windows
    counts = step.manager.counters
    for number, rejected in enumerate(("some rejected", *2 * ("none rejected",), *30 * ("some rejected",)), 1):
        counts.publishes = number > 1
        step.begin()
        step.forward()
        with torch.inference_mode(rejected == "some rejected"):
            step.commit(REJECTED[rejected])
        totals = [before + by for before, by in zip(totals, risen[rejected], strict=True)]
        read = counts.published()
        assert (read is None) == (number == 1)
        under_way.append((number, read, totals))
        if number > 3:
            if device != "cpu":
                torch.cuda.synchronize()
            commit, read, expected = under_way[-3]
            found = read()
            counters = found.counters()
            assert [counters.committed_tokens, counters.rejected_tokens, counters.windows] == expected
            assert found.commits == commit
    assert under_way[10][1]() is None
    steps = counters.staged_steps, counters.logged_steps
    assert steps == ((number, 0) if way == "staged" else (0, number))
    assert len(counts._ring) == 8


def test_steps_of_both_ways_follow_each_other(device):
    """A step of windows is staged, a mixed one is logged, in any order, and bytes are those of either."""
    step, expected = Step("HND", "staged", device, max_drafts=3), {"written": 0, "read": 0}
    for seed, queries in enumerate((DECODES, QUERIES, QUERIES, DECODES, DECODES)):
        step.batch = batch = Batch(queries, DRAFTS, device=device, seed=seed)
        step.rows = [step.paged.new_rows(batch.num_tokens, 100 * seed + layer) for layer in range(3)]
        step.before = step.paged.pool.clone(), batch.slot_mapping.clone()
        assert step.begin() and step.manager.serves_attention == (queries == DECODES)
        step.forward()
        step.commit(REJECTED["some rejected"])
        step.expect(batch.kept(REJECTED["some rejected"]))
        step.assert_pool()
        rows, drafts, kept, staged = 9, 6, 4, queries == DECODES
        copied = kept if staged else drafts + drafts - kept
        expected["written"] += rows + copied
        expected["read"] += copied + (0 if staged and device != "cpu" else rows)
    counters, row = step.manager.counters.read(), 3 * step.manager.layout.slot_bytes
    assert (counters.staged_steps, counters.logged_steps, counters.windows) == (3, 2, 15)
    assert (counters.bytes_written, counters.bytes_read) == (expected["written"] * row, expected["read"] * row)
    assert counters.bytes_avoided == (5 * 18 * row) - counters.bytes_written - counters.bytes_read
    step.manager.counters.reset()
    assert step.manager.counters.read() == Counters(), "warm-up does not count"


def test_under_graphs_a_layer_is_staged_once_and_for_all(device):
    """A replay calls no hook; what was captured through it needs no second proof."""
    step = Step("HND", "staged", device)
    step.manager.uses_full_cudagraphs = True  # as if made so
    step.begin()
    step.forward()
    step.commit(REJECTED["none rejected"])
    step.begin()
    step.commit(REJECTED["none rejected"])
    assert step.manager.counters.read().cancelled == 0


@example(requests=[(7, 0, 0), (1, 0, 0), (3, 0, 0)], kind="HND", mode="cow", seed=0)  # no drafts: no fallback either
@example(requests=[(7, 0, 0), (1, 0, 0), (3, 0, 0)], kind="HND", mode="stage", seed=0)
@example(requests=[(7, 2, 1), (3, 2, 1)], kind="HND", mode="stage", seed=0)  # a prompt's last chunk with drafts
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3),
    kind=st.sampled_from(list(MEMORY)),
    mode=st.sampled_from(["cow", "stage"]),
    seed=st.integers(0, 99),
)
def test_any_step(requests, kind, mode, seed, device):
    """Pages hold all kept rows of all target layers and nothing else, whatever is drawn; the drafter's never change."""
    kind = kind if device == "cpu" else "HND"
    drafts = tuple(min(number, rows - 1) for rows, number, _ in requests)
    rejected = tuple(min(gone, number) for number, (_, _, gone) in zip(drafts, requests, strict=True))
    step = Step(kind, mode, device, Batch(tuple(rows for rows, _, _ in requests), drafts, device=device, seed=seed))
    step.begin()
    step.forward()
    step.commit(rejected)
    counters, gone = step.manager.counters.read(), sum(rejected)
    assert (counters.windows, counters.fallbacks) == (sum(n > 0 for n in drafts), 0)
    assert (counters.rejected_tokens, counters.committed_tokens) == (gone, sum(drafts) - gone)
    step.expect(step.batch.kept(rejected))
    step.assert_pool()
