# SPDX-License-Identifier: Apache-2.0
"""The commands that measure on GPUs, and what is made of their tables: all but the measuring."""

import importlib
import json
import math
import os
import threading
from pathlib import Path

import pandas as pd
import pytest

from nwor_lab import cli, measure, paths, results
from nwor_lab.experiments import gpu_steps, options
from nwor_lab.experiments.parity import tolerance
from nwor_lab.microbench import attention
from nwor_lab.model.predicted import COUNTS, against_measured


def parse(arguments, monkeypatch):
    """What the options describe on a machine with two GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(options.machine, "on_cpu", lambda: False)
    return options.parse_config(arguments)


BENCHES = [name for name, one in measure.MEASUREMENTS.items() if one.command[1] == "bench"]
STEPS = [name for name, one in measure.MEASUREMENTS.items() if one.table == "gpu_steps"]


def test_the_matrix_has_every_combination_once():
    """A name that two of them share would leave one out, and nobody would miss it."""
    matrix = measure.tomllib.loads(Path(measure.__file__).with_name("measurements.toml").read_text())
    each = [[len(values) for values in entry.get("each", {}).values()] for entry in matrix["measurement"]]
    assert len(measure.MEASUREMENTS) == sum(map(math.prod, each))
    for name, one in measure.MEASUREMENTS.items():
        assert "{" not in " ".join([one.table, *one.command]).replace("{out}", ""), name
        module = cli.COMMANDS[one.command[1]][0] if one.command[0] == cli.__name__ else one.command[0]
        assert hasattr(importlib.import_module(module), "main"), name
        asked = [int(one.command[at + 1]) for at, word in enumerate(one.command) if word == "--repeats"]
        assert not one.least_repeats or asked[-1] >= one.least_repeats, name
        assert one.gpus == int((["1"] + [one.command[at + 1] for at, w in enumerate(one.command) if w == "--tp"])[-1])


def test_a_mode_more_is_a_word_more():
    text = Path(measure.__file__).with_name("measurements.toml").read_text()
    more = measure.read_matrix(text.replace('mode = ["cow"]', 'mode = ["cow", "another"]'))
    added = {name: one for name, one in more.items() if name not in measure.MEASUREMENTS}
    assert {name.replace("another", "cow") for name in added} == {name for name in STEPS if "-cow-" in name}
    assert all(one.command[one.command.index("--mode") + 1].endswith("another") for one in added.values())


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_one(name, tmp_path, monkeypatch):
    """Options, shapes and draft lengths that the bench takes; an hour on a GPU must not end at a misspelt word.

    No point of a grid of steps is left out for want of cache but the largest: the first fits twice beside weights.
    """
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    words = [word.replace("{out}", str(tmp_path)) for word in measure.MEASUREMENTS[name].command]
    assert words[:2] == ["nwor_lab.cli", "bench"]
    arguments = options.parser("bench", "").parse_args(words[2:])
    engine, plan, prompts = parse(arguments, monkeypatch)
    assert engine.llm_arguments()["speculative_config"]["num_speculative_tokens"] == engine.k
    assert engine.acceptance_length <= engine.k + 1
    if plan.random_prompts:  # else vLLM's own graphs: they end below 64 requests with k=8
        assert {size * rows for size in plan.sizes for rows in (1, engine.k + 1)} <= {*engine.cudagraph_capture_sizes}
        assert plan.tolerance == tolerance("bfloat16", engine.kv_cache_dtype, random_weights=True, on_gpu=True)
    assert len(prompts) >= 1 and plan.modes[0] in ("off", "vllm")
    every = plan.loads(engine.max_model_len, 10**9)
    assert all(length + plan.max_tokens <= engine.max_model_len for length, _ in every if plan.random_prompts)
    if name in STEPS or name.startswith(("cliff_steps", "long_steps")):
        config = json.loads((Path(engine.model) / "config.json").read_text())
        layers, heads = config["num_hidden_layers"] + 1, config["num_key_value_heads"]  # the drafter has one
        position = 2 * layers * heads // engine.tp * 128 * (1 if engine.kv_cache_dtype == "fp8" else 2)
        loads = plan.loads(engine.max_model_len, (engine.kv_cache_memory << 20) // position)
        assert set(every) - set(loads) <= {(length, size) for length, size in every if length * size >= 48 * 2048}


LAYERS = [name for name, one in measure.MEASUREMENTS.items() if one.command[0] == attention.__name__]


@pytest.mark.parametrize("name", LAYERS)
def test_every_table_of_layers_is_one(name, tmp_path, monkeypatch):
    """Options that the command takes, caches that half a GPU holds, and its table where it is looked for."""
    asked, made = [], bench_table({"off": 1.0})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(attention, "measure", lambda shapes, repeats: asked.extend(shapes) or made)
    monkeypatch.setattr(attention, "net", lambda times: times)
    path = measure.table(tmp_path, name)
    words = [word.replace("{out}", str(path.parent)) for word in measure.MEASUREMENTS[name].command[1:]]
    assert attention.main(words) == 0 and path.exists() and path.with_suffix(".json").exists()
    assert len(set(asked)) == len(asked) > 10 and max(shape.bytes for shape in asked) < 40e9
    assert {shape.heads // shape.kv_heads for shape in asked} <= {1, 4} and {shape.heads for shape in asked} <= {16, 32}


def bench_table(mode_us: dict[str, float], kv_heads: int = 8, repeats: int = 6, **common) -> pd.DataFrame:
    """Two modes' steps and kernels, as a bench leaves them on a GPU."""
    where = {"tp": 1, "kv_heads": kv_heads, "kv_cache_dtype": "auto", "k": 8, "prompt": 512, "batch": 4, "engine": ""}
    rows = []
    for mode, us in mode_us.items():
        for repeat in range(repeats):
            rows.append({"mode": mode, "metric": "step_ms", "value": us / 100, "unit": "ms", "repeat": repeat})
        rows.append({"mode": mode, "metric": "accepted_at", "value": 2, "unit": "windows", "position": 0})
        for kind, part in (("KV write", 0.1), ("attention", 0.8), ("NWOR", 0.1)):
            rows.append({"mode": mode, "metric": "kernel_us", "value": part * us, "unit": "us", "kind": kind})
    return results.tidy(rows, **{"model": "llama", "step": 0, "build": "k:1 t:1 x:1", **where, **common})


CLEAN = {"commit": "a" * 40, "clean": True, "changed": []}


def write(directory: Path, attempt: str, frame: pd.DataFrame, git: dict | str = CLEAN) -> Path:
    """A measurement's table and, at the path that is returned, what made it."""
    path = results.write_table(measure.table(directory, attempt), frame)
    return results.write_json(path.with_suffix(".json"), {"provenance": results.provenance({}) | {"git": git}})


def test_what_is_whole_is_recorded_and_nothing_else(tmp_path):
    """A missing measurement leaves its table as it was, and is named."""
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    for kv_heads, name in enumerate(STEPS):
        write(made, name, bench_table({"off": 600.0, "stage": 570.0}, kv_heads))
    write(made, "audit", bench_table({"off": 1.0}))
    with pytest.raises(ValueError, match=r"no measurement is in .*elsewhere: `nwor measure .*elsewhere` makes them"):
        measure.record(tmp_path / "elsewhere", recorded)
    assert measure.record(made, recorded) == ["gpu_audit"], "of which there is one, audit-tp2 is not"
    assert sorted(path.stem for path in recorded.iterdir()) == [
        "gpu_kernels",
        "gpu_runs",
        "gpu_steps",
        "kv_write_share",
    ]
    found = {path.stem: pd.read_parquet(path) for path in recorded.glob("*.parquet")}
    runs = json.loads((recorded / "gpu_runs.json").read_text())
    assert [run["name"] for run in runs] == STEPS
    assert all(run["run_id"] == "gpu" and run["git"] == {"commit": "a" * 40, "clean": True} for run in runs)
    assert set(found["gpu_steps"].metric) == {"step_ms"} and set(found["gpu_steps"].run_id) == {"gpu"}
    assert set(found["gpu_kernels"].kind) == {"KV write", "attention", "NWOR"}
    assert found["kv_write_share"].value.tolist() == pytest.approx([0.01] * found["gpu_steps"].kv_heads.nunique())
    assert (
        {build for frame in found.values() for build in frame["build"]}
        == {"k:1 t:1 x:1"}
        == {run["build"] for run in runs}
    )


def test_a_table_is_recorded_in_part_only_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    for kv_heads, name in enumerate(STEPS[1:]):
        write(made, name, bench_table({"off": 600.0, "stage": 570.0}, kv_heads))
    assert "gpu_steps" in measure.record(made, recorded) and not recorded.exists()
    monkeypatch.setattr(measure.record, "__defaults__", (recorded, ()))
    assert measure.main(["--record", str(made), "--partial", "gpu_steps", "gpu_audit"]) == 1
    said = capsys.readouterr().out
    assert STEPS[0] in said and "gpu_audit" in said and "gpu_steps" not in said
    assert [run["name"] for run in json.loads((recorded / "gpu_runs.json").read_text())] == STEPS[1:]
    before = (recorded / "gpu_steps.parquet").read_bytes()
    assert pd.read_parquet(recorded / "gpu_steps.parquet")["kv_heads"].nunique() == len(STEPS) - 1
    (made / STEPS[1]).rename(tmp_path / "elsewhere")
    assert measure.main(["--record", str(made), "--partial", "gpu_steps"]) == 2
    assert f"lacks what is recorded already: {STEPS[1]}; put it there too\n" in capsys.readouterr().err
    assert (recorded / "gpu_steps.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partial", "gpu_steps"], "--partial says what to record: name the folder with --record"),
        (["--record", ".", "--partial", "gpu_stesp"], "invalid choice: 'gpu_stesp'"),
    ],
)
def test_what_is_to_be_recorded_in_part_is_a_table_of_a_folder(words, said, capsys):
    with pytest.raises(SystemExit):
        measure.main(words)
    assert said in capsys.readouterr().err


def test_who_made_the_steps_stays_with_them(tmp_path):
    """Audits measured anew leave the steps as they were, and what is said of their runs."""
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    old = [{"table": "gpu_audit", "name": name, "run_id": "before"} for name in ("audit", "audit-2", "audit-tp2@2")]
    old += [{"table": "gpu_steps", "name": "steps-k8-32", "run_id": "before"}]
    results.write_json(recorded / "gpu_runs.json", old)
    for name in ("audit", "audit-tp2", STEPS[0]):
        write(made, name, bench_table({"off": 1.0}))
    assert "gpu_audit" not in measure.record(made, recorded)
    runs = {run["name"]: run["run_id"] for run in json.loads((recorded / "gpu_runs.json").read_text())}
    assert runs == {"steps-k8-32": "before", "audit": "gpu", "audit-tp2": "gpu"}


@pytest.mark.parametrize(
    ("frame", "git", "said"),
    [
        ({}, CLEAN | {"clean": False, "changed": [" M a.cu"]}, r"files differ from the commit \( M a.cu\)"),
        ({}, CLEAN | {"clean": False}, r"files differ from the commit \(says NWOR_COMMIT\): commit them"),
        ({}, "unavailable: no git", r"git could not be asked \(unavailable: no git\): set NWOR_COMMIT"),
        ({"build": "unavailable: no file"}, CLEAN, "its rows do not say with which build"),
        ({"repeats": 4}, CLEAN, r"4 repeats where 5 are needed \(mode (off|stage)\)"),
        ({"repeats": 0}, CLEAN, "it has no times"),
    ],
)  # fmt: skip
def test_what_cannot_be_trusted_is_not_recorded(frame, git, said, tmp_path, capsys):
    """One measurement of all; it is named, and nothing is written, what is whole neither."""
    made, names = tmp_path / "gpu", [name for name in measure.MEASUREMENTS if name.startswith("audit")]
    for name in names:
        write(made, name, bench_table({"off": 600.0, "stage": 570.0}))
    broken = "audited-8-fp8"
    file = write(made, broken, bench_table({"off": 600.0, "stage": 570.0}, **frame), git)
    with pytest.raises(
        ValueError, match=f"^{broken} is not recorded: .*({said}).*; measure it again in another folder$"
    ):
        measure.record(made, tmp_path / "recorded")
    assert not (tmp_path / "recorded").exists()
    assert measure.main(["--record", str(made)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    file.unlink()
    with pytest.raises(ValueError, match=rf"no {broken}\.json says what made it; measure it again"):
        measure.record(made, tmp_path / "recorded")


def test_parts_and_attempts_of_different_builds_are_not_joined(tmp_path):
    """Rows without a build, as all were once, are of another one too."""
    tables = [bench_table({"off": 600.0, "stage": 570.0}, build=build) for build in ("k:1 t:1 x:1", "k:2 t:1 x:1")]
    for name in ("audit", "audit-tp2"):
        write(tmp_path, name, tables[0])
    assert "gpu_audit" not in measure.record(tmp_path, tmp_path / "recorded")
    for name in ("audit-tp2@2", "audit-tp2"):
        write(tmp_path, name, tables[1])
        with pytest.raises(ValueError, match="different builds do not go together: k:1 t:1 x:1, k:2 t:1 x:1; measure"):
            measure.record(tmp_path, tmp_path / "recorded")
        write(tmp_path, "audit-tp2@2", tables[1])
    for other in (tables[1], tables[1].drop(columns="build")):
        with pytest.raises(ValueError, match="different builds do not go together: k:1 t:1 x:1, "):
            measure.gpu_tables([tables[0], other])
    old = [table.drop(columns="build") for table in tables]
    assert "build" not in measure.gpu_tables(old)["gpu_steps"], "what was recorded before is drawn as it was"


def test_every_attempt_counts(tmp_path):
    """Three repeats at 0.9 and three at 0.7 are six whose pairs are 0.9, 0.9, 0.7 and 0.7; neither is dropped."""
    for kv_heads, name in enumerate(STEPS, start=1):
        write(tmp_path, name, bench_table({"off": 600.0, "stage": 540.0}, kv_heads, repeats=5))
    again = bench_table({"off": 600.0, "stage": 420.0}, 1, repeats=5)
    write(tmp_path, STEPS[0] + "@2", again)
    assert measure.attempts(tmp_path, STEPS[0]) == [STEPS[0], STEPS[0] + "@2"]
    measure.record(tmp_path, tmp_path / "recorded")
    steps = pd.read_parquet(tmp_path / "recorded" / "gpu_steps.parquet")
    both = steps[steps["kv_heads"] == 1]
    assert both.groupby("attempt")["repeat"].agg(["min", "max"]).values.tolist() == [[0, 4], [6, 10]]
    line = gpu_steps.step_ratios(steps).query("mode == 'stage' and kv_heads == 1").iloc[0]
    assert (line["low"], line["high"]) == pytest.approx((0.7, 0.9))
    assert line["at_parity"] and not line["stable"] and pd.isna(line["step"])
    counts = [both[both["repeat"] == 0].assign(metric=metric, value=4.0) for metric in COUNTS]
    (point,) = against_measured(pd.concat([both, *counts]).assign(model="llama-2-7b"))["measured"]
    assert point == pytest.approx((0.9 * 0.7) ** 0.5), "one point, of both"
    runs = json.loads((tmp_path / "recorded" / "gpu_runs.json").read_text())
    assert [run["name"] for run in runs][:2] == [STEPS[0], STEPS[0] + "@2"]


def one(*command: str, gpus: int = 1, release: str = "") -> measure.Measurement:
    return measure.Measurement(list(command), "some", 1, gpus=gpus, release=release)


def test_a_measurement_that_fails_is_named_and_one_that_is_there_is_kept(tmp_path, monkeypatch, capsys):
    results.write_table(measure.table(tmp_path, "there"), bench_table({"off": 1.0}))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    matrix = {"bad": one("nwor.no_such"), "two": one("nwor", gpus=2), "there": one("nwor.no_such")}
    matrix |= {"next": one("nwor.no_such", release="9.9.0"), "this": one("nwor.no_such", release="0.32.0")}
    monkeypatch.setattr(measure, "MEASUREMENTS", matrix)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0+cpu")
    assert measure.measure(tmp_path, []) == ["bad", "two", "this"], "another release is no failure"
    said = capsys.readouterr().out
    assert "bad: failed, see" in said and "two: left out, it needs 2 NVIDIA GPUs\n" in said and "there" not in said
    assert "next: left out, it needs 1 NVIDIA GPU, vLLM 9.9.0\n" in said and "this: failed, see" in said
    assert "no_such" in (tmp_path / "bad" / "log.txt").read_text()


def test_what_is_measured_again_lies_beside_what_is_there(tmp_path, monkeypatch):
    """Its command is given a folder of its own; the first table keeps every byte."""
    first = results.write_table(measure.table(tmp_path, "some"), bench_table({"off": 1.0}))
    before = first.read_bytes()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'some.parquet').write_bytes(b'x')"
    (tmp_path / "writes_some.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(measure, "MEASUREMENTS", {"some": one("writes_some", "{out}")})
    assert measure.measure(tmp_path, []) == [] and measure.attempts(tmp_path, "some") == ["some"]
    for number in (2, 3):
        assert measure.measure(tmp_path, ["some"], again=True) == []
        assert measure.attempts(tmp_path, "some")[-1] == f"some@{number}"
    assert first.read_bytes() == before and measure.table(tmp_path, "some@3").read_bytes() == b"x"


@pytest.mark.parametrize("clean", [True, False])
def test_before_it_measures_it_says_that_nothing_can_be_recorded(clean, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "MEASUREMENTS", {})
    git = {"commit": "a" * 40, "clean": clean, "changed": [] if clean else [" M x"]}
    monkeypatch.setattr(measure.provenance, "git", lambda: git)
    assert measure.measure(tmp_path, []) == []
    said = "what is measured now cannot be recorded: files differ from the commit ( M x): commit them\n"
    assert capsys.readouterr().out == ("" if clean else said)


def test_each_measurement_has_gpus_of_its_own(tmp_path, monkeypatch):
    """On three GPUs one of two ranks has one of one rank beside it, then three of one rank are under way at once."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7,9")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    given = dict[int, set[int]]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, own: given.update({threading.get_ident(): own}))
    monkeypatch.setattr(measure, "MEASUREMENTS", {name: one() for name in "abcd"} | {"two": one(gpus=2)})
    under_way, seen, beside, three = [], {}, threading.Barrier(2), threading.Barrier(3)

    def run(directory, name, gpus):
        assert not set(gpus) & set(under_way)
        under_way.extend(gpus)
        (beside if name in ("two", "a") else three).wait(timeout=10)
        seen[name] = gpus, given[threading.get_ident()]
        for gpu in gpus:
            under_way.remove(gpu)
        return name != "c"

    monkeypatch.setattr(measure, "run", run)
    assert measure.measure(tmp_path, []) == ["c"]
    assert seen["two"] == (["4", "6"], set(range(8))) and seen["a"] == (["7"], {8, 9, 10, 11})
    assert sorted(seen[name][0] for name in "bcd") == [["4"], ["6"], ["7"]]
    assert not set.intersection(*(seen[name][1] for name in "bcd")), "one does not slow the other down"
