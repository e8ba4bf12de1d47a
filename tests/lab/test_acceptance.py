# SPDX-License-Identifier: Apache-2.0
"""Acceptance: shares and intervals by hand, one engine a draft length, and counts at scale."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from fake_engine import ACCEPTED

from nwor_lab import pair, paths, results
from nwor_lab.experiments import acceptance, options
from nwor_lab.experiments.survival import COUNTS


@pytest.fixture
def counts(engines, tmp_path) -> pd.DataFrame:
    """As the command leaves them, of two draft lengths."""
    words = ["--k", "1,3", "--num-prompts", "4", "--repeats", "2", "--run-dir", str(tmp_path / "run")]
    assert acceptance.main(words) == 0
    return pd.read_parquet(tmp_path / "run" / "gpu_acceptance.parquet")


def value(table: pd.DataFrame, metric: str, column: str = "value", **where: float) -> float:
    for name, wanted in where.items():
        table = table[table[name] == wanted]
    (found,) = table.loc[table.metric == metric, column]
    return float(found)


def test_all_engines_start_before_one_is_waited_for(engines, counts, tmp_path) -> None:
    log = [call[1] for call in engines.calls if call[1] in ("start", "wait", "close")]
    assert log == ["start"] * 2 + ["wait"] * 2 + ["close"] * 2
    assert [(one.spec.k, one.mode, one.spec.kv_cache_memory > 0) for one in engines.every] == [
        (1, "off", True),
        (3, "off", True),
    ]
    passes = [(4, 64, 0.0, 0, 0), (4, 64, 1.0, 0, 0), (4, 64, 1.0, 1000, 0)]
    asked = [call[3:] for call in engines.calls if call[1] == "generate"]
    assert sorted(asked, key=str) == sorted(2 * passes, key=str)
    report = json.loads((tmp_path / "run" / "gpu_acceptance.json").read_text())
    assert (report["plan"]["ks"], list(report["ranks"])) == ([1, 3], ["k=1", "k=3"])


def test_the_command_alone_counts_at_scale() -> None:
    """More than 100,000 windows, by the acceptance that was recorded at k=8."""
    given = options.parser("acceptance", "", **acceptance.AT_SCALE).parse_args([])
    spec, plan, prompts = options.parse_config(given)
    recorded = results.read_table("acceptance", paths.RECORDED)
    assert plan.ks == tuple(range(1, 9)) and (spec.batch, plan.num_prompts) == (64, len(pair.load_prompts()))
    assert [temperature for temperature, _, _ in plan.passes(0)].count(0.0) == 1
    assert len({seed for temperature, _, seed in plan.passes(0) if temperature}) == plan.repeats
    longest = {t: value(recorded, "acceptance_length", k=8, temperature=t) for t in plan.temperatures}
    tokens = len(prompts) * plan.max_tokens
    assert sum(len(plan.ks) * tokens / longest[temperature] for temperature, _, _ in plan.passes(0)) > 100_000


def test_tables_hold_counts_alone(counts) -> None:
    assert set(counts.metric) == set(COUNTS)
    keys = ["k", "temperature", "repeat", "metric", "position"]
    assert not counts.duplicated(keys).any()
    assert len(counts) == 3 * (4 + 1 + 4 + 3)


def test_shares_and_intervals_by_hand(counts) -> None:
    table = acceptance.survival(counts)
    for temperature, windows in ((0, 100), (1, 200)):
        where = {"k": 3, "temperature": temperature}
        assert value(table, "windows", **where) == windows
        assert value(table, "draft_tokens", **where) == 3 * windows
        assert [value(table, "survival", position=p, **where) for p in range(3)] == [0.75, 0.35, 0.10]
        each = np.repeat([0, *ACCEPTED], [25, *ACCEPTED.values()])
        half = 1.96 * each.std() / windows**0.5
        assert value(table, "acceptance_length", **where) == pytest.approx(1 + each.mean())
        assert value(table, "acceptance_length", "high", **where) == pytest.approx(1 + each.mean() + half)
        assert value(table, "rejected_share", **where) == pytest.approx((3 - each.mean()) / 4)
        assert value(table, "rejected_share", "low", **where) == pytest.approx((3 - each.mean() - half) / 4)
    low, high = (value(table, "survival", end, position=0, k=3, temperature=0) for end in ("low", "high"))
    assert (low, high) == pytest.approx((0.6570, 0.8246), abs=1e-4), "Wilson's, of 75 in 100"
    assert acceptance.summary(table).loc[(1, 3), "windows"] == 200


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repeats", "0"], "acceptance is counted in mode off, with at least one repeat"),
        (["--k", "2,2"], "ks must be different values"),
        (["--num-prompts", "9999"], "9999 prompts asked for"),
        (["--max-model-len", "80"], "a prompt has .* tokens, max_model_len 80 leaves room for 8"),
    ],
)
def test_wrong_counts_are_refused_before_an_engine_starts(words, says, engines, tmp_path, capsys) -> None:
    assert acceptance.main([*words, "--run-dir", str(tmp_path)]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not engines.every


def test_counts_at_scale_are_what_the_command_left(counts, tmp_path, monkeypatch) -> None:
    run = results.Run(tmp_path, "03_eagle_acceptance")

    def command(*words: object) -> None:
        assert words == ("acceptance", "--run-dir", run.directory, "--name", "gpu_acceptance")
        results.write_table(run.directory / "gpu_acceptance.parquet", counts)

    monkeypatch.setattr(run, "command", command)
    assert acceptance.measure(run).value.sum() == counts.value.sum()
