# SPDX-License-Identifier: Apache-2.0
"""The soak: what it draws, what it blames, how a failure is replayed, and that it goes on where it stopped."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.engines import child
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.traffic import OUTCOMES, Answer, Event, Traffic
from nwor_lab.experiments import bench
from nwor_lab.soak import command, script
from nwor_lab.soak.judge import judge
from tests.lab.soak_engines import FakeEngine, serve_without_restore

GREEDY = {"temperature": 0.0, "max_tokens": 4}


@pytest.fixture(autouse=True)
def results_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)


@pytest.fixture
def fake(monkeypatch):
    FakeEngine.forget()
    monkeypatch.setattr(bench, "Engine", FakeEngine)
    monkeypatch.setattr(script, "contrary", lambda: Path("contrary"))
    return FakeEngine


@pytest.mark.parametrize("number", range(5))
def test_a_seed_draws_the_same_again_and_another_seed_does_not(number):
    spec = script.configuration(7, number)
    assert spec == script.configuration(7, number) != script.configuration(8, number)
    assert script.script(11, spec) == script.script(11, spec) != script.script(12, spec)


def test_a_soak_draws_every_drafter_size_and_kind_of_request():
    specs = [script.configuration(0, number) for number in range(20)]
    assert len({(spec.method, spec.draft) for spec in specs[:4]}) == len(script.DRAFTERS)
    for field, least in {"tp": 2, "dtype": 2, "block_size": 2, "prefix_caching": 2}.items():
        assert len({getattr(spec, field) for spec in specs}) == least, field
    assert {spec.tp for spec in specs[:4]} == {1, 2}
    events = [event for seed in range(20) for event in script.script(seed, specs[0])]
    every = script.kinds(events)
    assert min(every[kind] for kind in ("aborts", "sampled", "n > 1", "structured", "stop strings", "joining")) >= 10
    grammars = Counter(name for event in events for name in event.sampling.get("structured_outputs", ()))
    assert grammars.keys() == {"json", "regex", "choice"}
    prompts = [event.prompt for event in script.script(0, specs[0]) if event.prompt]
    first = Counter(tuple(prompt[:16]) for prompt in prompts)
    assert first.most_common(1)[0][1] > 1, "no two prompts begin alike"
    names = [event.name for event in script.script(0, specs[0]) if event.prompt]
    assert len(set(names)) == len(names)


def test_a_contrary_drafter_is_the_target_but_for_its_last_norm():
    ours, target = (load_file(folder / "model.safetensors") for folder in (script.contrary(), paths.PAIR_TARGET))
    assert ours.keys() == target.keys()
    assert [name for name in ours if not torch.equal(ours[name], target[name])] == ["model.norm.weight"]
    assert torch.equal(ours["model.norm.weight"], -target["model.norm.weight"])


def traffic(tokens: list[int], gap: float = 1.0, **more) -> Traffic:
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
        ("dirty_slots", lambda made: made.ranks[0]["audit"].update(dirty_slots=2)),
        ("stray_slots", lambda made: made.ranks[0]["audit"].update(stray_slots=1)),
        ("unaudited", lambda made: made.ranks[0]["audit"].update(steps=0)),
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


def test_a_soak_without_a_fault_ends_well_and_goes_on_where_it_stopped(fake, tmp_path, capsys):
    assert command.main(["--minutes", "1e-6", "--scripts", "3", "--seed", "5"]) == 0
    [run] = tmp_path.glob("soak-*")
    assert fake.started == ["off", "cow", "stage"] and len(fake.served) == 3
    said = capsys.readouterr().out
    assert "12 layer-steps audited" in said and said.count("faults: none") == 4
    frame = pd.read_parquet(run / "soak.parquet")
    assert (run / "soak.json").exists() and set(frame["mode"]) == {"", "cow", "stage"}
    assert frame.query("mode == 'stage' and metric == 'layer-steps'")["value"].sum() == 6
    fake.forget()
    assert command.main(["--resume", run.name]) == 0  # by its minutes it is over
    assert not fake.served
    frame["value"] = frame["value"].mask(frame["metric"] == "seconds", -1.0)
    frame.to_parquet(run / "soak.parquet")
    fake.forget()
    assert command.main(["--resume", run.name, "--minutes", "0.016"]) == 0
    assert {seed // 1000 % 1000 for _, seed in fake.served} >= {1} and not [s for _, s in fake.served if s < 5001000]
    more = pd.read_parquet(run / "soak.parquet")
    assert more["episode"].nunique() > 1 and len(more) > len(frame)


@pytest.mark.parametrize(
    ("outcomes", "missing"),
    [
        ({"none accepted": 5}, ["accepted", "both"]),
        ({"all accepted": 5}, ["rejected", "both"]),
        ({"all accepted": 5, "none accepted": 5}, ["both"]),
        ({}, ["accepted", "rejected", "both"]),
    ],
)
def test_a_run_in_which_an_outcome_did_not_occur_under_a_mode_is_not_clean(fake, capsys, outcomes, missing):
    fake.windows = {"stage": Counter(outcomes)}
    assert command.main(["--minutes", "1e-6"]) == command.INCOMPLETE
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "incomplete" in verdict and verdict.count("under stage") == len(missing) and "cow" not in verdict
    assert all(word in verdict for word in missing)


def test_a_fault_says_more_than_an_outcome_that_did_not_occur(fake):
    fake.windows, fake.culprits = {"stage": Counter()}, {"r1"}
    assert command.main(["--minutes", "1e-6"]) == 1


def test_a_run_does_not_go_on_in_the_folder_of_another(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "FOLDER", "soak")
    assert command.main(["--minutes", "1e-6"]) == 0
    assert command.main(["--minutes", "1e-6", "--seed", "1"]) == 2
    assert "--resume soak" in capsys.readouterr().err


def test_a_short_run_meets_drafters_that_are_partly_always_and_never_right(fake, capsys):
    fake.seconds = 0.01
    assert command.main(["--minutes", "0.05", "--scripts", "1000"]) == 0
    assert {str(paths.PAIR_EAGLE), str(paths.PAIR_TARGET), "contrary"} <= set(fake.drafts), fake.drafts


@pytest.mark.parametrize("seed", range(8))
def test_the_first_engines_of_a_run_can_accept_and_reject_in_one_window(seed):
    first = script.configuration(seed, 0)
    assert first.draft == str(paths.PAIR_EAGLE) and first.k > 1


def test_a_failure_leaves_what_replays_it(fake, tmp_path, capsys):
    fake.culprits = {"r2", "r4"}
    assert command.main(["--minutes", "1e-6", "--mode", "stage"]) == 1
    file = re.search(r"--replay (\S+)", capsys.readouterr().out)[1]
    written = json.loads(Path(file).read_text())
    assert {"r2", "r4"} <= {event["name"] for event in written["scripts"][-1]["events"]}
    assert written["spec"]["model"] == "data/pair/target", "a replay serves in another checkout"
    assert command.main(["--replay", file]) == 1
    assert f"faults: {written['faults']['tokens']} tokens" in capsys.readouterr().out
    fake.culprits = set()
    assert command.main(["--replay", file]) == 0
    Path(file).write_text(json.dumps(written | {"mode": "stagger"}))
    assert command.main(["--replay", file]) == 2
    error = capsys.readouterr().err
    assert "'stagger' is not a mode; choose one of off, cow" in error and error.count("\n") == 1


@pytest.mark.parametrize(("kind", "fields"), [("died", {"dies": True}), ("dirty_slots", {"dirty": 2})])
def test_a_failure_that_is_not_of_tokens_is_blamed_too(fake, capsys, kind, fields):
    fake.culprits = {"r1"}
    for name, value in fields.items():
        setattr(fake, name, value)
    assert command.main(["--minutes", "1e-6", "--mode", "cow,stage"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    faults = {line[0]: " ".join(line) for line in lines if line and line[0] in ("cow", "stage")}
    assert "faults: none" in faults["cow"] and kind in faults["stage"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--mode", "off"], "--mode off: choose different ones of cow,stage"),
        (["--mode", "cow,cow"], "choose different ones"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--scripts", "0"], "--scripts 1 to 1000"),
        (["--resume", "nothing"], "there is no soak in"),
        (["--replay", "nothing.json"], "is no replay of a soak"),
    ],
)
def test_wrong_options_are_refused_in_one_line(fake, tmp_path, capsys, given, says):
    assert command.main(given) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir()) and not fake.started


def test_a_run_is_resumed_with_its_own_options(fake, tmp_path, capsys):
    command.main(["--minutes", "1e-6", "--scripts", "1"])
    [run] = tmp_path.glob("soak-*")
    assert command.main(["--resume", run.name, "--seed", "3"]) == 2
    assert "leave out --seed" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_real_engines_are_clean_and_a_mode_that_does_not_restore_is_not(monkeypatch, tmp_path, capsys):
    """A script each."""
    options = ["--minutes", "0.01", "--scripts", "1", "--tp", "1"]
    assert command.main([*options, "--mode", "stage"]) == 0, capsys.readouterr()
    [run] = tmp_path.glob("soak-*")
    frame = pd.read_parquet(run / "soak.parquet").query("mode == 'stage'").groupby("metric")["value"].sum()
    assert frame["layer-steps"] > 100 and frame["drafts"] > frame["accepted"]
    windows = [frame[f"windows {outcome}"] for outcome in OUTCOMES]
    assert min(windows) > 0 and frame["accepted"] >= windows[0] + windows[1] and sum(windows) <= frame["drafts"]
    monkeypatch.setattr(child, "serve", serve_without_restore)
    assert command.main([*options, "--mode", "cow"]) == 1
    said = capsys.readouterr().out
    assert "dirty_slots" in said
    events = json.loads(Path(re.search(r"--replay (\S+)", said)[1]).read_text())["scripts"][0]["events"]
    assert events
