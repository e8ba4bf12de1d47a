# SPDX-License-Identifier: Apache-2.0
"""A notebook's parameters: what its parameters cell declares, what the command line gives, what papermill passed."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nwor_lab.run import ranges

Values = dict[str, dict[str, Any]]
"""What each notebook, by name, is given."""


# -- on the command line -----------------------------------------------------------------------------------------------


def declared(notebook: Path) -> dict[str, tuple[str, Any]]:
    """Return the parameters a notebook declares, their types and defaults, such as `{"k": ("int", 4)}`."""
    import papermill

    found = papermill.inspect_notebook(str(notebook)).items()
    return {name: (entry["inferred_type_name"], ast.literal_eval(entry["default"])) for name, entry in found}


def read(text: str, kind: str) -> Any:
    """Read a parameter given on the command line as the type its notebook declares; a list is given with commas.

    Raises:
        pydantic.ValidationError: the text is not of that type; it is a ValueError.
    """
    items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)  # type: ignore[arg-type]  # pydantic resolves the name of a type
    return adapter.validate_python(items if kind.startswith("list") else text)


def read_points(
    chosen: list[Path], given: Mapping[str, str], grid: list[str], here: bool = True, all_of_them: bool = False
) -> dict[str, Values]:
    """Return each point of a grid by name, and what it gives to each notebook: the parameters that one declares.

    Args:
        given: parameters of every point, as text by name.
        grid: `name=value,value` for each parameter that varies; `;` separates the values of a list parameter.
            Without any there is one point, whose name is empty.
        here: as `ranges.check` takes it.
        all_of_them: nobody named the notebooks, so one that cannot have a value which others can keeps its own.

    Raises:
        ValueError: no notebook declares a name, a value is not of the declared type or cannot be, or a point is given
            twice.
        OSError: as `ranges.check`.
    """
    found = {notebook.stem: declared(notebook) for notebook in chosen}
    kinds = {name: {one: kind for one, (kind, _) in of.items()} for name, of in found.items()}
    known = {name: kind for each in kinds.values() for name, kind in each.items() if name != "run_dir"}
    axes: dict[str, list[str]] = {}
    for word in grid:
        name, _, text = word.partition("=")
        values = text.split(";" if known.get(name, "").startswith("list") else ",")
        axes[name] = [value.strip() for value in values if value.strip()]
        if not axes[name]:
            raise ValueError(f"--grid {word}: write it as name=value,value")
    if unknown := [name for name in (*given, *axes) if name not in known]:
        raise ValueError(f"no notebook here has a parameter {', '.join(unknown)}; they have {', '.join(sorted(known))}")
    points: dict[str, Values] = {}
    for product in itertools.product(*axes.values()):
        at = {**given, **dict(zip(axes, product, strict=True))}
        point = re.sub(r"[^\w.,=+-]+", "-", ",".join(f"{name}={at[name]}" for name in axes))[:120]
        if point in points:
            raise ValueError(f"--grid gives {point} twice")
        points[point] = {name: _read_all(name, kinds[name], at) for name in found}
        refused = dict[str, list[tuple[str, ValueError]]]()
        for notebook, passed in points[point].items():
            defaults = {name: default for name, (_, default) in found[notebook].items()}
            for name in passed:
                try:
                    ranges.check(notebook, defaults | passed, [name], here)
                except ValueError as error:
                    refused.setdefault(name, []).append((notebook, error))
        for name, refusals in refused.items():
            if not all_of_them or len(refusals) == sum(name in of for of in kinds.values()):
                raise refusals[0][1]
            for notebook, _ in refusals:
                del points[point][notebook][name]
    return points


def _read_all(notebook: str, kinds: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in texts.keys() & kinds.keys():
        try:
            values[name] = read(texts[name], kinds[name])
        except ValidationError:
            said = f"{notebook}: parameter {name}={texts[name]!r} is not of type {kinds[name]}"
            raise ValueError(said) from None
    return dict(sorted(values.items()))


def keep_their_own(chosen: list[Path], names: Iterable[str], points: Mapping[str, Values]) -> list[str]:
    """Return which notebooks cannot have a value that others were given, in words."""
    return [
        f"{book.stem} keeps its own {name}, since it cannot have that"
        for book, name in itertools.product(chosen, names)
        if name in declared(book) and any(name not in values[book.stem] for values in points.values())
    ]


# -- in the notebook ---------------------------------------------------------------------------------------------------


def check(scope: Mapping[str, Any], notebook: str) -> dict[str, Any]:
    """Return the parameters of a running notebook by name; `scope` is its `globals()`.

    Raises:
        NameError: papermill passed a parameter that the notebook does not declare.
        ValueError: a parameter has another type than declared, such as a mode `off` that YAML made `False`.
        ValueError, OSError: as `ranges.check`.
    """
    kinds = dict(scope.get("__annotations__", {}))
    if "run_dir" not in kinds:
        raise NameError(f'{notebook}: the parameters cell must declare `run_dir: str = ""`')
    if unknown := sorted(_injected(scope) - set(kinds)):
        raise NameError(f"{notebook} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(kinds))}")
    for name, kind in kinds.items():
        try:
            TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(scope[name])
        except ValidationError as error:
            hint = "; YAML reads a bare on or off as a boolean: quote it" if isinstance(scope[name], bool) else ""
            said = error.errors()[0]["msg"].removeprefix("Input ")
            raise ValueError(f"{notebook}: parameter {name} {said}, got {scope[name]!r}{hint}") from None
    values = {name: scope[name] for name in kinds}
    ranges.check(notebook, values, values)
    return values


def are_defaults(scope: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether `values` are those that the parameters cell declares, but for `run_dir`."""
    for source in scope.get("In", []):
        with contextlib.suppress(SyntaxError, ValueError):
            lines = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign) and node.value]
            if lines:  # the first cell with annotations is the parameters cell; papermill's own has none
                declared = {ast.unparse(line.target): ast.literal_eval(line.value) for line in lines if line.value}
                return all(values.get(name) == value for name, value in declared.items() if name != "run_dir")
    return True


def _injected(scope: Mapping[str, Any]) -> set[str]:
    # papermill puts what it was passed into a cell of its own that begins with this comment, a line each.
    cells = [source for source in scope.get("In", []) if source.startswith("# Parameters\n")]
    return {target.id for line in ast.parse("\n".join(cells)).body for target in getattr(line, "targets", ())}
