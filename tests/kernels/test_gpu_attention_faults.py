# SPDX-License-Identifier: Apache-2.0
"""What the tests of the GPU's verify attention compare sees a wrong line of the kernel.

Runs where `test_gpu_attention.py` does.
"""

import importlib.util
import inspect
from dataclasses import replace

import pytest

from tests.kernels.windows import MARKS, SPLIT, Windows

# isort: split
from nwor.attention import kernel, verify

pytestmark = MARKS
SOME = ((70, 9), (0, 3), (37, 12), (40, 2))


def test_without_a_fault_nothing_is_seen():
    Windows(SOME, kv_cache_dtype="fp8", config=SPLIT).check()


WRONG_LINES = {
    "held rows go to their pages": ("to_staging = staged >= 0", "to_staging = staged < -1"),
    "rows that are not held go nowhere": ("keep = (at >= 0)", "keep = to_staging"),
    "a row does not attend to itself": ("place[None, :] <= row[:, None]", "place[None, :] < row[:, None]"),
    "a row attends to the next": ("place[None, :] <= row[:, None]", "place[None, :] <= row[:, None] + 1"),
    "the position behind the prefix is read": ("seen = position < prefix", "seen = position <= prefix"),
    "the last tile of a split is left out": ("tl.range(begin, end,", "tl.range(begin, end - 1,"),
    "requests longer than a window are attended to": ("| (query_len > MAX_QUERY)", ""),
    "the last split but one to arrive combines": ("!= active - 1:", "!= active - 2:"),
    "splits are added without their share": ("tl.sum(found * fade[:, :, None], 1)", "tl.sum(found, 1)"),
    "arrivals are left behind": ("tl.store(arrival, 0)", "pass"),
    "values take the keys' scale": ("_quantize(tail_values, v_scale, FP8)", "_quantize(tail_values, k_scale, FP8)"),
    "stored rows are too large": ("tl.minimum(tl.maximum(scaled, -largest), largest)", "scaled * 1.5"),
    "query heads read the next KV head": (
        "pages = kv_cache + kv_head.to(tl.int64)",
        "pages = kv_cache + (1 - kv_head).to(tl.int64)",
    ),
}


@pytest.mark.parametrize("fault", WRONG_LINES)
def test_a_wrong_line_of_the_kernel_is_seen(fault, tmp_path, monkeypatch):
    right, wrong = WRONG_LINES[fault]
    source = inspect.getsource(kernel)
    assert right in source
    (tmp_path / "wrong_kernel.py").write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("wrong_kernel", tmp_path / "wrong_kernel.py")
    assert spec and spec.loader
    wrong_kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong_kernel)
    problem = Windows(SOME, kv_cache_dtype="fp8", config=SPLIT)
    problem.workspace.partials.fill_(float("nan"))
    # The last split to arrive combines, on a GPU too.
    problem.workspace.device = replace(problem.workspace.device, multiprocessors=0)
    monkeypatch.setattr(verify, "verify_windows", wrong_kernel.verify_windows)
    with pytest.raises(AssertionError):
        problem.check()
