# SPDX-License-Identifier: Apache-2.0
"""What `nwor bench` and its fronts are asked in common, and the engines, plan and prompts that follow from it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from tyro.conf import arg

from nwor_lab import machine, pair, paths
from nwor_lab.bench.parity import tolerance
from nwor_lab.bench.plan import Plan
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.engines.widened_pair import PAIR_AT, write_widened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Modes = Annotated[tuple[str, ...], arg(aliases=("--mode",))]
Ks = Annotated[tuple[int, ...], arg(name="k")]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go."""

    run_dir: str = ""
    """folder to write to; none: results/NAME"""
    name: str
    """name of the table and report"""

    @property
    def folder(self) -> Path:
        return Path(self.run_dir or paths.RESULTS / self.name).resolve()


def flat(options: Any) -> dict[str, Any]:
    """All options of a command by name, those of its groups too."""
    values: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        values |= flat(value) if is_dataclass(value) else {field.name: value}
    return values


def parse_config(given: Mapping[str, Any]) -> tuple[EngineSpec, Plan, list[list[int]]]:
    """The spec, the plan and the prompts (token ids) that options by name describe.

    An empty dtype is that of this machine.

    Raises:
        ValueError, OSError: an option is impossible here, or a file cannot be read.
    """
    if given.get("profile") and machine.on_cpu():
        raise ValueError("--profile sees the kernels of a GPU: leave it out here")
    if given["shape"]:
        shapes.find_shape(given["shape"])
        if not given["random_prompts"]:
            raise ValueError("--shape has no tokenizer: give lengths of --random-prompts")
    given = with_model(given)
    usual = tolerance(given["dtype"], given["kv_cache_dtype"], given["load_format"] == FORMAT, not machine.on_cpu())
    plan = from_options(Plan, given | {"tolerance": usual})
    spec = from_options(EngineSpec, given | {"k": plan.ks[0]})
    if plan.random_prompts:
        prompts = random_prompts(plan)
    else:
        used = max(plan.num_prompts, *plan.sizes) if plan.num_prompts else None
        prompts = list(map(load_tokenizer(spec.model).encode, pair.load_prompts(plan.prompts)[:used]))
    if not prompts:
        raise ValueError("there are no prompts: give --num-prompts, or a file of --prompts that has some")
    room, longest = spec.max_model_len - plan.max_tokens, max(map(len, prompts))
    if longest > room:
        limit = f"max_model_len {spec.max_model_len} leaves room for {room}"
        raise ValueError(f"a prompt has {longest} tokens, {limit}: raise it")
    return spec, replace(plan, num_prompts=plan.num_prompts or len(prompts)), prompts


def with_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with this machine's dtype where none is given, and folders for a shape, or the pair at one, written now.

    Raises:
        ValueError, OSError: this machine has no such cache or not as many GPUs, or the shape cannot be written.
    """
    import torch

    made = dict(given) | {"dtype": machine.model_dtype(given["dtype"])}
    if refused := machine.refuse_cache(made["kv_cache_dtype"]):
        raise ValueError(f"--kv-cache-dtype {made['kv_cache_dtype']}: {refused}")
    if not machine.on_cpu() and made["tp"] > (gpus := torch.cuda.device_count()):
        raise ValueError(f"--tp {made['tp']}: there {'are' if gpus > 1 else 'is'} {gpus} GPU{'s' * (gpus > 1)} here")
    if shape := made.get("shape"):
        folder = paths.RESULTS / "shapes" / f"{made['max_model_len']}"  # of its own: others may start beside it
        target, head = shapes.write_shape(shape, folder, made["max_model_len"])
        made |= {"model": str(target), "draft": str(head), "load_format": FORMAT}
    elif made["model"].startswith(PAIR_AT):
        folder = paths.RESULTS / "shapes" / f"{made['model']}-{made['dtype']}"
        target, head = write_widened(made["model"], folder, made["dtype"])
        made |= {"model": str(target), "draft": str(head)}
    return made


def from_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass from a mapping; fields that are not in it keep their defaults."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})  # type: ignore[arg-type]


def random_prompts(plan: Plan) -> list[list[int]]:
    """Prompts of random token ids, the longest that the plan asks for."""
    draw, number = random.Random(0), max(plan.num_prompts, *plan.sizes)
    return [[draw.randrange(10, 250) for _ in range(max(plan.random_prompts))] for _ in range(number)]


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """A model's own tokenizer.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except OSError as error:
        why = str(error).strip().splitlines()[0]
        ways = f"give a model's folder, its name on the hub, or a --shape of {', '.join(shapes.SHAPES)}"
        raise ValueError(f"model {model} cannot be read ({why}); {ways}") from error
