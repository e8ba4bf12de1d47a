# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts by position, and the share of written rows that is rejected, counted in vanilla vLLM.

    nwor acceptance --run-dir results/acceptance

One engine a draft length, all up at once: side by side on a GPU, on a CPU as many as have cores of their own. As it
stands the command counts at scale, and is meant for a GPU; notebook 03 asks for less. What is written are counts:
windows, drafts, accepted drafts, and the windows in which the draft at each position was accepted, of every pass.

Survival at position i is the share of windows in which the drafts 0 to i were all accepted: the count that vLLM
exports as ``spec_decode_num_accepted_tokens_per_pos`` over its number of windows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from nwor_lab import paths, results

if TYPE_CHECKING:
    from nwor_lab.engines.engine import EngineSpec

COUNTS = ("tokens", "windows", "draft_tokens", "accepted_tokens", "accepted_at")
RECORDED = "gpu_acceptance"
"""Table of the counts at scale, in a run and in `data/recorded/`."""


@dataclass(frozen=True)
class Plan:
    """What is counted.

    ks: draft lengths, an engine each; temperatures: 0 is greedy.
    num_prompts: prompts of a pass, 0 for all there are.
    max_tokens: of an answer; long greedy answers repeat themselves, and what repeats is drafted well.
    repeats: passes at a temperature above 0, each with seeds of its own. Greedy is one pass: another drafts the same.
    chat: a prompt is a user's turn in the model's chat template, and an answer ends where the model ends it; else every
        answer has `max_tokens` tokens.
    """

    ks: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 0
    max_tokens: int = 64
    repeats: int = 8
    chat: bool = False

    def __post_init__(self) -> None:
        if not self.ks or len(set(self.ks)) != len(self.ks) or min(self.ks) < 1:
            raise ValueError(f"ks must be different draft lengths of at least 1, got {self.ks}")
        if min(self.repeats, self.max_tokens) < 1:
            raise ValueError("repeats and max_tokens must be at least 1")

    def passes(self, seed: int) -> list[tuple[float, int, int]]:
        """(temperature, repeat, seed of the first request) of each pass."""
        return [
            (temperature, repeat, seed + 1000 * repeat)
            for temperature, repeat in itertools.product(self.temperatures, range(self.repeats))
            if temperature or not repeat
        ]


def count(spec: EngineSpec, plan: Plan, prompts: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Tidy rows of `COUNTS` by k, temperature and repeat, and every rank's status by k.

    Args:
        spec: of all engines but for k.

    Raises:
        RuntimeError: an engine failed.
        ValueError: no prompt, or one that does not fit beside `max_tokens` and a window.
    """
    from nwor_lab.engines.engine import Engine, on_cpu
    from nwor_lab.experiments import bench, bench_table
    from nwor_lab.experiments.bench import say

    if plan.num_prompts > len(prompts) or not prompts:
        raise ValueError(f"{plan.num_prompts or 'some'} prompts asked for, {len(prompts)} given")
    prompts = prompts[: plan.num_prompts or None]
    with ExitStack() as stack:
        engines = {
            k: stack.enter_context(
                Engine(replace(spec, k=k), bench.settings_of("off", audit=False), core=core * spec.tp)
            )
            for core, k in enumerate(plan.ks)
        }
        ranks = {}
        for k, engine in engines.items():
            engine.wait()
            say(f"k={k}: engine up")
            ranks[k] = engine.report()
            bench.require_served("off", ranks[k])
        tokens = chat_turns(spec.model, prompts) if plan.chat else engines[plan.ks[0]].encode(prompts)
        room = spec.max_model_len - plan.max_tokens - max(plan.ks)
        if (longest := max(map(len, tokens))) > room:
            raise ValueError(
                f"a prompt has {longest} tokens, max_model_len {spec.max_model_len} leaves room for {room}"
            )
        until = [{"ignore_eos": not plan.chat}]

        def passes(k: int) -> list[dict[str, Any]]:
            rows = []
            for number, (temperature, repeat, seed) in enumerate(plan.passes(spec.seed), 1):
                say(f"k={k}: pass {number} of {len(plan.passes(spec.seed))}, temperature {temperature:g}")
                done = engines[k].generate(tokens, plan.max_tokens, temperature, seed, sampling=until)
                common = {"mode": "off", "k": k, "temperature": temperature, "repeat": repeat, "seed": seed}
                rows += [{**common, **row} for row in bench_table.measured(done) if row["metric"] in COUNTS]
            return rows

        at_once = max(1, len(os.sched_getaffinity(0)) // spec.tp) if on_cpu() else len(engines)
        with ThreadPoolExecutor(at_once) as pool:
            rows = list(itertools.chain.from_iterable(pool.map(passes, engines)))
    return rows, {"ranks": ranks}


def chat_turns(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as the first turn of a chat, in the model's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def interval(accepted: int, windows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); windows of one request are treated as independent."""
    found = binomtest(accepted, windows).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def mean_accepted(accepted_at: Sequence[float], windows: int) -> tuple[float, float]:
    """Mean of the drafts accepted in a window, and its standard error.

    accepted_at: windows whose draft at each position was accepted. One of n accepted drafts counts at n positions, the
        i-th of which adds 2i + 1 to n squared.
    """
    mean = sum(accepted_at) / windows
    square = sum((2 * position + 1) * count for position, count in enumerate(accepted_at)) / windows
    return mean, math.sqrt(max(0.0, square - mean**2) / windows)


def survival(counts: pd.DataFrame) -> pd.DataFrame:
    """Tidy rows from the rows of `count` or of a bench run, by mode, k and temperature, over all repeats.

    Returns:
        metric ``survival`` at each ``position`` with its interval ``low``, ``high``; ``conditional`` likewise, given
        that the draft before was accepted; ``acceptance_length``, bonus token included, with the 95 % interval of a
        mean over windows; ``windows``; ``draft_tokens``; and ``rejected_share`` with its interval, rejected rows over
        the 1 + k rows that vanilla writes for each window.
    """
    rows = []
    for (mode, k, temperature), part in counts[counts.temperature.notna()].groupby(["mode", "k", "temperature"]):
        common = {"mode": mode, "k": k, "temperature": temperature}
        windows = int(part.loc[part.metric == "windows", "value"].sum())
        drafts = int(part.loc[part.metric == "draft_tokens", "value"].sum())
        accepted = int(part.loc[part.metric == "accepted_tokens", "value"].sum())
        before = windows
        at = part[part.metric == "accepted_at"].groupby("position").value.sum()
        for position, survived in at.items():
            for metric, trials in (("survival", windows), ("conditional", before)):
                if trials:
                    low, high = interval(int(survived), trials)
                    rows.append(
                        {
                            **common,
                            "metric": metric,
                            "value": survived / trials,
                            "unit": "share",
                            "position": int(position),
                            "low": low,
                            "high": high,
                        }
                    )
            before = int(survived)
        (mean, error), written = mean_accepted(at.sort_index().tolist(), windows), drafts + windows
        half = 1.96 * error
        for metric, unit, value, by in (
            ("acceptance_length", "tokens", 1 + mean, half),
            ("rejected_share", "share", (drafts - accepted) / written, half * windows / written),
        ):
            rows.append(
                {**common, "metric": metric, "value": value, "unit": unit, "low": value - by, "high": value + by}
            )
        rows.append({**common, "metric": "windows", "value": windows, "unit": "windows"})
        rows.append({**common, "metric": "draft_tokens", "value": drafts, "unit": "tokens"})
    return pd.DataFrame(rows)


def predict_rejected(frame: pd.DataFrame) -> pd.DataFrame:
    """Return columns `temperature`, `k`, `value`: the rejected share of 1 + k rows that survival at the
    longest k implies.

    Of k drafts, the sum of the survival of positions 0 .. k-1 is accepted; the last sampled token's row is kept.
    """
    rows = frame[frame["metric"] == "survival"]
    rows = rows[rows["k"] == rows["k"].max()]
    parts = []
    for temperature, group in rows.groupby("temperature"):
        survival = group.groupby("position")["value"].mean().sort_index().to_numpy()
        k = np.arange(1, len(survival) + 1)
        parts.append(pd.DataFrame({"temperature": temperature, "k": k, "value": (k - survival.cumsum()) / (1 + k)}))
    return pd.concat(parts, ignore_index=True)


def same_share(counts: Iterable[tuple[int, int]]) -> float:
    """The z statistic of two shares, given as (accepted, trials) twice; 0 where both are the same for certain."""
    (a, n), (b, m) = counts
    pooled = (a + b) / (n + m)
    deviation = (pooled * (1 - pooled) * (1 / n + 1 / m)) ** 0.5
    return 0.0 if deviation == 0 else (a / n - b / m) / deviation


def checks(table: pd.DataFrame) -> list[tuple[str, object, object, bool]]:
    """What must hold of a survival table, as (claim, predicted, measured, holds)."""
    survival = table[table.metric == "survival"].sort_values("position")
    falling = all(part.value.is_monotonic_decreasing for _, part in survival.groupby(["k", "temperature"]))
    lines: list[tuple[str, object, object, bool]] = [
        ("survival never rises with position", True, falling, falling),
    ]
    predicted = predict_rejected(table).set_index(["temperature", "k"]).value
    measured = table[table.metric == "rejected_share"]
    off = max(abs(row.value - predicted[row.temperature, row.k]) for row in measured.itertuples())
    lines.append(
        ("rejected share of written rows: counted against predicted from survival", "<= 0.08 apart", off, off <= 0.08)
    )
    return lines


def checks_at_scale(table: pd.DataFrame, drafts: int = 100_000) -> list[tuple[str, object, object, bool]]:
    """What must hold of the survival table of counts at scale, as `checks`: its windows, and what holds of any."""
    windows = int(table.loc[table.metric == "windows", "value"].sum())
    lines: list[tuple[str, object, object, bool]] = [("windows", f">= {drafts}", windows, windows >= drafts)]
    return [(f"at scale: {claim}", predicted, found, holds) for claim, predicted, found, holds in lines + checks(table)]


def calibration(table: pd.DataFrame, model: str, dataset: str, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """Greedy acceptance beside what was published of the same model, chain drafts of the same k and the same prompts.

    Args:
        table: of `survival`; model: a name on the hub, of which the last part counts; dataset: as `published` names it.

    Returns:
        columns ``k``, ``metric`` (``acceptance_length`` or ``survival``), ``position``, ``published``, ``value``,
        ``low``, ``high`` and ``apart``, the relative difference; no rows where nothing comparable was published.
    """
    known = pd.read_csv(paths.PUBLISHED_ACCEPTANCE) if published is None else published
    known = known[(known["model"] == Path(model).name) & (known["dataset"] == dataset) & (known["temperature"] == 0)]
    known = known.assign(
        k=pd.to_numeric(known["draft"].str.extract(r"^chain k=(\d+)$")[0]),
        metric=known["metric"].replace("tau", "acceptance_length"),
        published=known["value"],
    ).dropna(subset="k")
    keys = ["k", "metric", "position"]
    greedy = table.loc[table["temperature"] == 0, [*keys, "value", "low", "high"]]
    both = known[[*keys, "published"]].merge(greedy, on=keys)
    return both.assign(apart=both["value"] / both["published"] - 1)


def calibrated(beside: pd.DataFrame) -> list[tuple[str, object, object, bool]]:
    """What vLLM's own test asks of `calibration`'s rows, as `checks`:
    a length within 5 %, survival no more than 5 % less."""
    return [
        (
            f"{row.metric.replace('_', ' ')} at k={row.k:.0f}"
            + ("" if math.isnan(row.position) else f", position {row.position:.0f}")
            + " beside the published",
            row.published,
            row.value,
            (abs(row.apart) if row.metric == "acceptance_length" else -row.apart) <= 0.05,
        )
        for row in beside.itertuples()
    ]


def measure(run: results.Run) -> pd.DataFrame:
    """Counts at scale, which the command `nwor acceptance` takes on a GPU and keeps as a table of `run`."""
    run.command("acceptance", "--run-dir", run.directory, "--name", RECORDED)
    return results.read_table(RECORDED, run.directory)


def main(argv: list[str] | None = None) -> int:
    from nwor_lab import pair
    from nwor_lab.engines.engine import EngineSpec
    from nwor_lab.experiments import bench

    parser = argparse.ArgumentParser(
        prog="nwor acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--temperature", default="0,1", help="temperatures, comma-separated (default: %(default)s)")
    parser.add_argument("--prompts", default=str(paths.PROMPTS), help="JSONL file with a `prompt` a line")
    parser.add_argument("--run-dir", default="", help="folder to write to (default: results/<name>)")
    parser.add_argument("--name", default=RECORDED, help="name of the table and report (default: %(default)s)")
    pair_of = {"model": str(paths.PAIR_TARGET), "draft": str(paths.PAIR_EAGLE)}
    # With a cache of a given size engines start side by side, and none asks for much of the GPU to be free.
    size = {"batch": 64, "max_num_batched_tokens": 8192, "kv_cache_memory": 1024, "gpu_memory_utilization": 0.1}
    bench.add_fields(parser, EngineSpec, pair_of | size | {"dtype": ""}, skip=("k",))
    bench.add_fields(parser, Plan, {}, skip=("temperatures",))
    given = vars(bench.suit(parser.parse_args(argv)))
    temperatures = tuple(float(value) for value in given["temperature"].split(","))
    spec, plan = bench.from_options(EngineSpec, given), bench.from_options(Plan, given | {"temperatures": temperatures})
    rows, report = count(spec, plan, pair.load_prompts(given["prompts"]))
    frame, path = bench.keep(given, spec, plan, rows, report)
    print(summary(survival(frame)).to_string(float_format=lambda value: f"{value:.3f}"))
    windows, drafts = (int(frame.loc[frame.metric == metric, "value"].sum()) for metric in ("windows", "draft_tokens"))
    print(f"{windows} windows, {drafts} drafts\nwritten: {path} and .json")
    return 0


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """What `survival` says of whole windows: a line a temperature and k, a column a metric."""
    return table[table["position"].isna()].pivot_table(index=["temperature", "k"], columns="metric", values="value")


if __name__ == "__main__":
    sys.exit(main())
