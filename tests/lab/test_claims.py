# SPDX-License-Identifier: Apache-2.0
"""Each claim of a notebook fails in a plausible wrong world, its null model; those of notebook 04 in `test_endtoend`.

That the code in a cell gives what the library gives is claimed in the cell, and needs none.

A claim that no world breaks says nothing, and is found by `test_every_claim_has_a_null_model`.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.bench import acceptance, gpu_steps
from nwor_lab.bench.reference import claim, claim_by_hand, claim_chunks
from nwor_lab.cost import predicted
from nwor_lab.cost.traffic import Traffic
from nwor_lab.faults import COMMIT
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.gpu import layer_times as attention
from nwor_lab.operators import check
from nwor_lab.operators import reference as plain
from nwor_lab.run import results
from tests.lab.reference_models import compared, compared_in_chunks

Inputs = tuple[Any, ...]


def recorded(name: str) -> pd.DataFrame:
    return results.read_table(name, paths.RECORDED)


def change(at: int, how: Callable[[Any], Any]) -> Callable[..., Inputs]:
    """A world in which the input of number `at` is another."""
    return lambda *inputs: (*inputs[:at], how(inputs[at]), *inputs[at + 1 :])


def set_where(rows: str, **columns: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A table whose `columns` have other values in the rows of a query."""

    def changed(table: pd.DataFrame) -> pd.DataFrame:
        table, where = table.reset_index(drop=True), table.reset_index(drop=True).query(rows).index
        for column, value in columns.items():
            table.loc[where, column] = value(table.loc[where]) if callable(value) else value
        return table

    return changed


# -- worlds as they are ------------------------------------------------------------------------------------------------


def reference() -> Inputs:
    runs = compared(k=3)
    return runs, compared_in_chunks(k=12, chunk=4), {mode: runs[mode].tokens[:2] for mode in ("off", "stage")}


def claim_reference(run: results.Run, runs: dict[str, Any], long_runs: list[Any], by_hand: dict[str, Any]) -> None:
    claim_by_hand(run, by_hand, runs)
    claim(run, runs)
    claim_chunks(run, long_runs)


def operators() -> Inputs:
    parts = check.compare("cpu", 2, 0), check.injected_faults("cpu"), check.against_vllm("cpu", 0)
    by_hand = {"a loop": check.beside(lambda *args: plain.run(COMMIT, args, "cpu"), COMMIT, 2, 0)}
    return *(part.assign(device="cpu") for part in parts), by_hand


def accepted() -> Inputs:
    table = recorded("acceptance")
    by_hand = {"functions": acceptance.largest_difference(table, table, "value")}
    return table, acceptance.survival(recorded("gpu_acceptance")), "measured", by_hand


def controlled() -> Inputs:
    return recorded("gpu_direct"), gpu_steps.step_ratios(gpu_steps.unsplit_steps())


def claim_steps(run: results.Run, direct: pd.DataFrame, unsplit: pd.DataFrame) -> None:
    gpu_steps.claim(run, direct, "measured")
    gpu_steps.claim_unsplit(run, unsplit, "measured")


def bandwidth() -> Inputs:
    return kernels.select(recorded("kernel_times")), recorded("kernel_counters")


def attended() -> Inputs:
    times = recorded("attention")
    copy = kernels.ceilings(recorded("kernel_times"))[0]
    table = attention.frame(times, copy)
    return times, table, recorded("attention_counters"), recorded("gpu_cliff"), recorded("gpu_long")


def claim_attention(run: results.Run, times: pd.DataFrame, table: pd.DataFrame, *others: pd.DataFrame) -> None:
    counted, cliff, long = others
    attention.claim(run, times, table, counted, "bf16")
    attention.claim_each(run, cliff, long)


def modelled() -> Inputs:
    points = predicted.against_measured(recorded("gpu_steps"), attention=recorded("attention"))
    return points, kernels.priced(recorded("kernel_times"))


def claim_model(run: results.Run, points: pd.DataFrame, priced: pd.DataFrame) -> None:
    predicted.claim(run, points, "measured")
    predicted.claim_floor(run, priced, "measured")


HONEST: dict[str, tuple[Callable[..., None], Callable[[], Inputs]]] = {
    "01": (claim_reference, reference),
    "02": (check.claim, operators),
    "03": (acceptance.claim, accepted),
    "05 operators": (kernels.claim, bandwidth),
    "05 attention": (claim_attention, attended),
    "06 steps": (claim_steps, controlled),
    "06 price": (claim_model, modelled),
}
"""By notebook, or part of one: the function that claims, and its inputs as they are measured here or recorded."""


@functools.cache
def honest(book: str) -> Inputs:
    return HONEST[book][1]()


# -- worlds that are wrong ---------------------------------------------------------------------------------------------


def other_bytes(runs: dict[str, Any]) -> dict[str, Any]:
    """The last step of `stage` moves what the first moved, too."""
    *steps, last = runs["stage"].steps
    steps.append(replace(last, traffic=last.traffic + Traffic(steps[0].traffic)))
    return {**runs, "stage": replace(runs["stage"], steps=steps)}


def each_chunked(**changes: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Runs in chunks of which some parts are other."""
    return lambda runs: [runs[0], *(replace(run, **{n: how(run) for n, how in changes.items()}) for run in runs[1:])]


def all_computed(run: Any) -> list[Any]:
    """Every chunk is run, whatever was rejected before."""
    forwards = -(-(1 + run.generation.k) // run.chunk)
    return [replace(window, forwards=forwards, rows=1 + run.generation.k) for window in run.windows]


def no_right_draft(table: pd.DataFrame) -> pd.DataFrame:
    table = set_where("metric == 'rejected_share'", value=lambda rows: rows["k"] / (1 + rows["k"]))(table)
    table = set_where("metric == 'acceptance_length'", value=1.0)(table)
    return set_where("metric == 'survival'", value=0.0)(table)


def any_k_alike(table: pd.DataFrame) -> pd.DataFrame:
    """As large a share is rejected at every k as at the longest."""
    longest = table[(table["metric"] == "rejected_share") & (table["k"] == table["k"].max())]
    share = longest.set_index("temperature")["value"]
    return set_where("metric == 'rejected_share'", value=lambda rows: rows["temperature"].map(share))(table)


def every_row_moves(counters: pd.DataFrame) -> pd.DataFrame:
    """A kernel moves as much as it does where all rows are to be moved."""
    return counters.assign(
        value=counters.groupby(["op", "kv_heads", "cache", "rows", "metric"], observed=True)["value"].transform("max")
    )


def launch_a_layer(times: pd.DataFrame) -> pd.DataFrame:
    """The commit takes what vLLM's 32 launches take, to the sample."""
    vllm = times[times["op"] == "vllm"].assign(op="commit")
    return pd.concat([times[times["op"] != "commit"], vllm], ignore_index=True)


def no_effect(points: pd.DataFrame) -> pd.DataFrame:
    """Every step takes vanilla's time, but for what repeats differ by."""
    return points.assign(measured=1 + np.random.default_rng(0).normal(0, 0.005, len(points)))


def as_long_as(mode: str, factor: float, *others: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Steps of the other modes take `factor` of that mode's, sample by sample."""

    def changed(table: pd.DataFrame) -> pd.DataFrame:
        timed = (table["metric"] == "step_ms") & table["mode"].isin(others)
        base = table[(table["metric"] == "step_ms") & (table["mode"] == mode)]
        made = [base.assign(mode=other, engine=other, value=base["value"] * factor) for other in others]
        return pd.concat([table[~timed], *made], ignore_index=True)

    return changed


OURS = "op in ('commit', 'log', 'restore')"
PRECISE = "error against fp32 over FlashAttention 3's"
NULLS: list[tuple[str, str, Callable[..., Inputs], list[str]]] = [
    ("01", "stage hides drafts from attention", change(0, lambda runs: {**runs, "stage": runs["blind"]}),
     ["prompts whose tokens", "drafts accepted a window"]),
    ("01", "cow restores nothing", change(0, lambda runs: {**runs, "cow": runs["off"]}),
     ["unaccepted bytes left in the pages, cow and stage"]),
    ("01", "vanilla cleans up", change(0, lambda runs: {**runs, "off": runs["cow"]}),
     ["unaccepted bytes left in the pages, vanilla"]),
    ("01", "an operator moves other bytes", change(0, other_bytes), ["steps whose counted bytes"]),
    ("01", "blind staging costs nothing", change(0, lambda runs: {**runs, "blind": runs["off"]}),
     ["windows accepted whole"]),
    ("01", "the decoder by hand keeps a rejected draft", change(2, lambda tokens: {
     mode: [[0, *text[:-1]] for text in texts] for mode, texts in tokens.items()}), ["the lesson's decoder"]),
    ("01", "a chunk is judged by the wrong row", change(1, each_chunked(
     generation=lambda run: replace(run.generation, tokens=[text[::-1] for text in run.generation.tokens]))),
     ["prompts whose tokens in chunks"]),
    ("01", "the first rejection in a chunk is not seen", change(1, each_chunked(
     windows=lambda run: [replace(window, accepted=run.generation.k) for window in run.windows])),
     ["modes that accept the same drafts"]),
    ("01", "chunks behind a rejection are computed", change(1, each_chunked(windows=all_computed)),
     ["runs whose forwards", "rows computed in chunks"]),
    ("02", "an operator keeps rejected rows", change(0, set_where("metric == 'bytes_differing'", value=16)),
     ["bytes that differ from plain Python"]),
    ("02", "nothing is compared", change(0, lambda table: table.assign(value=0)),
     ["bytes that differ from plain Python"]),
    ("02", "the comparison is blind", change(1, lambda faults: faults.assign(bytes_differing=0)),
     ["injected faults that go unnoticed"]),
    ("02", "values are rounded otherwise", change(2, set_where("metric == 'bytes_differing'", value=1)),
     ["bytes that differ from vLLM's own writer"]),
    ("02", "a loop of one's own moves other rows", change(3, lambda by_hand: {
     other: {**sums, "bytes_differing": 8} for other, sums in by_hand.items()}),
     ["bytes that differ from a loop"]),
    ("02", "vLLM's writer writes nothing", change(2, lambda table: table.assign(value=0)),
     ["bytes that differ from vLLM's own writer"]),
    ("03", "no draft is ever right", change(0, no_right_draft), ["mean acceptance length", "this run's against"]),
    ("03", "any k alike", change(0, any_k_alike), ["rejected share of written rows at the shorter k"]),
    ("03", "any k alike at scale", change(1, any_k_alike), ["at scale"]),
    ("03", "functions of one's own count otherwise", change(3, lambda by_hand: dict.fromkeys(by_hand, 0.01)),
     ["functions: largest difference"]),
    ("06 steps", "the kernel gains nothing", change(0, as_long_as("vllm", 1, "direct", "stage")),
     ["stage's step over that of vLLM", "its control's step"]),
    ("06 steps", "holding drafts back costs a hundredth", change(0, as_long_as("direct", 1.01, "stage")),
     ["over its control's"]),
    ("06 steps", "tokens are not vanilla's", change(0, set_where("metric == 'fourth_powers'", value=1e9)),
     ["stage's step over that of vLLM", "its control's step", "over its control's"]),
    ("06 steps", "vLLM splits contexts too", change(1, lambda points: points.assign(step=0.95)),
     ["FlashAttention 2", "Triton"]),
    ("06 steps", "one setting is not at parity",
     change(1, set_where("attention == 'triton' and batch == 4", step=float("nan"))), ["Triton"]),
    ("06 steps", "one attention was not measured", change(1, lambda points: points.query("attention == 'triton'")),
     ["FlashAttention 2"]),
    ("05 operators", "one byte is wrong", change(0, set_where("metric == 'bytes_differing'", value=1.0)),
     ["bytes that differ"]),
    ("05 operators", "no byte is compared", change(0, lambda times: times[times["metric"] != "bytes_differing"]),
     ["bytes that differ"]),
    ("05 operators", "rejected rows are moved", change(1, every_row_moves), ["DRAM bytes counted"]),
    ("05 operators", "half the bandwidth", change(0, set_where(OURS, value=lambda rows: 2 * rows["value"])),
     ["share of copy bandwidth", "time over the model's"]),
    ("05 operators", "a launch a layer", change(0, launch_a_layer),
     ["a third of 9 rows", "a third of 72 rows", "a third of 144 rows", "times faster than any peer"]),
    ("05 operators", "rejected rows are paid for", change(0, set_where("op == 'commit' and kept == 0", value=100.0)),
     ["time at none accepted"]),
    ("05 attention", "sums in a shorter dtype", change(0, set_where("metric == 'error' and op == 'nwor'",
     value=lambda rows: 2 * rows["value"])), [f"{PRECISE}, worst", f"{PRECISE}, bf16"]),
    ("05 attention", "as fast as vLLM", change(1, lambda table: table.assign(ratio=1.0)),
     ["context 512, worst", "backend, median"]),
    ("05 attention", "always half busy", change(2, set_where("metric == 'dram'", value=50.0)),
     ["slots busy", "memory busy"]),
    ("05 attention", "vLLM splits contexts too", change(3, set_where("op in ('flash2', 'triton')", value=20.0)),
     ["forced"]),
    ("05 attention", "twice as slow where contexts are long", change(4, set_where("op == 'nwor'",
     value=lambda rows: 2 * rows["value"])), ["32k and 128k"]),
    ("06 price", "no mode makes a difference", change(0, no_effect), ["steps under cow", "steps under stage"]),
    ("06 price", "the model says 1.00", change(0, lambda points: points.assign(predicted=1.0, with_attention=1.0)),
     ["steps under cow", "steps under stage"]),
    ("06 price", "bytes are left out", change(1, set_where(OURS, error=0.1)), ["predicted time over measured"]),
]  # fmt: skip
"""Notebook, the wrong world in words, its inputs made of the honest ones, and what some claims that it breaks say."""


class HereAndNow(results.Run):
    """A run that measured all tables itself, so that what is said of them is claimed."""

    def origin(self, frame: pd.DataFrame) -> str:
        return "measured"


def claimed(book: str, inputs: Inputs) -> pd.DataFrame:
    """The claims of a notebook in a world."""
    with tempfile.TemporaryDirectory() as folder:
        HONEST[book][0](HereAndNow(folder, book), *inputs)
        return results.claims(folder)


@functools.cache
def failed(null: int) -> set[str]:
    """The claims that do not hold in the world of that number in `NULLS`."""
    book, _, wrong, _ = NULLS[null]
    claims = claimed(book, wrong(*honest(book)))
    return set(claims.loc[claims["holds"].eq(False), "claim"])


@pytest.mark.parametrize("null", range(len(NULLS)), ids=[" ".join(null[:2]) for null in NULLS])
def test_a_null_model_breaks_its_claims(null: int) -> None:
    assert [text for text in NULLS[null][3] if not any(text in claim for claim in failed(null))] == []


@pytest.mark.parametrize("book", HONEST)
def test_every_claim_has_a_null_model(book: str) -> None:
    claims = claimed(book, honest(book)).dropna(subset="holds")
    assert len(claims) and claims["holds"].all()
    assert (
        set(claims["claim"]) - set().union(*map(failed, (n for n, null in enumerate(NULLS) if null[0] == book)))
        == set()
    )


def test_an_engine_that_is_slower_paused_too_is_no_cost_of_holding_drafts_back() -> None:
    table = honest("06 steps")[0]
    slower = set_where("metric == 'step_ms' and engine == 'stage'", value=lambda rows: 1.02 * rows["value"])(table)
    before, after = (gpu_steps.step_ratios(each, "direct").query("mode == 'stage'") for each in (table, slower))
    assert after["step"].tolist() == pytest.approx(before["step"].tolist())
    before, after = (gpu_steps.step_ratios(each).query("mode == 'stage'") for each in (table, slower))
    assert after["step"].sum() > 1.01 * before["step"].sum()


@pytest.mark.parametrize("book", ["05 operators", "05 attention"])
def test_what_is_recorded_is_shown_and_not_claimed(book: str, tmp_path, capsys) -> None:
    run = results.Run(tmp_path, book)
    HONEST[book][0](run, *honest(book))
    assert results.claims(tmp_path).empty and capsys.readouterr().out.count("recorded: ") > 2


def test_a_notebook_claims_by_these_functions_alone() -> None:
    """But for what its own cells give beside the library, which they claim themselves."""
    for path in paths.NOTEBOOKS.glob("0[1-6]*.ipynb"):
        text = path.read_text()
        assert re.search(r"\w+\.claim\w*\(run, ", text) and "run.expect(" not in text, path.name
