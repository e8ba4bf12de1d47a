# SPDX-License-Identifier: Apache-2.0
"""What an attention of one layer is timed on: the tensors of a step on a GPU, and each backend's call on them."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nwor.attention.configs import Config
from nwor_lab.gpu.timer import Call, empty

HEAD_SIZE, BLOCK_SIZE = 128, 16
LAYERS = 32
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
