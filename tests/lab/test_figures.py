# SPDX-License-Identifier: Apache-2.0
"""The figures: all that the tables allow are drawn, from what they say, and only whole runs are drawn from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from nwor_lab import paths, results
from nwor_lab.experiments.gpu_steps import step_ratios
from nwor_lab.model import breakeven
from nwor_lab.plots import breakeven as breakeven_plots
from nwor_lab.plots import paper, steps, style


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    style.close()


@pytest.fixture(scope="module")
def recorded() -> dict[str, pd.DataFrame]:
    return paper.tables(paths.RECORDED)


@pytest.fixture(scope="module")
def measured(recorded: dict) -> pd.DataFrame:
    """Some of the recorded steps, since to draw all of them takes seconds; rows of counters have no `prompt`."""
    where = "k == 8 and tp == 1 and kv_cache_dtype == 'auto' and (prompt == 512 or prompt.isna())"
    return recorded["gpu_steps"].query(where)


def drawn_data(path: Path) -> pd.DataFrame:
    return pd.read_csv(path.with_suffix(".csv"))


def test_the_recorded_tables_draw_every_figure(tmp_path: Path, recorded: dict, measured: pd.DataFrame) -> None:
    tables = {**recorded, "gpu_steps": measured}
    assert not paper.absent(tables)
    run = results.Run(tmp_path / "run", "figures")
    drawn = [paper.draw_one(run, name, tables) for name in paper.FIGURES]
    assert [path.stem for path in drawn] == list(paper.FIGURES)
    for path in (path for path in drawn if path.suffix == ".pdf"):
        assert len(drawn_data(path)) and len(path.with_suffix(".txt").read_text()) > 60


def test_the_headline_shows_the_settings_that_it_names(tmp_path: Path, recorded: dict) -> None:
    """Longer prompts, an fp8 cache and fewer drafts in the same table move none of its points."""
    table = recorded["gpu_direct"]
    others = [table.assign(**other) for other in ({"prompt": 2048}, {"kv_cache_dtype": "fp8"}, {"k": 3})]
    alone = steps.headline(tmp_path / "alone.png", table)
    among_others = steps.headline(tmp_path / "among_others.png", pd.concat([table, *others]))
    assert (plt.imread(alone) == plt.imread(among_others)).all()


def test_each_write_policy_beside_vanilla(tmp_path: Path, recorded: dict) -> None:
    data = drawn_data(paper.policies(tmp_path, recorded["reference"], recorded["traffic"]))
    wide = data.pivot(index="mode", columns="metric", values="value")
    vanilla = wide.loc["off"]
    for mode in ("cow", "stage"):
        assert wide.loc[mode, "acceptance_length"] == vanilla["acceptance_length"]
        assert wide.loc[mode, ["same_tokens", "dirty_kb"]].tolist() == [1, 0]
    assert wide.loc["blind", "acceptance_length"] < vanilla["acceptance_length"]
    assert wide["written_mb"].idxmax() == "cow" and vanilla["dirty_kb"] > 0


def test_the_step_ratio_is_that_of_the_documents(tmp_path: Path, measured: pd.DataFrame) -> None:
    path = steps.step_ratio(tmp_path, measured)
    assert "0 of 16 settings are left out" in path.with_suffix(".txt").read_text()
    data = drawn_data(path).query("mode != 'off'")
    documents = step_ratios(measured)
    both = data.merge(documents, on=["mode", "kv_heads", "batch"])
    assert len(both) == len(data) == 16
    for drawn, said in (("measured", "step"), ("low_x", "low_y"), ("high_x", "high_y")):
        assert both[drawn].tolist() == pytest.approx(both[said].tolist())


def test_a_setting_without_parity_has_no_ratio(tmp_path: Path, measured: pd.DataFrame) -> None:
    wrong = measured.eval("mode == 'stage' and kv_heads == 8 and batch == 4 and metric == 'fourth_powers'")
    assert wrong.sum() == 1
    path = steps.step_ratio(tmp_path, measured.assign(value=measured["value"].mask(wrong, 1e6)))
    assert "1 of 16 settings are left out: not at parity, or" in path.with_suffix(".txt").read_text()
    assert drawn_data(path).query("mode == 'stage' and kv_heads == 8 and batch == 4").empty


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that would have been saved."""
    found: list[Any] = []
    monkeypatch.setattr(style, "save", lambda fig, *_: found.append(fig))
    return found


def test_a_cache_looks_the_same_in_every_panel(tmp_path: Path, recorded: dict, drawn: list[Any]) -> None:
    """Over two ranks one of the caches was not measured, and one of the batches."""
    share = recorded["kv_write_share"].query("tp == 1 and kv_cache_dtype == 'auto'")
    two = share[(share.kv_heads == 8) & (share.batch != share.batch.min())].assign(tp=2)
    steps.write_share(tmp_path, pd.concat([share, two], ignore_index=True))
    one, other = (
        {bars.get_label(): bars for bars in ax.containers if bars.get_label()[0] != "_"} for ax in drawn[0].axes
    )
    percent = 100 * share.groupby(["kv_heads", "batch"])["value"].median()
    assert sorted(bar.get_height() for bars in one.values() for bar in bars) == pytest.approx(sorted(percent))
    assert one.keys() == other.keys() == {"8 KV heads, bf16", "32 KV heads, bf16"}
    for label, bars in one.items():
        assert bars[0].get_facecolor() == other[label][0].get_facecolor()
        assert [bar.get_x() for bar in bars] == [bar.get_x() for bar in other[label]]


def test_no_two_series_look_alike() -> None:
    looks = [look[1:] for look in style.styles([f"cache {n}" for n in range(8)]).values()]
    assert len(set(looks)) == 8
    with pytest.raises(ValueError, match="several panels"):
        style.styles(range(9))
    markers = {look.marker for look in style.MODE_STYLE.values()}
    assert len(markers) == len(style.MODE_STYLE), "without colour too"


def test_no_measured_step_is_hidden(tmp_path: Path, measured: pd.DataFrame, recorded: dict) -> None:
    path = paper.draw_one(tmp_path, "predicted_against_measured", {**recorded, "gpu_steps": measured})
    points = drawn_data(path).query("panel == 'steps'")
    assert len(points) == 16
    assert f"largest error is {points['error'].abs().max():.3f}" in path.with_suffix(".txt").read_text()


def test_the_break_even_map_draws_the_model(tmp_path: Path) -> None:
    data = drawn_data(breakeven_plots.break_even(tmp_path, paper.published_survival()))
    grid, dots = data[data["source"] == "model"], data[data["source"] != "model"]
    assert set(dots["model"]) >= {"Llama-2-chat-7B", "Vicuna-7B", "Llama-3.1-8B", "Qwen3-8B"}
    at = "mode == 'stage' and model == 'llama-2-7b' and k == 8 and acceptance == 0.5 and batch == 64"
    window = breakeven.Window.expected(64, breakeven.survival_of(0.5, 8))
    us = breakeven.H200.us(breakeven.step_difference("stage", breakeven.MODELS["llama-2-7b"], window))
    assert grid.query(at)["us"].item() == pytest.approx(us)


def test_the_sliders_move_the_picture_and_the_words(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(style.plt, "show", lambda: shown.append(style.plt.gca().lines[0].get_ydata().copy()))
    widget = breakeven_plots.explore(batch=4, acceptance=0.5)
    assert {child.description: child.value for child in widget.children[:-1]} == {
        "model": "llama-2-7b", "k": 8, "acceptance": 0.5, "batch": 4, "context": 512, "tp": 1,
    }  # fmt: skip
    beyond = {"k": 40, "batch": 5000, "context": 100_000, "tp": 16}
    assert {child.description: child.value for child in breakeven_plots.explore(**beyond).children[:-1]}.items() >= (
        beyond.items()
    )
    for batch in (4, 64):
        breakeven_plots.draw_setting("llama-2-7b", 8, 0.5, batch, 512, 1)
        window = breakeven.Window.expected(batch, breakeven.survival_of(0.5, 8))
        us = breakeven.H200.us(breakeven.step_difference("stage", breakeven.MODELS["llama-2-7b"], window))
        assert f"stage: {us:+.1f} us a step" in capsys.readouterr().out
    breakeven_plots.draw_setting("llama-2-7b", 2, 0.5, 4, 512, 1)
    assert shown[0].tolist() != shown[-1].tolist()


# -- which run is drawn --------------------------------------------------------------------------------------------


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict) -> Any:
    """Make a run's folder under an empty `results/`: its tables, and a manifest of the given states."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)

    def make(
        name: str, states: dict[str, str], whole: bool = True, tables: tuple = paper.TABLES, passed: dict | None = None
    ) -> Path:
        run = tmp_path / name
        for table in tables:
            results.write_table(run / f"{table}.parquet", recorded[table])
        entries = {
            notebook: {"state": state, "whole": "hash" if whole and state == "done" else None, "passed": passed or {}}
            for notebook, state in states.items()
        }
        manifest = {"run_id": name, "notebooks": entries} | ({"chosen": list(states)} if whole else {})
        results.write_json(run / "manifest.json", manifest)
        return run

    return make


def test_only_the_newest_whole_run_is_drawn(run_of) -> None:
    """Not one that failed, nor one by hand, nor a part; the run that draws is whole but for the notebook that does."""
    assert set(paper.sources().values()) == {paths.RECORDED}
    whole = run_of("whole", {"01": "done", "03": "done"})
    run_of("failed", {"01": "done", "03": "failed"})
    run_of("interactive-1", {"03": "done"}, whole=False)
    run_of("part", {"01": "done"}, tables=("reference",))
    other = run_of("other parameters", {"03": "done"}, passed={"k": 2})
    assert paper.sources(str(other))["acceptance"] == other, "only where it is named"
    assert paper.sources()["acceptance"] == whole and paper.sources()["gpu_steps"] == paths.RECORDED
    own = run_of("own", {"01": "done", paper.DRAWS: "running"})
    assert {paper.sources(own=own)[name] for name in paper.TABLES} == {own}
    bad = run_of("bad", {"03": "failed", paper.DRAWS: "running"})
    assert paper.sources(own=bad)["acceptance"] == whole, "own is under way for any other run"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "is no run"),
        ("failed", "not whole: 03 did not finish"),
        ("part", "lacks acceptance"),
        ("broken", "manifest.json that can be read"),
    ],
)
def test_a_wrong_source_is_a_line_and_an_error(name, said, run_of, tmp_path: Path, capsys) -> None:
    run_of("failed", {"01": "done", "03": "failed"})
    (run_of("broken", {"01": "done"}) / "manifest.json").write_text("{")
    run_of("part", {"01": "done"}, tables=("reference",))
    assert paper.main(["--source", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out and not (tmp_path / "out").exists()


def test_each_figures_run_is_printed(run_of, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(paper, "FIGURES", {name: paper.FIGURES[name] for name in ("rejected_share", "step_time")})
    run = run_of("whole", {"01": "done"})
    assert paper.main(["--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(f"from {run}") for line in lines] == [True, True]
    monkeypatch.setattr(paper, "FIGURES", {"lost": (steps.step_ratio, ("nothing",))})
    assert paper.main(["--out", str(tmp_path / "out")]) == 0
    assert "not drawn: lost, since there is no nothing.parquet" in capsys.readouterr().out


# -- what they say ---------------------------------------------------------------------------------------------------


def test_a_changed_number_changes_its_figure_alone(tmp_path: Path, recorded: dict, monkeypatch) -> None:
    monkeypatch.setattr(paper, "FIGURES", {name: paper.FIGURES[name] for name in ("rejected_share", "step_time")})
    run = results.Run(tmp_path, "notebook")
    for name in paper.FIGURES:
        paper.draw_one(run, name, recorded)
    steps = recorded["steps"].copy()
    steps.loc[steps["metric"] == "step_ms", "value"] *= 2
    same = paper.same_again(run, {**recorded, "steps": steps})
    assert not same["step_time.pdf"] and same["rejected_share.pdf"]


@pytest.mark.parametrize(("rows", "caption"), [(0, "a caption"), (1, "  ")])
def test_a_figure_needs_data_and_a_caption(tmp_path: Path, rows: int, caption: str) -> None:
    fig, _ = style.figure()
    frame = results.tidy([{"metric": "step_ms", "value": 1.5, "unit": "ms", "mode": "off"}]).head(rows)
    with pytest.raises(ValueError, match="needs data and a caption"):
        style.save(fig, results.Run(tmp_path, "notebook"), "empty", frame, caption)
    assert not (tmp_path / "figures").exists()


def test_published_acceptance_is_turned_into_survival() -> None:
    llama = paper.published_survival().query("model == 'Llama-2-chat-7B, EAGLE-1'").sort_values("position")
    assert llama["value"].tolist() == pytest.approx([0.76, 0.76 * 0.69, 0.76 * 0.69 * 0.67, 0.2389, 0.16247], abs=1e-4)


def test_the_rejected_share_follows_from_survival() -> None:
    survival = 0.7 ** np.arange(1, 5)
    rows = [{"metric": "survival", "value": value, "position": position} for position, value in enumerate(survival)]
    measured = {"metric": "rejected_share", "value": (4 - survival.sum()) / 5}
    table = results.tidy([*rows, measured], unit="share", k=4, temperature=0.0)
    predicted = paper.predict_rejected(table).set_index("k")["value"]
    assert predicted[1] == pytest.approx((1 - 0.7) / 2)
    assert predicted[2] == pytest.approx((2 - 0.7 - 0.49) / 3)
    assert predicted[4] == pytest.approx(measured["value"])


def test_the_recorded_tables_say_where_they_are_from() -> None:
    manifest = results.read_manifest(paths.RECORDED)
    found = {results.read_table(name, paths.RECORDED)["run_id"].iloc[0] for name in paper.TABLES}
    assert found == {manifest["run_id"]}
    assert all(len(entry["provenance"]["git"]["commit"]) == 40 for entry in manifest["notebooks"].values())
