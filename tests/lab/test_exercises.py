# SPDX-License-Identifier: Apache-2.0
"""The exercises of the lessons: as they are shipped nobody has solved them, and each folded solution is right."""

import re
from typing import Any

import nbformat
import pytest

from nwor_lab import paths
from nwor_lab.run import lessons

BOOKS = {"00_idea": 2, "01_reference_model": 2, "03_eagle_acceptance": 1, "04_end_to_end": 2}
"""Lessons that take long to run, and how many exercises a call checks; `test_lesson_exercises.py` runs the others."""
FOLDED = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("book", BOOKS)
def test_each_folded_solution_is_right(book: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = nbformat.read(paths.NOTEBOOKS / f"{book}.ipynb", as_version=4).cells
    solved = 0
    for place, cell in enumerate(cells):
        if not (folded := FOLDED.search(cell.source)):
            continue
        exercise, check = (cell.source for cell in cells[place - 2 : place])
        if "lessons.check(" not in check:
            continue
        assert "raise NotImplementedError" in exercise
        scope: dict[str, Any] = {"__name__": "exercise"}
        exec("import torch\nfrom nwor_lab.run import answers, lessons", scope)  # noqa: S102
        for code, said in ((exercise, lessons.NOT_YET), (folded.group(1), lessons.RIGHT)):
            exec(code, scope)  # noqa: S102
            exec(check, scope)  # noqa: S102
            assert capsys.readouterr().out.startswith(said)
        solved += 1
    assert solved == BOOKS[book]
