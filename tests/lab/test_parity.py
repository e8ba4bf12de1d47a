# SPDX-License-Identifier: Apache-2.0
"""What counts as saying the same as the baseline."""

import math

import pandas as pd
import pytest

from nwor_lab.bench.parity import OUTLIER_FACTOR, Parity, compare, of_rows
from nwor_lab.engines.engine import Generation


def said(tokens: list[int], *best: dict[int, float]) -> Generation:
    """One request's tokens, and of each the log-probabilities of the best."""
    return Generation([tokens], [""], [], {}, [], [list(best)])


SURE, TIE = {7: -0.1, 8: -3.0}, {1: -0.70, 2: -0.75}


@pytest.mark.parametrize(
    ("other", "drafted", "parity"),
    [
        (said([7, 1], SURE, TIE), False, (1, 0.0, 0.0)),
        (said([7, 2], SURE, {2: -0.70, 1: -0.74}), False, (0, 0.05, 0.04)),
        (said([7, 9], SURE, TIE | {9: -9.0}), False, (0, math.inf, 0.0)),
        (said([7, 9], SURE, TIE | {9: -9.0}), True, (0, 0.0, 0.0)),
        (said([7, 1], {7: -0.4, 8: -1.0}, TIE), False, (1, 0.0, 0.3)),
        (said([7, 1], {8: -0.1, 3: -3.0}, TIE), True, (1, 0.0, math.inf)),
        (said([8, 1], {7: -0.1, 8: -0.2}, {5: 0.0}), True, (0, 2.9, 0.0)),
    ],
    ids=[
        "equal",
        "a near tie",
        "another token",
        "a draft's token",
        "a shift",
        "another distribution",
        "and none after",
    ],
)
def test_parity_is_of_tokens_and_of_what_the_target_says(other, drafted, parity):
    """Up to the first token that differs; where tokens may be the drafter's, what the target gives still tells."""
    found = compare(said([7, 1], SURE, TIE), other, drafted)
    assert (found.equal, found.largest_gap, found.largest_shift) == pytest.approx(parity)
    assert found.within(0.05) == (max(parity[1:]) <= OUTLIER_FACTOR * 0.05)


def test_a_shift_is_of_all_that_the_target_thinks_likely():
    """Of each place the root of the mean square, weighted; over places by the fourth power, without the first."""
    even, other = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.5) + 0.3, 2: math.log(0.5) - 0.1}
    sure = {1: -0.01, 2: -30.0}
    found = compare(said([1, 1, 1], even, even, sure), said([1, 1, 1], other, other, {1: -0.01, 2: -9.0}))
    assert found.places == 2 and found.shift == pytest.approx((0.05**2 / 2) ** 0.25, rel=1e-4)
    assert found.largest_shift == pytest.approx(0.3)
    assert compare(said([1], even), said([1], other)).shift == 0, "of prefill"


def test_tokens_that_structured_output_rules_out_shift_nothing():
    """Their log-probability is -inf in both; of one engine alone it is no rounding."""
    ruled, moved = {1: -0.1, 2: -math.inf}, {1: -0.1, 2: -5.0}
    assert compare(said([1, 1], ruled, ruled), said([1, 1], ruled, ruled)).within(1e-6)
    assert compare(said([1, 1], moved, moved), said([1, 1], ruled, ruled)).shift == math.inf


def test_a_fault_in_a_few_places_is_no_rounding():
    """By the largest of all, rounding in many places passes for a fault; by the mean square, a fault for rounding."""

    def moved(*shifts: float) -> Parity:
        places = [{1: -0.5, 2: -1.5}] * (1 + len(shifts))
        others = [places[0], *({1: -0.5 + shift, 2: -1.5 - shift} for shift in shifts)]
        return compare(said([1] * len(places), *places), said([1] * len(places), *others))

    rounded, faulty = moved(*97 * [0.02], *3 * [0.06]), moved(*97 * [0.02], *3 * [0.12])
    assert rounded.within(0.035) and not faulty.within(0.035)


def test_comparisons_add_up():
    """Tokens are counted, of what differs the worst is kept, and a shift is that of all places."""
    good, bad = Parity(8, 8, 0.1, 0.3, 30, 30 * 0.1**4), Parity(3, 4, 0.2, 0.0, 10, 10 * 0.2**4)
    assert good + bad == bad + good == Parity(11, 12, 0.2, 0.3, 40, pytest.approx(0.019))
    assert (good + bad).shift == pytest.approx((0.019 / 40) ** 0.25) and bad.shift == pytest.approx(0.2)
    assert of_rows(pd.DataFrame(good.rows() + bad.rows())) == good + bad
    assert of_rows(pd.DataFrame(bad.rows()).query("metric == 'none'")) == Parity()


@pytest.mark.parametrize("best", [{7: math.nan, 8: -3.0}, {7: -0.1, 8: math.nan}])
def test_what_is_no_number_is_explained_by_nothing(best):
    """`max` passes over a NaN that is not its first."""
    one, other = said([7, 1], SURE, TIE), said([7, 1], best, TIE)
    assert compare(one, one).within(0)
    assert not any(compare(*pair).within(1e9) for pair in ((one, other), (other, one), (other, other)))
