# SPDX-License-Identifier: Apache-2.0
"""What the operators of all layers are timed on: a step's tensors on a GPU, and each operator and its peers on them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from nwor import ops
from nwor_lab.cost.traffic import Shape
from nwor_lab.gpu.attention_case import BLOCK_SIZE, HEAD_SIZE, LAYERS, write_rows
from nwor_lab.gpu.timer import Call, empty

BLOCKS, QUERY = 1024, 9  # blocks of a layer, rows of a recorded window


def shape_of(kv_heads: int, cache: str) -> Shape:
    """The cache of a Llama-2-7B (32 KV heads) or of its like with fewer, in bf16 or fp8 (e4m3)."""
    return Shape(LAYERS, kv_heads, HEAD_SIZE, cache_bytes={"bf16": 2, "fp8": 1}[cache], model_bytes=2)


@functools.cache
def flashinfer_writer() -> Callable[..., None] | None:
    """FlashInfer's `append_paged_kv_cache`, which is compiled when first used, or None where it is not to be had."""
    try:
        from flashinfer.page import append_paged_kv_cache, get_page_module

        get_page_module()
    except Exception as error:  # noqa: BLE001 - a peer that is missing is a row less
        print(f"flashinfer is left out: {type(error).__name__}: {error}", flush=True)
        return None
    return append_paged_kv_cache


class OperatorCase:
    """The tensors of one step on a pool laid out as vLLM's (layer, block, slot, head, key and value): "NHD".

    Args:
        kv_heads: of a layer. cache: bf16 or fp8. query: rows of a window, its token and drafts, which
            have to fit into two pages.
    """

    def __init__(self, kv_heads: int, cache: str, seed: int = 0, query: int = QUERY) -> None:
        self.query = query
        self.shape, self.cache, self.fp8, self.heads = shape_of(kv_heads, cache), cache, cache == "fp8", kv_heads
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.uint8 if self.fp8 else torch.bfloat16
        width = 2 * HEAD_SIZE * self.shape.cache_bytes  # bytes of a slot and head
        row = self.shape.row
        self.pool = torch.empty(LAYERS * BLOCKS * BLOCK_SIZE * row, dtype=torch.uint8, device="cuda")
        self.pool.view(torch.int64).random_()
        self.layer_offsets = torch.arange(LAYERS, device="cuda") * (BLOCKS * BLOCK_SIZE * row)
        self.strides = (BLOCK_SIZE * row, width, row)
        self.layers = self.pool.view(self.dtype).view(LAYERS, BLOCKS, BLOCK_SIZE, kv_heads, 2 * HEAD_SIZE)
        self.scale = torch.ones(1, device="cuda")

    def fill(self, rows: int) -> None:
        """Draw the slots, keys and values of `rows` rows; the mini-cache holds what vLLM's writer makes of them."""
        requests = rows // self.query
        blocks = torch.randperm(BLOCKS, generator=self.generator)[: 2 * requests].view(requests, 2)
        row = torch.arange(self.query)
        first = torch.randint(0, BLOCK_SIZE, (requests, 1), generator=self.generator)
        self.positions = (first + row).int()
        self.blocks = blocks
        self.slots = (blocks.gather(1, (first + row) // BLOCK_SIZE) * BLOCK_SIZE + (first + row) % BLOCK_SIZE).cuda()
        self.key, self.value = torch.randn(2, LAYERS, rows, self.heads, HEAD_SIZE, device="cuda").bfloat16()
        mini = -(-rows // BLOCK_SIZE)
        packed = torch.empty(LAYERS, mini, BLOCK_SIZE, self.heads, 2 * HEAD_SIZE, dtype=self.dtype, device="cuda")
        self.writes(LAYERS, torch.arange(rows, device="cuda"), packed)()
        self.packed = packed.flatten(1, 2)[:, :rows].flatten(2)  # [L, M, 2 * H * D]
        self.rows = packed.view(torch.uint8).transpose(2, 3)
        self.num_rejected, self.kept = torch.zeros(2, requests, dtype=torch.int32, device="cuda")
        self.num_drafts = torch.full_like(self.kept, self.query)
        self.counts = torch.zeros(6, dtype=torch.int64, device="cuda")

    def writes(self, layers: int, slots: Tensor, caches: Tensor | None = None, triton: bool = False) -> Call:
        """One of vLLM's writers on the first `layers` layers of the pool, or of `caches`, a launch each."""
        pools = self.layers if caches is None else caches

        def each_layer() -> None:
            for key, value, cache in zip(self.key[:layers], self.value, pools, strict=False):
                write_rows(key, value, cache, slots, self.scale, triton)

        return each_layer

    def calls(self, kept: int) -> dict[str, Call]:
        """Every operator and peer at hand on the present window, each request keeping its first `kept` rows."""
        self.num_rejected.fill_(self.query - kept)
        where = (self.pool, self.layer_offsets, self.strides, self.slots, None, self.rows)
        decisions = (self.num_drafts, self.num_rejected, self.kept, self.counts)
        found: dict[str, Call] = {
            "empty": empty,
            "commit": functools.partial(ops.commit_all_layers, *where, *decisions),
            "restore": functools.partial(ops.restore_all_layers, *where, *decisions),
            "log": functools.partial(ops.log_all_layers, *where),
        }
        accepted = torch.arange(self.query) < kept
        masked = torch.where(accepted.cuda(), self.slots, -1).flatten()
        found["vllm"] = self.writes(LAYERS, masked)
        found["vllm triton"] = self.writes(LAYERS, masked, triton=True)
        if not kept:
            return found  # the others launch nothing for no rows
        chosen = torch.arange(self.slots.numel()).view(-1, self.query)[:, :kept].flatten().cuda()
        if flashinfer := self._flashinfer(kept, chosen):
            found["flashinfer"] = flashinfer
        return found

    def _flashinfer(self, kept: int, chosen: Tensor) -> Call | None:
        if not (append_paged_kv_cache := flashinfer_writer()):
            return None
        requests = len(self.blocks)
        request = torch.arange(requests).repeat_interleave(kept).int().cuda()
        positions = self.positions[:, :kept].flatten().contiguous().cuda()
        pages = self.blocks.flatten().int().cuda()
        indptr = (2 * torch.arange(requests + 1)).int().cuda()
        last = torch.full((requests,), BLOCK_SIZE, dtype=torch.int32, device="cuda")
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        keys, values = (tensor[:, chosen].to(dtype).contiguous() for tensor in (self.key, self.value))

        def all_layers() -> None:
            for key, value, cache in zip(keys, values, self.layers.view(dtype), strict=True):
                pair = cache.split(HEAD_SIZE, -1)
                append_paged_kv_cache(key, value, request, positions, pair, pages, indptr, last)

        return all_layers

    def differing(self, call: Call, kept: int) -> int:
        """Bytes of the accepted slots that are not what vLLM's writer makes, after `call` on a pool without them."""
        slots = self.slots[:, :kept].flatten()
        flat = self.layers.flatten(3).flatten(1, 2).view(torch.uint8)
        for layer in flat:
            layer[slots] = 0x55
        call()
        wanted = self.packed.view(torch.uint8).unflatten(1, (-1, self.query))[:, :, :kept].flatten(1, 2)
        return sum(int((layer[slots] != rows).sum()) for layer, rows in zip(flat, wanted, strict=True))
