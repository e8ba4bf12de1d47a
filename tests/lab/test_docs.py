# SPDX-License-Identifier: Apache-2.0
"""README and `docs/`: the pages are what their templates give, and what they link to exists."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import jinja2
import pandas as pd
import pytest

from docs import generate, values
from nwor_lab import paths
from nwor_lab.run import cli
from nwor_lab.serving.table import SETTING

PAGES = [paths.ROOT / "README.md", *sorted((paths.ROOT / "docs").glob("*.md"))]
TEMPLATES = generate.pages()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_page_is_up_to_date(template: Path) -> None:
    assert generate.render(template) == TEMPLATES[template].read_text(), "run `make docs`"


def test_a_number_that_is_not_recorded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="0 rows"):
        values.row(batches=(3,))
    with pytest.raises(LookupError, match="0 rows"):
        values.promise("bandwidth", "here: nothing")
    monkeypatch.setattr(generate, "TEMPLATES", tmp_path)
    (tmp_path / "page.md.j2").write_text("{{ unheard_of }}")
    with pytest.raises(jinja2.UndefinedError, match="unheard_of"):
        generate.render(tmp_path / "page.md.j2")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_paths_exist(page: Path) -> None:
    """Links as the repository's web view follows them, relative to the page; paths in code from the root."""
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    folders = "nwor|nwor_lab|notebooks|data|tests|kernels|docs"
    named = [paths.ROOT / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)]
    assert [path for path in links + named if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z]+):", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = set(re.findall(r"`(?:\.venv/bin/)?nwor ([a-z]+)", text))
    made = set(re.findall(r"(?:`|^    )make ([a-z]+)", text, re.MULTILINE)) - {"help"}
    assert commands <= cli.COMMANDS.keys() and made <= set(targets)


def test_servers_without_parity_are_counted_apart_from_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three servers of the pair one is not at parity; a fourth, of random weights, always is."""
    ratios = {("H200", 1, "auto"): 1.02, ("H200", 2, "auto"): math.nan, ("H100", 1, "auto"): 1.06}
    ratios |= {("H200", 1, "nwor_random"): 1.1}
    rows = [(gpu, tp, 4, "auto", of, "stage", "16 at once", ratio) for (gpu, tp, of), ratio in ratios.items()]
    lines = pd.DataFrame(rows, columns=[*SETTING, "mode", "load", "ratio"]).set_index([*SETTING, "mode", "load"])
    monkeypatch.setattr(values, "all_served", lambda: lines.assign(parity=lines["ratio"].notna()))
    assert values.served_over_all("stage", 16) == "1.06 (median of 3, 1.02 to 1.10)"
    assert values.without_parity("stage", 16) == "1 of 3"


def test_every_recorded_claim_holds() -> None:
    claims = values.table("claims")
    assert len(claims) > 50 and claims["holds"].dropna().astype(bool).all()


def test_the_table_of_all_settings_is_up_to_date_and_the_page_is_of_it() -> None:
    assert generate.RESULTS.read_text() == generate.results_csv(), "run `make docs`"
    rows = pd.read_csv(generate.RESULTS)
    where = (
        "table == 'gpu_direct' and mode == 'stage' and kv_heads == 32 and k == 8 and context == 512 and cache == 'bf16'"
    )
    steps = rows.query(where).query("over == @values.NEVER_PATCHED").sort_values("batch")["value"]
    assert values.slashes(steps) == values.row()


def test_commands_of_the_record_exist() -> None:
    text = (paths.RECORDED / "README.md").read_text()
    assert set(re.findall(r"\bnwor ([a-z]+)", text)) <= cli.COMMANDS.keys()
    assert all(importlib.util.find_spec(name) for name in re.findall(r"python -m ([\w.]+)", text))
    tables = {path.name for path in paths.RECORDED.iterdir()} - {"README.md"}
    assert {name for name in tables if f"`{name}`" not in text and name != "manifest.json"} == set()


def test_tests_that_hold_a_line_of_the_matrix_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", (paths.ROOT / "docs" / "modes.md").read_text()))
    assert named and named <= {path.name for path in (paths.ROOT / "tests").rglob("test_*.py")}
