# SPDX-License-Identifier: Apache-2.0
"""A notebook's parameters: what its parameters cell declares, what the command line gives, what papermill passed."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nwor_lab import ranges

Values = dict[str, dict[str, Any]]
"""What each notebook, by name, is given."""


# -- on the command line -----------------------------------------------------------------------------------------------


def declared(notebook: Path) -> dict[str, tuple[str, Any]]:
    """Return the parameters a notebook declares, their types and defaults, such as `{"k": ("int", 4)}`."""
    import papermill

    found = papermill.inspect_notebook(str(notebook)).items()
    return {name: (entry["inferred_type_name"], ast.literal_eval(entry["default"])) for name, entry in found}


READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}
"""What reads a parameter of each declared type. A string stays as it was given: `off` is `off`, never YAML's false."""


def parse(text: str, kind: str) -> Any:
    """Read a parameter given on the command line as the type its notebook declares; a list is given with commas.

    Raises:
        ValueError, KeyError: the text is not of that type.
    """
    if found := re.fullmatch(r"list\[(\w+)\]", kind):
        return [parse(item.strip(), found[1]) for item in text.strip("[]").split(",") if item.strip()]
    return READ[kind](text)


def read_points(chosen: list[Path], given: Mapping[str, str], grid: list[str], here: bool = True) -> dict[str, Values]:
    """Return each point of a grid by name, and what it gives to each notebook: the parameters that one declares.

    Args:
        given: parameters of every point, as text by name.
        grid: `name=value,value` for each parameter that varies; `;` separates the values of a list parameter.
            Without any there is one point, whose name is empty.
        here: as `ranges.check` takes it.

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
        points[point] = {notebook: {} for notebook in kinds}
        for notebook, name in ((notebook, name) for notebook in kinds for name in at if name in kinds[notebook]):
            try:
                points[point][notebook][name] = parse(at[name], kinds[notebook][name])
            except (ValueError, KeyError):
                said = f"{notebook}: parameter {name}={at[name]!r} is not of type {kinds[notebook][name]}"
                raise ValueError(said) from None
        for notebook, passed in points[point].items():
            defaults = {name: default for name, (_, default) in found[notebook].items()}
            ranges.check(notebook, defaults | passed, passed, here)
    return points


# -- in the notebook ---------------------------------------------------------------------------------------------------


def check(scope: Mapping[str, Any], notebook: str) -> dict[str, Any]:
    """Return the parameters of a running notebook by name; `scope` is its `globals()`.

    Raises:
        NameError: papermill passed a parameter that the notebook does not declare.
        TypeError: a parameter has another type than declared, such as a mode `off` that YAML made `False`.
        ValueError, OSError: as `ranges.check`.
    """
    kinds = dict(scope.get("__annotations__", {}))
    if "run_dir" not in kinds:
        raise NameError(f'{notebook}: the parameters cell must declare `run_dir: str = ""`')
    if unknown := sorted(_injected(scope) - set(kinds)):
        raise NameError(f"{notebook} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(kinds))}")
    for name, kind in kinds.items():
        _check_type(notebook, name, scope[name], kind)
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


def _check_type(notebook: str, parameter: str, value: Any, kind: Any) -> None:
    origin = getattr(kind, "__origin__", kind)
    if not isinstance(origin, type):
        raise TypeError(f"{notebook}: parameter {parameter} is declared as {kind!r}; use str, int, float, bool or list")
    good = isinstance(value, origin) or (origin is float and type(value) is int)
    if good and (origin is bool or not isinstance(value, bool)):
        return
    hint = "; YAML reads a bare on or off as a boolean: quote it, or pass it with -p" if isinstance(value, bool) else ""
    raise TypeError(f"{notebook}: parameter {parameter} is {value!r}, not of type {origin.__name__}{hint}")
