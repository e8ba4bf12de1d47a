# SPDX-License-Identifier: Apache-2.0
"""The closed formulas of bytes and launches against the reference model's ledger and a manager's buffers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor.counters import DeviceCounters
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor_lab.cost.traffic import (
    MODES,
    SERVED,
    Moved,
    Shape,
    Traffic,
    Window,
    served_traffic,
    staging_bytes,
    step_traffic,
)
from nwor_lab.reference.policies import make_policy
from tests.lab.reference_models import make_case, run_step

LLAMA_7B = Shape(num_layers=32, num_kv_heads=32, head_size=128)
WINDOW = Window(requests=1, draft_rows=8, rejected_rows=6, context_rows=521)
"""k = 8, 2 accepted, 512 tokens before."""
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


@st.composite
def steps(draw):
    size = draw(st.sampled_from(sorted(DTYPES)))
    tp = draw(st.sampled_from([1, 2, 4]))
    layers, heads, width = (draw(st.sampled_from(s)) for s in ([1, 2, 3], [1, 2, 4], [2, 8]))
    shape = Shape(layers, heads, width, size, max(size, 2), tp)
    requests, rejected = [], []
    for _ in range(draw(st.integers(1, 4))):
        drafts = draw(st.integers(0, 5))
        requests.append((draw(st.integers(0, 13)), drafts, draw(st.integers(1, 9))))
        rejected.append(draw(st.integers(0, drafts)))
    return shape, requests, rejected


def window_of_k(k, accepted) -> Window:
    """Requests of `k` drafts and 100 tokens before."""
    n = len(accepted)
    return Window(n, n * k, n * k - sum(accepted), n * (100 + 1 + k))


def window_of(requests, rejected) -> Window:
    prefill = sum(rows for _, drafts, rows in requests if not drafts)
    drafts = [d for _, d, _ in requests if d]
    own = sum(drafts) + len(drafts) + prefill
    return Window(len(drafts), sum(drafts), sum(rejected), sum(c for c, _, _ in requests) + own, prefill)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_counted_equals_formula(mode, step):
    shape, requests, rejected = step
    cache, batch = make_case(shape, DTYPES[shape.cache_bytes], requests)
    run_step(make_policy(mode, cache), batch, rejected)
    assert cache.traffic == step_traffic(mode, shape, window_of(requests, rejected))


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("mode", ["cow", "stage"])
@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_the_bytes_that_a_rank_counts_are_the_formulas(mode, on_cpu, step):
    """`bytes_avoided` is what vanilla moves more than the mode; attention on a CPU reads staging back, too."""
    shape, requests, rejected = step
    window = window_of(requests, rejected)
    cache = torch.zeros(shape.num_layers, 1, shape.heads, 1, 2 * shape.head_size, dtype=DTYPES[shape.cache_bytes])
    layout = CacheLayout.from_kv_caches(list(cache if on_cpu else cache.to("meta")))
    accepted = window.draft_rows - window.rejected_rows
    counts = [accepted, window.rejected_rows, window.requests, window.draft_rows, 0, 0]
    ways = [counts, 6 * [0]] if mode == "stage" else [6 * [0], counts]
    counted = DeviceCounters(layout, 1).as_totals(ways, 1).counters()
    vanilla, moved = (step_traffic(name, shape, window) for name in ("off", mode))
    tail = vanilla.get("tail", Moved()).read if mode == "stage" and on_cpu else 0
    more = vanilla.total() - moved.total()
    assert counted.bytes_avoided == more.read + more.written - tail
    at_once = window.prefill_rows * shape.num_layers * shape.row
    assert counted.bytes_written == moved.total().written - at_once
    from_cache = sum(moved.get(kind, Moved()).read for kind in ("tail", "commit", "log", "restore"))
    assert counted.bytes_read == from_cache + tail


def test_a_served_step_by_hand():
    """The same window as vLLM serves it: 32 layers, 9 rows of 16 KiB of which 3 are kept, rope apart."""
    off = served_traffic("off", LLAMA_7B, WINDOW)
    assert off == step_traffic("off", LLAMA_7B, WINDOW)
    row, layers = 16384, 32
    cow, stage = (served_traffic(mode, LLAMA_7B, WINDOW) for mode in ("cow", "stage"))
    logged_before = step_traffic("cow", LLAMA_7B, WINDOW) | {"log": Moved(layers * 3 * row, layers * 3 * row, 1)}
    assert cow == Traffic(logged_before) + Traffic(open=Moved(0, 0, 1))
    every = served_traffic("cow", LLAMA_7B, Window(1, 8, 0, 521))
    assert every["log"] == Moved(layers * 8 * row, layers * 8 * row, 1)
    assert stage == step_traffic("stage", LLAMA_7B, WINDOW) + Traffic(open=Moved(0, 0, 1))
    direct = served_traffic("direct", LLAMA_7B, WINDOW)
    assert direct == Traffic({kind: moved for kind, moved in off.items() if kind != "tail"}) | {
        "write": Moved(layers * 9 * row, layers * 9 * row, 0)
    }
    launches = {"off": 64, "cow": 67, "direct": 32, "stage": 34}
    assert {mode: served_traffic(mode, LLAMA_7B, WINDOW).total().launches for mode in SERVED} == launches
    assert stage["commit"] == Moved(layers * 2 * row, layers * 2 * row, 1)


def test_step_without_drafts_is_vanilla_in_every_mode():
    prefill = Window(requests=0, draft_rows=0, rejected_rows=0, context_rows=64, prefill_rows=64)
    assert {step_traffic(mode, LLAMA_7B, prefill).total() for mode in MODES} == {
        served_traffic(mode, LLAMA_7B, prefill).total() for mode in SERVED
    }


@given(k=st.integers(1, 8), batch=st.integers(1, 5), accepted=st.data())
def test_an_expected_step_is_the_mean_of_steps(k, batch, accepted):
    """Survival counted over windows gives back their mean traffic: it is linear in the rows."""
    steps = [[accepted.draw(st.integers(0, k)) for _ in range(batch)] for _ in range(4)]
    windows = [count for step in steps for count in step]
    survival = [sum(count > position for count in windows) / len(windows) for position in range(k)]
    mean = served_traffic("stage", LLAMA_7B, Window.expected(batch, survival, 100)).total()
    each = [served_traffic("stage", LLAMA_7B, window_of_k(k, step)).total() for step in steps]
    assert mean.read == pytest.approx(sum(moved.read for moved in each) / 4)
    assert mean.written == pytest.approx(sum(moved.written for moved in each) / 4)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_staging_memory_is_the_managers(mode):
    layers, heads, size, block = 3, 2, 8, 4
    pool = torch.zeros(layers, 6, heads, block, 2 * size, dtype=torch.bfloat16)
    manager = DraftCommitManager(CacheLayout.from_kv_caches(list(pool)), mode, 4, 3, 64)
    assert manager.rows.nbytes == staging_bytes(mode, Shape(layers, heads, size), 4, 3)
    assert staging_bytes("off", LLAMA_7B, 4, 3) == 0


def test_ranks_beyond_the_heads_hold_one_each():
    assert Shape(1, 2, 8, tp=4).heads == 1
    with pytest.raises(ValueError, match="evenly"):
        Shape(1, 6, 8, tp=4)


def test_a_mode_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="choose"):
        step_traffic("staging", LLAMA_7B, WINDOW)
    with pytest.raises(ValueError, match="not served"):
        served_traffic("blind", LLAMA_7B, WINDOW)


def test_a_served_step_that_holds_prefill_is_logged():
    """Under `stage` too, whole; the control leaves it to vLLM."""
    shape, window = Shape(6, 8, 16), Window(2, 8, 3, 500, prefill_rows=40)
    logged = step_traffic("cow", shape, window)
    for mode in ("stage", "cow"):
        served = served_traffic(mode, shape, window)
        assert served["open"].launches == 1 and all(served[kind] == logged[kind] for kind in logged)
    assert served_traffic("direct", shape, window) == step_traffic("off", shape, window)
