# SPDX-License-Identifier: Apache-2.0
"""Each lesson runs by `nwor reproduce` at small parameters and is reported, and its folded solutions are right.

As shipped nobody has solved an exercise, which stops no run; in the copies that run here each is asked once more behind
its fold, with the solution.
"""

import json
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

import nbformat
import pandas as pd
import papermill
from traitlets.config import Config

from nwor_lab import paths
from nwor_lab.run import lessons, reproduce, results

SMALL = {
    "00_idea": "num_prompts 1 max_tokens 16",
    "01_reference_model": "num_prompts 2 max_tokens 24 long_k 16",
    "02_kernels": "cases 2 k 5 num_rejected 3 block_size 2",
    "03_eagle_acceptance": "num_prompts 2 max_tokens 24 k 2,4",
    "04_end_to_end": "num_prompts 2 max_tokens 24 repeats 2 tp 1 dtype float32 serving_concurrency 1 "
    "serving_requests 2",
    "05_kernels_on_a_gpu": "",
    "06_where_it_pays": "",
}
"""The lessons, each with parameters at which it takes less than a minute or two."""
FOLDED = re.compile(r"<summary>Solution</summary>\s+```python\n(.*?)```", re.DOTALL)


def ask_again(book: nbformat.NotebookNode) -> int:
    """Behind each folded solution ask its exercise again with it, and take it back; return how many there are."""
    cells: list[nbformat.NotebookNode] = []
    exercises = 0
    for cell in book.cells:
        code = [before for before in cells if before.cell_type == "code"]
        cells.append(cell)
        if (folded := FOLDED.search(cell.source)) and "raise NotImplementedError" in (exercise := code[-2].source):
            cells += map(nbformat.v4.new_code_cell, (folded[1], code[-1].source, exercise))
            exercises += 1
    book.cells = cells
    return exercises


class Links(HTMLParser):
    """Collect what a page refers to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found |= {value for name, value in attributes if name in ("href", "src") and value}


def check_serving(run: Path) -> None:
    """What notebook 04 leaves of vLLM's own servers and client: each mode proven, and its turns."""
    frame, report = pd.read_parquet(run / "serving.parquet"), json.loads((run / "serving.json").read_text())
    table = pd.read_csv(run / "serving-summary.csv").set_index("mode")
    assert table["parity"].all() and table["acceptance"].between(1.5, 5).all() and table.loc["stage", "ratio"] > 0
    assert report["served"]["off"] == {"layers": 0, "ranks": 0} and report["served"]["stage"]["layers"] == 5
    windows = frame[(frame["mode"] == "stage") & (frame.metric == "windows")]["value"].sum()
    assert report["served"]["stage"]["windows_total"] > windows > 0, "those of the warm-up beside"
    turns = frame.dropna(subset=["load"])[["repeat", "mode"]].drop_duplicates().to_numpy().tolist()
    assert turns == [[0, "off"], [0, "stage"], [1, "stage"], [1, "off"]]


def test_plain_papermill_stops_at_a_misspelt_parameter(tmp_path: Path) -> None:
    path, given = paths.NOTEBOOKS / "00_idea.ipynb", {"run_dir": str(tmp_path / "run"), "run_dri": "x"}
    how = {"parameters": given, "cwd": str(paths.ROOT), "progress_bar": False}
    with (
        tempfile.TemporaryDirectory() as sockets,  # a port chosen for a kernel may be taken before it starts
        pytest.raises(papermill.PapermillExecutionError, match="has no parameter run_dri; it has"),
    ):
        files = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        papermill.execute_notebook(str(path), None, config=files, **how)
    assert not (tmp_path / "run").exists()


@pytest.mark.engine
@pytest.mark.parametrize("name", [path.stem for path in reproduce.notebooks()])
def test_a_lesson_runs_and_is_reported_and_its_solutions_are_right(name: str, tmp_path: Path, monkeypatch) -> None:
    book, copy = nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4), tmp_path / f"{name}.ipynb"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells), "committed without"
    exercises = ask_again(book)
    nbformat.write(book, copy)
    monkeypatch.setattr(reproduce, "notebooks", lambda only=None: [copy])
    words = SMALL[name].split()
    given = [word for pair in zip(words[::2], words[1::2], strict=True) for word in ("-p", *pair)]
    run = tmp_path / "run"
    assert reproduce.main(["--only", name, "--run", str(run), *given]) == 0

    cells = nbformat.read(run / f"{name}.ipynb", as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "figures are on the page"
    assert not [output.text for output in outputs if output.get("name") == "stderr"], "no warnings on the page"
    lines = "".join(output.text for output in outputs if output.get("name") == "stdout").splitlines()
    assert sum(line.startswith(f"{lessons.RIGHT}, in ") for line in lines) == exercises > 0
    assert sum(line.startswith(lessons.NOT_YET) for line in lines) >= exercises
    for page in (run / "index.html", run / f"{name}.html"):
        links = {link for link in Links(page).found if not link.startswith(("#", "data:"))}
        assert f"{name}.html" in links or page.name != "index.html"
        local = {link for link in links if not link.startswith("http")}
        assert [link for link in local if not (run / link.partition("#")[0]).exists()] == []
    assert set(results.claims(run)["notebook"]) == {name}
    if name == "04_end_to_end":
        check_serving(run)
