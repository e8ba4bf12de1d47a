# SPDX-License-Identifier: Apache-2.0
"""Where the operator tests run: on the CPU always, on a GPU under `-m gpu`."""

import pytest
import torch

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
