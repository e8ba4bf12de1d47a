# SPDX-License-Identifier: Apache-2.0
"""The list of commands that measure on a GPU, and what the recorder keeps of what they left."""

import importlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.bench import acceptance, bench, options
from nwor_lab.command_line import parse
from nwor_lab.gpu import attention, operators
from nwor_lab.run import cli, measure, results
from nwor_lab.serving import command as serving

CLEAN = {"commit": "a" * 40, "clean": True, "changed": []}
CARDS = (79.1, 139.8)
"""GiB of an H100 and of an H200."""
H100, H200 = "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB", "NVIDIA H200, 580.159.04, 143771 MiB"


@pytest.fixture(autouse=True)
def a_build(monkeypatch):
    monkeypatch.setattr(measure, "build_of", lambda commit: "kernels:1 attention:1")


def table(repeats: int = 6, **common) -> pd.DataFrame:
    steps = [
        {"mode": mode, "metric": "step_ms", "value": 6.0, "unit": "ms", "repeat": repeat, "tp": tp}
        for repeat in range(repeats)
        for mode in ("vllm", "stage")
        for tp in (1, 2)
    ]
    counts = [{"mode": "stage", "metric": "windows", "value": 9, "unit": "count"}]
    return results.tidy(steps + counts, model="llama", k=8, **common)


def left(directory: Path, name: str, frame: pd.DataFrame, git: object = CLEAN, gpu: str = H200) -> Path:
    """What a finished command leaves; the path of its table."""
    words = measure.command_of(name, directory / name, 139)
    made = results.provenance({"command": words}) | {"git": git, "gpu": [gpu]}
    results.write_json(directory / name / measure.MADE_BY, made)
    return results.write_table(directory / name / f"{name}.parquet", frame)


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("name", measure.MEASUREMENTS)
def test_every_line_is_a_command_that_takes_its_options(name, gib, tmp_path, monkeypatch):
    """An hour on a GPU must not end at a misspelt word."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(options.machine, "on_cpu", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    module, *words = measure.command_of(name, tmp_path, gib)
    assert str(tmp_path) in " ".join(words)
    if module == cli.__name__:
        command = cli.COMMANDS[words[0]][0]
        kind = {"bench": bench.Bench, "acceptance": acceptance.Acceptance, "serving": serving.Serving}[words[0]]
        asked = parse(kind, words[1:], "nwor", "")
        assert importlib.util.find_spec(command) and (asked.output.name, asked.output.run_dir) == (name, str(tmp_path))
        if kind is bench.Bench:
            engine, plan, _ = options.parse_config(asked)
            assert engine.acceptance_length <= min(plan.ks) + 1
            if plan.random_prompts:  # else vLLM's own graphs: they end below 64 requests with k=8
                rows = {size * (1 + k) for size in plan.sizes for k in (0, *plan.ks)}
                assert rows <= {*engine.cudagraph_capture_sizes} and plan.modes[0] == "vllm"
    else:
        kind = {"nwor_lab.gpu.attention": attention.Attention, "nwor_lab.gpu.operators": operators.Operators}[module]
        assert parse(kind, words, module, "").out == tmp_path


def test_layers_leave_their_table_where_it_is_looked_for(tmp_path, monkeypatch):
    made = table().assign(op="nwor")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(attention, "measure", lambda shapes, repeats: made)
    monkeypatch.setattr(attention, "over_each", lambda times: times)
    monkeypatch.setattr(attention, "net", lambda times: times.assign(ratio=1.0))
    words = measure.command_of("gpu_cliff", tmp_path, 139)
    assert attention.main(words[1:]) == 0 and len(results.read_table("gpu_cliff", tmp_path))


def test_caches_and_modes_are_sized_to_the_card():
    h100, h200 = (measure.command_of("gpu_decode", Path("out"), gib) for gib in CARDS)
    cache = [int(words[words.index("--kv-cache-memory") + 1]) for words in (h100, h200)]
    modes = [words[words.index("--modes") + 1].split(",") for words in (h100, h200)]
    assert [len(of) for of in modes] == [3, 4] and set(modes[1]) - set(modes[0]) == {"cow"}
    for mib, of, gib in zip(cache, modes, CARDS, strict=True):
        assert mib > 2048 and len(of) * (mib / 1024 + measure.ENGINE_GIB) < gib
    assert measure.command_of("gpu_decode", Path("out"), 24) == []
    assert measure.command_of("gpu_pair", Path("out"), 24)


def test_a_command_that_fails_is_named_and_one_that_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    there = left(tmp_path, "gpu_pair", table())
    before = there.read_bytes()
    monkeypatch.setattr(
        measure,
        "MEASUREMENTS",
        {"bad": "nwor.no_such", "big": "nwor.no_such {cache}", "gpu_pair": "nwor.no_such", "cut": "nwor.no_such"},
    )
    results.write_json(left(tmp_path, "cut", table()).with_suffix(".json"), {"interrupted": "the cow engine failed"})
    monkeypatch.setattr(measure, "gpu_gib", lambda: 24.0)
    assert measure.measure(tmp_path, measure.MEASUREMENTS) == ["bad", "cut"]
    said = capsys.readouterr().out
    assert "bad: exit status" in said and "big: left out" in said and "gpu_pair" not in said
    assert "no_such" in (tmp_path / "bad" / "log.txt").read_text() and there.read_bytes() == before
    assert json.loads((tmp_path / "bad" / measure.MADE_BY).read_text())["git"]


def test_a_command_that_is_interrupted_has_the_time_to_keep_what_is_whole(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[-1])\n"
        "try:\n    (folder / 'begun').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1.5); (folder / 'kept').touch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "MEASUREMENTS", {"slow": "slow"})

    def interrupt_once_begun():
        while not (tmp_path / "slow" / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        threading.Thread(target=interrupt_once_begun, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            measure.measure(tmp_path, ["slow"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "slow" / "kept").exists()


# -- the record --------------------------------------------------------------------------------------------------------


def test_what_is_whole_is_recorded_and_nothing_else(tmp_path):
    made, recorded = tmp_path / "gpu", tmp_path / "recorded"
    results.write_json(
        recorded / "gpu_runs.json", [{"table": "gpu_pair", "gpu": [H200]}, {"table": "gpu_direct", "gpu": [H200]}]
    )
    results.write_table(recorded / "gpu_pair.parquet", table().assign(gpu="H200", build=""))
    left(made, "gpu_pair", table(10))
    left(made, "gpu_cliff_steps_k8", table())
    (made / "gpu_decode").mkdir()
    assert measure.record(made, recorded) == ["gpu_cliff_steps_k8", "gpu_pair"], "gpu_decode has no table"
    pair, cliff = (results.read_table(name, recorded) for name in ("gpu_pair", "gpu_cliff_steps_k8"))
    assert set(pair["build"]) == {"kernels:1 attention:1"} and set(pair["run_id"]) == {"gpu"}
    assert len(pair) == len(table(10)) and len(cliff) == len(table()), "what was there of this GPU is replaced"
    runs = json.loads((recorded / "gpu_runs.json").read_text())
    assert sorted(run["table"] for run in runs) == ["gpu_cliff_steps_k8", "gpu_direct", "gpu_pair"]
    assert runs[-1]["git"] == {"commit": "a" * 40, "clean": True} and "environment" not in runs[-1]


def test_a_serving_run_that_was_stopped_is_not_recorded(tmp_path):
    """It keeps the passes that are whole: fewer than the list asks for."""
    left(tmp_path / "gpu", "gpu_serving", table(3))
    with pytest.raises(ValueError, match="gpu_serving is not recorded: 3 repeats where 4"):
        measure.record(tmp_path / "gpu", tmp_path / "recorded")
    left(tmp_path / "gpu", "gpu_serving", table(4))
    assert measure.record(tmp_path / "gpu", tmp_path / "recorded") == ["gpu_serving"]


def test_a_bench_that_was_interrupted_is_run_again_and_not_recorded(tmp_path, monkeypatch):
    """One draft length may be whole and the next one missing: its table does not tell."""
    there = left(tmp_path / "gpu", "gpu_pair", table(10))
    monkeypatch.setattr(measure, "gpu_gib", lambda: 139.0)
    run = []
    monkeypatch.setattr(measure, "run_one", lambda command, log: run.append(command))
    measure.measure(tmp_path / "gpu", ["gpu_pair"])
    assert not run
    results.write_json(there.with_suffix(".json"), {"interrupted": True})
    with pytest.raises(ValueError, match="interrupted"):
        measure.record(tmp_path / "gpu", tmp_path / "recorded")
    measure.measure(tmp_path / "gpu", ["gpu_pair"])
    assert len(run) == 1


def test_what_another_kind_of_gpu_gave_stays(tmp_path, monkeypatch):
    recorded = tmp_path / "recorded"
    for number, gpu in enumerate((H200, H100, H200)):
        monkeypatch.setattr(measure, "build_of", lambda commit, number=number: f"kernels:{number} attention:1")
        left(tmp_path / f"gpu{number}", "gpu_pair", table(10 + number), gpu=gpu)
        measure.record(tmp_path / f"gpu{number}", recorded)
    counts = results.read_table("gpu_pair", recorded).groupby("gpu")["repeat"].nunique().to_dict()
    assert counts == {"H100 80GB HBM3": 11, "H200": 12}
    runs = json.loads((recorded / "gpu_runs.json").read_text())
    assert [run["run_id"] for run in runs] == ["gpu1", "gpu2"]
    builds = results.read_table("gpu_pair", recorded).groupby("gpu")["build"].unique()
    assert [*builds["H100 80GB HBM3"]] == ["kernels:1 attention:1"] and [*builds["H200"]] == ["kernels:2 attention:1"]


@pytest.mark.parametrize(
    ("repeats", "git", "said"),
    [
        (10, CLEAN | {"clean": False, "changed": [" M a.cu"]}, "M a.cu"),
        (10, CLEAN | {"clean": False}, "NWOR_COMMIT"),
        (10, "unavailable: no git", "NWOR_COMMIT"),
        (4, CLEAN, "4 repeats where 10"),
        (0, CLEAN, "repeats"),
    ],
)
def test_what_cannot_be_trusted_is_not_recorded(repeats, git, said, tmp_path, monkeypatch, capsys):
    """One line names it, and nothing is written, what is whole neither."""
    made = tmp_path / "gpu"
    left(made, "gpu_audit", table())
    left(made, "gpu_pair", table(repeats), git)
    monkeypatch.setattr(measure.record, "__defaults__", (tmp_path / "recorded",))
    assert measure.main(["--record", str(made)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "gpu_pair is not recorded" in line and said in line and not (tmp_path / "recorded").exists()


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure.main([str(tmp_path / "run")]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert measure.main(["--list"]) == 0


def test_nothing_is_nothing_to_record(tmp_path, capsys):
    (tmp_path / "soak.parquet").touch()  # without what made it
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert measure.main(["--record", str(folder)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("clean", [True, False])
def test_a_whole_reproduction_run_is_recorded_without_what_is_of_one_machine(clean, tmp_path, monkeypatch):
    recorded = tmp_path / "recorded"
    run = results.Run(tmp_path / "run", "01_x", {"k": 1, "run_dir": "somewhere"})
    run.claim("a", 1, 1, True)
    monkeypatch.setattr(measure, "REPRODUCED", ("steps",))
    with pytest.raises(ValueError, match="not whole"):
        measure.record(run.directory, recorded)
    run.finish()
    run.table("steps", table())
    results.write_table(run.directory / "claims.parquet", results.claims(run.directory))
    for picture in ("tour_pages.gif", "tour_pages.png"):
        results.write_text(run.directory / "figures" / picture, "a picture")
    manifest = results.read_manifest(run.directory)
    manifest["notebooks"]["01_x"]["provenance"] |= {"git": CLEAN | {"clean": clean}, "gpu": "unavailable"}
    results.write_json(run.directory / "manifest.json", manifest)
    if not clean:
        with pytest.raises(ValueError, match="01_x is not recorded"):
            measure.record(run.directory, recorded)
        assert not recorded.exists()
        return
    assert measure.record(run.directory, recorded) == ["claims", "steps"]
    names = {"steps.parquet", "claims.parquet", "tour_pages.gif", "tour_pages.png", "manifest.json"}
    assert {path.name for path in recorded.iterdir()} == names
    made = results.read_manifest(recorded)["notebooks"]["01_x"]["provenance"]
    assert made["parameters"] == {"k": 1}


@pytest.mark.parametrize(("gpu", "name"), [(["an H200"], "gpu_soak"), ("unavailable: no nvidia-smi", "soak")])
def test_a_soak_is_recorded_by_where_it_ran(tmp_path, gpu, name):
    run, recorded = tmp_path / "soak-1", tmp_path / "recorded"
    path = results.write_table(run / "soak.parquet", table())
    made = results.provenance({}) | {"git": CLEAN, "gpu": gpu}
    results.write_json(path.with_suffix(".json"), {"provenance": made})
    assert measure.record(run, recorded) == [name] and len(results.read_table(name, recorded))
    assert json.loads((recorded / f"{name}.json").read_text())["git"]["commit"] == "a" * 40
