# SPDX-License-Identifier: Apache-2.0
"""What `nwor_lab.gpu` times: the tensors of a step on a GPU, and each backend's call on them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nwor import ops
from nwor.attention.configs import Config
from nwor_lab.cost.traffic import Shape
from nwor_lab.gpu.timer import Call, empty

HEAD_SIZE, BLOCK_SIZE = 128, 16
LAYERS, BLOCKS, QUERY = 32, 1024, 9  # of the operators: layers, blocks of a layer, rows of a recorded window
BATCHES = (1, 4, 16, 64)
FLASH_SPLITS = (1, 2, 4, 8, 16)
ENTRY = ("cache_bytes", "query", "group", "head_size", "programs")
"""Of an entry of a tuning table, what says which shapes it is for; programs are requests times KV heads."""


def write_rows(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, scale: Tensor, triton: bool = False) -> None:
    """Write keys and values [T, H, D] to `cache` [blocks, N, H, 2 * D] by vLLM's writer, or by its Triton one."""
    from vllm import _custom_ops
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash

    ours, theirs = _custom_ops.reshape_and_cache_flash, triton_reshape_and_cache_flash.triton_reshape_and_cache_flash
    dtype = "fp8" if cache.element_size() == 1 else "auto"
    (theirs if triton else ours)(key, value, *cache.chunk(2, -1), slots, dtype, scale, scale)


# -- the all-layer operators ---------------------------------------------------------------------------------------


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


# -- the attention of one layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention of `batch` windows of a token and k drafts.

    cache: bf16 or fp8 (e4m3, with the query in fp8 as vLLM has it).
    """

    heads: int
    kv_heads: int
    batch: int
    context: int
    cache: str = "bf16"
    k: int = 8
    head_size: int = HEAD_SIZE

    @property
    def query(self) -> int:
        """Rows of a window."""
        return self.k + 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def element(self) -> int:
        return {"bf16": 2, "fp8": 1}[self.cache]

    @property
    def entry(self) -> dict[str, int]:
        """What a tuning table knows the shape by."""
        programs = self.batch * self.kv_heads
        return dict(zip(ENTRY, (self.element, self.query, self.group, self.head_size, programs), strict=True))

    @property
    def bytes(self) -> int:
        """What has to move: prefix and query read, new rows read and stored, output written."""
        row = self.kv_heads * 2 * self.head_size
        query = self.query * self.heads * self.head_size * (self.element + 2)
        return self.batch * (self.context * row * self.element + self.query * row * (2 + self.element) + query)


KEYS = [name for name in AttentionShape.__dataclass_fields__ if name != "head_size"]
"""Columns that identify a shape in a table; all shapes of a table have heads of one size."""


def split_scratch(shape: AttentionShape, device: torch.device) -> dict[str, Any]:
    """What vLLM's Triton attention splits a context with, as its backend makes it: arguments of `unified_attention`.

    vLLM 0.32 splits in decodes alone, 0.33 in windows of up to 8 rows too; neither does without them.
    """
    from vllm.v1.attention.backends import triton_attn

    requests, segments = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // shape.kv_heads, triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    size = (min(shape.batch, requests) * shape.query, shape.heads, segments)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    return {
        "seq_threshold_3D": requests,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": empty(*size, 1 << (shape.head_size - 1).bit_length()),
        "softmax_segm_max": empty(size),
        "softmax_segm_expsum": empty(size),
    }


def has_flash2() -> bool:
    """Whether vLLM's FlashAttention 2 can be called here."""
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    return is_fa_version_supported(2)


def has_xqa() -> bool:
    """Whether FlashInfer is here, whose XQA its backend in vLLM takes for windows on a Hopper."""
    return bool(importlib.util.find_spec("flashinfer")) and torch.cuda.get_device_capability() == (9, 0)


class AttentionCase:
    """The tensors of one layer and step, the cache laid out as vLLM's (block, slot, head, key and value): "NHD"."""

    def __init__(self, shape: AttentionShape) -> None:
        from nwor.attention.verify import Workspace

        generator = torch.Generator(device="cuda").manual_seed(0)
        random = functools.partial(torch.randn, device="cuda", generator=generator)
        self.shape, self.fp8 = shape, shape.cache == "fp8"
        batch, length, tokens = shape.batch, shape.context + shape.query, shape.batch * shape.query
        pages = -(-length // BLOCK_SIZE)
        self.kv_cache = self.cache(batch * pages, generator)
        self.staging = self.cache(-(-tokens // BLOCK_SIZE), generator)
        table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages)
        width = 1024 * -(-pages // 1024)  # room for 16k positions, or for 32k and so on
        self.block_table = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
        self.block_table[:, :pages] = table
        self.qkv = random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_size).bfloat16()
        query, self.key, self.value = self.qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        self.query = query.to(torch.float8_e4m3fn) if self.fp8 else query
        self.output = torch.empty(tokens, shape.heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
        self.query_start_loc = torch.arange(0, tokens + 1, shape.query, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        positions = torch.arange(shape.context, length, device="cuda")
        self.slots = (table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        draft = torch.arange(tokens, device="cuda") % shape.query > 0
        self.page_slots = self.slots.masked_fill(draft, -1)
        self.staging_rows = torch.where(draft, draft.cumsum(0) - 1, -1)
        self.one = torch.ones(1, device="cuda")
        self.scale = shape.head_size**-0.5
        self.workspace = Workspace(max(BATCHES), shape.query, shape.heads, shape.head_size, "cuda")

    def cache(self, blocks: int, generator: torch.Generator) -> Tensor:
        """[blocks, H, N, 2 * D] of random numbers around 1."""
        size = (blocks, BLOCK_SIZE, self.shape.kv_heads, 2 * self.shape.head_size)
        if self.fp8:
            cache = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)
            cache &= 0xBF  # numbers under 2
        else:
            cache = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        return cache.transpose(1, 2)

    def nwor(self, config: Config | None = None) -> Call:
        from nwor.attention.verify import verify_attention

        return functools.partial(
            verify_attention, self.query, self.key, self.value, self.kv_cache, self.output,
            query_start_loc=self.query_start_loc, seq_lens=self.seq_lens, block_table=self.block_table,
            page_slots=self.page_slots, staging=self.staging, staging_rows=self.staging_rows,
            max_query_len=self.shape.query, scale=self.scale, kv_cache_dtype="fp8" if self.fp8 else "auto",
            workspace=self.workspace, config=config,
            **dict.fromkeys(("q_scale", "k_scale", "v_scale"), self.one if self.fp8 else None),
        )  # fmt: skip

    def write(self, triton: bool = False) -> None:
        """vLLM's own write of the new rows."""
        write_rows(self.key, self.value, self.kv_cache.transpose(1, 2), self.slots, self.one, triton)

    def arguments(self) -> dict[str, Any]:
        """What vLLM's two backends are called with alike."""
        cache = self.kv_cache.view(torch.float8_e4m3fn) if self.fp8 else self.kv_cache
        keys, values = cache.transpose(1, 2).chunk(2, -1)
        return {
            "q": self.query, "k": keys, "v": values, "out": self.output, "block_table": self.block_table,
            "cu_seqlens_q": self.query_start_loc, "max_seqlen_q": self.shape.query, "seqused_k": self.seq_lens,
            "max_seqlen_k": self.block_table.shape[1] * BLOCK_SIZE, "softmax_scale": self.scale, "causal": True,
        }  # fmt: skip

    def flash(self, splits: int, version: int = 3) -> Call:
        """vLLM's write and FlashAttention 3; 32 splits mean at most, by a schedule as vLLM makes it for full graphs.

        With `version` 2, or where there is no FlashAttention 3, FlashAttention 2, which takes no number of splits.
        """
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
            is_fa_version_supported,
        )

        shape, given, schedule = self.shape, self.arguments(), None
        if version == 2 or not is_fa_version_supported(3):
            splits, version = 0, 2
        elif splits == 32:
            schedule = get_scheduler_metadata(
                batch_size=shape.batch, max_seqlen_q=shape.query, max_seqlen_k=given["max_seqlen_k"],
                num_heads_q=shape.heads, num_heads_kv=shape.kv_heads, headdim=shape.head_size,
                cache_seqlens=self.seq_lens, qkv_dtype=self.query.dtype, cu_seqlens_q=self.query_start_loc,
                page_size=BLOCK_SIZE, causal=True, window_size=(-1, -1), num_splits=splits,
            )  # fmt: skip
        descale = self.one.expand(shape.batch, shape.kv_heads) if self.fp8 else None
        given |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)

        def call() -> None:
            self.write()
            flash_attn_varlen_func(**given, scheduler_metadata=schedule, num_splits=splits, fa_version=version)

        return call

    def triton(self) -> Call:
        """vLLM's Triton write and attention."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        mode = KVQuantMode.FP8_PER_TENSOR if self.fp8 else KVQuantMode.NONE
        descale = self.one.expand(self.shape.batch, self.shape.kv_heads)
        given = self.arguments() | split_scratch(self.shape, self.kv_cache.device)
        given |= {"q_descale": self.one if self.fp8 else None, "k_descale": descale, "v_descale": descale}

        def call() -> None:
            self.write(triton=True)
            unified_attention(**given, window_size=(-1, -1), softcap=0, kv_quant_mode=mode)

        return call

    def xqa(self) -> Call:
        """vLLM's write and FlashInfer's XQA, as vLLM's backend calls it: the query copied to be dense, and in bf16 with
        any cache."""
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
        from vllm.v1.attention.backends.flashinfer import _get_trtllm_workspace_buffer, _make_xqa_draft_block_mask

        shape, given = self.shape, self.arguments()
        query = self.qkv[:, : shape.heads]
        mask = _make_xqa_draft_block_mask(shape.query, causal=True, device=query.device)
        call = functools.partial(
            xqa_batch_decode_with_kv_cache, kv_cache=(given["k"], given["v"]), out=self.output,
            workspace_buffer=_get_trtllm_workspace_buffer(), block_tables=self.block_table, seq_lens=self.seq_lens,
            max_seq_len=given["max_seqlen_k"], bmm1_scale=self.scale, bmm2_scale=1.0, q_len_per_req=shape.query,
            mask=mask.expand(shape.batch, -1, -1).contiguous(),
        )  # fmt: skip

        def write_and_attend() -> None:
            self.write()
            call(query.contiguous())

        return write_and_attend

    def vanilla(self) -> dict[str, Call]:
        """vLLM's backends on this device, each with its write, by name; FlashAttention 2 takes no fp8 cache."""
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

        flash = {} if self.fp8 and not is_fa_version_supported(3) else {"flash": self.flash(32)}
        return {**flash, "triton": self.triton()}

    def calls(self) -> dict[str, Call]:
        """Everything that is compared, by name."""
        return {
            "empty": empty,
            "nwor": self.nwor(),
            "flash": self.flash(32),
            **{f"flash {splits}": self.flash(splits) for splits in FLASH_SPLITS},
            **({"flash2": self.flash(0, version=2)} if not self.fp8 and has_flash2() else {}),
            "triton": self.triton(),
            **({"xqa": self.xqa()} if has_xqa() else {}),
            "write": self.write,
        }

    def error(self, call: Call) -> float:
        """Relative error of a call's output, of at most two requests, against fp32 softmax of what the cache reads."""
        self.write()
        self.output.fill_(float("nan"))
        call()
        context, query, given, wanted = self.shape.context, self.shape.query, self.arguments(), []
        length, device = context + query, self.output.device
        seen = torch.arange(length, device=device) <= torch.arange(context, length, device=device)[:, None]
        for request in range(min(2, self.shape.batch)):
            pages = self.block_table[request, : -(-length // BLOCK_SIZE)].long()
            keys, values = (given[half][pages].float().flatten(0, 1)[:length].transpose(0, 1) for half in ("k", "v"))
            rows = self.query[request * query : (request + 1) * query].float().transpose(0, 1)
            with sdpa_kernel(SDPBackend.MATH):
                wanted.append(
                    functional.scaled_dot_product_attention(
                        rows, keys, values, attn_mask=seen, scale=self.scale, enable_gqa=True
                    ).transpose(0, 1)
                )
        expected = torch.cat(wanted)
        return float((self.output[: len(expected)].float() - expected).norm() / expected.norm())
