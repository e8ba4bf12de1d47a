# SPDX-License-Identifier: Apache-2.0
"""An operator held to its plain Python, byte for byte; one that refuses has changed nothing."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nwor import ops
from nwor_lab.operators.reference import Twins, run_both

Change = Callable[[Any], Any]
Wrong = tuple[str, str, list[Change], str]
"""Operators, their arguments that each change makes wrong, both separated by spaces, the changes, and a word of the
error; "" for the name of the first of these arguments."""


def check(operator: str, *args: Any) -> None:
    """Run an operator and its reference on equal memory and compare every byte."""
    run_both(operator, *args).assert_equal(operator)


def check_refused(operator: str, args: Sequence[Any], word: str) -> None:
    """The operator raises a RuntimeError with `word` in it and has changed no byte."""
    twins = Twins(*args)
    with pytest.raises(RuntimeError, match=re.escape(word)):
        getattr(ops, operator)(*args)
    twins.assert_equal(operator)


def check_wrong(operator: str, args: Sequence[Any], names: str, change: Change, word: str) -> None:
    """The operator refuses its arguments once `change` has made those of `names` wrong."""
    parameters, wrong = ops.OPERATORS[operator], names.split()
    assert set(wrong) <= set(parameters)
    given = [change(arg) if name in wrong else arg for name, arg in zip(parameters, args, strict=False)]
    check_refused(operator, given, word or wrong[0])


def cases(wrong: list[Wrong]) -> pytest.MarkDecorator:
    """A parameter `wrong`, (operator, names, change, word), for each operator and change of each wrong input."""
    each = [
        (operator, names, change, word)
        for operators, names, changes, word in wrong
        for operator in operators.split()
        for change in changes
    ]
    return pytest.mark.parametrize(
        "wrong", each, ids=[f"{number}-{one[0]}-{one[1]}" for number, one in enumerate(each)]
    )


def at(place: Any, value: int) -> Change:
    """The change that puts `value` at one place of a tensor."""

    def change(tensor: Any) -> Any:
        changed = tensor.clone()
        changed[place] = value
        return changed

    return change
