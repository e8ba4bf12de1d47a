# SPDX-License-Identifier: Apache-2.0
"""Lessons that start no engine, run with their folded solutions in place of the exercises."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

import nbformat

from nwor_lab import paths
from nwor_lab.run import kernel, lessons, results

SMALL: dict[str, dict[str, Any]] = {
    "02_kernels": {"cases": 2, "k": 5, "num_rejected": 3, "block_size": 2},
    "05_kernels_on_a_gpu": {},
    "06_where_it_pays": {},
}
SOLUTION = re.compile(r"<summary>Solution</summary>\s+```python\n(.*?)```", re.DOTALL)


def solve(book: nbformat.NotebookNode) -> int:
    """Put each solution in the place of its exercise, the last cell before it that is to be filled in."""
    solved, exercise = 0, None
    for cell in book.cells:
        if cell.cell_type == "code" and re.search(r"raise NotImplementedError|^\w+ = \[\]  #", cell.source):
            exercise = cell
        elif cell.cell_type == "markdown" and exercise and (solution := SOLUTION.search(cell.source)):
            exercise.source, exercise, solved = solution[1], None, solved + 1
    return solved


def executed(book: nbformat.NotebookNode, name: str, folder: Path) -> str:
    """What the notebook prints."""
    nbformat.write(book, folder / f"{name}.ipynb")
    done = folder / "done.ipynb"
    with open(folder / "log", "w") as log:
        given = SMALL[name] | {"run_dir": str(folder / "run")}
        kernel.execute(folder / f"{name}.ipynb", done, given, log, 10)
    claims = results.claims(folder / "run")
    assert len(claims) and not claims["holds"].eq(False).any()
    outputs = [out for cell in nbformat.read(done, 4).cells for out in cell.get("outputs", ())]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    return "".join(out.text for out in outputs if out.get("name") == "stdout")


@pytest.mark.parametrize("name", SMALL)
def test_a_lesson_runs_and_its_solutions_are_right(name: str, tmp_path: Path) -> None:
    book = nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    exercises = solve(book)
    assert exercises == 2
    assert executed(book, name, tmp_path).count(lessons.RIGHT) == exercises


def test_an_exercise_that_nobody_has_solved_stops_no_run(tmp_path: Path) -> None:
    book = nbformat.read(paths.NOTEBOOKS / "02_kernels.ipynb", as_version=4)
    printed = executed(book, "02_kernels", tmp_path)
    assert printed.count(lessons.NOT_YET) == 2 and lessons.RIGHT not in printed
