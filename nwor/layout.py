# SPDX-License-Identifier: Apache-2.0
"""Where slots lie in vLLM's one KV allocation, and how many rows a window needs beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheLayout:
    """Where the slots of every target layer lie inside vLLM's one KV allocation.

    pool: uint8 [bytes], the whole allocation.
    layer_offsets: int64 [L], byte offset of each layer's first element.
    strides: bytes between blocks, heads and tokens, the same for all layers.
    num_heads, block_size: H and N; row_bytes: C, the bytes of one slot and head, keys then values, or MLA's latent row.
    dtype: the cache's element type (uint8 for fp8 caches).
    packing: int32 [N, E] or None. For caches whose slots are scattered inside a (block, head) chunk, element e of
        in-block offset n lies at element ``packing[n, e]`` of the chunk.
    """

    pool: Tensor
    layer_offsets: Tensor
    strides: tuple[int, int, int]
    num_heads: int
    block_size: int
    row_bytes: int
    dtype: torch.dtype
    packing: Tensor | None = None

    @classmethod
    def from_kv_caches(cls, kv_caches: Sequence[Tensor], packing: Tensor | None = None) -> "CacheLayout":
        """Read the layout off the layers' cache views, each [num_blocks, H, N, elements] of any strides.

        Raises:
            ValueError: the layers differ in shape, strides or dtype, or do not share one allocation.
        """
        first = kv_caches[0]
        storage = first.untyped_storage()
        for index, cache in enumerate(kv_caches):
            if cache.untyped_storage().data_ptr() != storage.data_ptr():
                raise ValueError(f"layer {index} lies in another allocation than layer 0")
            if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
                raise ValueError(
                    f"layer {index} is {tuple(cache.shape)}/{cache.stride()}/{cache.dtype}, "
                    f"layer 0 is {tuple(first.shape)}/{first.stride()}/{first.dtype}"
                )
            if cache.dim() != 4 or cache.stride(3) != 1:
                raise ValueError(f"layer {index} is no [blocks, heads, block_size, elements] view with dense rows")
        _, num_heads, block_size, width = first.shape
        size = first.element_size()
        offsets = torch.tensor([cache.storage_offset() * size for cache in kv_caches], dtype=torch.int64)
        return cls(
            pool=torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage),
            layer_offsets=offsets.to(first.device),
            strides=(first.stride(0) * size, first.stride(1) * size, first.stride(2) * size),
            num_heads=num_heads,
            block_size=block_size,
            row_bytes=width * size,
            dtype=first.dtype,
            packing=packing,
        )

    @property
    def num_layers(self) -> int:
        return self.layer_offsets.numel()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in one layer on this rank."""
        return self.num_heads * self.row_bytes

    def new_rows(self, capacity: int) -> Tensor:
        """A zeroed mini-cache uint8 [L, ceil(capacity / N), H, N, C] in the pool's own order of heads and tokens."""
        blocks = -(-capacity // self.block_size)
        heads_inside = self.strides[1] < self.strides[2] and self.packing is None
        order = (self.block_size, self.num_heads) if heads_inside else (self.num_heads, self.block_size)
        rows = torch.zeros(self.num_layers, blocks, *order, self.row_bytes, dtype=torch.uint8, device=self.pool.device)
        return rows.transpose(2, 3) if heads_inside else rows
