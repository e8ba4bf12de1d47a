# SPDX-License-Identifier: Apache-2.0
"""An operator held to its plain Python, byte for byte; one that refuses names what is wrong and has changed nothing."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nwor import ops
from nwor_lab.operators import reference
from nwor_lab.operators.reference import Twins, run_both

Change = Callable[[Any], Any]
OTHER_DTYPE = {torch.int64: torch.int32, torch.int32: torch.int64, torch.bool: torch.int32, torch.uint8: torch.int8}


def check(operator: str, *args: Any) -> None:
    """Run an operator and its reference on equal memory and compare every byte."""
    run_both(operator, *args).assert_equal(operator)


def check_refused(operator: str, args: Sequence[Any], word: str = "") -> None:
    """The operator raises a RuntimeError with `word` in it and has changed no byte."""
    twins = Twins(*args)
    with pytest.raises(RuntimeError, match=re.escape(word)):
        getattr(ops, operator)(*args)
    twins.assert_equal(operator)


def check_wrong(operator: str, args: Sequence[Any], name: str, change: Change, word: str = "") -> None:
    """The operator refuses its arguments once `change` has made that of `name` wrong."""
    at = ops.OPERATORS[operator].index(name)
    check_refused(operator, [*args[:at], change(args[at]), *args[at + 1 :]], word)


def changes(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor with another dtype, number of dimensions, size or stride; most of its numbers are as they were."""
    yield tensor.to(OTHER_DTYPE.get(tensor.dtype, torch.float64))
    yield tensor[None]
    yield tensor.repeat_interleave(2, -1)[..., ::2]
    for dim, size in enumerate(tensor.shape):
        yield tensor.narrow(dim, 0, size - 1)
        yield torch.cat([tensor, tensor], dim)
        if size > 1:
            yield tensor.narrow(dim, 0, 1).expand_as(tensor)
    if tensor.dim() > 1:
        yield tensor.flatten()


def check_changes(operator: str, arguments: Callable[[str], Sequence[Any]], device: str) -> None:
    """Of each tensor every one of `changes` is refused, with a name of an argument; or the operator still does as plain
    Python does. `arguments` makes them for a device."""
    names, refused = ops.OPERATORS[operator], 0
    tensors = [at for at, arg in enumerate(arguments("cpu")) if isinstance(arg, Tensor)]
    for at in tensors:
        for number in range(len([*changes(arguments("cpu")[at])])):
            args = [*arguments("cpu")]
            args[at] = [*changes(args[at])][number]
            twins = Twins(*args)
            what = f"{operator}, {names[at]}, change {number}"
            try:
                getattr(ops, operator)(*args)
            except RuntimeError as error:
                assert any(re.search(rf"\b{name}\b", str(error)) for name in names), f"{what}: {error}"
                refused += 1
                if device == "cuda" and "] is " not in str(error):  # contents are not known to the host there
                    check_wrong(operator, arguments(device), names[at], lambda t, n=number: [*changes(t)][n])
            else:
                reference.run(operator, twins.copies, "cpu")
            twins.assert_equal(what)
    assert refused > 3 * len(tensors)
