# SPDX-License-Identifier: Apache-2.0
"""The extension as a library: torch's own checks, loading beside vLLM,
and the bytes of vLLM's own writers."""

import subprocess
import sys

import pytest
import torch
from devices import each_device, needs_fp8_cache, needs_gpu

from nwor import ops
from nwor_lab.operators.inputs import (
    LAYOUTS,
    Pool,
    make_batch,
    make_cache,
    make_mask,
    make_scale,
    make_slots,
    make_staging,
    make_targets,
    make_vectors,
    make_window,
)

ops.load()


def arguments_of(operator: str, device: str) -> tuple:
    key, value = make_vectors("qkv", 5, 2, 8, torch.bfloat16, device)
    slots = make_slots(5, 16, device)
    mask = make_mask("sparse", 5, device)
    staging = make_staging(6, 2, 8, torch.uint8, device)
    caches = make_cache("NHD", 4, 4, 2, 8, torch.uint8, device)
    scales = make_scale("scalar", 5, 2, device, 1), make_scale("head", 5, 2, device, 2)
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device, element_size=2 if device == "cpu" else 0)
    window = make_window([3, 1], [1, 0], 16, device)
    batch = make_batch([3, 4], [3, 1], 16, device)
    return {
        "stage_kv_cache": (key, value, slots, *staging, "fp8", *scales),
        "commit_staged_kv_cache": (*staging, *caches, torch.tensor([0], device=device)),
        "commit_draft_layer": (key, value, *caches, slots, mask, "fp8", *scales),
        "log_cache_slots": (*caches, slots, *staging[:2]),
        "restore_rejected_drafts": (*staging[:2], slots, mask, *caches),
        "open_window": (*batch, *make_targets(3, 3, batch[2].numel(), device), pool.counts),
        "log_all_layers": pool.arguments(window[0]),
        "restore_all_layers": (*pool.arguments(window[0]), *window[1:], pool.counts),
        "commit_all_layers": (*pool.arguments(window[0]), *window[1:], pool.counts),
    }[operator]


LAYER_OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]


@each_device
@pytest.mark.parametrize("operator", LAYER_OPERATORS)
def test_opcheck(operator, device):
    """Schema (each mutation declared), fake implementation, no autograd surprise, traceable."""
    torch.library.opcheck(getattr(torch.ops._C_cache_ops, operator).default, arguments_of(operator, device))


@each_device
def test_opcheck_without_staging(device):
    """The optional tensors of `open_window` left out, as `cow` does."""
    args = arguments_of("open_window", device)
    torch.library.opcheck(torch.ops._C_cache_ops.open_window.default, (*args[:5], None, None, args[7]))


@pytest.mark.parametrize("operator", LAYER_OPERATORS)
def test_fakes_run_without_data(operator):
    """On fake tensors an operator does nothing and needs no data."""
    args = arguments_of(operator, "cpu")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        assert getattr(torch.ops._C_cache_ops, operator)(*fakes) is None


USE = """
import torch
from nwor import ops
key = torch.randn(2, 2, 8)
caches = torch.zeros(2, 4, 4, 2, 8)
ops.commit_draft_layer(key, key, *caches, torch.tensor([3, 9]), torch.tensor([True, False]))
assert torch.equal(caches[0, 0, 3], key[0]) and caches.count_nonzero() == 2 * key[0].numel()
"""
VLLM = "import vllm._custom_ops, torch; vllm_op = torch.ops._C.cpu_attn_reshape_and_cache\n"


@pytest.mark.parametrize("order", ["alone", "vllm first", "vllm second"])
def test_loads_beside_vllm(order):
    """The operators share vLLM's namespace; it may be loaded before them, after them or not at all."""
    if order != "alone":
        pytest.importorskip("vllm")
    script = {"alone": USE, "vllm first": VLLM + USE, "vllm second": USE + VLLM + USE}[order]
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]


def test_not_built_says_what_to_do(monkeypatch, tmp_path):
    """A checkout without the extension says that it has to be built."""
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "ops.py"))
    with pytest.raises(ImportError, match="make kernels"):
        ops.library()


@pytest.mark.parametrize("operators", [{"open_window": ["query_start_loc", "slots"]}, {"close_window": ["slots"]}])
def test_an_extension_of_other_sources_is_refused(operators, monkeypatch):
    """One that was built before its operators changed made every mode fall back, for a reason that named no build."""
    monkeypatch.setattr(ops, "OPERATORS", operators)
    with pytest.raises(ImportError, match="from other sources, whose .*_window is another; run `make kernels`"):
        ops.load.__wrapped__()


def test_importing_ops_loads_nothing():
    """`import nwor.ops` registers nothing until an operator is used."""
    script = "import nwor.ops, torch; assert not hasattr(torch.ops._C_cache_ops, 'stage_kv_cache')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# -- vLLM's own writers ------------------------------------------------------------------------------------------------


def write_with_vllm_cpu(key, value, slots, kv_cache_dtype, k_scale, v_scale, cache_dtype):
    """Caches [8, 32, 2, 32] by vLLM's CPU writer in its `vec` packing, brought to rows: keys transposed in a block."""
    vllm_ops = pytest.importorskip("vllm._custom_ops")
    packed = torch.zeros(8, 2, 2 * 32, 32, dtype=cache_dtype)
    packed_keys, packed_values = packed.chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(
        key, value, packed_keys, packed_values, slots, "vec", float(k_scale), float(v_scale), kv_cache_dtype
    )
    keys = packed_keys.reshape(8, 2, 32, 32).transpose(2, 3)  # [block, head, element, offset] to [.., offset, element]
    return keys.transpose(1, 2).contiguous(), packed_values.transpose(1, 2).contiguous()


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.037, 2.5])
@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", *(pytest.param(fp8, marks=needs_fp8_cache) for fp8 in ("fp8", "fp8_e4m3", "fp8_e5m2"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_of_vllms_cpu_writer(dtype, kv_cache_dtype, scale):
    """What is staged and committed is what vLLM would have written, over all sizes and special values."""
    cache_dtype = dtype if kv_cache_dtype == "auto" else torch.uint8
    key, value = make_vectors("packed", 200, 2, 32, dtype, "cpu", seed=int(scale * 1000))
    slots = make_slots(200, 256, "cpu")
    scales = torch.tensor([scale]), torch.tensor([scale * 1.7])
    expected = write_with_vllm_cpu(key, value, slots, kv_cache_dtype, *scales, cache_dtype)

    caches = [torch.zeros(8, 32, 2, 32, dtype=cache_dtype) for _ in range(2)]
    ops.commit_draft_layer(key, value, *caches, slots, make_mask("full", 200, "cpu"), kv_cache_dtype, *scales)
    staging = make_staging(200, 2, 32, cache_dtype, "cpu")
    committed = [torch.zeros(8, 32, 2, 32, dtype=cache_dtype) for _ in range(2)]
    ops.stage_kv_cache(key, value, slots, *staging, kv_cache_dtype, *scales)
    ops.commit_staged_kv_cache(*staging, *committed, staging[3][:1])
    for ours, staged, theirs in zip(caches, committed, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(staged.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_vllms_cpu_writer_rounds_towards_zero(fmt):
    """A finding to hold on to: torch (and vLLM's CUDA writer) round to nearest even, vLLM's CPU writer does not."""
    key = torch.linspace(-400, 400, 2 * 2 * 32).view(2, 2, 32)
    caches = [torch.zeros(1, 4, 2, 32, dtype=torch.uint8) for _ in range(2)]
    ops.commit_draft_layer(key, key, *caches, torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), fmt)
    torch_dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3" else torch.float8_e5m2
    ours, nearest = caches[0][0, :2].view(torch_dtype).float(), key.to(torch_dtype).float()
    assert (ours.abs() <= key.abs()).all() and not torch.equal(ours, nearest)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_bytes_of_vllms_cuda_writer(kv_cache_dtype, scale, layout, device):
    """The same against `reshape_and_cache_flash`."""
    vllm_ops = pytest.importorskip("vllm._custom_ops")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cache_dtype = dtype if kv_cache_dtype == "auto" else torch.uint8
        key, value = make_vectors("packed", 200, 2, 32, dtype, device, seed=int(scale * 1000))
        slots = make_slots(200, 256, device)
        scales = torch.tensor([scale], device=device), torch.tensor([scale * 1.7], device=device)
        caches = make_cache(layout, 8, 32, 2, 32, cache_dtype, device)
        theirs = make_cache(layout, 8, 32, 2, 32, cache_dtype, device)
        ops.commit_draft_layer(key, value, *caches, slots, make_mask("full", 200, device), kv_cache_dtype, *scales)
        vllm_ops.reshape_and_cache_flash(key, value, *theirs, slots, kv_cache_dtype, *scales)
        for cache, other in zip(caches, theirs, strict=True):
            assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8)), dtype
