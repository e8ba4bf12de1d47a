# SPDX-License-Identifier: Apache-2.0
"""Where the operator tests run: on the CPU always, on a GPU under `-m gpu`. And smaller GPUs, by their limits."""

from dataclasses import replace

import pytest
import torch

from nwor.attention.configs import H200, Device
from nwor_lab import machine

A100 = Device("NVIDIA A100-SXM4-80GB", multiprocessors=108, shared_memory=163 << 10)
L40S = Device("NVIDIA L40S", multiprocessors=142, shared_memory=99 << 10)
A10 = Device("NVIDIA A10", multiprocessors=84, shared_memory=99 << 10)
RTX_5090 = Device("NVIDIA GeForce RTX 5090", multiprocessors=170, shared_memory=99 << 10)
SMALLER = [pytest.param(device, id=device.name) for device in (A100, L40S, A10, RTX_5090)]
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
needs_fp8_cache = pytest.mark.skipif(bool(machine.why_no_fp8_cache()), reason=machine.why_no_fp8_cache() or "served")


def limit(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Have the attention keep to `device`'s limits on the GPU at hand, whose multiprocessors have to do, too."""
    here = torch.cuda.get_device_properties(0).multi_processor_count
    limited = replace(device, multiprocessors=min(device.multiprocessors, here))
    patch.setattr(Device, "of", lambda where: limited)
