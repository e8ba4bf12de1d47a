# SPDX-License-Identifier: Apache-2.0
"""What `nwor bench` and its fronts are asked in common, and the engines, plan and prompts that follow from it."""

from __future__ import annotations

import importlib.util
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import arg

from nwor_lab import command_line, machine, pair, paths
from nwor_lab.bench.parity import tolerance
from nwor_lab.bench.plan import Plan
from nwor_lab.engines import shapes
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.engines.spec import EngineOptions, EngineSpec
from nwor_lab.engines.widened_pair import PAIR_AT, write_widened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Modes = Annotated[tuple[str, ...], arg(aliases=("--mode",))]
Ks = Annotated[tuple[int, ...], arg(name="k")]
NAMES = {
    "dtype": ("vllm.config.model", "ModelDType"),
    "method": ("vllm.config.speculative", "SpeculativeMethod"),
    "kv_cache_dtype": ("vllm.config.cache", "CacheDType"),
}
"""Module and name of vLLM's own list for each option whose values have names."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go."""

    run_dir: str = ""
    """folder to write to; none: results/NAME"""
    name: str
    """name of the table and report"""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]*\w", self.name):
            raise ValueError(f"--name is a word of letters, digits, dots and dashes, got {self.name!r}: give --run-dir")

    @property
    def folder(self) -> Path:
        return Path(self.run_dir or paths.RESULTS / self.name).resolve()


def parse_config(asked: Any) -> tuple[EngineSpec, Plan, list[list[int]]]:
    """The spec, the plan and the prompts (token ids) that the options of a command describe, its `engine` and `plan`.

    Raises:
        ValueError, OSError: an option is impossible here, or a file cannot be read.
    """
    plan: Plan = asked.plan
    if plan.profile and machine.on_cpu():
        raise ValueError("--profile sees the kernels of a GPU: leave it out here")
    if plan.shape and not plan.random_prompts:
        raise ValueError("--shape has no tokenizer: give lengths of --random-prompts")
    if (most := max(plan.batches, default=0)) > asked.engine.batch:
        raise ValueError(f"--batches {most}: engines run {asked.engine.batch} requests at once: raise --batch")
    spec = EngineSpec(**vars(with_model(asked.engine, plan.shape)), k=plan.ks[0])
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
    usual = tolerance(spec.dtype, spec.kv_cache_dtype, spec.load_format == FORMAT, not machine.on_cpu())
    return spec, replace(plan, num_prompts=plan.num_prompts or len(prompts), tolerance=usual), prompts


def with_model(engine: EngineOptions, shape: str = "") -> EngineOptions:
    """Options with this machine's dtype where none is given, and folders for a shape, or the pair at one, written now.

    Raises:
        ValueError, OSError: vLLM does not know a name, this machine has no such cache or not as many GPUs, or the shape
            cannot be written.
    """
    import torch

    check_names(engine)
    engine = replace(engine, dtype=machine.model_dtype(engine.dtype))
    if refused := machine.refuse_cache(engine.kv_cache_dtype):
        raise ValueError(f"--kv-cache-dtype {engine.kv_cache_dtype}: {refused}")
    if not machine.on_cpu() and engine.tp > (gpus := torch.cuda.device_count()):
        raise ValueError(f"--tp {engine.tp}: there {'are' if gpus > 1 else 'is'} {gpus} GPU{'s' * (gpus > 1)} here")
    if shape:
        folder = paths.RESULTS / "shapes" / f"{engine.max_model_len}"  # of its own: others may start beside it
        target, head = shapes.write_shape(shape, folder, engine.max_model_len)
        return replace(engine, model=str(target), draft=str(head), load_format=FORMAT)
    if engine.model.startswith(PAIR_AT):
        folder = paths.RESULTS / "shapes" / f"{engine.model}-{engine.dtype}"
        target, head = write_widened(engine.model, folder, engine.dtype)
        return replace(engine, model=str(target), draft=str(head))
    return engine


def check_names(engine: EngineOptions) -> None:
    """Raise ValueError for a name that vLLM's own list does not have. Defaults are not looked up: vLLM takes seconds to
    import."""
    asked = {name: getattr(engine, name) for name in NAMES if getattr(engine, name) != getattr(EngineOptions, name)}
    for name, value in asked.items() if importlib.util.find_spec("vllm") else ():
        module, names = NAMES[name]
        known = get_args(getattr(importlib.import_module(module), names))
        command_line.check_names(f"--{name.replace('_', '-')}", (value,), known)


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
        if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
            raise OSError("there is no config.json in it" if Path(model).is_dir() else "no such folder")
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        ways = f"give a model's folder, its name on the hub, or a --shape of {', '.join(shapes.SHAPES)}"
        raise ValueError(f"model {model} cannot be read ({why}); {ways}") from error
