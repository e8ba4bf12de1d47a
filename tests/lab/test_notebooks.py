# SPDX-License-Identifier: Apache-2.0
"""Each notebook says what it claims and what it takes, and is committed without outputs."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from nwor_lab import paths
from nwor_lab.run import reproduce

BOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
each = pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
PARAMETER = re.compile(r"[a-z]\w*: (str|int|float|bool|list\[(str|int|float)\]) = .+?  # \S.+")


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_a_reproduction_run_has_every_notebook() -> None:
    assert [path.stem for path in reproduce.notebooks()] == [path.stem for path in BOOKS]
    assert [path.stem[:3] for path in BOOKS] == [f"{number:02}_" for number in range(7)]


@each
def test_no_outputs_and_a_generic_kernel(path: Path) -> None:
    assert [cell.execution_count for cell in code(path) if cell.execution_count is not None or cell.outputs] == []
    metadata = read(path).metadata
    assert metadata.kernelspec.name == "python3"
    assert set(metadata) <= {"kernelspec", "language_info"}


@each
def test_it_opens_with_its_claim_and_ends_in_assertions(path: Path) -> None:
    first, last = read(path).cells[0], code(path)[-1]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert "claim" in first.source.lower()
    assert "run.finish()" in last.source


@each
def test_each_parameter_has_a_type_and_a_comment(path: Path) -> None:
    (cell,) = [cell for cell in code(path) if "parameters" in cell.metadata.get("tags", [])]
    lines = cell.source.splitlines()
    assert [line for line in lines if not PARAMETER.fullmatch(line)] == []
    seen = papermill.inspect_notebook(str(path))
    assert len(seen) == len(lines)
    assert "run_dir" in seen
    assert [name for name, entry in seen.items() if entry["inferred_type_name"] == "None" or not entry["help"]] == []


@each
def test_the_cell_after_the_parameters_starts_the_run_by_the_notebooks_own_name(path: Path) -> None:
    assert [f'results.start(globals(), "{path.stem}")' in cell.source for cell in code(path)].index(True) == 1


def test_plain_papermill_stops_at_a_misspelt_parameter(tmp_path: Path) -> None:
    path = BOOKS[0]
    given = {"run_dir": str(tmp_path / "run"), "run_dri": "x"}
    with pytest.raises(PapermillExecutionError, match="has no parameter run_dri; it has"):
        papermill.execute_notebook(str(path), None, parameters=given, cwd=str(paths.ROOT), progress_bar=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "llama-3-8b"}, "llama-3.1-8b"),
        ({"acceptance": 70}, "acceptance"),
        ({"k": 0}, "equal to 1"),
        ({"batch": 0}, "equal to 1"),
        ({"context": -1}, "equal to 0"),
        ({"tp": 0}, "equal to 1"),
        ({"tp": 3}, "divides 32"),
        ({"copy_tb_s": 0.0}, "copy_tb_s"),
    ],
)
def test_what_cannot_be_priced_stops_in_the_first_cell_and_the_choices_are_named(given, says, tmp_path: Path) -> None:
    parameters, first, *_ = code(paths.NOTEBOOKS / "06_where_it_pays.ipynb")
    first.source = "\n".join(line for line in first.source.splitlines() if not line.startswith("%"))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(parameters.source, scope)  # noqa: S102
    scope |= {"run_dir": str(tmp_path), **given}
    with pytest.raises(ValueError, match=says) as refused:
        exec(first.source, scope)  # noqa: S102
    assert "\n" not in str(refused.value)
