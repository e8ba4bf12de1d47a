# SPDX-License-Identifier: Apache-2.0
"""Parameters of the notebooks: what each may be, what the command line gives, what a running notebook was passed."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from nwor_lab import machine, pair, paths
from nwor_lab.cost.breakeven import MODELS

Values = dict[str, dict[str, Any]]
"""What each notebook, by name, is given."""


# -- what each may be --------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


def _different(items: list[Item]) -> list[Item]:
    if len(set(items)) < len(items):
        raise ValueError("must be different values")
    return items


Several = Annotated[list[Item], Field(min_length=1), AfterValidator(_different)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, lt=math.inf)]

MAY_BE: dict[str, Any] = {
    **dict.fromkeys(("k", "long_k", "chunk", "tp", "kv_heads", "batch", "num_prompts", "max_tokens"), Positive),
    **dict.fromkeys(("cases", "repeats", "serving_concurrency", "serving_requests"), Positive),
    **dict.fromkeys(("num_rejected", "block_size", "num_blocks", "kv_cache_memory", "seed", "context"), NotNegative),
    **dict.fromkeys(("temperatures", "launch_us"), Amount),
    "copy_tb_s": Annotated[float, Field(ge=0.001, lt=math.inf)],
    "acceptance": Annotated[float, Field(ge=0, le=1)],
    "dtype": Literal["", "auto", "bfloat16", "float16", "half", "float32", "float"],
    "kv_cache_dtype": Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
    "cache": Literal["bf16", "fp8"],
    "method": Literal["eagle", "eagle3"],
    "device": Literal["", "cpu", "cuda"],
    "source": Literal["", "measure", "recorded"],
}
"""By the name of a parameter its type, or of a list that of an item; the others are as their notebook declares them."""
IN_NOTEBOOK: dict[str, Any] = {
    "00_idea.k": Annotated[int, Field(ge=1, le=4)],  # what the two blocks of the small window hold
    "02_kernels.block_size": Positive,
    "05_kernels_on_a_gpu.k": Several[Annotated[int, Field(ge=1, le=16)]],  # rows of a window that lie in two pages
    "05_kernels_on_a_gpu.batch": list[Positive],  # empty: all that are recorded
    "05_kernels_on_a_gpu.context": list[NotNegative],
    "06_where_it_pays.model": Literal[*MODELS],
}
"""Types that a parameter has in one notebook alone."""


def _validated(notebook: str, name: str, declared: Any, value: Any, strict: bool) -> Any:
    """A value as what the parameter may be; `declared`: the type that its notebook says, or its name."""
    kind = MAY_BE.get(name, declared)
    if name in MAY_BE and "list" in str(declared):
        kind = Several[kind]  # type: ignore[valid-type]
    kind = IN_NOTEBOOK.get(f"{notebook}.{name}", kind)
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=strict)).validate_python(value)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Input ").removeprefix("Value error, ")
        hint = "; YAML reads a bare on or off as a boolean: quote it" if isinstance(value, bool) else ""
        raise ValueError(f"{notebook}: {name} {why}, got {value!r}{hint}") from None


def _wrong_together(values: Mapping[str, Any], given: Collection[str], here: bool) -> Iterator[str]:
    """Say what single types cannot, of the parameters that were `given`; here: this machine will run them."""

    def has(*names: str) -> bool:
        return all(name in values for name in names) and not set(names).isdisjoint(given)

    if has("num_rejected", "k") and values["num_rejected"] > values["k"]:
        yield f"num_rejected={values['num_rejected']} of k={values['k']} drafts"
    if has("kv_heads", "tp"):
        for kv, ranks in itertools.product(values["kv_heads"], values["tp"]):
            if 32 % kv or kv % ranks:
                yield f"32 heads and {kv} KV heads do not divide over {ranks} ranks"
    if not here:
        return
    import torch

    if has("prompts", "num_prompts"):
        pair.load_prompts(values["prompts"] or paths.PROMPTS, values["num_prompts"])
    if has("kv_cache_dtype") and (why := machine.refuse_cache(values["kv_cache_dtype"])):
        yield why
    if has("tp", "draft") and not machine.on_cpu() and (gpus := torch.cuda.device_count()) < values["tp"]:
        yield f"tp={values['tp']}: GPUs here: {gpus}"
    for name, of_a_gpu in (("device", "cuda"), ("source", "measure")):
        if has(name) and values[name] == of_a_gpu and machine.on_cpu():
            yield f"{name}={of_a_gpu}: there is no NVIDIA GPU here"


def _check_together(notebook: str, *said: Any) -> None:
    for why in _wrong_together(*said):
        raise ValueError(f"{notebook}: {why}")


# -- on the command line -----------------------------------------------------------------------------------------------


def declared(notebook: Path) -> dict[str, tuple[str, Any]]:
    """Return the parameters a notebook declares, their types and defaults, such as `{"k": ("int", 4)}`."""
    import papermill

    found = papermill.inspect_notebook(str(notebook)).items()
    return {name: (entry["inferred_type_name"], ast.literal_eval(entry["default"])) for name, entry in found}


def read_points(chosen: list[Path], given: Mapping[str, str], grid: list[str], here: bool = True) -> dict[str, Values]:
    """Return each point of a grid by name, and what it gives to each notebook: the parameters that one declares.

    Args:
        given: parameters of every point, as text by name; a list is written with commas.
        grid: `name=value,value` for each parameter that varies; `;` separates the values of a list parameter.
            Without any there is one point, whose name is empty.
        here: this machine will run them, and is asked what it has.

    Raises:
        ValueError: no notebook declares a name, a value cannot be, or a point is given twice.
        OSError: a parameter names a file that cannot be read.
    """
    books = {notebook.stem: declared(notebook) for notebook in chosen}
    known = {name: kind for book in books.values() for name, (kind, _) in book.items() if name != "run_dir"}
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
        points[point] = {}
        for name, book in books.items():
            passed = {one: _read(name, one, book[one][0], at[one]) for one in sorted(at.keys() & book.keys())}
            defaults = {one: default for one, (_, default) in book.items()}
            _check_together(name, defaults | passed, passed, here)
            points[point][name] = passed
    return points


def _read(notebook: str, name: str, kind: str, text: str) -> Any:
    items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
    return _validated(notebook, name, kind, items if kind.startswith("list") else text, strict=False)


# -- in the notebook ---------------------------------------------------------------------------------------------------


def check(scope: Mapping[str, Any], notebook: str) -> tuple[dict[str, Any], bool]:
    """Return the parameters of a running notebook by name, and whether they are its own; `scope`: its `globals()`.

    Raises:
        NameError: papermill passed a parameter that the notebook does not declare.
        ValueError: a parameter cannot be what it is, such as a mode `off` that YAML made `False`.
        OSError: a parameter names a file that cannot be read.
    """
    kinds = dict(scope.get("__annotations__", {}))
    if "run_dir" not in kinds:
        raise NameError(f'{notebook}: the parameters cell must declare `run_dir: str = ""`')
    # papermill puts what it was passed into a cell of its own that begins with this comment, a line each.
    cells = [source for source in scope.get("In", []) if source.startswith("# Parameters\n")]
    passed = {target.id for line in ast.parse("\n".join(cells)).body for target in getattr(line, "targets", ())}
    if unknown := sorted(passed - set(kinds)):
        raise NameError(f"{notebook} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(kinds))}")
    values = {name: _validated(notebook, name, kind, scope[name], strict=True) for name, kind in kinds.items()}
    _check_together(notebook, values, values, True)
    return values, passed <= {"run_dir"}
