# SPDX-License-Identifier: Apache-2.0
"""An operator of `nwor.ops` and its plain Python on equal memory.

Each byte of each storage that the arguments lie in is compared, whether it was to be written or not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor_lab.operators import reference


class Twins:
    """Copies of tensors on the CPU that share storages where the originals do."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # address: (original bytes, copied bytes)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            original = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self.storages[storage.data_ptr()] = (original, original.to("cpu", copy=True))
        copied = self.storages[storage.data_ptr()][1]
        twin = torch.empty(0, dtype=value.dtype)
        return twin.set_(copied.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def compare(self) -> tuple[int, int]:
        """How many bytes there are in all storages, and how many of them differ now."""
        differing = sum(int((original.cpu() != copied).sum()) for original, copied in self.storages.values())
        return sum(len(copied) for _, copied in self.storages.values()), differing

    def assert_equal(self, what: str) -> None:
        """Every byte of every storage, or an AssertionError that says how many are wrong and where."""
        for original, copied in self.storages.values():
            wrong = (original.cpu() != copied).nonzero().flatten()
            if len(wrong):
                places = wrong[:8].tolist()
                raise AssertionError(f"{what}: {len(wrong)} of {len(copied)} bytes differ, first at {places}")


def run_both(operator: str, *args: Any, given: Sequence[Any] | None = None) -> Twins:
    """Run the reference on twins of `args` and the operator on `args`, or on what it is `given` instead of them."""
    twins = Twins()
    expected = [twins(arg) for arg in args]
    device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
    getattr(reference, operator)(*expected, device=device)
    getattr(ops, operator)(*(args if given is None else given))
    return twins
