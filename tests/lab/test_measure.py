# SPDX-License-Identifier: Apache-2.0
"""The commands that measure on GPUs, and what is made of their tables: all but the measuring."""

import itertools
import json
import os
import threading
from pathlib import Path

import pandas as pd
import pytest

from nwor_lab import measure, paths, results
from nwor_lab.experiments import acceptance, options
from nwor_lab.experiments.plan import Plan
from nwor_lab.microbench import attention


def parse(arguments, monkeypatch):
    """What the options describe on a machine with two GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(options.machine, "on_cpu", lambda: False)
    return options.parse_config(arguments)


@pytest.mark.parametrize("name", [name for name in measure.MEASUREMENTS if name not in measure.ALONE])
def test_every_bench_is_one(name, tmp_path, monkeypatch):
    """Options, shapes and draft lengths that the bench takes; an hour on a GPU must not end at a misspelt word."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    words = [word.format(out=tmp_path, name=name) for word in measure.MEASUREMENTS[name]]
    assert words[:2] == ["nwor_lab.cli", "bench"]
    arguments = options.parser("bench", "").parse_args(words[2:])
    engine, plan, prompts = parse(arguments, monkeypatch)
    assert engine.llm_arguments()["speculative_config"]["num_speculative_tokens"] == engine.k
    assert engine.acceptance_length <= engine.k + 1
    if plan.random_prompts:  # else vLLM's own graphs: they end below 64 requests with k=8
        assert {size * rows for size in plan.sizes for rows in (1, engine.k + 1)} <= {*engine.cudagraph_capture_sizes}
    assert len(prompts) >= 1 and plan.variants[0].columns["mode"] == "off"
    left = Plan(**{**vars(plan), "profile": False}).loads(engine.max_model_len, 10**9)
    assert all(length + plan.max_tokens <= engine.max_model_len for length, _ in left if plan.random_prompts)


@pytest.mark.parametrize(("name", "module"), [("attention", attention), ("gpu_acceptance", acceptance)])
def test_the_other_commands_are_of_their_modules(name, module):
    words = measure.MEASUREMENTS[name]
    assert words[0] == module.__name__ or words[:2] == ["nwor_lab.cli", module.__name__.rpartition(".")[2]]


@pytest.mark.parametrize("name", [name for name in measure.STEPS if not name.endswith("cow")])
def test_a_cache_of_steps_holds_every_load_but_the_largest(name, tmp_path, monkeypatch):
    """No point of the grid is left out but 64 prompts of 8k of 32 KV heads: 131 GiB in fp8."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    arguments = options.parser("bench", "").parse_args([*measure.MEASUREMENTS[name][2:], "--name", name])
    engine, plan, _ = parse(arguments, monkeypatch)
    config = json.loads((Path(engine.model) / "config.json").read_text())
    layers, heads = config["num_hidden_layers"] + 1, config["num_key_value_heads"]  # the drafter has one
    position = 2 * layers * heads * 128 * (1 if engine.kv_cache_dtype == "fp8" else 2)
    loads = plan.loads(engine.max_model_len, (engine.kv_cache_memory << 20) // position)
    largest = [(8192, 64)] if heads == 32 else []
    every = itertools.product(plan.random_prompts, plan.sizes)
    assert sorted(set(every) - set(loads)) == largest


def bench_table(mode_us: dict[str, float], kv_heads: int = 8) -> pd.DataFrame:
    """Two modes' steps and kernels, as a bench leaves them."""
    where = {"tp": 1, "kv_heads": kv_heads, "kv_cache_dtype": "auto", "k": 8, "prompt": 512, "batch": 4, "engine": ""}
    rows = []
    for mode, us in mode_us.items():
        rows.append(where | {"mode": mode, "metric": "step_ms", "value": us / 100, "unit": "ms", "step": 0})
        rows.append(where | {"mode": mode, "metric": "accepted_at", "value": 2, "unit": "windows", "position": 0})
        for kind, part in (("KV write", 0.1), ("matmul", 0.9)):
            rows.append(where | {"mode": mode, "metric": "kernel_us", "value": part * us, "unit": "us", "kind": kind})
    return results.tidy(rows, model="llama")


def test_what_is_whole_is_recorded_and_nothing_else(tmp_path):
    """A missing measurement leaves its table as it was, and is named."""
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    for kv_heads, name in enumerate([*measure.STEPS, *measure.STEPS_OF_TWO]):
        frame = bench_table({"off": 600.0, "stage": 570.0}, kv_heads)
        results.write_table(measure.table(made, name), frame)
        provenance = results.provenance({})
        results.write_json(measure.table(made, name).with_suffix(".json"), {"provenance": provenance})
    results.write_table(measure.table(made, "audit"), bench_table({"off": 1.0}))
    missing = measure.record(made, recorded)
    assert missing == [
        "kernel_times",
        "attention_counters",
        "attention",
        "gpu_acceptance",
        "gpu_tests",
        "gpu_audit",
        "gpu_audited_steps",
    ]
    assert sorted(path.stem for path in recorded.iterdir()) == [
        "gpu_kernels",
        "gpu_runs",
        "gpu_steps",
        "kv_write_share",
    ]
    found = {path.stem: pd.read_parquet(path) for path in recorded.glob("*.parquet")}
    runs = json.loads((recorded / "gpu_runs.json").read_text())
    assert {run["name"] for run in runs} == measure.STEPS.keys() | measure.STEPS_OF_TWO.keys()
    assert all(run["run_id"] == "gpu" and run["git"].keys() == {"commit", "clean"} for run in runs)
    assert set(found["gpu_steps"].metric) == {"step_ms"} and set(found["gpu_steps"].run_id) == {"gpu"}
    assert set(found["gpu_kernels"].kind) == {"KV write", "matmul"}
    assert found["kv_write_share"].value.tolist() == pytest.approx([0.01] * found["gpu_steps"].kv_heads.nunique())


def test_who_made_the_steps_stays_with_them(tmp_path):
    """Audits measured anew leave the steps as they were, and what is said of their runs."""
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    old = [{"name": "steps-k8-32", "run_id": "before"}, {"name": "audit", "run_id": "before"}]
    results.write_json(recorded / "gpu_runs.json", old)
    for name in (*measure.AUDITS, *measure.AUDITS_OF_TWO):
        results.write_table(measure.table(made, name), bench_table({"off": 1.0}))
        results.write_json(measure.table(made, name).with_suffix(".json"), {"provenance": results.provenance({})})
    results.write_json(measure.table(made, "steps-k8-8").with_suffix(".json"), {"provenance": results.provenance({})})
    assert "gpu_audit" not in measure.record(made, recorded)
    runs = {run["name"]: run["run_id"] for run in json.loads((recorded / "gpu_runs.json").read_text())}
    assert runs == {"steps-k8-32": "before", "audit": "gpu", "audit-tp2": "gpu"}


def test_a_run_whose_git_could_not_be_asked(tmp_path):
    made = {name: "x" for name in ("time", "versions", "python", "gpu", "cpu")} | {"git": "unavailable: no git"}
    results.write_table(measure.table(tmp_path, "attention"), bench_table({"off": 1.0}))
    results.write_json(measure.table(tmp_path, "attention").with_suffix(".json"), {"provenance": made})
    assert "attention" not in measure.record(tmp_path, tmp_path / "recorded")
    (run,) = json.loads((tmp_path / "recorded" / "gpu_runs.json").read_text())
    assert run["git"] == "unavailable: no git"


def test_a_whole_reproduction_run_is_recorded_without_what_is_of_one_machine(tmp_path, monkeypatch, capsys):
    recorded = tmp_path / "recorded"
    run = results.Run(tmp_path / "run", "01_x", {"k": 1, "run_dir": "somewhere"})
    run.claim("a", 1, 1, True)
    monkeypatch.setattr(measure.paper, "TABLES", ("steps",))
    with pytest.raises(ValueError, match="run is not whole: 01_x; go on with"):
        measure.record_run(run.directory, recorded)
    run.finish()
    run.table("steps", bench_table({"off": 600.0}))
    results.write_table(run.directory / "claims.parquet", results.claims(run.directory))
    results.write_text(run.directory / "figures" / "reference_policies.png", "a picture")
    measure.record_run(run.directory, recorded)
    names = {"steps.parquet", "claims.parquet", "reference_policies.png", "manifest.json"}
    assert {path.name for path in recorded.iterdir()} == names
    made = results.read_manifest(recorded)["notebooks"]["01_x"]["provenance"]
    assert made["parameters"] == {"k": 1} and not {"command", "platform"} & set(made)
    assert measure.main(["--record", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"nwor measure: no folder {tmp_path / 'nothing'}\n"


def test_a_measurement_that_fails_is_named_and_one_that_is_there_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(
        measure, "MEASUREMENTS", {"bad": ["nwor.no_such"], "two": ["nwor", "--tp", "2"], "there": ["nwor.no_such"]}
    )
    results.write_table(measure.table(tmp_path, "there"), bench_table({"off": 1.0}))
    assert measure.measure(tmp_path, []) == ["bad", "two"]
    said = capsys.readouterr().out
    assert "bad: failed, see" in said and "two: left out, 2 NVIDIA GPUs are needed" in said and "there" not in said
    assert "no_such" in (tmp_path / "bad" / "log.txt").read_text()


def test_each_gpu_has_a_measurement_of_its_own(tmp_path, monkeypatch):
    """Two of one rank are under way at once, on two GPUs; one of two ranks has both, and nobody beside it."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr(measure, "MEASUREMENTS", {"two": ["--tp", "2"]} | {name: [] for name in ("a", "b", "c", "d")})
    under_way, cores, seen, together = [], {}, [], threading.Barrier(2)

    def run(directory, name, gpus):
        assert not set(gpus) & set(under_way)
        under_way.extend(gpus)
        if name != "two":
            cores[gpus[0]] = os.sched_getaffinity(0)
            together.wait(timeout=10)
            together.wait(timeout=10)
        seen.append((name, gpus))
        for gpu in gpus:
            under_way.remove(gpu)
        return name != "c"

    monkeypatch.setattr(measure, "run", run)
    assert measure.measure(tmp_path, []) == ["c"]
    assert {gpus[0] for name, gpus in seen if name != "two"} == {"4", "6"}
    assert len(seen) == 5 and seen[-1] == ("two", ["4", "6"])
    assert not cores["4"] & cores["6"] or len(os.sched_getaffinity(0)) == 1, "one does not slow the other down"
