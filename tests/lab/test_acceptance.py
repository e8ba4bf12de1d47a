# SPDX-License-Identifier: Apache-2.0
"""Acceptance: shares and intervals by hand, one engine a draft length, and counts at scale."""

import json
import re
import time

import numpy as np
import pandas as pd
import pytest
from fake_engine import ACCEPTED, FakeEngine

from nwor_lab.bench import acceptance
from nwor_lab.engines.engine import EngineError
from nwor_lab.run import results


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
    asked = [call[2:] for call in engines.calls if call[1] == "generate"]
    assert sorted(asked, key=str) == sorted(2 * passes, key=str)
    report = json.loads((tmp_path / "run" / "gpu_acceptance.json").read_text())
    assert (report["plan"]["ks"], list(report["ranks"])) == ([1, 3], ["k=1", "k=3"])


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


def test_what_was_counted_is_said_in_a_sentence_and_what_was_not_is_not_claimed(counts, tmp_path) -> None:
    greedy, sampled = acceptance.verdicts(table := acceptance.survival(counts))
    assert greedy.startswith("greedy, k=3") and sampled.startswith("temperature 1, k=3")
    assert "2.20 tokens a window" in greedy and "45% of the rows" in greedy
    run = results.Run(tmp_path, "03")
    acceptance.claim(run, table, table, {})
    claimed = results.claims(tmp_path)
    assert not claimed["claim"].str.contains("k=4").any() and "nan" not in claimed["found"].astype(str).tolist()


def test_what_a_reader_computes_is_held_to_the_table(counts) -> None:
    table = acceptance.survival(counts)
    mine = table[["temperature", "k", "metric", "position", "value", "low"]]
    assert acceptance.largest_difference(mine, table, "value", "low") == 0
    assert acceptance.largest_difference(mine.assign(value=mine["value"] + 0.25), table, "value") == 0.25
    with pytest.raises(KeyError, match="does not have"):
        acceptance.largest_difference(mine.assign(k=5), table, "value")


def test_a_guessed_curve_is_near_or_not_yet(capsys) -> None:
    curve = [0.75, 0.35, 0.10]
    assert acceptance.check_curve([0.8, 0.4, 0.2], curve)
    for guessed in ([], [0.75, 0.35], [0.9, 0.8, 0.7]):
        assert not acceptance.check_curve(guessed, curve)
    right, *others = capsys.readouterr().out.splitlines()
    assert right.startswith("right: off by 0.067") and all(line.startswith("not yet") for line in others)


def test_where_one_engine_fails_the_others_begin_no_further_pass(engines, monkeypatch, tmp_path, capsys) -> None:
    """Ctrl-C, too, comes while all engines count."""
    generate, counted = FakeEngine.generate, []

    def fails(self, *how, **named):
        if self.spec.k == 1:
            while not counted:
                time.sleep(0.001)
            raise EngineError("it ended")
        counted.append(self)
        time.sleep(0.01)
        return generate(self, *how, **named)

    monkeypatch.setattr(FakeEngine, "generate", fails)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    words = ["--k", "1,2", "--repeats", "500", "--random-prompts", "16", "--num-prompts", "1"]
    assert acceptance.main([*words, "--run-dir", str(tmp_path)]) == 1
    assert "it ended" in capsys.readouterr().err and 0 < len(counted) < 100


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--num-prompts", "9999"], "9999 prompts asked for"),
        (["--random-prompts", "16,64"], "several lengths"),
        (["--max-tokens", "1"], "no window"),
    ],
)
def test_wrong_counts_are_refused_before_an_engine_starts(words, says, engines, tmp_path, capsys) -> None:
    assert acceptance.main([*words, "--run-dir", str(tmp_path)]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not engines.every
