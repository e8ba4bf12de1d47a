# SPDX-License-Identifier: Apache-2.0
"""The options of `nwor bench` and its fronts: a sentence each, made of the fields of `EngineSpec` and `Plan`."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nwor_lab import machine, pair, paths
from nwor_lab.bench.parity import tolerance
from nwor_lab.bench.plan import Plan
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.engines.widened_pair import PAIR_AT, write_widened

T = TypeVar("T")
OPTIONS = {"modes": "--mode", "ks": "--k", "temperatures": "--temperature"}
"""Options that are not named as their field of `Plan` is."""
DEFAULTS = {"model": str(paths.PAIR_TARGET), "draft": str(paths.PAIR_EAGLE), "dtype": ""}
"""Defaults that are not those of their field."""


def parser(
    command: str, description: str, fixed: Sequence[str] = (), plan: type = Plan, **defaults: Any
) -> argparse.ArgumentParser:
    """The parser of a command with the fields of `EngineSpec` and of the dataclass `plan` as options.

    `defaults` win over those of the fields, and fields named in `fixed` are no options.
    """
    made = argparse.ArgumentParser(
        prog=f"nwor {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--prompts", default=str(paths.PROMPTS), help="JSONL file with a `prompt` a line")
    made.add_argument("--shape", default="", help=f"random weights of a shape instead: {', '.join(shapes.SHAPES)}")
    made.add_argument("--run-dir", default="", help="folder to write to (default: results/NAME)")
    name = defaults.get("name", command)
    made.add_argument("--name", default=name, help="name of the table and report (default: %(default)s)")
    defaults = {**DEFAULTS, **defaults}
    hints = {**get_type_hints(EngineSpec), **get_type_hints(plan)}
    sentences = {**_sentences(EngineSpec), **_sentences(plan)}
    for field in (*fields(EngineSpec), *fields(plan)):
        if field.name == "k" and plan is Plan:  # which has a list of them
            continue
        option = "--" + field.name.replace("_", "-")
        option = OPTIONS.get(field.name, option) if plan is Plan else option
        default, hint = defaults.get(field.name, field.default), hints[field.name]
        if field.name in fixed:
            made.set_defaults(**{field.name: default})
            continue
        how: dict[str, Any] = {"dest": field.name, "default": default, "help": sentences[field.name]}
        if hint in (bool, bool | None):
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(hint) is tuple:
            how |= {"type": _list_of(get_args(hint)[0]), "metavar": "A,B,..."}
            how["help"] += f" (default: {','.join(map(str, default)) or 'none'})"
        else:
            how |= {"type": hint, "metavar": hint.__name__.upper()}
            how["help"] += " (default: %(default)s)" if default != "" else ""
        made.add_argument(option, **how)
    return made


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(value) for value in text.split(",") if value)

    return values


def _sentences(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each of its fields."""
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", kind.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("%", "%%") for name, text in found}


def parse_config(arguments: argparse.Namespace) -> tuple[EngineSpec, Plan, list[list[int]]]:
    """The spec, the plan and the prompts (token ids) that the options describe.

    An empty dtype is that of this machine, and a `tolerance` of 0 that of the dtypes.

    Raises:
        ValueError, OSError: an option is impossible here, or a file cannot be read.
    """
    if arguments.profile and machine.on_cpu():
        raise ValueError("--profile sees the kernels of a GPU: leave it out here")
    if arguments.shape:
        shapes.find_shape(arguments.shape)
        if not arguments.random_prompts:
            raise ValueError("--shape has no tokenizer: give lengths of --random-prompts")
    given = with_model(vars(arguments))
    if given["count"]:
        given |= {"modes": ("off",), "audit": False}
    usual = tolerance(given["dtype"], given["kv_cache_dtype"], given["load_format"] == FORMAT, not machine.on_cpu())
    given["tolerance"] = given["tolerance"] or usual
    plan = from_options(Plan, given)
    spec = from_options(EngineSpec, given | {"k": plan.ks[0]})
    if (room := spec.max_model_len - plan.max_tokens) < max(plan.random_prompts, default=1):
        raise ValueError(f"max_model_len {spec.max_model_len} leaves room for {room} tokens of a prompt: raise it")
    if plan.random_prompts:
        prompts = random_prompts(plan)
    else:
        prompts = tokenized(spec, plan, pair.load_prompts(given["prompts"]))
    if not prompts:
        raise ValueError("there are no prompts: give --num-prompts, or a file of --prompts that has some")
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
    if made["shape"]:
        folder = paths.RESULTS / "shapes" / f"{made['max_model_len']}"  # of its own: others may start beside it
        target, head = shapes.write_shape(made["shape"], folder, made["max_model_len"])
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


def tokenized(spec: EngineSpec, plan: Plan, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of the texts by the model's own tokenizer.

    Raises:
        ValueError: there is no such model; or acceptance is to be counted, and a prompt is missing or does not fit
            beside its answer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.model)
    except OSError as error:
        raise shapes.unreadable(spec.model, error) from error
    prompts = [tokenizer.encode(text) for text in texts]
    if plan.count:
        if plan.num_prompts > len(prompts) or not prompts:
            raise ValueError(f"{plan.num_prompts or 'some'} prompts asked for, {len(prompts)} given")
        room, longest = spec.max_model_len - plan.max_tokens - max(plan.ks), max(map(len, prompts))
        if longest > room:
            limit = f"max_model_len {spec.max_model_len} leaves room for {room}"
            raise ValueError(f"a prompt has {longest} tokens, {limit}")
    return prompts
