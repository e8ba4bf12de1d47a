# SPDX-License-Identifier: Apache-2.0
"""The paper's figures: all that the tables allow are drawn, from what they say, and the others are named as absent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from nwor_lab import paths, results
from nwor_lab.model import breakeven
from nwor_lab.plots import breakeven as breakeven_plots
from nwor_lab.plots import paper, steps, style

WIDTHS = {round(inches * 300) for inches in (style.COLUMN, style.TWO_COLUMNS)}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    style.close()


def gpu_steps(slower: dict[str, float], **settings: list) -> pd.DataFrame:
    """A table as the GPU sweep leaves it: vanilla takes 5 ms a step, each mode `slower[mode]` times that."""
    rows = []
    grid = pd.MultiIndex.from_product(settings.values(), names=settings.keys()).to_frame(index=False)
    for where in grid.to_dict("records"):
        for repeat in range(3):
            for mode, factor in {"off": 1.0, **slower}.items():
                common = {**where, "mode": mode, "repeat": repeat, "model": "llama-2-7b", "unit": ""}
                step = 5 * factor * (1 + 0.01 * repeat * (mode != "off"))
                rows += [{**common, "metric": "step_ms", "value": step, "step": n} for n in range(4)]
                for metric, value in (("windows", 4), ("draft_tokens", 4 * where["k"]), ("accepted_tokens", 4)):
                    rows.append({**common, "metric": metric, "value": value * where["batch"]})
    return results.tidy(pd.DataFrame(rows), run_id="h200")


@pytest.fixture(scope="module")
def swept() -> pd.DataFrame:
    return gpu_steps({"cow": 1.01, "stage": 0.95}, k=[1, 8], batch=[1, 16], kv_heads=[8, 32], prompt=[512, 2048])


@pytest.fixture(scope="module")
def share() -> pd.DataFrame:
    rows = [
        {"metric": "kv_write_share", "value": 0.016 * heads / batch, "unit": "share", "batch": batch, "kv_heads": heads}
        for heads in (8, 32)
        for batch in (1, 16)
    ]
    return results.tidy(rows, run_id="h200")


@pytest.fixture(scope="module")
def counts() -> pd.DataFrame:
    rows = [
        {"metric": "accepted_at", "value": 900 - 300 * position, "unit": "windows", "position": position}
        for position in (0, 1)
    ]
    for metric, value in (("windows", 1000), ("draft_tokens", 2000), ("accepted_tokens", 1500)):
        rows.append({"metric": metric, "value": value, "unit": ""})
    return results.tidy(rows, run_id="h200", mode="off", k=2).assign(temperature=0.0)


def test_the_recorded_tables_draw_all_but_what_is_not_recorded_yet(tmp_path: Path, swept, share, counts) -> None:
    tables = paper.tables(paths.RECORDED)
    drawn = paper.draw(tmp_path, tables)
    missing = paper.absent(tables)
    assert {path.stem for path in drawn} | set(missing) == set(paper.FIGURES)
    assert not {path.stem for path in drawn} & set(missing)
    assert set(missing.values()) <= set(paper.OPTIONAL), "all else is recorded"
    tables = {name: table for name, table in tables.items() if name not in paper.OPTIONAL}
    for path in drawn:
        assert b"/Type3" not in path.read_bytes(), "fonts are embedded as TrueType (pdf.fonttype 42)"
        assert b"CreationDate" not in path.read_bytes()
        assert plt.imread(path.with_suffix(".png")).shape[1] in WIDTHS
        assert len(pd.read_csv(path.with_suffix(".csv")))
        assert len(path.with_suffix(".txt").read_text()) > 60
    style.close()
    every = paper.draw(tmp_path, {**tables, "gpu_steps": swept, "kv_write_share": share, "gpu_acceptance": counts})
    assert [path.stem for path in every] == list(paper.FIGURES)
    style.close()


def test_what_is_absent_is_said(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paper, "FIGURES", {"step_ratio": (steps.step_ratio, ("gpu_steps",))})
    monkeypatch.setattr(paper, "tables", lambda source: {})
    assert paper.main(["--out", str(tmp_path)]) == 0
    assert "absent: step_ratio, since gpu_steps.parquet is neither in a run nor recorded" in capsys.readouterr().out


def test_a_walks_table_that_is_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    with pytest.raises(FileNotFoundError, match="make reproduce"):
        paper.tables()


def test_the_generations_are_judged_against_vanilla(tmp_path: Path) -> None:
    tables = paper.tables(paths.RECORDED)
    path = paper.generations(tmp_path, tables["reference"], tables["traffic"])
    data = pd.read_csv(path.with_suffix(".csv")).pivot(index="mode", columns="metric", values="worse_than_vanilla")
    wrong = {mode: set(line[line].index) for mode, line in data.iterrows()}
    bytes_moved = "MB moved to write a window"
    assert wrong == {
        "off": set(),
        "blind": {"drafts and bonus accepted (tokens)", "prompts with vanilla's tokens", bytes_moved},
        "cow": {bytes_moved},
        "stage": {bytes_moved},
    }


def test_the_step_ratio_is_that_of_the_table(tmp_path: Path, swept: pd.DataFrame) -> None:
    path = steps.step_ratio(tmp_path, swept)
    data = pd.read_csv(path.with_suffix(".csv"))
    assert len(data) == 2 * 2 * 2 * 2 * 2
    assert data.groupby("mode")["measured"].median().to_dict() == pytest.approx(
        {"cow": 1.01 * 1.01**0.5, "stage": 0.95 * 1.01**0.5}
    ), "of the two repeats that are a pair"
    assert (data["low"] < data["measured"]).all()
    assert (data["measured"] < data["high"]).all()
    assert "Run h200." in path.with_suffix(".txt").read_text()


def test_the_write_share_is_drawn_in_percent(tmp_path: Path, share: pd.DataFrame) -> None:
    data = pd.read_csv(steps.write_share(tmp_path, share).with_suffix(".csv"))
    assert data["percent"].tolist() == pytest.approx([12.8, 0.8, 51.2, 3.2])
    assert data["cache"].unique().tolist() == ["8 KV heads", "32 KV heads"]


def test_no_two_series_of_bars_look_alike() -> None:
    fig, ax = style.figure()
    frame = pd.DataFrame({"batch": 1, "value": 1.0, "cache": [f"cache {n}" for n in range(7)]})
    style.bars(ax, frame[:6], x="batch", by="cache")
    with pytest.raises(ValueError, match="several panels"):
        style.bars(ax, frame, x="batch", by="cache")
    style.close(fig)


@pytest.fixture
def drawn(monkeypatch) -> list[Any]:
    """Figures that would have been saved."""
    found: list[Any] = []
    monkeypatch.setattr(style, "save", lambda fig, *_: found.append(fig))
    return found


def test_the_write_share_has_a_panel_for_each_tp(tmp_path: Path, drawn: list[Any]) -> None:
    """As many caches as are recorded, none clipped."""
    steps.write_share(tmp_path, results.read_table("kv_write_share", paths.RECORDED))
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes] == ["TP=1", "TP=2"]
    for ax in axes:
        bars = [patch.get_height() for patch in ax.patches]
        assert len(bars) == 4 * 4 and min(bars) > 0 and max(bars) < ax.get_ylim()[1]


def test_a_cache_looks_the_same_in_every_panel(tmp_path: Path, share: pd.DataFrame, drawn: list[Any]) -> None:
    """Over two ranks one of the caches was not measured, and one of the batches."""
    two = share[(share.kv_heads == 8) & (share.batch != share.batch.min())].assign(tp=2)
    steps.write_share(tmp_path, pd.concat([share.assign(tp=1), two], ignore_index=True))
    one, other = (
        {bars.get_label(): bars for bars in ax.containers if bars.get_label()[0] != "_"} for ax in drawn[0].axes
    )
    assert one.keys() == other.keys() == {"8 KV heads", "32 KV heads"}
    for label, bars in one.items():
        assert bars[0].get_facecolor() == other[label][0].get_facecolor()
        assert [bar.get_x() for bar in bars] == [bar.get_x() for bar in other[label]]


def test_no_measured_point_is_hidden(tmp_path: Path, swept: pd.DataFrame) -> None:
    tables = {name: table for name, table in paper.tables(paths.RECORDED).items() if name != "gpu_steps"}
    alone = pd.read_csv(paper.draw_one(tmp_path, "predicted_against_measured", tables).with_suffix(".csv"))
    tables["gpu_steps"] = swept
    path = paper.draw_one(tmp_path, "predicted_against_measured", tables)
    both = pd.read_csv(path.with_suffix(".csv"))
    assert (alone["panel"] == "steps").sum() >= 2
    assert (both["panel"] == "steps").sum() == (alone["panel"] == "steps").sum() + 32
    worst = both.loc[both["panel"] == "steps", "error"].abs().max()
    assert f"largest error is {worst:.3f}" in path.with_suffix(".txt").read_text()


def test_the_break_even_map_draws_the_model(tmp_path: Path) -> None:
    path = breakeven_plots.break_even(tmp_path, paper.published_survival())
    data = pd.read_csv(path.with_suffix(".csv"))
    grid, dots = data[data["source"] == "model"], data[data["source"] != "model"]
    assert len(grid) == len(breakeven_plots.MAPS) * len(breakeven_plots.BATCHES) * len(breakeven_plots.KS) * 21
    assert set(dots["model"]) == {"Llama-2-chat-7B", "Vicuna-7B", "Llama-3.1-8B", "Qwen3-8B"}
    point = grid.query("mode == 'stage' and vanilla == 'fused' and k == 8 and acceptance == 0.5 and batch == 64").iloc[
        0
    ]
    window = breakeven.Window.expected(64, breakeven.survival_of(0.5, 8))
    assert point["us"] == pytest.approx(
        breakeven.step_difference_us("stage", breakeven.MODELS["llama-2-7b"], window, fused=True)
    )


def test_figures_are_byte_stable(
    tmp_path: Path, swept: pd.DataFrame, share: pd.DataFrame, counts: pd.DataFrame
) -> None:
    given = {"gpu_steps": swept, "kv_write_share": share, "gpu_acceptance": counts}
    tables = {**paper.tables(paths.RECORDED), **given}
    run = results.Run(tmp_path / "run", "figures")
    paper.draw(run, tables)
    same = paper.same_again(run, tables)
    assert len(same) == 2 * len(paper.FIGURES)
    assert all(same.values()), same
