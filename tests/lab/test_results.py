# SPDX-License-Identifier: Apache-2.0
"""Results are whole, tidy and say where they came from; figures are byte-stable."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from nwor_lab import paths, results
from nwor_lab.plots import paper, style

ROW = {"metric": "step_ms", "value": 1.5, "unit": "ms", "mode": "off"}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    style.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> results.Run:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return results.Run(tmp_path / "one", "notebook")


@pytest.fixture
def tables(run: results.Run) -> dict[str, pd.DataFrame]:
    survival = 0.7 ** np.arange(1, 5)
    accepted = [
        {"metric": "survival", "value": v, "unit": "share", "k": 4, "position": p, "low": v - 0.05, "high": v + 0.05}
        for p, v in enumerate(survival)
    ] + [{"metric": "rejected_share", "value": (4 - survival.sum()) / 5, "unit": "share", "k": 4}]
    moved = [
        {"metric": metric, "value": float(n), "unit": "B", "mode": mode, "kind": kind}
        for n, mode in enumerate(style.MODE_STYLE, 1)
        for metric in ("bytes_read", "bytes_written", "launches")
        for kind in ("attention", "write")
    ]
    steps = [
        {**ROW, "value": tp + n, "mode": mode, "tp": tp, "repeat": n}
        for mode in ("off", "cow")
        for tp in (1, 2)
        for n in range(5)
    ]
    return {
        "acceptance": run.table("acceptance", [{"temperature": 0.0, **row} for row in accepted], mode="off"),
        "traffic": run.table("traffic", moved),
        "steps": run.table("steps", steps),
    }


# -- whole files or none -----------------------------------------------------------------------------------------


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    target = results.write_text(tmp_path / "a.parquet", "whole")
    with pytest.raises(ZeroDivisionError), results.whole_file(target) as part:
        part.write_text("ha")
        raise ZeroDivisionError
    assert target.read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    frame = results.tidy([ROW])
    target = results.write_table(tmp_path / "steps.parquet", frame)
    code = f"""
import os, signal
from nwor_lab import results
{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
results.write_table({str(target)!r}, results.tidy([{ROW!r}] * 100))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, timeout=120, check=False)
    assert done.returncode == -9
    pd.testing.assert_frame_equal(pd.read_parquet(target), frame)
    assert list(tmp_path.glob("*.parquet")) == [target], "the half-written file must not look like a result"


def test_a_table_is_parquet_or_csv(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.parquet or \.csv"):
        results.write_table(tmp_path / "a.xlsx", results.tidy([ROW]))
    assert not list(tmp_path.iterdir())


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


def test_a_run_puts_its_name_on_every_row(run: results.Run) -> None:
    run.table("steps", [ROW])
    assert results.read_table("steps", run.directory)["run_id"].tolist() == ["one"]


# -- claims and the manifest -------------------------------------------------------------------------------------


def test_claims_are_kept_replaced_and_gathered_over_notebooks(run: results.Run) -> None:
    assert run.claim("fast", 2.0, 1.23456, True) is True
    run.claim("right", "equal", "unequal", False)
    run.claim("right", "equal", "equal", True)
    results.Run(run.directory, "another").claim("small", 1, 1, True)
    table = results.claims(run.directory)
    assert table.values.tolist() == [
        ["another", "small", "1", "1", True, "claim", "measured"],
        ["notebook", "fast", "2", "1.235", True, "claim", "measured"],
        ["notebook", "right", "equal", "equal", True, "claim", "measured"],
    ]
    results.Run(run.directory, "another")
    assert set(results.claims(run.directory)["notebook"]) == {"notebook"}, "claims of an earlier pass are gone"


def test_a_claim_that_cannot_be_checked_is_skipped_with_its_reason(run: results.Run) -> None:
    run.skip("fp8", 0, "no AVX-512")
    assert run.finish()["holds"].tolist() == [None], "neither holds nor broken"
    run.claim("fast", 1, 1, True)
    results.Run(run.directory, "another").claim("small", 1, 1, True)
    assert results.claims(run.directory).values.tolist() == [
        ["another", "small", "1", "1", True, "claim", "measured"],
        ["notebook", "fp8", "0", "no AVX-512", None, "claim", "measured"],
        ["notebook", "fast", "1", "1", True, "claim", "measured"],
    ]


def test_finish_names_each_claim_that_does_not_hold(run: results.Run) -> None:
    run.claim("good", 1, 1, True)
    run.claim("fast enough", 1, 2, False)
    with pytest.raises(AssertionError, match="fast enough: predicted 1, measured 2"):
        run.finish()
    assert results.read_manifest(run.directory)["notebooks"]["notebook"]["state"] == "failed"
    run.claim("fast enough", 1, 1, True)
    assert run.finish()["holds"].all()
    assert results.read_manifest(run.directory)["notebooks"]["notebook"]["state"] == "done"


def test_an_expectation_fails_a_run_at_the_defaults_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["", 'mode: str = "off"\ntp: int = 1\nrate: float = 1\nrun_dir: str = ""\n']
    run = results.start(scope(tmp_path, In=cells), "02_x")
    assert run.expect("fast", 2, 1, False) is False
    with pytest.raises(AssertionError, match="fast: predicted 2, measured 1"):
        run.finish()
    run = results.start(scope(tmp_path, In=[*cells, "# Parameters\ntp = 2\n"], tp=2), "02_x")
    assert run.expect("fast", 2, 1, False, origin="recorded") is False
    assert "not at the defaults, so not checked: fast: expected 2, found 1" in capsys.readouterr().out
    assert run.finish().values.tolist() == [["02_x", "fast", "2", "1", None, "expectation", "recorded"]]
    with pytest.raises(ValueError, match="origin is one of measured, recorded, model, got 'x'"):
        run.claim("fast", 2, 2, True, origin="x")


def test_many_writers_of_one_manifest_lose_nothing(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=results.update_manifest, args=(tmp_path, f"n{n}"), kwargs={"state": "done"})
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results.read_manifest(tmp_path)["notebooks"]) == 16


def test_the_newest_run_that_holds_a_table_is_read(
    run: results.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.table("steps", [ROW])
    other = results.Run(tmp_path / "two", "notebook")
    assert results.newest_run() == other.directory
    assert results.newest_run("steps") == run.directory
    assert results.read_table("steps")["run_id"].tolist() == ["one"]
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    with pytest.raises(FileNotFoundError, match=r"no absent\.parquet in .*make reproduce"):
        results.read_table("absent")
    results.write_table(paths.RECORDED / "absent.parquet", results.tidy([ROW]))
    assert len(results.read_table("absent")) == 1


# -- provenance --------------------------------------------------------------------------------------------------


def test_provenance_says_what_made_a_result() -> None:
    said = results.provenance({"seed": 3, "k": 4})
    assert said["parameters"] == {"seed": 3, "k": 4}
    assert said["seeds"] == {"seed": 3}
    assert said["versions"]["torch"][0].isdigit()
    assert said["cpu"]["cores"] >= 1
    assert len(said["sha256"]["requirements/cpu.lock"]) == 64


def test_a_failed_probe_is_a_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    for module, name in (
        (results.subprocess, "run"),
        (results.importlib.metadata, "version"),
        (results.platform, "platform"),
        (results.os, "sched_getaffinity"),
        (results, "sha256"),
    ):
        monkeypatch.setattr(module, name, broken)
    said = results.provenance({"seed": 3})
    for name in ("git", "gpu", "cpu", "platform", "sha256"):
        assert said[name] == "unavailable: RuntimeError: broken", name
    assert set(said["versions"].values()) == {"unavailable: RuntimeError: broken"}
    results.write_json(tmp_path / "provenance.json", said)


def test_no_key_leaves_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    assert "hush" not in str(results.provenance())
    assert results.provenance()["environment"]["VLLM_NWOR_MODE"] == "cow"


# -- a notebook's parameters -------------------------------------------------------------------------------------


def scope(tmp_path: Path, **more: object) -> dict:
    declared = {"mode": str, "tp": int, "rate": float, "run_dir": str}
    return {
        "__annotations__": declared,
        "mode": "off",
        "tp": 1,
        "rate": 1,
        "run_dir": str(tmp_path / "r"),
        "In": [],
        **more,
    }


def test_start_opens_the_folder_it_is_given(tmp_path: Path) -> None:
    run = results.start(scope(tmp_path), "02_x")
    assert run.directory == tmp_path / "r"
    entry = results.read_manifest(run.directory)["notebooks"]["02_x"]
    assert entry["provenance"]["parameters"] == {"mode": "off", "tp": 1, "rate": 1, "run_dir": str(tmp_path / "r")}


def test_start_makes_a_folder_when_it_is_given_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert results.start(scope(tmp_path, run_dir=""), "02_x").directory.name.startswith("interactive-")


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (
            {"In": ["# Parameters\nmdoe = 'cow'\n"]},
            NameError,
            "02_x has no parameter mdoe; it has mode, rate, run_dir, tp",
        ),
        ({"mode": False}, TypeError, "mode is False, not of type str; YAML reads a bare on or off as a boolean"),
        ({"tp": "two"}, TypeError, "tp is 'two', not of type int"),
        ({"tp": True}, TypeError, "tp is True, not of type int"),
        ({"rate": "1"}, TypeError, "rate is '1', not of type float"),
        ({"__annotations__": {"mode": str}}, NameError, "must declare `run_dir"),
    ],
)
def test_start_refuses_what_the_notebook_does_not_declare(tmp_path: Path, more: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        results.start(scope(tmp_path, **more), "02_x")
    assert not (tmp_path / "r").exists(), "refused before anything is written"


# -- child processes ---------------------------------------------------------------------------------------------


def test_a_command_is_shown_and_its_log_kept(run: results.Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.command("--help")
    assert "No-Write-On-Reject" in capsys.readouterr().out
    assert "No-Write-On-Reject" in (run.directory / "logs" / "notebook-0.log").read_text()


def test_a_command_that_fails_raises_with_the_end_of_its_log(run: results.Run) -> None:
    with pytest.raises(RuntimeError, match=r"`nwor benhc` failed with 2(?s:.*)invalid choice: 'benhc'"):
        run.command("benhc")


# -- figures -----------------------------------------------------------------------------------------------------


def test_each_mode_is_told_apart_without_colour() -> None:
    looks = style.MODE_STYLE.values()
    for part in ("label", "color", "marker", "linestyle", "hatch"):
        assert len({getattr(look, part) for look in looks}) == len(looks), part


def test_figures_are_drawn_with_data_and_caption_and_are_byte_stable(
    run: results.Run, tables: dict, tmp_path: Path
) -> None:
    drawn = [path for path in paper.draw(run, tables) if "Run one." in path.with_suffix(".txt").read_text()]
    assert len(drawn) == 4, "those of the tables given; the others are drawn from what is recorded"
    for pdf in drawn:
        assert b"/Type3" not in pdf.read_bytes(), "fonts are embedded as TrueType (pdf.fonttype 42)"
        assert b"CreationDate" not in pdf.read_bytes()
        width = plt.imread(pdf.with_suffix(".png")).shape[1]
        assert width == round(style.COLUMN * 300)
        assert len(pd.read_csv(pdf.with_suffix(".csv")))
    assert all(paper.same_again(run, tables).values())
    # In another process, later, and with another hash seed.
    command = [
        sys.executable,
        "-m",
        "nwor_lab.cli",
        "figures",
        "--source",
        str(run.directory),
        "--out",
        str(tmp_path / "again"),
    ]
    environment = {**results.os.environ, "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "123456789"}
    subprocess.run(command, cwd=paths.ROOT, env=environment, check=True, timeout=120)
    for pdf in drawn:
        for path in (pdf, pdf.with_suffix(".png"), pdf.with_suffix(".csv")):
            assert path.read_bytes() == (tmp_path / "again" / "figures" / path.name).read_bytes(), path.name


def test_a_changed_number_changes_the_figure(run: results.Run, tables: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "FIGURES", {name: paper.FIGURES[name] for name in ("rejected_share", "step_time")})
    paper.draw(run, tables)
    tables["steps"].loc[0, "value"] += 1
    same = paper.same_again(run, tables)
    assert not same["step_time.pdf"]
    assert same["rejected_share.pdf"]


@pytest.mark.parametrize(("rows", "caption"), [(0, "a caption"), (1, "  ")])
def test_a_figure_needs_data_and_a_caption(run: results.Run, rows: int, caption: str) -> None:
    fig, _ = style.figure()
    with pytest.raises(ValueError, match="needs data and a caption"):
        style.save(fig, run, "empty", results.tidy([ROW]).head(rows), caption)
    assert not (run.directory / "figures").exists()


def test_published_acceptance_is_turned_into_survival() -> None:
    llama = paper.published_survival().query("model == 'Llama-2-chat-7B, EAGLE-1'").sort_values("position")
    assert llama["value"].tolist() == pytest.approx([0.76, 0.76 * 0.69, 0.76 * 0.69 * 0.67, 0.2389, 0.16247], abs=1e-4)


def test_the_rejected_share_follows_from_survival(tables: dict) -> None:
    predicted = paper.predict_rejected(tables["acceptance"]).set_index("k")["value"]
    assert predicted[1] == pytest.approx((1 - 0.7) / 2)
    assert predicted[2] == pytest.approx((2 - 0.7 - 0.49) / 3)
    measured = tables["acceptance"].query("metric == 'rejected_share'")["value"].iloc[0]
    assert predicted[4] == pytest.approx(measured)


def test_the_recorded_tables_draw_every_figure_and_say_where_they_are_from(tmp_path: Path) -> None:
    recorded = paper.tables(paths.RECORDED)
    assert len(paper.draw(tmp_path, recorded)) == len(paper.FIGURES) - len(paper.absent(recorded))
    assert (paths.RECORDED / "README.md").exists()
    notebooks = results.read_manifest(paths.RECORDED)["notebooks"]
    assert {recorded[name]["run_id"].iloc[0] for name in paper.TABLES} == {
        results.read_manifest(paths.RECORDED)["run_id"]
    }
    assert all(len(entry["provenance"]["git"]["commit"]) == 40 for entry in notebooks.values())
    assert {len(notebooks) > 0, (paths.RECORDED / "manifest.json").exists()} == {True}


def test_what_made_a_table_is_told_beside_it(tmp_path):
    path = results.write_provenance(tmp_path / "times.parquet", {"repeats": 3})
    assert path == tmp_path / "times.json"
    assert json.loads(path.read_text())["provenance"]["parameters"] == {"repeats": 3}
