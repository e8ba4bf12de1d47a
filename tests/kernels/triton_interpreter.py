# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter (3.7) with a GPU's arithmetic: its own truncates to bf16 and fp8, and multiplies bf16's bits."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object = None) -> np.ndarray:
    """Bits of `target` as unsigned integers, rounded to nearest even."""
    tensor = torch.from_numpy(np.ascontiguousarray(data)).view(TORCH_DTYPES[source]).to(TORCH_DTYPES[target])
    bits = target.primitive_bitwidth
    return tensor.view(getattr(torch, f"uint{bits}")).numpy().reshape(data.shape)


def as_fp32(handle: TensorHandle) -> TensorHandle:
    source = handle.dtype.scalar
    if source in (tl.float16, tl.float32):
        return handle
    return TensorHandle(convert(handle.data, source, tl.float32).view(np.float32), tl.float32)


def install() -> None:
    """Replace the interpreter's conversions and products in this process."""
    multiply = InterpreterBuilder.create_dot
    interpreter._convert_float = convert
    InterpreterBuilder.create_dot = lambda builder, a, b, *rest: multiply(builder, as_fp32(a), as_fp32(b), *rest)
