# SPDX-License-Identifier: Apache-2.0
"""An operator's arguments by name, and changes that make one of them wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.kernels.operators import check_refused

Arguments = dict[str, Any]
Change = Callable[[Arguments], None]


def put(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: arguments.__setitem__(name, change(arguments[name]))


def cases(wrong: list[tuple[str, str, Change, str]]) -> list[Any]:
    """A parameter (operator, change, message) for each operator of each wrong input."""
    return [
        pytest.param(operator, change, message, id=f"{operator}: {what}")
        for what, operators, change, message in wrong
        for operator in operators.split()
    ]


def check_wrong(operator: str, arguments: Arguments, names: Sequence[str], change: Change, message: str) -> None:
    """The operator refuses its arguments, those of `names` in this order, once `change` has made one of them wrong."""
    change(arguments)
    check_refused(operator, [arguments[name] for name in names], message)


def check_devices(operator: str, make: Callable[[], Arguments], names: Sequence[str]) -> None:
    """Every tensor argument in its turn on another device than the rest is refused."""
    for moved in names:
        arguments = make()
        if isinstance(arguments[moved], torch.Tensor):
            check_wrong(operator, arguments, names, put(moved, lambda t: t.cpu()), "must be on the device of")
