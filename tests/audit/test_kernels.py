# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernels against their form for a CPU, bit for bit.

Runs on an NVIDIA GPU, or anywhere with Triton's interpreter (``TRITON_INTERPRET=1``), as `make test` does.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU; `make test` runs these under Triton's interpreter apart", allow_module_level=True)
pytest.importorskip("triton", reason="no Triton here")

from vllm_kv_audit.marks import COUNTERS, REJECTED

from tests.audit.test_marks import LAYOUTS
from tests.audit.windows import Served, small_pages

if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kernels_are_the_form_for_a_cpu(layout):
    """State, identities, contents, what is expected next, counts and findings of the same traffic and faults."""
    device = "cpu" if INTERPRETED else "cuda"
    both = [Served(small_pages(**layout), where, triton) for where, triton in (("cpu", False), (device, True))]
    for step in range(8):
        for served in both:
            served.step(size=6 if step % 2 else 0, adopt=step == 7)
            if step == 5:
                served.marks.state[served.slot(0, served.computed[0] - 1)] = 0
                served.marks.state[served.slot(1, served.computed[1] - 1)] = REJECTED
                served.marks.identity[served.slot(2, served.computed[2] - 1)] += 1
                slot = torch.tensor([served.slot(2, served.computed[2] - 2)], device=served.device)
                served.pages.units[served.pages.offsets[1] + served.pages.addresses(slot)[:, 1]] ^= 1
    reference, kernels = both
    assert len(reference.findings()) >= 3 and kernels.findings() == reference.findings()
    assert kernels.ring[:COUNTERS].tolist() == reference.ring[:COUNTERS].tolist()
    assert torch.equal(kernels.expected.cpu(), reference.expected)
    for name in ("state", "identity", "content"):
        assert torch.equal(getattr(kernels.marks, name).cpu(), getattr(reference.marks, name)), name
