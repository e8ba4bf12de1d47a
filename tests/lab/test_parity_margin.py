# SPDX-License-Identifier: Apache-2.0
"""Tolerances of parity lie between what rounding does and what injected faults do: as recorded, and in live engines."""

import itertools
import math
from functools import partial

import pandas as pd
import pytest
import torch

from nwor import ops
from nwor.settings import Settings
from nwor.vllm.self_check import attend
from nwor_lab import paths, results
from nwor_lab.engines.engine import Engine
from nwor_lab.experiments import parity_faults, parity_margin
from nwor_lab.experiments.parity import compare, tolerance
from nwor_lab.plots import parity as plot
from tests.lab.attention import Problem, identity_packing

PARTIAL = {"one_head_unseen", "tail_unseen_in_one_layer"}
"""Faults in a part of the model, which the rest of it may drown."""


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    return plot.margin_points(results.read_table("parity_margin", paths.RECORDED))


def test_every_tolerance_lies_above_all_noise_and_below_every_fault(points):
    for panel, rows in points.groupby("panel"):
        noise, faults = rows[rows["fault"] == "rounding"], rows[rows["fault"] != "rounding"]
        faults = faults[~faults["fault"].str.replace(" ", "_").isin(PARTIAL)]
        assert len(noise) and faults["fault"].nunique() >= 4, panel
        bound = rows["tolerance"].iloc[0]
        room = 1.04 if panel.startswith("H200") and panel.endswith("fp8") else 1.15
        assert room * noise["value"].max() < bound < faults["value"].min() / room, panel


def test_tolerances_are_the_geometric_middle(points):
    """Of all configurations that share one, to a fifth; faults in a part count where rounding does not drown them."""
    for bound, rows in points.groupby("tolerance"):
        noise = rows["fault"] == "rounding"
        most, faults = rows.loc[noise, "value"].max(), rows[~noise]
        if faults["value"].min() < 1.3 * most:
            faults = faults[~faults["fault"].str.replace(" ", "_").isin(PARTIAL)]
        assert bound == pytest.approx(math.sqrt(most * faults["value"].min()), rel=0.2)


def test_the_check_at_start_up_finds_what_parity_may_drown():
    """Each fault of the kernel; one in a single layer is no fault of the kernel."""
    table = results.read_table("parity_margin", paths.RECORDED).query("metric == 'self_check'")
    failed = table.groupby("fault")["value"].agg(["min", "max"])
    assert set(failed.index) == {"none", *parity_faults.FAULTS}
    quiet = failed.index.isin(["none", "tail_unseen_in_one_layer"])
    assert (failed[quiet] == 0).all(axis=None) and (failed[~quiet] == 1).all(axis=None)


CHANGED = {
    "tail_unseen": ([0, 1, 1, 1, 1], [0, 1, 1]),
    "one_head_unseen": ([0, 1, 1, 1, 1], [0, 1, 1]),
    "drafts_swapped": ([0, 1, 0, 0, 0], [0, 1, 0]),
    "next_draft_seen": ([0, 1, 1, 1, 0], [0, 1, 0]),
    "last_page_missed": ([1, 1, 1, 1, 1], [1, 1, 1]),
    "tail_unseen_in_one_layer": ([0, 1, 1, 1, 1], [0, 1, 1]),
}
"""Rows that a fault changes, of two windows of 5 and 3 rows."""


def attend_as_on_a_gpu(
    query, key, value, kv_cache, output, query_start_loc, seq_lens, block_table, max_query_len, scale, k_scale, **_
) -> None:
    """What `nwor.attention.verify.verify_attention` returns, in plain PyTorch."""
    for request, (first, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        prefix = int(seq_lens[request]) - (end - first)
        if end - first > max_query_len:
            continue
        blocks, offsets = (torch.arange(prefix) // kv_cache.shape[2], torch.arange(prefix) % kv_cache.shape[2])
        rows = kv_cache[block_table[request].long()[blocks], :, offsets]
        rows = torch.cat([rows, torch.cat([key, value], dim=-1)[first:end]])
        output[first:end] = attend(query[first:end].double(), rows, prefix, scale, k_scale=float(k_scale)).float()


@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "GPU"])
@pytest.mark.parametrize("name", parity_faults.FAULTS)
def test_a_fault_is_what_its_name_says(name, on_cpu):
    """The rows it changes: of two windows, and between them of a request that has none."""
    packing = identity_packing(16, 64)
    problem = Problem([40, 9, 70], [5, 12, 3], windows=[True, False, True], packing=packing)
    if on_cpu:
        attention, named = ops.verify_attention, problem.arguments()
    else:
        attention = attend_as_on_a_gpu
        tails = [rows[prefix:] for rows, prefix in zip(problem.rows, problem.prefixes, strict=True)]
        key, value = torch.cat(tails).chunk(2, dim=-1)
        named = problem.arguments() | {"key": key, "value": value, "max_query_len": 9, "k_scale": torch.ones(1)}
    attention(**named)
    right = problem.output.clone()
    torch.testing.assert_close(right.double(), problem.reference(), rtol=1e-5, atol=2e-6, equal_nan=True)
    parity_faults.FAULTS[name](parity_faults.Call(attention, named, on_cpu, middle=True))
    moved = (problem.output - right).abs().amax(dim=2).nan_to_num(0) > 1e-4
    scaled = not on_cpu  # the CPU's operator looks at scales of fp8 alone
    first, last = CHANGED.get(name, (5 * [scaled], 3 * [scaled]))
    assert moved.any(dim=1).int().tolist() == [*first, *12 * [0], *last]
    assert name != "one_head_unseen" or moved[1].tolist() == [True, True, False, False]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_clean_mode_passes_and_the_weakest_fault_does_not():
    """The shipped pair in bfloat16: an engine against itself, its mode paused."""
    spec, prompts = parity_margin.of_pair("bfloat16", "auto")
    prompts, bound = prompts[:8], tolerance("bfloat16")
    with Engine(spec, Settings(mode="stage", eagle_bias=True)) as engine:
        engine.pause()
        vanilla = engine.generate(prompts, 32, logprobs=20)
        engine.resume()
        clean = compare(vanilla, engine.generate(prompts, 32, logprobs=20))
        engine.on_every_rank(partial(parity_faults.inject, name="one_head_unseen"))
        faulty = compare(vanilla, engine.generate(prompts, 32, logprobs=20))
        engine.on_every_rank(partial(parity_faults.inject, name=""))
        again = compare(vanilla, engine.generate(prompts, 32, logprobs=20))
    assert clean.within(bound) and again == clean and clean.places > 100, clean
    assert not faulty.within(bound) and faulty.shift > 2 * bound, faulty
