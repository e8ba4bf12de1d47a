# SPDX-License-Identifier: Apache-2.0
"""Where the operator tests run: on the CPU always, on a GPU under `-m gpu`."""

import pytest
import torch

from nwor_lab import machine

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
needs_fp8_cache = pytest.mark.skipif(bool(machine.why_no_fp8_cache()), reason=machine.why_no_fp8_cache() or "served")
