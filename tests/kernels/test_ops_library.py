# SPDX-License-Identifier: Apache-2.0
"""The extension as a library: torch's own checks, loading beside vLLM,
and the bytes of vLLM's own writers."""

import subprocess
import sys

import pytest
import torch
from devices import each_device

from nwor import ops
from nwor_lab import machine
from nwor_lab.operators.check import against_vllm
from nwor_lab.operators.inputs import LAYOUTS, calls

ops.load()

LAYER_OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]


@each_device
@pytest.mark.parametrize("operator", LAYER_OPERATORS)
def test_opcheck(operator, device):
    """Schema (each mutation declared), fake implementation, no autograd surprise, traceable."""
    for stages in (True, False):  # False: the optional tensors left out, as `cow` does
        args = calls(device, element_size=2 if device == "cpu" else 0, stages=stages)[operator]
        torch.library.opcheck(getattr(torch.ops._C_cache_ops, operator).default, args)
        if operator != "open_window":
            break


USE = """
import torch
from nwor import ops
assert not hasattr(torch.ops._C_cache_ops, "stage_kv_cache"), "importing it loads nothing"
key = torch.randn(2, 2, 8)
caches = torch.zeros(2, 4, 4, 2, 8)
ops.commit_draft_layer(key, key, *caches, torch.tensor([3, 9]), torch.tensor([True, False]))
assert torch.equal(caches[0, 0, 3], key[0]) and caches.count_nonzero() == 2 * key[0].numel()
"""
VLLM = "import vllm._custom_ops, torch; vllm_op = torch.ops._C.cpu_attn_reshape_and_cache\n"


def test_loads_beside_vllm():
    """The operators share vLLM's namespace, which may be loaded after them; in every engine it is before."""
    pytest.importorskip("vllm")
    script = USE + VLLM + USE[USE.index("key") :]
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
    with pytest.raises(ImportError, match="_window"):
        ops.load.__wrapped__()


# -- vLLM's own writers ------------------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize(("scale", "layout"), [*zip([1.0, 0.3, 0.037, 2.5], LAYOUTS, strict=True)])
def test_bytes_of_vllms_own_writer(scale, layout, device):
    """What is committed, staged or not, is what vLLM would have written, over all sizes and special values."""
    pytest.importorskip("vllm")
    found = against_vllm(device, int(scale * 1000), scale, layout)
    if found.empty:
        pytest.skip(f"the vLLM here has no writer for {device}")
    sums = found.pivot(index=["dtype", "cache"], columns="metric", values="value")
    assert sums["bytes_compared"].gt(0).all() and sums["bytes_differing"].eq(0).all(), sums
    assert len(sums) == 3 * (1 if machine.why_no_fp8_cache() and device == "cpu" else 3)
