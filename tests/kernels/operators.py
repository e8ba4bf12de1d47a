# SPDX-License-Identifier: Apache-2.0
"""An operator held to its plain Python, byte for byte; one that refuses has changed nothing."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nwor import ops
from nwor_lab.operators.reference import Twins, run_both

Wrong = tuple[str, str, Callable[[Any], Any], str]
"""Operators, their arguments that one change makes wrong, both separated by spaces, the change, and the error."""


def check(operator: str, *args: Any) -> None:
    """Run an operator and its reference on equal memory and compare every byte."""
    run_both(operator, *args).assert_equal(operator)


def check_refused(operator: str, args: Sequence[Any], message: str) -> None:
    """The operator raises a RuntimeError with `message` in it and has changed no byte."""
    twins = Twins(*args)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(ops, operator)(*args)
    twins.assert_equal(operator)


def check_wrong(operator: str, args: Sequence[Any], names: str, change: Callable[[Any], Any], message: str) -> None:
    """The operator refuses its arguments once `change` has made those of `names` wrong."""
    parameters, wrong = ops.OPERATORS[operator], names.split()
    assert set(wrong) <= set(parameters)
    given = [change(arg) if name in wrong else arg for name, arg in zip(parameters, args, strict=False)]
    check_refused(operator, given, message)


def cases(wrong: list[Wrong]) -> pytest.MarkDecorator:
    """A parameter `wrong`, (operator, names, change, message), for each operator of each wrong input."""
    each = [(operator, *rest) for operators, *rest in wrong for operator in operators.split()]
    ids = [f"{operator}: {names} {message}" for operator, names, _, message in each]
    return pytest.mark.parametrize("wrong", each, ids=ids)


def at(place: Any, value: int) -> Callable[[Any], Any]:
    """The change that puts `value` at one place of a tensor."""

    def change(tensor: Any) -> Any:
        changed = tensor.clone()
        changed[place] = value
        return changed

    return change
