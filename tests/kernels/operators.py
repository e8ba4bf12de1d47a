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
        yield tensor.narrow(dim, 0, 0)
        yield torch.cat([tensor, tensor], dim)
        if size > 1:
            yield tensor.narrow(dim, 0, 1).expand_as(tensor)
    if tensor.dim() > 1:
        yield tensor.flatten()


def check_changes(operator: str, arguments: Callable[[str], Sequence[Any]], device: str) -> None:
    """Of each tensor, and of keys and values together, every one of `changes` is refused, with a name of an argument;
    or the operator still does as plain Python does. `arguments` makes them for a device."""
    names, drawn, refused = ops.OPERATORS[operator], arguments("cpu"), 0
    tensors = [name for name, arg in zip(names, drawn, strict=False) if isinstance(arg, Tensor)]
    pairs = [(name, name.replace("key", "value")) for name in tensors if "key" in name]

    def with_change(on: str, which: Sequence[str], number: int) -> list[Any]:
        given = zip(names, arguments(on), strict=False)
        return [[*changes(arg)][number] if name in which else arg for name, arg in given]

    for which in [*((name,) for name in tensors), *pairs]:
        for number in range(len([*changes(drawn[names.index(which[0])])])):
            args, what = with_change("cpu", which, number), f"{operator}, {' and '.join(which)}, change {number}"
            twins = Twins(*args)
            try:
                getattr(ops, operator)(*args)
            except RuntimeError as error:
                assert any(re.search(rf"\b{name}\b", str(error)) for name in names), f"{what}: {error}"
                refused += 1
                if device == "cuda" and "] is " not in str(error):  # contents are not known to the host there
                    check_refused(operator, with_change(device, which, number))
            else:
                reference.run(operator, twins.copies, "cpu")
            twins.assert_equal(what)
    assert refused > 3 * len(tensors)
