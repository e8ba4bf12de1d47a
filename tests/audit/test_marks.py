# SPDX-License-Identifier: Apache-2.0
"""What the sampled auditor's marks see, in torch, without an engine."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_kv_audit import marks as definitions
from vllm_kv_audit.marks import ADOPTED_AT, BYTES, CHECKED_AT, REJECTED, REJECTED_ROW, TOKEN, UNWRITTEN

from tests.audit.windows import BLOCK, PROMPTS, Served, small_pages

LAYOUTS = [
    {"heads": 1, "width": 20},
    {"heads": 3, "width": 300, "window": 7},
    {"heads": 2, "width": 4, "chunk": 4, "parts": 2},
    {"heads": 2, "width": 6, "packed": True, "dtype": torch.int8},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [0, 6])
def test_what_vllm_wrote_is_never_a_finding(layout, size):
    """Prefill in chunks, decodes with drafts, rejected rows that are written over; all slots and a sample."""
    served = Served(small_pages(**layout))
    for _ in range(12):
        assert served.step(size) == []
    assert served.ring[CHECKED_AT] > 40


def test_each_kind_is_found_once_and_named():
    served = Served(small_pages(heads=2, width=6))
    for _ in range(5):
        served.step()
    slot = served.slot
    place = served.pages.offsets[1] + served.pages.addresses(torch.tensor([slot(0, 18)]))
    served.pages.units[place[0, 7]] ^= 1
    served.marks.identity[slot(1, 3)] = served.marks.identity[slot(1, 2)]
    served.marks.state[slot(2, 8)] = REJECTED
    served.marks.state[slot(2, 7)] = 0
    expected = sorted([(BYTES, 3, 18, 1), (TOKEN, 0, 3, -1), (REJECTED_ROW, 4, 8, -1), (UNWRITTEN, 4, 7, -1)])
    assert served.step() == expected
    assert served.step() == expected, "none a second time"


def test_a_token_that_is_not_the_requests_own_is_found():
    """The model was fed another token than was sampled: that row, and every later one, stands on it."""
    served = Served(small_pages())
    while served.computed[0] < PROMPTS[0]:
        served.step()
    position = served.computed[0]
    assert served.step(fed={0: 1000}) == []
    assert (TOKEN, 3, position, -1) in served.step()


def test_a_request_that_gets_anothers_block_is_found():
    served = Served(small_pages())
    for _ in range(4):
        served.step()
    served.table[0, 0] = served.table[2, 0]
    found = served.step()
    assert [(TOKEN, 3, position, -1) for position in range(BLOCK)] == found


def test_the_newest_rows_are_always_in_the_sample():
    served = Served(small_pages())
    for _ in range(4):
        served.step(6)
    for count in (3, 6, 9):
        for back in (1, 2, 3):
            served.marks.state[served.slot(0, served.computed[0] - back)] = 0
        assert len(served.step(6)) == count


def test_a_draft_too_many_that_counts_as_accepted_is_found():
    """Its row is in the pages, with the token that was drafted; nobody would see it by its bytes."""
    served = Served(small_pages())
    while not any(served.rejected):
        assert served.step() == []
    computed = [done + bool(more) for done, more in zip(served.computed, served.rejected, strict=True)]
    found = [(kind, row) for kind, row, *_ in served.look(computed)]
    rows = [row for row, more in zip(served.rows, served.rejected, strict=True) if more]
    assert found == [(REJECTED_ROW, row) for row in sorted(rows)]


def test_a_sample_looks_at_the_newest_slots_in_all_layers_and_at_others_in_one_after_the_other():
    served = Served(small_pages())
    for _ in range(6):
        served.step(6)
    pages, slot = served.pages, torch.tensor([served.slot(0, served.computed[0] - 3)])

    def look(steps: int) -> list[int]:
        seen = len(served.findings())
        found = []
        for _ in range(steps):
            served.look(served.computed, size=6)
            found.append(len(served.findings()) - seen)
        return found

    pages.units[pages.offsets[1] + pages.addresses(slot)[:, 3]] ^= 1
    assert look(3)[-1] == 1, "one layer is wrong"
    newest = torch.tensor([served.slot(0, served.computed[0] - back) for back in (1, 2)])
    pages.units[pages.offsets[1] + pages.addresses(newest)[:, 3]] ^= 1
    assert look(1) == [2]
    pages.units[pages.offsets[:, None] + pages.addresses(slot)] ^= 1
    assert look(3) == [1, 2, 3], "each layer is wrong: met at once"


def test_a_sample_comes_to_every_slot_in_time():
    served = Served(small_pages())
    for _ in range(6):
        served.step(4)
    served.marks.state[served.slot(0, 5)] = 0
    assert any(served.step(12) for _ in range(10))


@pytest.mark.parametrize("limit", [{"window": 7}, {"chunk": 4}])
def test_what_no_request_can_see_is_not_looked_at(limit):
    """vLLM has given these blocks away, and their entries in block tables stay."""
    served = Served(small_pages(**limit))
    for _ in range(5):
        served.step()
    computed = served.computed[0]
    below = computed - 6 if "window" in limit else computed // 4 * 4
    served.marks.state[[served.slot(0, position) for position in range(below)]] = 0
    assert served.step() == []
    served.table[1, 0] = 0
    assert served.step() == [], "block 0 is in the place of one that was given away"


def test_rows_of_a_connector_are_taken_over_and_then_held_to():
    served = Served(small_pages())
    for _ in range(4):
        served.step()
    served.marks.state[served.slot(0, 3)] = 0
    assert served.step(adopt=True) == [] and served.ring[ADOPTED_AT] == 1
    served.pages.units[served.pages.addresses(torch.tensor([served.slot(0, 3)]))[0, 0]] ^= 1
    assert served.step() == [(BYTES, 3, 3, 0)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_change_of_a_slot_changes_its_hash(data):
    pages = small_pages(heads=2, width=6, packed=data.draw(st.booleans()), dtype=torch.int8)
    marks, slots = definitions.Marks.of(pages, 0), torch.arange(pages.num_slots)
    before = marks.contents(slots)
    layer, slot = data.draw(st.integers(0, 2)), data.draw(st.integers(0, pages.num_slots - 1))
    units = data.draw(st.lists(st.integers(0, 11), min_size=1, unique=True))
    for unit in units:
        pages.units[pages.offsets[layer] + pages.addresses(torch.tensor([slot]))[0, unit]] ^= data.draw(
            st.sampled_from([1, 2, 64, -128, -1])
        )
    changed = (marks.contents(slots) != before).nonzero().tolist()
    assert changed == [[layer, slot]]


def test_identities_tell_order_and_place():
    """Permuted tokens, shifted ones and a longer row of the same: none meets another in 300,000."""
    tokens = torch.randint(0, 50, (3000, 100), generator=torch.Generator().manual_seed(0))
    places = torch.arange(100)
    sums = [definitions.mix(x, places + shift).cumsum(1).int() for x in (tokens, tokens.flip(1)) for shift in (0, 1)]
    found = torch.stack(sums)[:, :, 20:40].flatten()
    assert len(found.unique()) > len(found) - 20
