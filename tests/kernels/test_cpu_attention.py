# SPDX-License-Identifier: Apache-2.0
"""Mode `stage` on vLLM's own CPU attention: its writer's packing, its numbers, its sliding window.

No engine: the backend's methods are called with stand-ins for what they are given. Our hooks run in every CPU engine.
"""

from types import SimpleNamespace

import pytest
import torch
from devices import needs_fp8_cache
from torch import Tensor

from tests.lab.attention import FP8, TOLERANCE, Batch

pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")

from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata, _get_attn_isa

from nwor import ops
from nwor.vllm import attention_cpu

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU backend is not in this build")

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 4, 2, 32
PREFIXES, TAILS = (37, 0, 31, 64, 90), (5, 3, 1, 9, 4)
CACHES = [
    pytest.param(
        dtype,
        kv_cache_dtype,
        isa,
        id=f"{dtype}-{kv_cache_dtype}-{isa or 'best'}".removeprefix("torch."),
        marks=needs_fp8_cache if kv_cache_dtype != "auto" else (),
    )
    for dtype, isa in [(torch.float32, "vec"), (torch.float16, "vec"), (torch.bfloat16, "vec"), (torch.bfloat16, "")]
    for kv_cache_dtype in ("auto", "fp8", "fp8_e5m2")
]


class Backend:
    """One attention layer of vLLM's CPU backend over its own cache, and a batch for it."""

    def __init__(
        self, dtype: torch.dtype, kv_cache_dtype: str, isa: str = "", head_size: int = 64, sliding_window: int = -1
    ) -> None:
        quantised = kv_cache_dtype != "auto"
        self.dtype, self.head_size = dtype, head_size
        self.impl = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype=kv_cache_dtype,
            scale=head_size**-0.5,
            sliding_window=sliding_window,
            logits_soft_cap=0,
            alibi_slopes=None,
            sinks=None,
            use_zentorch_sdpa=False,
        )
        batch = Batch([*zip(PREFIXES, TAILS, strict=True)], dtype, head_size=head_size, block_size=BLOCK_SIZE)
        self.block_table, self.query_start_loc, self.seq_lens = batch.block_table, batch.query_start_loc, batch.seq_lens
        self.query, self.slots = batch.query.contiguous(), torch.cat(batch.slots)
        rows = torch.randn(2, len(self.slots), NUM_KV_HEADS, head_size, generator=batch.generator)
        self.key, self.value = rows.to(dtype)
        is_tail = [torch.arange(prefix + tail) >= prefix for prefix, tail in batch.requests]
        self.tail_rows = torch.cat(is_tail).nonzero().flatten()
        self.layer = SimpleNamespace(
            kv_cache=torch.zeros(batch.kv_cache.shape, dtype=torch.uint8 if quantised else dtype),
            isa=isa or _get_attn_isa(dtype, BLOCK_SIZE, head_size, kv_cache_dtype),
            impl=self.impl,
            _k_scale_float=1.5 if quantised else 1.0,
            _v_scale_float=0.75 if quantised else 1.0,
        )

    def in_float32(self) -> "Backend":
        """The same numbers and masks, for vLLM's attention that rounds none of them."""
        exact = Backend(torch.float32, self.impl.kv_cache_dtype, "vec", self.head_size, self.impl.sliding_window)
        exact.query, exact.key, exact.value = self.query.float(), self.key.float(), self.value.float()
        exact.impl = self.impl
        return exact

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """vLLM's own write of `rows` of the batch, through the patched or unpatched method."""
        key, value = self.key[rows], self.value[rows]
        CPUAttentionBackendImpl.do_kv_cache_update(self.impl, self.layer, key, value, cache, slots)

    def attend(self) -> Tensor:
        """vLLM's own attention of the tails, through the patched or unpatched method."""
        schedule = vllm_ops.cpu_attn_get_scheduler_metadata(
            len(TAILS), NUM_HEADS, NUM_KV_HEADS, self.head_size, self.seq_lens, self.dtype, self.query_start_loc, True,
            self.impl.sliding_window, self.layer.isa, True, None, self.impl.kv_cache_dtype,
        )  # fmt: skip
        metadata = CPUAttentionMetadata(
            num_actual_tokens=sum(TAILS), max_query_len=max(TAILS), query_start_loc=self.query_start_loc,
            max_seq_len=int(self.seq_lens.max()), seq_lens=self.seq_lens, block_table=self.block_table,
            slot_mapping=self.slots[self.tail_rows], scheduler_metadata=schedule,
        )  # fmt: skip
        output = torch.full_like(self.query, float("nan"))
        key, value = self.key[self.tail_rows], self.value[self.tail_rows]
        CPUAttentionBackendImpl.forward(
            self.impl, self.layer, self.query, key, value, self.layer.kv_cache, metadata, output
        )
        return output

    def verify(self, staged: bool) -> Tensor:
        """Ours: drafts lie in staging, written by vLLM's writer, and their slots hold other rows; or in the pages."""
        cache, staging = self.layer.kv_cache.clone(), None
        if staged:
            staging = torch.zeros_like(cache[:2])
            self.write(staging, torch.arange(len(self.tail_rows)), self.tail_rows)
            self.write(cache, self.slots[self.tail_rows], self.tail_rows.roll(1))
            first = self.tail_rows[self.query_start_loc[:-1].long()]
            self.write(cache, self.slots[first], first)
        output = torch.full_like(self.query, float("nan"))
        ops.verify_attention(
            self.query, cache, staging, output, self.query_start_loc, self.seq_lens, self.block_table,
            self.query_start_loc[:-1] + 1, attention_cpu.find_packing(self.layer), scale=self.impl.scale,
            sliding_window=self.impl.sliding_window, alibi_slopes=self.impl.alibi_slopes, sinks=self.impl.sinks,
            kv_cache_dtype=self.impl.kv_cache_dtype, k_scale=self.layer._k_scale_float,
            v_scale=self.layer._v_scale_float,
        )  # fmt: skip
        return output


@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "isa"), CACHES)
@pytest.mark.parametrize("head_size", [32, 128])
def test_packing_of_vllms_writer(head_size, dtype, kv_cache_dtype, isa):
    """Every element of every slot is found again where the packing says, whatever vLLM's instruction set."""
    backend = Backend(dtype, kv_cache_dtype, isa, head_size)
    packing = attention_cpu.find_packing(backend.layer)
    assert packing is not None
    assert sorted(packing.flatten().tolist()) == list(range(BLOCK_SIZE * 2 * head_size))
    backend.write(backend.layer.kv_cache, backend.slots, torch.arange(len(backend.slots)))
    chunks = backend.layer.kv_cache.flatten(2)
    unpacked = chunks[:, :, packing.flatten().long()].view(backend.layer.kv_cache.shape).transpose(1, 2).flatten(0, 1)
    found = unpacked[backend.slots]
    if kv_cache_dtype == "auto":
        assert torch.equal(found, torch.cat([backend.key, backend.value], dim=-1))
    else:  # the writer rounds towards zero: less than one step of 3 or 2 bits
        numbers = found.view(FP8[kv_cache_dtype]).float()
        key, value = numbers.chunk(2, dim=-1)
        step = 2**-3 if kv_cache_dtype == "fp8" else 2**-2
        torch.testing.assert_close(key * 1.5, backend.key.float(), rtol=step, atol=0.02)
        torch.testing.assert_close(value * 0.75, backend.value.float(), rtol=step, atol=0.02)


def test_a_packing_that_cannot_be_read(monkeypatch):
    """A writer that stores something else than each element once has no packing, and the mode falls back."""
    backend = Backend(torch.float32, "auto")
    real = vllm_ops.cpu_attn_reshape_and_cache

    def lossy(key, value, key_cache, *more, **options):
        real(key, value, key_cache, *more, **options)
        key_cache[..., 1] = key_cache[..., 0]

    monkeypatch.setattr(vllm_ops, "cpu_attn_reshape_and_cache", lossy)
    assert attention_cpu.find_packing(backend.layer) is None
    monkeypatch.setattr(vllm_ops, "cpu_attn_reshape_and_cache", lambda *args, **options: None)
    assert attention_cpu.find_packing(backend.layer) is None


@pytest.mark.parametrize(
    ("sliding_window", "masks"), [(-1, ""), (1, "slopes"), (4, "sinks"), (33, ""), (33, "slopes and sinks")]
)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "isa"), CACHES)
def test_our_attention_is_vllms(dtype, kv_cache_dtype, isa, sliding_window, masks):
    """The same bytes, prefix in pages and tail in staging or in pages too, give what vLLM's attention gives in fp32.

    Up to one rounding: vLLM's attention of bfloat16 is off by more with AMX, which rounds weights and scaled values.
    """
    backend = Backend(dtype, kv_cache_dtype, isa, sliding_window=sliding_window)
    exact = backend.in_float32()
    for each in (backend, exact):
        each.write(each.layer.kv_cache, each.slots, torch.arange(len(each.slots)))
    plain = exact.attend()
    backend.impl.alibi_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if "slopes" in masks else None
    backend.impl.sinks = torch.tensor([3.0, -1.0, 0.5, 2.0]) if "sinks" in masks else None
    theirs, ours = exact.attend(), backend.verify(staged=True)
    torch.testing.assert_close(ours.float(), theirs, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[torch.float32])
    assert torch.equal(ours, backend.verify(staged=False)), "where the tail lies changes no bit"
    changes_nothing = masks in ("", "slopes") and (sliding_window == 1 or not masks)  # a row's own slope adds 0
    assert changes_nothing or (theirs - plain).abs().max() > 0.1
