# SPDX-License-Identifier: Apache-2.0
"""Where the operator tests run: on the CPU always, on a GPU under `-m gpu`. And smaller GPUs, by their limits."""

from dataclasses import replace

import pytest
import torch

from nwor.attention.configs import Device
from nwor_lab import machine

A100 = Device("NVIDIA A100-SXM4-80GB", multiprocessors=108, shared_memory=163 << 10)
L40S = Device("NVIDIA L40S", multiprocessors=142, shared_memory=99 << 10)

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
needs_fp8_cache = pytest.mark.skipif(bool(machine.why_no_fp8_cache()), reason=machine.why_no_fp8_cache() or "served")


def limit(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Have the attention keep to `device`'s limits on the GPU at hand, whose multiprocessors have to do, too."""
    here = torch.cuda.get_device_properties(0).multi_processor_count
    limited = replace(device, multiprocessors=min(device.multiprocessors, here))
    patch.setattr(Device, "of", lambda where: limited)
