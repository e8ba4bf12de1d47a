# SPDX-License-Identifier: Apache-2.0
"""Bytes of a recurrent layer's verify step, worked by hand."""

import pytest

from nwor_lab.model.recurrent import MAMBA_2, WAYS, state_memory, state_traffic
from nwor_lab.model.traffic import Moved


def test_one_state_a_draft_against_one_state_and_the_inputs() -> None:
    """A layer as Mamba-2 of 2.7B has it, k = 4, two accepted.

    State: 80 x 64 x 128 x 4 = 2,621,440 bytes. Inputs: x 80 x 64 x 2 = 10,240, B 128 x 2 = 256, dt 80 x 4 = 320.
    """
    state, inputs = 2_621_440, 10_816
    assert (MAMBA_2.state, MAMBA_2.inputs) == (state, inputs)
    assert state_traffic("snapshots", MAMBA_2, 4, 2) == Moved(state, 13_107_200)
    assert state_traffic("commit", MAMBA_2, 4, 2) == Moved(5_242_880 + 32_448, 54_080 + state)
    assert state_traffic("replay", MAMBA_2, 4, 2) == Moved(state, 54_080)
    assert state_traffic("replay", MAMBA_2, 4, 2, history=8, flushes=0.25) == Moved(state + 86_528, 54_080 + 655_360)
    assert state_memory("snapshots", MAMBA_2, 4) == 13_107_200
    assert state_memory("commit", MAMBA_2, 4) == 2_675_520
    assert state_memory("replay", MAMBA_2, 4, ring=16) == 2_675_520 + 173_056


def test_snapshots_cost_the_same_whatever_is_accepted_and_a_commit_only_the_kept_inputs_more() -> None:
    for accepted in range(4):
        less, more = (state_traffic("snapshots", MAMBA_2, 4, n) for n in (accepted, accepted + 1))
        assert less == more
        less, more = (state_traffic("commit", MAMBA_2, 4, n) for n in (accepted, accepted + 1))
        assert more - less == Moved(MAMBA_2.inputs, 0)


def test_without_drafts_snapshots_are_a_plain_step() -> None:
    assert state_traffic("snapshots", MAMBA_2, 0, 0) == Moved(MAMBA_2.state, MAMBA_2.state)


@pytest.mark.parametrize(
    ("way", "accepted", "said"), [("rewind", 1, "no way to come back"), ("replay", 5, "5 accepted of 4")]
)
def test_bad_input_is_an_error(way: str, accepted: int, said: str) -> None:
    assert way not in WAYS or accepted > 4
    with pytest.raises(ValueError, match=said):
        state_traffic(way, MAMBA_2, 4, accepted)
