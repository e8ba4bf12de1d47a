# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that are wrapped, as each known release has them: their parameters, and a hash of their body.

`nwor doctor --vllm PATH --record` writes a release into `releases.json`, for all functions named there; a function that
is to be wrapped anew is first named there with ``{}``. Reading needs no vLLM: neither this module nor that command
imports it.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("releases.json")
TESTED = "0.32.0"  # the release that tests run on


class Function(NamedTuple):
    """parameters: their names in order, ``self`` included, with a space between. body: what `body_hash` says."""

    parameters: str
    body: str


KNOWN: dict[str, dict[str, Function]] = {
    name: {release: Function(*found) for release, found in releases.items()}
    for name, releases in json.loads(FILE.read_text()).items()
}
"""By the function's full name and by release."""
RELEASES = sorted({release for releases in KNOWN.values() for release in releases})
SERIES = sorted({release.rpartition(".")[0] for release in RELEASES})


def release_of(version: str) -> str:
    """A version without its local part: ``0.32.0+cpu`` is release ``0.32.0``."""
    return version.partition("+")[0]


def in_known_series(version: str) -> bool:
    return version.startswith(tuple(f"{series}." for series in SERIES))


def compare(found: Function | None, known: Function | None) -> str:
    """In words, how a function differs from the one that a release has."""
    if found is None or known is None:
        return "missing" if found is None else "new"
    if found.parameters == known.parameters:
        return "unchanged" if found == known else "changed body" if found.body else "no source to compare with"
    new, gone = found.parameters.split(), known.parameters.split()
    words = [f"new: {name}" for name in new if name not in gone] + [f"gone: {name}" for name in gone if name not in new]
    return f"changed signature ({'; '.join(words) or 'in another order'})"


def of_node(node: ast.FunctionDef) -> Function:
    """The function that a syntax tree holds."""
    a = node.args
    names = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    return Function(" ".join(name.arg for name in names), body_hash(node))


def of_object(function: Callable) -> Function:
    """The function that this process runs, below what wraps it; an empty body where its source cannot be read."""
    parameters = " ".join(inspect.signature(function).parameters)
    try:
        return Function(parameters, body_hash(_node_of(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):
        return Function(parameters, "")


def _node_of(function: Callable) -> ast.AST:
    source = inspect.getsource(function)
    [node] = ast.parse(f"if 1:\n{source}" if source[0].isspace() else source).body
    return node.body[0] if isinstance(node, ast.If) else node


def body_hash(node: ast.AST) -> str:
    """A hash of what a function does: layout, comments, docstrings and annotations do not count, decorators do.

    It does not depend on the version of Python, as `ast.dump` and `ast.unparse` do.
    """
    return hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:16]


_NOT_SEEN = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"}


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(item) for item in node if not _does_nothing(item)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    values = [(name, getattr(node, name, None)) for name in node._fields if name not in _NOT_SEEN]
    return type(node).__name__, [(name, _plain(value)) for name, value in values if value is not None and value != []]


def _does_nothing(item: Any) -> bool:
    """Whether it is a docstring, or any other text that stands alone, or a declaration without a value."""
    if isinstance(item, ast.AnnAssign):
        return item.value is None
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
