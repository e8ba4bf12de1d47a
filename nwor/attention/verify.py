# SPDX-License-Identifier: Apache-2.0
"""Attention of verify windows on a GPU: prefix from the pages, the step's own rows from the projection, one launch.

A window is a request whose query has 1 to `max_query_len` rows. Its rows attend to the positions
``[0, seq_len - query_len)`` in the pages and, causally, to the query's own keys and values, which need not be in any
page; each of these rows is stored once on the way, to staging or to its page.

Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor.attention import configs
from nwor.attention.configs import HEAD_SIZES, Config, Device, next_power_of_2
from nwor.attention.kernel import verify_windows

FP8 = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 2}
PARTIAL_ROWS = 1 << 16  # rows of the partial sums of all splits: bounds the number of splits, 32 MiB at head size 128


class Workspace:
    """What splits leave for each other; made once, used by all layers of a stream in turn.

    `arrivals` holds two numbers for each window, KV head and tile of rows. Where the last split combines, the first is
    how many have arrived, 0 between launches. Where splits wait for each other, the sign of the second is what turns.

    Args:
        max_requests: of a batch, padding included.
        max_query_len: rows of a window at most.
        num_heads: query heads of a layer.
        head_size: their size.
        device: of everything.
    """

    def __init__(
        self, max_requests: int, max_query_len: int, num_heads: int, head_size: int, device: torch.device | str
    ) -> None:
        self.max_requests, self.max_query_len, self.num_heads = max_requests, max_query_len, num_heads
        rows = max(PARTIAL_ROWS, num_heads * max_query_len)
        self.partials = torch.empty(rows, head_size, dtype=torch.float32, device=device)
        self.softmax = torch.empty(rows, 2, dtype=torch.float32, device=device)
        tiles = num_heads * (2 + max_query_len // 16)
        self.arrivals = torch.zeros(max_requests * tiles, 2, dtype=torch.int32, device=device)
        self.device = Device.of(self.arrivals.device)
        self.launches: dict[tuple, dict[tuple, _Launch]] = {}  # of layers alike, by the signature of a call


def verify_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    page_slots: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    max_query_len: int,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Workspace,
    config: Config | None = None,
) -> None:
    """Attend and store the window rows of one layer, in one launch.

    Requests with more than `max_query_len` rows, and padded ones with none, are left alone: their output, pages and
    staging are not touched. No page position from ``seq_len - query_len`` on is read. Allocates nothing, waits for
    nothing, and depends on the shapes alone, so it may be captured in a CUDA graph and replayed on other values.

    Args:
        query: [T, Hq, D] bf16 or fp16, or float8_e4m3fn with an fp8 cache; D 64, 96, 128 or 256.
        key, value: [T', H, D] bf16 or fp16, T' >= T, the rows as projected (rotated), not yet quantised.
        kv_cache: [num_blocks, H, N, 2 * D], keys then values, of the dtype of `key`, or uint8 for fp8; any strides
            but the last, which is 1.
        output: [T, Hq, D] bf16 or fp16. The last dimension of these four is dense, their other strides are free.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], the query's rows included.
        block_table: int32 [R, max_blocks], rows dense.
        page_slots: int64 [>= T], ``block * N + offset`` of the page slot to write a row to, negative: none.
        staging: [B', H, N, 2 * D], the layer's mini-cache, of the dtype of `kv_cache`.
        staging_rows: int64 [>= T], the row of staging (block ``m // N``, offset ``m % N``) for a held row; such a row
            is not written to its page. Negative: not held.
        max_query_len: rows of a window at most.
        scale: of the scores. softcap: 0 is none. sliding_window: 0 or the window in positions, own row included.
        alibi_slopes: fp32 [Hq] or None. sinks: [Hq] or None, a score more in each head's softmax.
        kv_cache_dtype: ``"auto"``, ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``. Stored bytes are those of vLLM's
            `reshape_and_cache_flash`; with fp8 the tail is attended to as it is stored.
        q_scale, k_scale, v_scale: fp32, one element each on the device: what fp8 numbers are multiples of.
        workspace: see `Workspace`; not shared by launches that may run at once.
        config: instead of the tuned one.

    Raises:
        ValueError: wrong input, named, before anything is launched.
    """
    attend = LayerAttention(
        staging=staging, staging_rows=staging_rows, max_query_len=max_query_len, scale=scale, softcap=softcap,
        sliding_window=sliding_window, alibi_slopes=alibi_slopes, sinks=sinks, kv_cache_dtype=kv_cache_dtype,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, workspace=workspace, config=config,
    )  # fmt: skip
    attend(query, key, value, kv_cache, output, query_start_loc, seq_lens, block_table, page_slots)


@dataclass
class _Launch:
    """A launch but for addresses; run: of the compiled kernel, None until there is one, and under the interpreter."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    run: Callable[..., None] | None = None


@dataclass(eq=False, kw_only=True)
class LayerAttention:
    """`verify_attention` for the steps of one layer; what does not change from step to step is given once, as there.

    The first call of a signature is checked, planned and bound by Triton: of all that these depend on, which is shapes,
    dtypes, devices, strides, and what addresses leave of 16. A call of a known one, of this layer or of another alike
    on the same workspace, launches at once. Numbers of rows may differ from call to call, and are compared in each.
    """

    staging: Tensor
    staging_rows: Tensor
    max_query_len: int
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    kv_cache_dtype: str = "auto"
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    workspace: Workspace
    config: Config | None = None

    def __post_init__(self) -> None:
        tensors = self._tensors()
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._scales = float(self.scale), float(self.softcap)
        self._fixed = *addresses, *self._scales
        self._room = self.staging_rows.numel()
        alike = (
            self.max_query_len, self.softcap > 0, self.sliding_window, self.kv_cache_dtype, self.config,
            *[t if t is None else (t.dtype, t.device, t.stride(), t.shape) for t in tensors],
            *[address and address % 16 for address in addresses],
        )  # fmt: skip
        self._launches = self.workspace.launches.setdefault(alike, {})

    def _tensors(self) -> list[Tensor | None]:
        """What does not change, in the order of the kernel's arguments."""
        workspace = self.workspace
        return [
            self.staging, self.staging_rows, self.alibi_slopes, self.sinks, self.q_scale, self.k_scale, self.v_scale,
            workspace.partials, workspace.softmax, workspace.arrivals,
        ]  # fmt: skip

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        page_slots: Tensor,
    ) -> None:
        """Attend and store the window rows of a step; arguments, errors and promises are those of `verify_attention`.

        They come in the order of the kernel's.
        """
        tensors = query, key, value, kv_cache, output, query_start_loc, seq_lens, block_table, page_slots
        addresses = [tensor.data_ptr() for tensor in tensors]
        rows, projected = query.shape, key.shape
        signature = (
            rows[1:], projected[1:], kv_cache.shape, query_start_loc.shape, seq_lens.shape, block_table.shape,
            *[(tensor.dtype, tensor.device, tensor.stride()) for tensor in tensors],
            *[address % 16 for address in addresses],
        )  # fmt: skip
        launch = self._launches.get(signature)
        if (
            launch is None
            or output.shape != rows
            or value.shape != projected
            or not rows[0] <= min(projected[0], page_slots.numel(), self._room)
            or not page_slots.is_contiguous()
        ):
            self._check(tensors)
            if len(seq_lens) == 0:
                return
            launch = self._launches[signature] = self._plan(tensors)
        if launch.run is None:
            self._bind(launch, tensors)
        else:
            launch.run(*addresses, *self._fixed, *launch.numbers, *launch.constants.values())

    def _bind(self, launch: _Launch, tensors: tuple[Tensor, ...]) -> None:
        """Launch by Triton's own binding, which compiles where it has to, and keep the compiled kernel."""
        query, key, value, kv_cache, *others = tensors
        staging = self.staging
        if fp8 := FP8.get(self.kv_cache_dtype):  # as such the tensor cores can take keys from where they were copied to
            kind = torch.float8_e4m3fn if fp8 == 1 else torch.float8_e5m2
            kv_cache, staging = kv_cache.view(kind), staging.view(kind)
        kernel = verify_windows[launch.grid](
            query, key, value, kv_cache, *others, staging, *self._tensors()[1:], *self._scales,
            *launch.numbers, **launch.constants, **launch.options,
        )  # fmt: skip
        launch.run = kernel and kernel[launch.grid]

    def _plan(self, tensors: tuple[Tensor, ...]) -> _Launch:
        query, key, value, kv_cache, output, _, seq_lens, block_table, _ = tensors
        requests, (heads, head_size), (kv_heads, block_size) = len(seq_lens), query.shape[1:], kv_cache.shape[1:3]
        query_fp8, workspace = query.dtype == torch.float8_e4m3fn, self.workspace
        plan = configs.plan(
            workspace.device, len(workspace.partials), requests, heads, kv_heads, head_size, kv_cache.element_size(),
            self.max_query_len, query_fp8, self.config,
        )  # fmt: skip
        compiled = plan.compiled
        strides = [stride for tensor in (query, key, value, output) for stride in tensor.stride()[:2]]
        strides += [*kv_cache.stride()[:3], *self.staging.stride()[:3], block_table.stride(0)]
        constants = {
            "GROUP": heads // kv_heads,
            "HEAD_SIZE": head_size,
            "WIDTH": next_power_of_2(head_size),
            "BLOCK_SIZE": block_size,
            "MAX_QUERY": self.max_query_len,
            "ROWS": compiled.rows,
            "ROW_TILES": compiled.row_tiles,
            "TAIL": max(16, next_power_of_2(self.max_query_len)),
            "TILE": compiled.tile,
            "SPLIT": compiled.split,
            "SLIDING_WINDOW": self.sliding_window,
            "SOFTCAP": self.softcap > 0,
            "ALIBI": self.alibi_slopes is not None,
            "SINKS": self.sinks is not None,
            "FP8": FP8.get(self.kv_cache_dtype, 0),
            "QUERY_FP8": query_fp8,
            "STAGES": compiled.stages,
            "KEY_GROUPS": compiled.warps if compiled.keys_per_warp else 1,
            "GRID_BARRIER": compiled.grid_barrier,
            "MAX_SPLITS": compiled.max_splits,
            "COMBINE_ROWS": compiled.combine_rows,
        }
        options = {
            "num_warps": compiled.warps,
            "num_stages": compiled.stages,
            "launch_cooperative_grid": compiled.grid_barrier,
            "maxnreg": compiled.registers or None,
        }
        grid = kv_heads, requests * compiled.row_tiles, plan.splits
        return _Launch(grid, (*strides, plan.min_tiles_per_split), constants, options)

    def _check(self, tensors: tuple[Tensor, ...]) -> None:
        query, key, value, kv_cache, output, query_start_loc, seq_lens, block_table, page_slots = tensors
        staging, staging_rows, workspace = self.staging, self.staging_rows, self.workspace
        kv_cache_dtype, max_query_len = self.kv_cache_dtype, self.max_query_len

        def need(condition: bool, complaint: str) -> None:
            if not condition:
                raise ValueError(complaint)

        need(query.dim() == 3 and key.dim() == 3 and value.dim() == 3, "query, key and value must be [T, heads, D]")
        need(kv_cache.dim() == 4 and staging.dim() == 4, "kv_cache and staging must be [blocks, H, N, 2 * D]")
        tokens, heads, head_size = query.shape
        kv_heads = kv_cache.shape[1]
        fp8 = kv_cache_dtype in FP8
        need(head_size in HEAD_SIZES, f"head size {head_size} is none of {HEAD_SIZES}; use vLLM's own attention")
        whole = heads > 0 < kv_heads and heads % kv_heads == 0
        need(whole, f"{heads} query heads do not divide among {kv_heads} KV heads")
        need(fp8 or kv_cache_dtype == "auto", f"kv_cache_dtype {kv_cache_dtype!r} is none of auto, {', '.join(FP8)}")
        need(key.dtype in (torch.bfloat16, torch.float16), f"key must be bfloat16 or float16, is {key.dtype}")
        need(key.shape == value.shape and key.dtype == value.dtype, "key and value must have one shape and dtype")
        need(key.shape[0] >= tokens and key.shape[1:] == (kv_heads, head_size), f"key has shape {tuple(key.shape)}")
        need(
            output.shape == query.shape and output.dtype == key.dtype, "output must have query's shape and key's dtype"
        )
        cache_dtype = torch.uint8 if fp8 else key.dtype
        need(kv_cache.dtype == cache_dtype, f"kv_cache of {kv_cache_dtype} must be {cache_dtype}, is {kv_cache.dtype}")
        need(
            kv_cache.shape[3] == 2 * head_size, f"kv_cache rows hold {kv_cache.shape[3]} elements, not {2 * head_size}"
        )
        need(
            staging.dtype == kv_cache.dtype and staging.shape[1:] == kv_cache.shape[1:],
            "staging must have the dtype, heads, block size and row of kv_cache",
        )
        quantised = query.dtype == torch.float8_e4m3fn
        need(query.dtype == key.dtype or (fp8 and quantised), f"query is {query.dtype} beside a key of {key.dtype}")
        for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output)):
            need(tensor.stride(2) == 1, f"{name} must have a dense last dimension")
        need(
            kv_cache.stride(3) == 1 and staging.stride(3) == 1, "kv_cache and staging must have a dense last dimension"
        )
        requests = seq_lens.shape[0]
        for name, tensor, dtype, least in (
            ("query_start_loc", query_start_loc, torch.int32, requests + 1),
            ("seq_lens", seq_lens, torch.int32, requests),
            ("page_slots", page_slots, torch.int64, tokens),
            ("staging_rows", staging_rows, torch.int64, tokens),
        ):
            need(tensor.dtype == dtype and tensor.is_contiguous(), f"{name} must be contiguous {dtype}")
            need(tensor.numel() >= least, f"{name} has {tensor.numel()} elements, needs {least}")
        need(
            block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.stride(1) == 1,
            "block_table must be int32 [R, max_blocks] with dense rows",
        )
        need(block_table.shape[0] >= requests, f"block_table has {block_table.shape[0]} rows, needs {requests}")
        scales = [("q_scale", self.q_scale, quantised), ("k_scale", self.k_scale, fp8), ("v_scale", self.v_scale, fp8)]
        for name, scale, wanted in scales:
            if wanted:
                need(scale is not None, f"{name} is needed for fp8")
                assert scale is not None
                need(
                    scale.numel() == 1 and scale.dtype == torch.float32,
                    f"{name} must be one fp32; use vLLM's attention",
                )
        for name, per_head in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            need(per_head is None or per_head.shape == (heads,), f"{name} must be [{heads}]")
        need(
            requests <= workspace.max_requests
            and 0 < max_query_len <= workspace.max_query_len
            and heads <= workspace.num_heads
            and head_size <= workspace.partials.shape[1],
            f"the workspace is for {workspace.max_requests} requests of {workspace.max_query_len} rows, "
            f"{workspace.num_heads} heads of {workspace.partials.shape[1]}; make a larger one",
        )
        need(
            all(tensor is None or tensor.device == query.device for tensor in (*tensors, *self._tensors())),
            f"everything must be on {query.device}, where query is",
        )
