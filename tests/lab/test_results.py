# SPDX-License-Identifier: Apache-2.0
"""Results are whole, tidy and say where they came from."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from nwor_lab import paths
from nwor_lab.run import provenance, results

ROW = {"metric": "step_ms", "value": 1.5, "unit": "ms", "mode": "off"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> results.Run:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return results.Run(tmp_path / "one", "notebook")


# -- whole files or none -----------------------------------------------------------------------------------------


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    target = results.write_text(tmp_path / "a.parquet", "whole")
    with pytest.raises(ZeroDivisionError), results.whole_file(target) as part:
        part.write_text("ha")
        assert list(tmp_path.glob("*.parquet")) == [target], "what a killed writer leaves does not look like a result"
        raise ZeroDivisionError
    assert target.read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


# -- tidy rows ---------------------------------------------------------------------------------------------------


def test_tidy_rows_have_all_columns_in_order_and_keep_their_own() -> None:
    frame = results.tidy([ROW, {**ROW, "tp": 2, "rank": 1}], model="pair", k=4)
    assert tuple(frame.columns) == (*results.COLUMNS, "rank")
    assert frame["tp"].tolist() == [1, 2]
    assert frame["k"].tolist() == [4, 4]
    assert frame["model"].tolist() == ["pair", "pair"]
    assert frame["mode"].tolist() == ["off", "off"], "mode off is a word, not a boolean"


@pytest.mark.parametrize("lost", ["metric", "value", "unit"])
def test_a_row_without_metric_value_or_unit_is_an_error(lost: str) -> None:
    with pytest.raises(ValueError, match=lost):
        results.tidy([{name: value for name, value in ROW.items() if name != lost}])


def test_a_value_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError):
        results.tidy([{**ROW, "value": "fast"}])


# -- claims and the manifest -------------------------------------------------------------------------------------


def test_claims_are_kept_replaced_and_gathered_over_notebooks(run: results.Run) -> None:
    run.claim("fast", 2.0, 1.23456, True)
    run.claim("right", "equal", "unequal", False)
    run.claim("right", "equal", "equal", True)
    results.Run(run.directory, "another").claim("small", 1, 1, True)
    table = results.claims(run.directory)
    assert table.values.tolist() == [
        ["another", "small", "1", "1", True],
        ["notebook", "fast", "2", "1.235", True],
        ["notebook", "right", "equal", "equal", True],
    ]
    results.Run(run.directory, "another")
    assert set(results.claims(run.directory)["notebook"]) == {"notebook"}, "claims of an earlier pass are gone"


def test_an_expectation_fails_a_run_at_the_defaults_alone(tmp_path: Path) -> None:
    cells = ["", 'mode: str = "off"\ntp: int = 1\nrate: float = 1\nrun_dir: str = ""\n']
    run = results.start(scope(tmp_path, In=cells), "02_x")
    run.expect("fast", 2, 1, False)
    with pytest.raises(AssertionError, match="fast: expected 2, found 1"):
        run.finish()
    assert results.read_manifest(run.directory)["notebooks"]["02_x"]["state"] == "failed"
    run = results.start(scope(tmp_path, In=[*cells, "# Parameters\ntp = 2\n"], tp=2), "02_x")
    run.expect("fast", 2, 1, False)
    shown = run.finish()
    assert results.read_manifest(run.directory)["notebooks"]["02_x"]["state"] == "done"
    assert shown.data.values.tolist() == [["fast", "2", "1 (parameters were given)", "not judged"]]
    assert "text-align: left" in shown.to_html()


def test_a_table_is_of_the_run_that_is_named(run: results.Run, tmp_path: Path) -> None:
    run.table("steps", [ROW])
    assert results.read_table("steps", run.directory)["run_id"].tolist() == ["one"]
    with pytest.raises(FileNotFoundError, match="steps.parquet"):
        results.read_table("steps", tmp_path)


# -- provenance --------------------------------------------------------------------------------------------------


def test_provenance_says_what_made_a_result() -> None:
    said = provenance.provenance({"seed": 3, "k": 4})
    assert said["parameters"] == {"seed": 3, "k": 4}
    assert said["versions"]["torch"][0].isdigit()
    assert said["cpu"]["cores"] >= 1
    assert len(said["sha256"]["requirements/cpu.lock"]) == 64


def test_a_failed_probe_is_a_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(provenance.subprocess, "run", broken)
    said = provenance.provenance({"seed": 3})
    assert said["git"] == said["gpu"] == "unavailable: RuntimeError: broken" and said["cpu"]["cores"]
    results.write_json(tmp_path / "provenance.json", said)


SHA = "0123456789" * 4
MALFORMED = "unavailable: ValueError: NWOR_COMMIT is '<sha of 40 digits> clean' or '... dirty', got "


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (f"{SHA} clean", {"commit": SHA, "clean": True, "changed": []}),
        (f"{SHA} dirty", {"commit": SHA, "clean": False, "changed": []}),
        (SHA, f"{MALFORMED}'{SHA}'"),
        ("main clean", f"{MALFORMED}'main clean'"),
    ],
)
def test_files_sent_without_their_history_are_of_the_commit_that_the_sender_names(
    sent: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = provenance.git()
    monkeypatch.setenv("NWOR_COMMIT", sent)
    assert provenance.git() == ours, "where git can say, nobody else does"
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert provenance.probe(provenance.git) == expected
    monkeypatch.delenv("NWOR_COMMIT")
    assert str(provenance.probe(provenance.git)).startswith("unavailable: CalledProcessError")


def test_no_key_leaves_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    assert "hush" not in str(provenance.provenance())
    assert provenance.provenance()["environment"]["VLLM_NWOR_MODE"] == "cow"


# -- a notebook's parameters -------------------------------------------------------------------------------------


def scope(tmp_path: Path, **more: object) -> dict:
    declared = {"mode": str, "tp": int, "rate": float, "run_dir": str}
    values = {"mode": "off", "tp": 1, "rate": 1, "run_dir": str(tmp_path / "r")}
    return {"__annotations__": declared, **values, "In": [], **more}


def test_start_opens_the_folder_it_is_given_or_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = results.start(scope(tmp_path), "02_x")
    assert run.directory == tmp_path / "r"
    entry = results.read_manifest(run.directory)["notebooks"]["02_x"]
    assert entry["provenance"]["parameters"] == {"mode": "off", "tp": 1, "rate": 1, "run_dir": str(tmp_path / "r")}
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert results.start(scope(tmp_path, run_dir=""), "02_x").directory.name.startswith("interactive-")


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (
            {"In": ["# Parameters\nmdoe = 'cow'\n"]},
            NameError,
            "no parameter mdoe; it has mode, rate, run_dir, tp",
        ),
        ({"mode": False}, ValueError, "mode .*YAML"),
        ({"tp": "two"}, ValueError, "tp .*integer"),
        ({"rate": "1"}, ValueError, "rate .*number"),
        ({"__annotations__": {"mode": str}}, NameError, "must declare `run_dir"),
    ],
)
def test_start_refuses_what_the_notebook_does_not_declare(tmp_path: Path, more: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        results.start(scope(tmp_path, **more), "02_x")
    assert not (tmp_path / "r").exists(), "refused before anything is written"


# -- child processes ---------------------------------------------------------------------------------------------


def test_what_a_command_says_is_in_its_log(run: results.Run, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails raises with the log's end."""
    run.command("--help")
    assert "No-Write-On-Reject" in (run.directory / "logs" / "notebook-0.log").read_text()
    with pytest.raises(RuntimeError, match=r"`nwor benhc` failed with 2(?s:.*)benhc"):
        run.command("benhc")
    assert "doctor" not in capsys.readouterr().out
    assert "doctor" in (run.directory / "logs" / "notebook-1.log").read_text()


def test_what_made_a_table_is_told_beside_it(tmp_path):
    path = results.write_provenance(tmp_path / "times.parquet", {"repeats": 3})
    assert path == tmp_path / "times.json"
    assert json.loads(path.read_text())["provenance"]["parameters"] == {"repeats": 3}


# -- measured here, or recorded ----------------------------------------------------------------------------------------


def samples() -> pd.DataFrame:
    return results.tidy([{"metric": "time", "value": 3.0, "unit": "us"}], mode="", model="")


def must_not() -> pd.DataFrame:
    raise AssertionError("measured")


def test_with_a_gpu_they_are_measured_unless_the_recorded_are_asked_for(run: results.Run, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for source in ("", "measure"):
        measured = results.measure_or_load_recorded(run, "kernel_times", samples, source)
        assert measured["value"].tolist() == [3.0] and set(measured["run_id"]) == {run.id}
    assert results.read_table("kernel_times", run.directory)["value"].tolist() == [3.0]
    assert len(results.measure_or_load_recorded(run, "kernel_times", must_not, "recorded")) > 1


@pytest.mark.parametrize("error", [results.Unmeasurable, RuntimeError])
def test_only_what_cannot_be_measured_falls_back_to_what_is_recorded(error, run: results.Run, monkeypatch, capsys):
    def refuse() -> pd.DataFrame:
        raise error("no permission")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if error is results.Unmeasurable:
        assert len(results.measure_or_load_recorded(run, "attention_counters", refuse)) > 1
        assert "attention_counters is what was recorded on an H200, since no permission" in capsys.readouterr().out
    with pytest.raises(error, match="no permission"):
        results.measure_or_load_recorded(
            run, "attention_counters", refuse, "measure" if error is not RuntimeError else ""
        )
