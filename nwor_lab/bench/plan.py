# SPDX-License-Identifier: Apache-2.0
"""What an experiment runs: which modes, in which order, and with how many prompts of which length."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from nwor.settings import MODES, Settings
from nwor_lab import progress
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


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What is timed, and what of it counts."""

    batches: tuple[int, ...] = ()
    """prompts of each timed generation, one generation after the other, as far as caches hold them; none: all"""
    temperatures: Annotated[tuple[float, ...], arg(name="temperature")] = (0.0,)
    """sampling temperatures; 0 is greedy, and parity is checked there alone"""
    repeats: int = 5
    """timed passes; the modes are interleaved, and each repeat reverses their order"""
    max_minutes: float = 0.0
    """no repeat but the first begins that would end later than this, by the longest so far; 0 for no limit"""
    tolerance: float = 0.0
    """nats by which a mode may shift log-probabilities; 0 for what rounding in the dtypes explains"""
    profile: bool = False
    """also take GPU time by kind of kernel, in untimed generations"""
    audit: bool = True
    """compare the whole cache byte by byte in the first pass, which is not timed"""


@dataclass(frozen=True, kw_only=True)
class Plan(Timing, Workload):
    """A grid of modes, draft lengths, temperatures and loads, and what is done at each of its points.

    modes: modes to compare, of off, cow, direct, stage, and vllm without the plugin; the first is the baseline.
    ks: draft lengths; engines of one length are up at once, lengths follow each other.
    count: count accepted drafts and nothing else: no parity, audit or times; engines of all draft lengths work side by
        side, and greedy passes are not repeated.
    """

    modes: tuple[str, ...] = MODES
    ks: tuple[int, ...] = (4,)
    count: bool = False

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in (*MODES, UNPATCHED):
                raise ValueError(f"{mode!r} is not a mode; choose of {', '.join((*MODES, UNPATCHED))}")
        for name in ("modes", "ks", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be different values, at least one; got {values}")
        for name in ("ks", "batches", "random_prompts"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{'k' if name == 'ks' else name} must be at least 1, got {min(getattr(self, name))}")
        for name, least in (("max_tokens", 1), ("num_prompts", 0), ("repeats", 0), ("max_minutes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.count and (not self.repeats or self.modes != ("off",)):
            raise ValueError("acceptance is counted in mode off, with at least one repeat")

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
        fits = [(length, size) for length, size in every if size * (length + self.max_tokens) <= capacity]
        for length, size in every:
            if (length, size) not in fits:
                progress.note(
                    f"left out: {size} prompts of {length} tokens, the cache has {capacity} slots", sys.stderr
                )
        return fits

    def passes(self, seed: int) -> list[tuple[float, int, int]]:
        """(temperature, repeat, seed of the first request) of each counted pass."""
        return [
            (temperature, repeat, seed + 1000 * repeat)
            for temperature, repeat in itertools.product(self.temperatures, range(self.repeats))
            if temperature or not repeat
        ]


def settings_of(mode: str, audit: bool) -> Settings:
    """A mode's settings; what repairs vLLM's loading and sampling is the same in all modes, the baseline too."""
    if mode == UNPATCHED:
        return Settings(audit=audit)
    return Settings(mode=mode, audit=audit, debug_sync=mode != "off", eagle_bias=True, fix_cpu_sampling=on_cpu())
