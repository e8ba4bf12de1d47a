# SPDX-License-Identifier: Apache-2.0
"""The operators of a step, bound once to the tensors of a manager (`kernels/step.cpp`)."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from nwor import ops


class Step:
    """`ops.open_window` and the operators of all layers, with all that stays the same from step to step bound once.

    A call brings pointers, and takes a third of the host's time that it takes through torch's dispatcher. It runs
    where the tensors are, on the current stream. They are checked, as by the operators, at the first call; what a call
    brings is checked in size, and in kind at the first one with as many requests: the same lines make it in every step.

    Args:
        tensors: by the operators' names pool, layer_offsets, cache_strides, slots, packing, rows, num_drafts, kept,
            staging_rows, page_slots (None: nothing can be staged) and logged (None where something can); and counts
            int64 [ways, 6], of which a call raises one row and publishes all. They are kept alive.
    """

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors
        self._on_gpu, self._max_requests = tensors["slots"].is_cuda, len(tensors["slots"])
        self._max_tokens = 0 if tensors["staging_rows"] is None else tensors["staging_rows"].numel()
        self._published = tensors["counts"].numel() + self._max_requests
        self._bound: Tensor | None = None
        self._opened, self._closed = set[int](), set[int]()  # numbers of requests whose tensors have been checked

    def _bind(self) -> None:
        self._open, self._close = _step_functions()
        bound = torch.zeros(1024, dtype=torch.uint8)
        torch.ops._C_cache_ops.bind_step(**self.tensors, bound=bound)
        self._bound, self._address = bound, bound.data_ptr()

    def open(
        self,
        query_start_loc: Tensor,
        cu_num_logits: Tensor,
        slot_mapping: Tensor,
        counts: Tensor,
        *,
        stages: bool = False,
        logs: bool = False,
    ) -> None:
        """`open_window`, with staging where `stages`; and behind it `log_all_layers` where `logs`.

        Raises:
            RuntimeError: a tensor is of another dtype or device, or not contiguous, or has too few elements; or what
                the operators raise.
        """
        num_requests, num_tokens = cu_num_logits.numel() - 1, slot_mapping.numel()
        if (
            num_requests not in self._opened
            or query_start_loc.numel() <= num_requests
            or (stages and num_tokens > self._max_tokens)
        ):
            self._check(query_start_loc, cu_num_logits, slot_mapping, stages)
            self._opened.add(num_requests)
        failure = self._open(
            self._address, query_start_loc.data_ptr(), cu_num_logits.data_ptr(), slot_mapping.data_ptr(),
            num_tokens, num_requests, counts.data_ptr(), stages, logs,
        )  # fmt: skip
        if failure:
            raise RuntimeError(failure.decode())

    def _check(self, query_start_loc: Tensor, cu_num_logits: Tensor, slot_mapping: Tensor, stages: bool) -> None:
        num_requests, num_tokens, on_gpu = cu_num_logits.numel() - 1, slot_mapping.numel(), self._on_gpu
        if not (
            query_start_loc.dtype is cu_num_logits.dtype is torch.int32
            and slot_mapping.dtype is torch.int64
            and query_start_loc.is_cuda is cu_num_logits.is_cuda is slot_mapping.is_cuda is on_gpu
            and query_start_loc.is_contiguous()
            and cu_num_logits.is_contiguous()
            and slot_mapping.is_contiguous()
        ):
            raise RuntimeError(
                "query_start_loc and cu_num_logits must be contiguous int32, slot_mapping int64, where slots are"
            )
        if not 0 <= num_requests <= self._max_requests or query_start_loc.numel() <= num_requests:
            raise RuntimeError(f"query_start_loc or what is bound is too short for {num_requests} requests")
        if stages and num_tokens > self._max_tokens:
            raise RuntimeError(f"slot_mapping has {num_tokens} tokens, staging_rows {self._max_tokens}")
        if self._bound is None:
            self._bind()

    def close(
        self, num_rejected: Tensor, counts: Tensor, published: Tensor | None = None, *, restores: bool = False
    ) -> None:
        """`commit_all_layers`, or where `restores` `restore_all_layers`, of as many requests as `num_rejected` has.

        published: as for the operators, with the counts of all ways: of ``6 * ways + max_requests`` numbers.

        Raises:
            RuntimeError: as `open`.
        """
        if (num_requests := num_rejected.numel()) not in self._closed:
            if not (
                num_rejected.dtype is torch.int32
                and num_rejected.is_cuda is self._on_gpu
                and num_rejected.is_contiguous()
                and num_requests <= self._max_requests
            ):
                raise RuntimeError(f"num_rejected must be contiguous int32, of at most {self._max_requests} requests")
            if self._bound is None:
                self._bind()
            self._closed.add(num_requests)
        if published is not None and published.numel() < self._published:
            raise RuntimeError(f"published has {published.numel()} numbers, needs {self._published}")
        failure = self._close(
            self._address, num_rejected.data_ptr(), num_requests, counts.data_ptr(),
            None if published is None else published.data_ptr(), restores,
        )  # fmt: skip
        if failure:
            raise RuntimeError(failure.decode())


@functools.cache
def _step_functions() -> tuple[Any, Any]:
    """`nwor_open` and `nwor_close` of the extension."""
    ops.load()
    functions = ctypes.PyDLL(str(ops.library()))  # they are too short for others to take the interpreter meanwhile
    place, number = ctypes.c_void_p, ctypes.c_int64
    functions.nwor_open.argtypes = [*4 * [place], number, number, place, ctypes.c_bool, ctypes.c_bool]
    functions.nwor_close.argtypes = [place, place, number, place, place, ctypes.c_bool]
    for function in (functions.nwor_open, functions.nwor_close):
        function.restype = ctypes.c_char_p
    return functions.nwor_open, functions.nwor_close
