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

import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.bench import acceptance
from nwor_lab.bench.reference import claim, claim_by_hand, claim_chunks
from nwor_lab.cost.traffic import Traffic
from nwor_lab.faults import COMMIT
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
    return table, acceptance.survival(recorded("gpu_acceptance")), by_hand


HONEST: dict[str, tuple[Callable[..., None], Callable[[], Inputs]]] = {
    "01": (claim_reference, reference),
    "02": (check.claim, operators),
    "03": (acceptance.claim, accepted),
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
    ("03", "functions of one's own count otherwise", change(2, lambda by_hand: dict.fromkeys(by_hand, 0.01)),
     ["functions: largest difference"]),
]  # fmt: skip
"""Notebook, the wrong world in words, its inputs made of the honest ones, and what some claims that it breaks say."""


def claimed(book: str, inputs: Inputs) -> pd.DataFrame:
    """The claims of a notebook in a world."""
    with tempfile.TemporaryDirectory() as folder:
        HONEST[book][0](results.Run(folder, book), *inputs)
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


def test_a_notebook_claims_by_these_functions_alone() -> None:
    """But for what its own cells give beside the library, which they claim themselves."""
    for path in paths.NOTEBOOKS.glob("0[1-4]*.ipynb"):
        text = path.read_text()
        assert re.search(r"\w+\.claim\w*\(run, ", text) and "run.expect(" not in text, path.name
