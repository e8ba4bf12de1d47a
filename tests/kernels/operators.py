# SPDX-License-Identifier: Apache-2.0
"""An operator held to its plain Python, byte for byte; one that refuses has changed nothing."""

from collections.abc import Sequence
from typing import Any

from nwor import ops
from nwor_lab.operators.twins import Twins, run_both


def check(operator: str, *args: Any) -> None:
    """Run an operator and its reference on equal memory and compare every byte."""
    run_both(operator, *args).assert_equal(operator)


def check_refused(operator: str, args: Sequence[Any], message: str) -> None:
    """The operator raises a RuntimeError with `message` in it and has changed no byte."""
    twins = Twins()
    for arg in args:
        twins(arg)
    try:
        getattr(ops, operator)(*args)
    except RuntimeError as error:
        if message not in str(error):
            raise AssertionError(f"{operator} says {error}, not {message!r}") from error
    else:
        raise AssertionError(f"{operator} took it; expected an error with {message!r}")
    twins.assert_equal(operator)
