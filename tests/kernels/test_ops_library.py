# SPDX-License-Identifier: Apache-2.0
"""The extension as a library: torch's own checks, loading beside vLLM,
and the bytes of vLLM's own writers."""

import subprocess
import sys

import pytest
import torch
from devices import each_device, needs_fp8_cache, needs_gpu

from nwor import ops
from nwor_lab.operators.check import written_by_vllm
from nwor_lab.operators.inputs import (
    LAYOUTS,
    cache_dtype_of,
    calls,
    make_cache,
    make_slots,
    make_staging,
    make_vectors,
    without_staging,
)

ops.load()


LAYER_OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]


@each_device
@pytest.mark.parametrize("operator", LAYER_OPERATORS)
def test_opcheck(operator, device):
    """Schema (each mutation declared), fake implementation, no autograd surprise, traceable."""
    torch.library.opcheck(
        getattr(torch.ops._C_cache_ops, operator).default,
        calls(device, element_size=2 if device == "cpu" else 0)[operator],
    )


@each_device
def test_opcheck_without_staging(device):
    """The optional tensors of `open_window` left out, as `cow` does."""
    torch.library.opcheck(torch.ops._C_cache_ops.open_window.default, without_staging(calls(device)["open_window"]))


@pytest.mark.parametrize("operator", LAYER_OPERATORS)
def test_fakes_run_without_data(operator):
    """On fake tensors an operator does nothing and needs no data."""
    args = calls("cpu", element_size=2)[operator]
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


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.037, 2.5])
@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", *(pytest.param(fp8, marks=needs_fp8_cache) for fp8 in ("fp8", "fp8_e4m3", "fp8_e5m2"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_of_vllms_cpu_writer(dtype, kv_cache_dtype, scale):
    """What is staged and committed is what vLLM would have written, over all sizes and special values."""
    pytest.importorskip("vllm._custom_ops")
    cache_dtype = cache_dtype_of(dtype, kv_cache_dtype)
    key, value = make_vectors("packed", 200, 2, 32, dtype, "cpu", seed=int(scale * 1000))
    slots = make_slots(200, 256, "cpu")
    scales = torch.tensor([scale]), torch.tensor([scale * 1.7])
    caches = [torch.zeros(8, 32, 2, 32, dtype=cache_dtype) for _ in range(2)]
    expected = written_by_vllm(key, value, caches[0], slots, kv_cache_dtype, scales)
    ops.commit_draft_layer(key, value, *caches, slots, slots >= 0, kv_cache_dtype, *scales)
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
        cache_dtype = cache_dtype_of(dtype, kv_cache_dtype)
        key, value = make_vectors("packed", 200, 2, 32, dtype, device, seed=int(scale * 1000))
        slots = make_slots(200, 256, device)
        scales = torch.tensor([scale], device=device), torch.tensor([scale * 1.7], device=device)
        caches = make_cache(layout, 8, 32, 2, 32, cache_dtype, device)
        theirs = make_cache(layout, 8, 32, 2, 32, cache_dtype, device)
        ops.commit_draft_layer(key, value, *caches, slots, slots >= 0, kv_cache_dtype, *scales)
        vllm_ops.reshape_and_cache_flash(key, value, *theirs, slots, kv_cache_dtype, *scales)
        for cache, other in zip(caches, theirs, strict=True):
            assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8)), dtype
