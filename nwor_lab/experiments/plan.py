# SPDX-License-Identifier: Apache-2.0
"""What a bench runs: which modes take turns, in which order, and with how many prompts of which length."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nwor.settings import Settings

if TYPE_CHECKING:
    from nwor_lab.engines.engine import Engine


@dataclass(frozen=True)
class Turn:
    """What takes a turn: the engine of a mode, as it is or with its mode paused, which makes it vanilla.

    engine: the mode of the engine that serves. pauses: whether this engine takes turns of both kinds.
    """

    engine: str
    pauses: bool = False
    paused: bool = False

    @property
    def name(self) -> str:
        return self.engine + " paused" * self.paused

    @property
    def columns(self) -> dict[str, str]:
        """What its rows are told by: the mode that serves, and an engine that is to be compared with itself."""
        return {"mode": "off" if self.paused else self.engine, "engine": self.engine if self.pauses else ""}

    @contextmanager
    def on(self, engine: "Engine") -> Iterator[None]:
        """The mode of `engine` paused, if this is such a turn."""
        if self.paused:
            engine.pause()
        yield
        if self.paused:
            engine.resume()


@dataclass(frozen=True)
class Plan:
    """What is run on the engines.

    modes: the first is the baseline that engines without turns of their own as vanilla are compared with.
    temperatures: 0 is greedy; parity of tokens is judged there alone.
    num_prompts: prompts of the first pass, and of the timed ones where `batches` is empty.
    batches: prompts of each timed generation, one after the other; the engine's `batch` is the most that run at once.
    random_prompts: lengths of prompts of random token ids, each timed with every batch that the caches hold; none for
        the prompts given.
    profile: also take GPU time by kind of kernel in one untimed generation a batch and mode (on a GPU).
    paused: let each treated engine take turns with its mode paused as well: it is compared with itself as vanilla, in
        graphs that, where they hold the mode, are captured anew for every repeat.
    audit: hold the first pass, which is not timed, to the whole-cache audit.
    max_minutes: into the run, by when repeats end: none but the first begins that as long as the longest so far would
        end later. 0 for no limit; a profile comes after them.
    logit_gap: the bound in nats below which a differing token is a near tie, and which no log-probability may shift by.
    """

    modes: tuple[str, ...] = ("off", "cow", "stage")
    temperatures: tuple[float, ...] = (0.0,)
    num_prompts: int = 8
    batches: tuple[int, ...] = ()
    random_prompts: tuple[int, ...] = ()
    max_tokens: int = 64
    repeats: int = 5
    max_minutes: float = 0.0
    logit_gap: float = 0.25
    seed: int = 0
    profile: bool = False
    paused: bool = False
    audit: bool = True

    @property
    def turns(self) -> list[Turn]:
        """Those of each repeat, in order."""
        turns = []
        for mode in self.modes:
            pauses = self.paused and mode != "off"
            turns += [Turn(mode, pauses, paused) for paused in ((True, False) if pauses else (False,))]
        return turns

    @property
    def sizes(self) -> tuple[int, ...]:
        """Prompts of each timed generation."""
        return self.batches or (self.num_prompts,)

    @property
    def most_prompts(self) -> int:
        return max(self.num_prompts, *self.sizes)

    def loads(self, longest: int, capacity: int) -> list[tuple[int, int]]:
        """Length of the prompts (at most `longest`) and number of them, of each timed generation.

        Those that the caches (`capacity` positions) would not hold at once are left out, and said.
        """
        lengths = [min(longest, length) for length in self.random_prompts] or [longest]
        every = list(itertools.product(lengths, self.sizes))
        if not self.random_prompts:
            return every
        fits = [(length, size) for length, size in every if size * (length + self.max_tokens) <= capacity]
        for length, size in every:
            if (length, size) not in fits:
                print(f"left out: {size} prompts of {length} tokens, the cache has {capacity} slots", file=sys.stderr)
        return fits

    def __post_init__(self) -> None:
        for mode in self.modes:
            Settings(mode=mode)
        if len(set(self.modes)) != len(self.modes):
            raise ValueError(f"modes repeat: {','.join(self.modes)}")
        if self.repeats < 0 or min(self.num_prompts, *self.sizes, *self.random_prompts) < 1:
            raise ValueError("repeats must be at least 0, num_prompts, batches and random_prompts at least 1")
        if self.max_minutes < 0:
            raise ValueError(f"max_minutes must be at least 0, no limit, got {self.max_minutes}")
