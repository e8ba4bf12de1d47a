# SPDX-License-Identifier: Apache-2.0
"""Which values the parameters of the notebooks may have. A name means the same in all of them, or `notebook.name` here.

What a model, a file or this machine has to say is asked too, where it can be before anything starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nwor_lab import machine, pair, paths

Given = Mapping[str, Any]

AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("k", "long_k", "chunk", "tp", "kv_heads", "batch"), 1),
    **dict.fromkeys(("num_prompts", "max_tokens", "cases", "repeats", "02_kernels.block_size"), 1),
    **dict.fromkeys(("num_rejected", "block_size", "num_blocks", "kv_cache_memory", "seed", "context"), 0),
    **dict.fromkeys(("temperatures", "acceptance", "launch_us"), 0),
    **dict.fromkeys(("serving_concurrency", "serving_requests"), 1),
    "copy_tb_s": 0.001,
}
AT_MOST: dict[str, float] = {
    "acceptance": 1,
    "00_idea.k": 4,  # what the two blocks of the small window hold
    "05_kernels_on_a_gpu.k": 16,  # rows of a window that lie in two pages
}
MEASURING = ("03_eagle_acceptance", "05_kernels_on_a_gpu")
"""Notebooks that measure where there is a GPU; in another, `source` is a folder."""
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("", "auto", "bfloat16", "float16", "half", "float32", "float"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "cache": ("bf16", "fp8"),
    "method": ("eagle", "eagle3"),
    "device": ("", "cpu", "cuda"),
    **dict.fromkeys([f"{notebook}.source" for notebook in MEASURING], ("", "measure", "recorded")),
    "06_where_it_pays.model": ("llama-2-7b", "vicuna-7b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "gpt-oss-20b"),
}
MAY_BE_EMPTY = ("05_kernels_on_a_gpu.batch", "05_kernels_on_a_gpu.context")


def check(notebook: str, values: Given, given: Collection[str], here: bool = True) -> None:
    """Check parameters of a notebook; `values` has all of them.

    Args:
        given: those that are checked, each alone and with the others.
        here: the notebook will run on this machine, which is asked what it has.

    Raises:
        ValueError: one cannot be; the message says which can.
        OSError: it names a file that cannot be read.
    """
    for name in given:
        if why := _alone(notebook, name, values[name]):
            raise ValueError(f"{notebook}: {name} {why}, got {values[name]!r}")
    for names, ask in TOGETHER + HERE * here:
        if not set(names).isdisjoint(given) and (why := ask(notebook, values)):
            raise ValueError(f"{notebook}: {why}")


def _alone(notebook: str, name: str, value: Any) -> str:
    own = f"{notebook}.{name}"
    least, most = (of.get(own, of.get(name)) for of in (AT_LEAST, AT_MOST))
    choices = CHOICES.get(own, CHOICES.get(name))
    items = value if isinstance(value, list) else [value]
    numbers = [item for item in items if isinstance(item, int | float)]
    if not items and own not in MAY_BE_EMPTY:
        return "must have a value at least"
    if len(set(items)) < len(items):
        return "must be different values"
    if choices and set(items) - set(choices):
        return f"must be {', '.join(filter(None, choices))}{' or empty' * ('' in choices)}"
    if not all(map(math.isfinite, numbers)):
        return "must be finite"
    if least is not None and min(numbers, default=least) < least:
        return f"must be at least {least}"
    if most is not None and max(numbers, default=most) > most:
        return f"must be at most {most}"
    return ""


# -- several together --------------------------------------------------------------------------------------------------


def _rejected(notebook: str, values: Given) -> str:
    if "num_rejected" in values and values["num_rejected"] > values["k"]:
        return f"num_rejected={values['num_rejected']} of k={values['k']} drafts"
    return ""


def _heads(notebook: str, values: Given) -> str:
    pairs = itertools.product(values["kv_heads"], values["tp"]) if "kv_heads" in values else ()
    uneven = [f"32 heads and {kv} KV heads do not divide over {tp} ranks" for kv, tp in pairs if 32 % kv or kv % tp]
    return uneven[0] if uneven else ""


# -- what only the machine knows on which the notebook runs ------------------------------------------------------------


def _ranks(notebook: str, values: Given) -> str:
    import torch

    there, asked = torch.cuda.device_count(), values.get("tp", 1)
    return f"tp={asked}: GPUs here: {there}" if "draft" in values and 0 < there < asked else ""


def _prompts(notebook: str, values: Given) -> str:
    file = values.get("prompts") or paths.PROMPTS
    pair.load_prompts(file, None if notebook in REPEATS_PROMPTS else values.get("num_prompts"))
    return ""


def _cache(notebook: str, values: Given) -> str:
    return machine.refuse_cache(values["kv_cache_dtype"])


def _gpu(notebook: str, values: Given) -> str:
    wanted = values.get("device") == "cuda" or (notebook in MEASURING and values["source"] == "measure")
    return "there is no NVIDIA GPU here" if wanted and machine.on_cpu() else ""


REPEATS_PROMPTS = ("04_end_to_end",)
"""Notebooks that take the prompts again where there are fewer than they are to decode."""

Ask = Callable[[str, Given], str]
TOGETHER: tuple[tuple[tuple[str, ...], Ask], ...] = (
    (("num_rejected", "k"), _rejected),
    (("kv_heads", "tp"), _heads),
)
HERE: tuple[tuple[tuple[str, ...], Ask], ...] = (
    (("tp",), _ranks),
    (("prompts", "num_prompts"), _prompts),
    (("kv_cache_dtype",), _cache),
    (("device", "source"), _gpu),
)
"""What says, where one of these parameters is given, what is wrong with it; empty where nothing is."""
