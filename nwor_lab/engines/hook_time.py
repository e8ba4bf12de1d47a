# SPDX-License-Identifier: Apache-2.0
"""Host time of a mode's hooks in a decode step, summed inside them: what a step of vLLM's takes more on the host.

Each hook is timed from its call to its end, less the function of vLLM's that it wraps, and less what a hook that does
nothing takes to be timed. Hooks of the attention are left out: where CUDA graphs serve a step they do not run. The
scheduler, the worker and the front end are in one process, so that all of them are seen.

    python -m nwor_lab.engines.hook_time [--requests 16] [MODE ...]
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import tyro

from nwor.settings import MODES, Settings
from nwor_lab import command_line, paths
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.machine import on_cpu

NOT_TIMED = ("forward", "do_kv_cache_update")  # of each layer
WARM_UP, STEPS, REPEATS = 20, 100, 3


class Clock:
    """Nanoseconds by name while it is on, each without what is timed inside it."""

    def __init__(self) -> None:
        self.own, self.calls, self.is_on = Counter[str](), Counter[str](), False
        self._inside = [0]

    def timed(self, name: str, function: Callable) -> Callable:
        """The function, its time counted under that name; an empty name takes it from the one around it alone."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self._inside.append(0)
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                passed = time.perf_counter_ns() - start
                inside = self._inside.pop()
                self._inside[-1] += passed
                if name:
                    self.own[name] += passed - inside
                    self.calls[name] += 1

        return run

    def overhead(self, calls: int = 3000) -> float:
        """Nanoseconds that a hook which does nothing is timed at."""
        inner = self.timed("", lambda: None)
        hook = self.timed("empty", lambda: inner())
        self.is_on = True
        for _ in range(calls):
            hook()
        self.is_on = False
        return self.own.pop("empty") / self.calls.pop("empty")

    def decode_times(self, served: Any, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, float]:
        """Microseconds of a decode step by name, where all prompts decode together, and end the engine.

        served: a `child.Served` of this process, whose hooks are timed by this clock.
        """
        steps = 0
        for repeat in range(REPEATS + 1):  # one before, for what is compiled
            served.add_requests(prompts, max_tokens)
            done = 0
            while served.engine.has_unfinished_requests():
                done += 1
                decode_alone = served.engine.get_num_unfinished_requests() == len(prompts)
                self.is_on = repeat > 0 and WARM_UP <= done < WARM_UP + STEPS and decode_alone
                steps += self.is_on
                served.engine.step()
        self.is_on = False
        own, calls = dict(self.own), dict(self.calls)
        each = self.overhead()
        served.engine.engine_core.shutdown()
        return {name: max(0.0, own[name] - each * calls[name]) / steps / 1e3 for name in own}


def hook_times(spec: EngineSpec, mode: str, requests: int, max_tokens: int) -> dict[str, float]:
    """Microseconds of a decode step by hook, of an engine made in this very process that answers with `max_tokens`.

    Raises:
        RuntimeError: the mode does not serve.
    """
    settings, clock = Settings(mode=mode), Clock()
    os.environ.update({**spec.environ(), **settings.environ()})
    _time_hooks(clock)
    from nwor_lab.engines.child import Served

    served = Served(spec)
    [rank] = served.report()
    if rank["serving"] != mode:
        raise RuntimeError(f"mode {mode} is not active: {rank['serving']} is")
    prompts = [[(7 * i + 13 * j) % 300 + 3 for j in range(24)] for i in range(requests)]
    return clock.decode_times(served, prompts, max_tokens)


def _time_hooks(clock: Clock) -> None:
    """Let every hook that this process puts on be timed."""
    from nwor import counters
    from nwor.vllm import batch, patch, runner_v1, runner_v2, stats, worker

    wrap = patch.wrap

    def timing(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        def made(original: Callable) -> Callable:
            return make(original) if name in NOT_TIMED else clock.timed(name, make(clock.timed("", original)))

        made.__module__ = make.__module__
        wrap(owner, name, made)

    for module in (patch, batch, runner_v1, runner_v2, stats, worker):
        module.wrap = timing  # type: ignore[attr-defined]
    for owner, name in ((counters.DeviceCounters, "read_published"), (stats.CountsLogger, "record")):
        setattr(owner, name, clock.timed(name, getattr(owner, name)))


@dataclass(frozen=True)
class HookTime:
    modes: tyro.conf.Positional[tuple[str, ...]] = ("stage", "cow")
    """modes to time"""
    requests: int = 16
    """that decode at once"""


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for wrong input."""
    try:
        asked = command_line.parse(HookTime, argv, "hook_time", __doc__ or "")
        command_line.check_names("mode", asked.modes, MODES)
    except ValueError as error:
        return command_line.fail("hook_time", error)
    more: dict[str, Any] = {"dtype": "float32", "num_blocks": 16 * asked.requests} if on_cpu() else {
        "enforce_eager": False, "num_blocks": 64 * asked.requests, "kv_cache_memory": 2048
    }  # fmt: skip
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), batch=asked.requests, max_num_batched_tokens=2048,
        max_model_len=1024, **more,
    )  # fmt: skip
    for mode in asked.modes:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            tokens = (spec.k + 1) * (WARM_UP + STEPS)
            found = pool.submit(hook_times, spec, mode, asked.requests, tokens).result()
        print(f"{mode}: {sum(found.values()):.0f} us of host time a step of {asked.requests} requests")
        for name, microseconds in sorted(found.items(), key=lambda item: -item[1]):
            print(f"  {microseconds:6.1f}  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
