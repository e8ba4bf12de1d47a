# SPDX-License-Identifier: Apache-2.0
"""What an experiment runs: which modes, in which order, and with how many prompts of which length."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from nwor.settings import MODES, Settings
from nwor_lab import command_line, paths
from nwor_lab.engines.shapes import SHAPES
from nwor_lab.machine import on_cpu

UNPATCHED = "vllm"
"""vLLM without NWOR's plugin, as a mode of a plan."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded."""

    num_prompts: int = 8
    """prompts that are decoded; 0 for all there are"""
    random_prompts: tuple[int, ...] = ()
    """lengths of prompts of random token ids, in place of a file's"""
    max_tokens: int = 64
    """tokens of every answer"""
    prompts: str = str(paths.PROMPTS)
    """JSONL file with a `prompt` a line"""
    shape: Annotated[str, arg(help=f"random weights of a shape: {', '.join(SHAPES)}")] = ""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What is timed, and what of it counts."""

    batches: tuple[int, ...] = ()
    """prompts of each timed generation, one generation after the other, as far as caches hold them; none: all"""
    repeats: int = 5
    """timed passes; the modes are interleaved, and each repeat reverses their order"""
    profile: bool = False
    """also take GPU time by kind of kernel, in untimed generations"""
    audit: bool = True
    """compare the whole cache byte by byte while the first load is compared, which is not timed"""


@dataclass(frozen=True, kw_only=True)
class Plan(Timing, Workload):
    """A grid of modes, draft lengths and loads, and what is done at each of its points.

    modes: modes to compare, of off, cow, direct, stage, and vllm without the plugin; the first is the baseline.
    ks: draft lengths; engines of one length are up at once, lengths follow each other.
    tolerance: nats by which a mode may shift log-probabilities.
    temperatures: of sampling, where acceptance is counted; what is compared and timed is greedy.
    """

    modes: tuple[str, ...] = MODES
    ks: tuple[int, ...] = (4,)
    tolerance: float = 0.0
    temperatures: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        command_line.check_names("--modes", self.modes, (*MODES, UNPATCHED))
        for name in ("modes", "ks", "temperatures", "batches", "random_prompts"):
            values, needed = getattr(self, name), name in ("modes", "ks", "temperatures")
            if len(values) < needed or len(set(values)) != len(values):
                raise ValueError(f"{name} must be different values{', at least one' * needed}; got {values}")
        for name in ("ks", "batches", "random_prompts"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{'k' if name == 'ks' else name} must be at least 1, got {min(getattr(self, name))}")
        for name, least in (("max_tokens", 1), ("num_prompts", 0), ("repeats", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Prompts of each timed generation."""
        return self.batches or (self.num_prompts,)

    def loads(self, longest: int, capacity: int) -> list[tuple[int, int]]:
        """(prompt length, number of prompts) of each timed generation; the length is `longest` for those of a file.

        Loads that the caches (`capacity` positions) would not hold at once are left out, and standard error says so.
        """
        every = list(itertools.product(self.random_prompts or (longest,), self.sizes))
        if not self.random_prompts:
            return every
        large = [(length, size) for length, size in every if size * (length + self.max_tokens) > capacity]
        for length, size in large:
            print(f"left out: {size} prompts of {length} tokens, the cache has {capacity} slots", file=sys.stderr)
        return [load for load in every if load not in large]


def settings_of(mode: str, audit: bool, repaired: bool = True) -> Settings:
    """A mode's settings. repaired: whether vLLM's loading and sampling are, in all engines of a run or in none: where
    the baseline is vLLM never patched, all modes have the drafter that it loads."""
    if mode == UNPATCHED:
        return Settings(audit=audit)
    sampling = repaired and on_cpu()
    return Settings(mode=mode, audit=audit, debug_sync=mode != "off", eagle_bias=repaired, fix_cpu_sampling=sampling)
