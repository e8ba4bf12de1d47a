# SPDX-License-Identifier: Apache-2.0
"""What repeats say together."""

import pandas as pd
import pytest

from nwor_lab.model.ratios import abba_ratio, is_stable


@pytest.mark.parametrize(
    ("ratios", "together"),
    [
        ([0.95 * 1.02, 0.95 / 1.02], 0.95),  # who comes first gains 2 %, in either order
        ([0.95 * 1.02, 0.95 / 1.02, 0.95 * 1.02], 0.95),
        ([0.95 * 1.02, 0.95 / 1.02, 0.90, 0.90, 0.99 * 1.1, 0.99 / 1.1], 0.95),
        ([0.97], 0.97),
    ],
)
def test_a_ratio_is_free_of_which_turn_came_first(ratios, together):
    assert abba_ratio(pd.Series(ratios)) == pytest.approx(together)


def test_repeats_are_paired_by_their_number():
    """Of a table with a hole: 1 and 2 are of one order each, but of two captures and minutes apart."""
    assert abba_ratio(pd.Series({0: 0.9, 1: 1.0, 3: 0.5})) == pytest.approx(0.9**0.5)


def test_a_range_of_a_tenth_says_nothing():
    assert is_stable(pd.DataFrame({"low": [0.9, 0.95], "high": [1.01, 1.0]})).tolist() == [False, True]
