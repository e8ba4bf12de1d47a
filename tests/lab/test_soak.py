# SPDX-License-Identifier: Apache-2.0
"""The soak: what it draws, what it blames, and that a failure is made small and found again."""

import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.bench import bench
from nwor_lab.engines import child
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.engines.traffic import Answer, Event, ScriptResult
from nwor_lab.soak import command, scripts
from nwor_lab.soak.judge import judge
from tests.lab.soak_engines import FakeEngine, serve_without_restore

GREEDY = {"temperature": 0.0, "max_tokens": 4}
SHORT = ["--minutes", "1e-6"]
"""One episode of one script."""


@pytest.fixture(autouse=True)
def results_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)


@pytest.fixture
def fake(monkeypatch):
    FakeEngine.forget()
    monkeypatch.setattr(bench, "Engine", FakeEngine)
    monkeypatch.setattr(scripts, "worst_drafter", lambda: Path("worst"))
    return FakeEngine


# -- what is drawn --------------------------------------------------------------------------------------------------


def test_four_seeds_meet_every_drafter_and_twenty_every_size(fake):
    specs = [scripts.configuration(seed) for seed in range(20)]
    assert specs == [scripts.configuration(seed) for seed in range(20)]
    assert len({(spec.method, spec.draft) for spec in specs[:4]}) == len(scripts.DRAFTERS)
    for field in ("tp", "dtype", "block_size", "prefix_caching"):
        assert len({getattr(spec, field) for spec in specs}) == 2, field
    assert {spec.tp for spec in specs[:4]} == {1, 2}
    assert all(spec.k > 1 for spec in specs[::4]), "some of a window's drafts may be accepted, and some not"


def test_an_episode_serves_every_kind_of_request_to_all_modes_alike(fake):
    episode = command.Episode(scripts.configuration(0), ["cow", "stage"])
    assert episode.run(time.monotonic() + 600) == ""
    assert len(fake.served) == 3 * command.SCRIPTS and fake.started == ["off", "cow", "stage"]
    by_mode = [[events for served, events in fake.served if served == mode] for mode in fake.started]
    assert by_mode[0] == by_mode[1] == by_mode[2]
    events = [event for script in by_mode[0] for event in script]
    asked = [event for event in events if event.prompt is not None]
    assert len(asked) > 4 * command.SCRIPTS
    kinds = Counter(name for event in asked for name in event.sampling)
    kinds["aborts"], kinds["follows"] = len(events) - len(asked), sum(bool(event.follows) for event in asked)
    kinds["several"] = sum(event.sampling.get("n", 1) > 1 for event in asked)
    assert min(kinds[kind] for kind in ("aborts", "follows", "several", "stop", "structured_outputs")) >= 3, kinds
    begins = Counter(tuple(event.prompt[:16]) for event in asked if len(event.prompt) > 16)
    assert begins.most_common(1)[0][1] > 1, "no two prompts begin alike"


# -- what is blamed -------------------------------------------------------------------------------------------------


def traffic(tokens: list[int], gap: float = 1.0, **more) -> ScriptResult:
    """One greedy request's; token 4 leads token 5 by `gap` nats."""
    FakeEngine.forget()
    given = FakeEngine(EngineSpec("target"), Settings(mode="stage")).traffic([Event(0, "r0", [9], GREEDY)], 0)
    best = [{token: 0.0} for token in tokens[:-1]] + [{4: 0.0, 5: -gap}]
    return replace(given, answers={"r0": [Answer(tokens, best, "length")]}, **more)


def test_tokens_must_be_vanillas_or_under_stage_a_near_tie():
    events = [Event(0, "r0", [9], GREEDY)]
    same, parted = [1, 2, 3, 4], [1, 2, 3, 5]

    def blamed(tokens: list[int], mode: str, gap: float) -> Counter:
        return judge(events, traffic(same, gap), traffic(tokens, gap), mode, "bfloat16").faults

    assert not blamed(same, "cow", 1.0) and not blamed(same, "stage", 1.0)
    assert blamed(parted, "cow", 1e-6) == blamed(parted, "stage", 1.0) == Counter(tokens=1)
    tie = judge(events, traffic(same, 1e-6), traffic(parted, 1e-6), "stage", "bfloat16")
    assert not tie.faults and tie.counts["near ties"] == 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("dirty_layer_steps", lambda made: made.ranks[0]["audit"].update(dirty_layer_steps=2)),
        ("stray_slots", lambda made: made.ranks[0]["audit"].update(stray_slots=1)),
        ("unaudited", lambda made: made.ranks[0]["audit"].update(steps=0)),
        ("sampled audit", lambda made: made.ranks[0].update(sampled={"steps": 3, "findings": [{}]})),
        ("unaudited", lambda made: made.ranks[0].update(sampled={"steps": 0, "findings": []})),
        ("scheduler_mismatches", lambda made: made.metrics.update(nwor_scheduler_mismatches=1)),
        ("fallbacks", lambda made: made.metrics.update(nwor_fallbacks=1)),
        ("counts", lambda made: made.metrics.update(nwor_committed_tokens=4)),
        ("lost", lambda made: made.answers["r0"].clear()),
    ],
)
def test_what_is_a_fault(kind, change):
    made = traffic([1, 2, 3, 4])
    change(made)
    faults = judge([Event(0, "r0", [9], GREEDY)], traffic([1, 2, 3, 4]), made, "stage", "float32").faults
    assert kind in faults and faults.keys() <= {kind, "tokens"}, faults


def test_an_aborted_request_needs_no_end_and_stage_no_more_tokens_than_vanilla():
    events = [Event(0, "r0", [9], GREEDY), Event(2, "r0")]
    one, more = (traffic([1, 2, 3, 4]) for _ in range(2))
    one.answers["r0"] = [Answer([1, 2], one.answers["r0"][0].top_logprobs, None)]
    assert not judge(events, one, more, "stage", "float32").faults
    assert judge(events, one, more, "cow", "float32").faults == Counter(tokens=1)
    assert judge(events, one, one, "cow", "float32").counts["aborted"] == 1


# -- how it ends ----------------------------------------------------------------------------------------------------


def verdict(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_soak_without_a_fault_is_clean_and_kept(fake, tmp_path, capsys):
    assert command.main([*SHORT, "--seed", "5"]) == 0
    assert fake.started == ["off", "cow", "stage"] and len(fake.served) == 3
    said = capsys.readouterr().out
    assert "verdict: clean" in said and re.search(r"layer-steps +6 +6\n", said)
    (table,) = tmp_path.glob("soak-*/soak.parquet")
    frame = pd.read_parquet(table)
    assert table.with_suffix(".json").exists() and frame["episode"].nunique() == 1
    assert frame.query("mode == 'stage' and metric == 'layer-steps'")["value"].item() == 6


@pytest.mark.parametrize(("accepted", "missing"), [(0, "accepted"), (5, "rejected")])
def test_a_run_in_which_an_outcome_did_not_occur_is_not_clean(fake, capsys, accepted, missing):
    fake.accepted = accepted
    assert command.main([*SHORT, "--mode", "stage"]) == command.INCOMPLETE
    assert f"incomplete, no draft was {missing} under stage" in verdict(capsys)


@pytest.mark.parametrize("kind", ["tokens", "dirty_layer_steps", "died"])
def test_a_fault_is_shown_by_a_small_script_and_found_again_by_its_seed(fake, capsys, kind):
    fake.fault = kind
    assert command.main(["--minutes", "1", "--seed", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    blamed = [line for line in lines if ": " + kind in line]
    assert kind in lines[-1] and blamed and all(line.startswith("stage: ") for line in blamed)
    smallest = fake.served[-1][1]
    assert len([event for event in smallest if event.prompt is None]) == 1 and len(smallest) == 2
    (again,) = [line.split()[3:] for line in lines if line.startswith("again: ")]
    assert command.main(["--minutes", "1", *again]) == 1
    assert fake.served[-1][1] == smallest
    fake.fault = ""
    assert command.main([*SHORT, *again]) == 0


def test_a_fault_that_does_not_come_again_is_one_too(fake, capsys):
    fake.fault, fake.lasts = "dirty_layer_steps", 1
    assert command.main(["--minutes", "1"]) == 1
    assert "dirty_layer_steps" in verdict(capsys)


def test_an_interrupt_leaves_nothing_and_says_so(fake, monkeypatch, tmp_path, capsys):
    def interrupted(self, events, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "traffic", interrupted)
    assert command.main(["--minutes", "1"]) == 130
    assert "nothing" in capsys.readouterr().err.splitlines()[-1] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ends", "status"), [(KeyboardInterrupt(), 130), (EngineError("it\ndid not start"), 1)])
def test_episodes_before_the_end_are_kept(fake, monkeypatch, tmp_path, capsys, ends, status):
    run, episodes = command.Episode.run, []

    def second_fails(episode, deadline):
        episodes.append(episode)
        if len(episodes) == 2:
            raise ends
        return run(episode, 0)

    monkeypatch.setattr(command.Episode, "run", second_fails)
    assert command.main(["--minutes", "1"]) == status
    said = capsys.readouterr()
    assert "whole are kept" in said.err.splitlines()[-1] and "verdict" not in said.out
    (folder,) = tmp_path.iterdir()
    assert set(pd.read_parquet(folder / "soak.parquet")["episode"]) == {0}


@pytest.mark.parametrize("given", [["--modes", "off"], ["--mode", "cow,cow"], ["--minutes", "0"]])
def test_wrong_options_are_refused_in_one_line(fake, tmp_path, capsys, given):
    assert command.main(given) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir()) and not fake.started


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_real_engines_are_clean_and_a_mode_that_does_not_restore_is_not(monkeypatch):
    monkeypatch.setattr(command, "SCRIPTS", 6)
    stops = {"temperature": 0.0, "max_tokens": 48, "min_tokens": 12, "stop": ["e", "\n"]}
    with closing(command.Episode(scripts.configuration(0, tp=1), ["stage"])) as episode:
        for prompt in scripts.prompts()[:3]:  # ended by the front end, whose core has nothing to serve then
            episode.serve([scripts.Request((0, 0), prompt[:20], stops, 0)])
        assert episode.run(time.monotonic() + 600) == ""
    found = episode.verdicts["stage"]
    assert found.untried == [] and found.counts["layer-steps"] > 100 and found.counts["scripts"] == 9
    monkeypatch.setattr(child, "serve", serve_without_restore)
    assert "cow: dirty_layer_steps" in command.Episode(scripts.configuration(0, tp=1), ["cow"]).run(
        time.monotonic() + 600
    )
