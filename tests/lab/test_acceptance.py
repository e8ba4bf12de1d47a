# SPDX-License-Identifier: Apache-2.0
"""Acceptance: shares and intervals by hand, one engine a draft length,
and counts at scale that may not be there yet."""

import json
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import pytest

from nwor_lab import pair, paths, results
from nwor_lab.engines import engine
from nwor_lab.engines.engine import EngineSpec, Generation
from nwor_lab.experiments import acceptance
from nwor_lab.experiments.acceptance import Plan
from nwor_lab.plots import paper, style

ACCEPTED = {1: 40, 2: 25, 3: 10}
"""Windows of a pass of the fake engine by the drafts they accept, beside 25 that accept none; cut at k."""


class FakeEngine:
    """Counts as an engine of `spec.k` drafts would, and keeps what it was asked."""

    every: ClassVar[list["FakeEngine"]] = []
    log: ClassVar[list[str]] = []

    def __init__(self, spec: EngineSpec, settings: Any, core: int = 0) -> None:
        self.spec, self.mode, self.calls = spec, settings.mode, []
        self.every.append(self)
        self.log.append("start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("close")

    def wait(self) -> None:
        self.log.append("wait")

    def report(self) -> list[dict[str, Any]]:
        return [{"rank": 0, "mode": self.mode, "serving": self.mode}]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def generate(self, prompts: list, max_tokens: int, temperature: float, seed: int, sampling: list) -> Generation:
        self.calls.append((len(prompts), max_tokens, temperature, seed, sampling))
        cut = [min(self.spec.k, n) for n, windows in ACCEPTED.items() for _ in range(windows)]
        at = [sum(n > position for n in cut) for position in range(self.spec.k)]
        counters = {"drafts": 100, "draft_tokens": 100 * self.spec.k, "accepted_tokens": sum(cut)}
        return Generation([[0] * max_tokens for _ in prompts], [], [0.01], counters, at)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(engine, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "every", [])
    monkeypatch.setattr(FakeEngine, "log", [])
    return FakeEngine


@pytest.fixture
def counts(engines: type[FakeEngine], tmp_path) -> pd.DataFrame:
    """As the command leaves them, of two draft lengths."""
    words = ["--ks", "1,3", "--num-prompts", "4", "--repeats", "2", "--run-dir", str(tmp_path / "run")]
    assert acceptance.main(words) == 0
    return pd.read_parquet(tmp_path / "run" / "gpu_acceptance.parquet")


def value(table: pd.DataFrame, metric: str, column: str = "value", **where: float) -> float:
    for name, wanted in where.items():
        table = table[table[name] == wanted]
    (found,) = table.loc[table.metric == metric, column]
    return float(found)


def test_all_engines_start_before_one_is_waited_for(engines, counts, tmp_path) -> None:
    assert engines.log == ["start"] * 2 + ["wait"] * 2 + ["close"] * 2
    assert [(one.spec.k, one.mode, one.spec.kv_cache_memory > 0) for one in engines.every] == [
        (1, "off", True),
        (3, "off", True),
    ]
    plain = [{"ignore_eos": True}]
    for one in engines.every:
        assert one.calls == [(4, 64, 0.0, 0, plain), (4, 64, 1.0, 0, plain), (4, 64, 1.0, 1000, plain)]
    report = json.loads((tmp_path / "run" / "gpu_acceptance.json").read_text())
    assert (report["plan"]["ks"], list(report["ranks"])) == ([1, 3], ["1", "3"])


def test_the_command_alone_counts_at_scale() -> None:
    """What notebook 03 claims of the recorded counts can be met, by the acceptance that the walk recorded at k=8."""
    plan, walk = Plan(), results.read_table("acceptance", paths.RECORDED)
    assert plan.ks == tuple(range(1, 9))
    assert [temperature for temperature, _, _ in plan.passes(0)].count(0.0) == 1
    assert len({seed for temperature, _, seed in plan.passes(0) if temperature}) == plan.repeats
    longest = {t: value(walk, "acceptance_length", k=8, temperature=t) for t in plan.temperatures}
    tokens = len(pair.load_prompts()) * plan.max_tokens
    assert sum(len(plan.ks) * tokens / longest[temperature] for temperature, _, _ in plan.passes(0)) > 100_000


def test_tables_hold_counts_alone(counts: pd.DataFrame) -> None:
    assert set(counts.metric) == set(acceptance.COUNTS)
    keys = ["k", "temperature", "repeat", "metric", "position"]
    assert not counts.duplicated(keys).any()
    assert len(counts) == 3 * (4 + 1 + 4 + 3)


def test_shares_and_intervals_by_hand(counts: pd.DataFrame) -> None:
    table = acceptance.survival(counts)
    for temperature, windows in ((0, 100), (1, 200)):
        where = {"k": 3, "temperature": temperature}
        assert value(table, "windows", **where) == windows
        assert value(table, "draft_tokens", **where) == 3 * windows
        assert [value(table, "survival", position=p, **where) for p in range(3)] == [0.75, 0.35, 0.10]
        assert value(table, "conditional", position=1, **where) == pytest.approx(0.35 / 0.75)
        each = np.repeat([0, *ACCEPTED], [25, *ACCEPTED.values()])
        half = 1.96 * each.std() / windows**0.5
        assert value(table, "acceptance_length", **where) == pytest.approx(1 + each.mean())
        assert value(table, "acceptance_length", "high", **where) == pytest.approx(1 + each.mean() + half)
        assert value(table, "rejected_share", **where) == pytest.approx((3 - each.mean()) / 4)
        assert value(table, "rejected_share", "low", **where) == pytest.approx((3 - each.mean() - half) / 4)
    low, high = (value(table, "survival", end, position=0, k=3, temperature=0) for end in ("low", "high"))
    assert (low, high) == pytest.approx((0.6570, 0.8246), abs=1e-4), "Wilson's, of 75 in 100"


def test_wrong_plans_are_refused(engines) -> None:
    for wrong in ({"ks": ()}, {"ks": (2, 2)}, {"ks": (0,)}, {"repeats": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Plan(**wrong)
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), max_model_len=80)
    with pytest.raises(ValueError, match="3 prompts asked for, 2 given"):
        acceptance.count(spec, Plan(num_prompts=3), ["a", "b"])
    assert not engines.every
    with pytest.raises(ValueError, match="a prompt has 9 tokens, max_model_len 80 leaves room for 8"):
        acceptance.count(spec, Plan(), ["123456789"])


def test_chat_turns_end_where_the_model_ends_them(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "chat_turns", lambda model, prompts: [[1, 2]] * len(prompts))
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE))
    acceptance.count(spec, Plan(ks=(3,), temperatures=(0.0,), chat=True), ["a"])
    assert engines.every[0].calls == [(1, 64, 0.0, 0, [{"ignore_eos": False}])]


def test_scale_is_claimed_of_windows(counts: pd.DataFrame) -> None:
    table = acceptance.survival(counts)
    claims = {claim: holds for claim, _, _, holds in acceptance.checks_at_scale(table, 600)}
    assert all(claims.values()) and all(claim.startswith("at scale: ") for claim in claims)
    assert not acceptance.checks_at_scale(table, 601)[0][3]
    table.loc[(table.metric == "survival") & (table.position == 2), "value"] = 0.9
    assert not acceptance.checks_at_scale(table, 600)[1][3]


def survival_of(length: float, at: list[float]) -> pd.DataFrame:
    rows = [{"metric": "acceptance_length", "value": length}]
    rows += [{"metric": "survival", "value": share, "position": position} for position, share in enumerate(at)]
    return pd.DataFrame(rows).assign(k=3, temperature=0.0, low=0.0, high=1.0)


def test_calibration_is_held_to_vllms_own_rule() -> None:
    """A length 5 % off at most, each position no more than 5 % below; of the same model, k and data set alone."""
    name = "meta-llama/Llama-3.1-8B-Instruct"
    beside = acceptance.calibration(survival_of(2.70, [0.80, 0.50, 0.33]), name, "MT-bench")
    assert beside.published.tolist() == [2.60, 0.7296, 0.5208, 0.3545]
    assert beside.apart.tolist() == pytest.approx(
        [2.7 / 2.6 - 1, 0.8 / 0.7296 - 1, 0.5 / 0.5208 - 1, 0.33 / 0.3545 - 1]
    )
    assert [line[3] for line in acceptance.calibrated(beside)] == [True, True, True, False]
    longer = acceptance.calibration(survival_of(2.74, [0.8, 0.6, 0.4]), name, "MT-bench")
    assert [line[3] for line in acceptance.calibrated(longer)] == [False, True, True, True]
    for model, dataset in (("", "MT-bench"), (name, "GSM8K"), (name, "")):
        assert acceptance.calibration(survival_of(2.6, [0.7]), model, dataset).empty
    assert acceptance.calibration(survival_of(2.6, [0.7]).assign(k=4), name, "MT-bench").empty


def test_counts_at_scale_are_what_the_command_left(counts, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = results.Run(tmp_path, "03_eagle_acceptance")

    def command(*words: object) -> None:
        assert words == ("acceptance", "--run-dir", run.directory, "--name", "gpu_acceptance")
        results.write_table(run.directory / "gpu_acceptance.parquet", counts)

    monkeypatch.setattr(run, "command", command)
    assert acceptance.measure(run).value.sum() == counts.value.sum()


def test_the_figure_draws_both_with_their_intervals(counts: pd.DataFrame, tmp_path) -> None:
    walk = results.read_table("acceptance", paths.RECORDED)
    path = paper.acceptance_at_scale(tmp_path, walk, counts)
    style.close()
    data = pd.read_csv(path.with_suffix(".csv"))
    assert data.groupby(["source", "k", "temperature"]).size().to_dict() == {
        ("at scale", 3, 0.0): 3,
        ("at scale", 3, 1.0): 3,
        ("walk", 8, 0.0): 8,
        ("walk", 8, 1.0): 8,
    }
    assert (data.low < data.value).all() and (data.value < data.high).all()
    assert "600 windows in all, k of 1 to 3" in path.with_suffix(".txt").read_text()
