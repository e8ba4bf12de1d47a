# SPDX-License-Identifier: Apache-2.0
"""The operators of `kernels/`, typed and documented: `torch.ops._C_cache_ops`, beside vLLM's own.

Shapes use T tokens, R requests, W the most drafts of one, L layers, H KV heads, D head size, N block size.

Of one layer:

* *key*, *value* [T', H, D] float32, float16 or bfloat16, last dimension contiguous, other strides free. T' may exceed
  T, the length of `slot_mapping`, as vLLM's padded batches do.
* *key_cache*, *value_cache* [num_blocks, N, H, D]. The layout is in the strides alone: NHD as it is, HND as
  ``hnd.transpose(1, 2)``, vLLM 0.32's own view [num_blocks, H, N, 2 * D] as
  ``kv_cache.transpose(1, 2).split(D, -1)``. The last dimension is contiguous.
* *slot_mapping* int64 [T]: ``block * N + offset``, pairwise different; negative: no row.
* *accepted_mask* bool [T], a prefix or any set of rows.
* *staging_key*, *staging_value* [C, H, D], in the bytes of the cache: the dtype of `key`, or uint8 for fp8.
  *staging_slots* int64 [C], the slot of each staged row. *staging_metadata* int32 [2], ``[staged_count, error_flag]``:
  one count a token, whatever the launch shape.
* *log_key*, *log_value* [T', H, D] of the cache's dtype, T' >= T; row t is slot t, and rows of negative slots keep what
  they held.
* *kv_cache_dtype* ``"auto"`` (the cache has the dtype of `key`; scales are not looked at), ``"fp8"`` or ``"fp8_e4m3"``,
  or ``"fp8_e5m2"`` (the cache is uint8). *k_scale*, *v_scale* None (1.0), one fp32 number, fp32 [T, 1] (one a token) or
  fp32 [1, H] (one a head), on the device of `key`.

Of all layers at once, in one launch, whose slots of C bytes a head (keys, then values) move between the pages and a
mini-cache, that of `open_window`:

* *pool* uint8 [bytes], the whole KV allocation; every layer is a view of it. On CUDA a layer has fewer than 2^31 slots.
* *layer_offsets* int64 [L], byte offset of each layer's first element. *cache_strides* bytes between blocks, between
  heads and between the tokens of a block, the same in all layers.
* *slots* int64 [R, W], negative: no row.
* *packing* None, or int32 [N, E] for caches whose slots are scattered over the N * C bytes of their (block, head)
  chunk, as vLLM's CPU caches are: element e of in-block offset n is element ``packing[n, e]`` of the chunk, in `pool`
  and in `rows` alike. Elements have C / E bytes. CPU only.
* *rows* uint8 [L, B, H, N, C]; row ``m = r * W + d`` lies in block ``m // N`` at offset ``m % N``, so that vLLM's own
  writer can fill it with m for a slot.
* *logged* None, or for a log that outlives the step int64 [R', P], R' >= R, P a power of two, at least W, that divides
  N: of each row of the log the slot whose bytes it holds as the pages do, -1: none. Slot s of request r is then row
  ``r * P + s % P``. The slots of a request must be of consecutive positions, so that no two of them share a row.
* *num_drafts* int32 [R], as `open_window` wrote it. *num_rejected* int32 [R], as vLLM's runner has it. Draft d of
  request r is kept where ``d < num_drafts[r] - num_rejected[r]``: vLLM keeps the rows ``[0, query_len - num_rejected)``
  of a query, of which the drafts are the last, and advances `num_computed_tokens` by that many.
* *kept* int32 [R], set to each request's kept rows, of those that are there.
* *counts* int64 [6], raised by the kept rows, the rejected rows, the requests that hold rows, their drafts (n - 1 each)
  and the requests that fall back; the first two on closing, the others by `open_window`. One count a row, whatever L, H
  or the launch. The last number is 0 between launches.
* *published* None, or int64 [6 + R'] on the host, R' >= R, in pinned memory where `pool` is on a GPU, which then writes
  it: `counts` as they are after the call, and for each request two int32, its kept and its held drafts. It may be read
  once whatever was queued behind the call is done.

The fp8 bytes are those that vLLM's own writer makes on that device, and its two writers differ: the CPU's
(`cpu_attn_reshape_and_cache`) multiplies by ``1 / scale``, rounds towards zero, writes NaN as the largest finite value
and -0.0 as 0; CUDA's (`reshape_and_cache_flash`) divides by `scale`, rounds to nearest even and writes NaN as 0x7f.
Both saturate.

Each operator raises RuntimeError, naming the tensor, before it modifies anything. Values that only the device knows (a
slot beyond the cache, a batch that ends before it starts, more rows accepted than staged) are errors on the CPU and
skipped without a write on CUDA, where the host must not wait for them. On CUDA every operator only enqueues kernels on
the current stream of the tensors' device, allocates nothing, and may be captured in a CUDA graph: all that changes
between replays is read on the device.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., None])

OPERATORS: dict[str, list[str]] = {}  # names of the parameters of each


def library() -> Path:
    """The built extension.

    Raises:
        ImportError: it has not been built.
    """
    folder = Path(__file__).parent
    built = sorted(folder.glob("_C.*so"))
    if not built:
        raise ImportError(f"the operators are not built: no _C.*so in {folder}; run `make kernels`")
    return built[0]


@functools.cache
def load() -> None:
    """Load the extension once, and tell torch that its operators return nothing but what they write in place.

    Raises:
        ImportError: the extension has not been built, or for another torch, or from other sources than these.
    """
    path = library()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"{path} does not load beside torch {torch.__version__} ({error}); run `make kernels`"
        ) from error
    for name, parameters in OPERATORS.items():
        operator = getattr(torch.ops._C_cache_ops, name, None)
        if operator is None or [argument.name for argument in operator.default._schema.arguments] != parameters:
            raise ImportError(f"{path} was built from other sources, whose {name} is another; run `make kernels`")
        torch.library.register_fake(f"_C_cache_ops::{name}", lambda *args, **kwargs: None)


def _operator(declaration: F) -> F:
    """Make a call of the C++ operator of that name; the declaration gives types, documentation and nothing else."""
    name = declaration.__name__
    OPERATORS[name] = list(inspect.signature(declaration).parameters)
    bound: list[Callable[..., None]] = []  # torch takes longer to find an operator by its name than to call it

    @functools.wraps(declaration)
    def call(*args: Any, **kwargs: Any) -> None:
        if not bound:
            load()
            bound.append(getattr(torch.ops._C_cache_ops, name).default)
        bound[0](*args, **kwargs)

    return cast(F, call)


@_operator
def stage_kv_cache(
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    staging_key: Tensor,
    staging_value: Tensor,
    staging_slots: Tensor,
    staging_metadata: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Append one layer's rows to its staging instead of writing them to the cache.

    Rows go in token order behind those already staged; rows with a negative slot are left out. If they do not all
    fit, none of them is staged and the error flag is set; a flagged window takes no more rows until the caller zeroes
    `staging_metadata`.
    """


@_operator
def commit_staged_kv_cache(
    staging_key: Tensor,
    staging_value: Tensor,
    staging_slots: Tensor,
    staging_metadata: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    accepted_len: Tensor,
) -> None:
    """Copy the first `accepted_len` staged rows to their slots, byte for byte; nothing if the error flag is set.

    accepted_len: one int32 or int64 on the device, at most the staged count. The caches have the staging's dtype.
    """


@_operator
def commit_draft_layer(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    accepted_mask: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the accepted rows of one layer, and only those, as vLLM's own writer would."""


@_operator
def log_cache_slots(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, log_key: Tensor, log_value: Tensor
) -> None:
    """Copy the raw bytes of one layer's slots, of any dtype, to a log, before vLLM overwrites them."""


@_operator
def restore_rejected_drafts(
    log_key: Tensor,
    log_value: Tensor,
    slot_mapping: Tensor,
    accepted_mask: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> None:
    """Restore one layer's slots of the rows that were not accepted to the bytes that `log_cache_slots` logged."""


@_operator
def open_window(
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    slot_mapping: Tensor,
    slots: Tensor,
    num_drafts: Tensor,
    staging_rows: Tensor | None,
    page_slots: Tensor | None,
    counts: Tensor,
) -> None:
    """Find on the device which rows of a batch are drafts to hold, and where all rows are to be written.

    Of a request with n logits and q rows the n - 1 drafts are held, the last rows of the query; where staging is asked
    for (`staging_rows` is not None) only if the query is a verify query, one with ``n == q``. The row before the
    drafts, the token sampled last, is never held. A request whose drafts are not held, for that or because they are
    more than W or q, falls back, and `counts` says so.

    Args:
        query_start_loc: int32 [R + 1], first row of each query in the batch; may be longer, as vLLM pads it.
        cu_num_logits: int32 [R + 1], logits of the requests before each.
        slots: int64 [R', W], R' >= R, written whole: ``slots[r, d]`` is the slot of draft d of request r, which is row
            ``r * W + d`` of the mini-cache; -1 behind the drafts, for a negative slot, and for requests from R on. W
            may be 0: then all fall back.
        num_drafts: int32 [R'], written whole: the held drafts of each request.
        staging_rows: None, or int64 [T'], T' >= T, written whole: the mini-cache's row of each held row, else -1.
        page_slots: None, or int64 [T'], written whole: the slot of each row that is not held, else -1; -1 from
            ``query_start_loc[R]`` on. Goes with `staging_rows`; neither may be `slot_mapping` itself.
    """


@_operator
def log_all_layers(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    logged: Tensor | None = None,
) -> None:
    """Copy the raw bytes of the slots of all layers to a mini-cache; with `logged`, of those not there already."""


@_operator
def restore_all_layers(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    num_drafts: Tensor,
    num_rejected: Tensor,
    kept: Tensor,
    counts: Tensor,
    logged: Tensor | None = None,
    published: Tensor | None = None,
) -> None:
    """Copy the *rejected* rows from the mini-cache to their slots in all layers.

    logged: set to the slot of each rejected row, and to -1 for each kept one.
    """


@_operator
def commit_all_layers(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    num_drafts: Tensor,
    num_rejected: Tensor,
    kept: Tensor,
    counts: Tensor,
    published: Tensor | None = None,
) -> None:
    """Copy the *kept* rows from the mini-cache to their slots in all layers: the other half of `restore_all_layers`."""


@_operator
def verify_attention(
    query: Tensor,
    kv_cache: Tensor,
    staging: Tensor | None,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    window_start: Tensor,
    packing: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of verify windows on the CPU: drafts from staging, all positions before them from the pages.

    Args:
        query: [T, Hq, D] float32, float16 or bfloat16; head vectors dense, D a multiple of 8.
        kv_cache: [num_blocks, H, N, 2 * D], one layer's pages, of the dtype of `query`, or uint8 for fp8.
        staging: [B, H, N, 2 * D], the layer's mini-cache of drafts, of the same dtype and packing; None: drafts lie in
            the pages.
        output: [T, Hq, D], written for the rows of requests with a window; other rows keep what they held.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], this step's rows included.
        block_table: int32 [R, max_blocks].
        window_start: int32 [R], the staging row of each request's first draft, the second row of its query, any number
            from 0 without staging; negative: no window.
        packing: int32 [N, 2 * D].
        scale, softcap: of the scores; softcap 0 is none. sliding_window: 0 or the window in positions.
        alibi_slopes, sinks: float32 [Hq] or None; a sink is a score more in its head's softmax.
        kv_cache_dtype, k_scale, v_scale: how uint8 elements are read.
    """
