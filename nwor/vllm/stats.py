# SPDX-License-Identifier: Apache-2.0
"""Patch of the engine core's scheduler: hold each step's commits to its own count, and let the counts go on.

Why: worker counts have no way into vLLM's metrics of their own, and a commit that differs from what vLLM has accepted
leaves wrong rows in the cache.
How: a commit's counts come on the model runner's output, which vLLM sends anyway, and are there once vLLM has the
step's tokens. The drafts that were committed are compared with those that the scheduler counts as accepted, in all, in
steps where it counts the windows that were held: a difference is a warning, at most one a minute, and under
``VLLM_NWOR_DEBUG_SYNC`` an error. Twice a second what the counters rose by goes on with the scheduler's statistics, to
one front end of perhaps several (`metrics`). What is added to a message of vLLM's is taken off before vLLM meets it.
When it can go: when vLLM carries a plugin's worker metrics.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from nwor.counters import Totals
from nwor.settings import Settings
from nwor.vllm.context import context_of, make_cancelling
from nwor.vllm.patch import wrap

_SECONDS_BETWEEN_WARNINGS = 60.0
_SECONDS_BETWEEN_STATISTICS = 0.5
_PREFIX = "nwor:"
UNSEEN = {"cancelled"}
"""Counters that no front end shows: a step without a commit has failed, and with it a server's engine."""


def install(settings: Settings) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", lambda original: _make_update(original, settings))


# -- in a worker -------------------------------------------------------------------------------------------------------


def make_sample_tokens(original: Callable) -> Callable:
    """A wrapper of either runner's `sample_tokens`, whose output carries the counts of the commit within."""
    original = make_cancelling(original)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output, context = original(self, grammar_output), context_of(self)
        add_to_output(output, context.counts)
        context.counts = None
        return output

    return sample_tokens


def add_to_output(output: Any, counts: Callable[[], Totals | None] | None) -> None:
    """Let a model runner's output carry a commit's counts, as `DeviceCounters.published` has them."""
    if counts is None or output is None:
        return

    def add(result: Any) -> Any:
        if (totals := counts()) is not None:
            result.nwor_commit = totals
        return result

    original = getattr(output, "get_output", None)
    if original is None:
        add(output)
        return

    def get_output() -> Any:
        del output.get_output  # an output that refers to itself would keep its buffers until cycles are collected
        return add(original())

    output.get_output = get_output


# -- in the engine core ------------------------------------------------------------------------------------------------


@dataclass
class _Commits:
    """`scheduler.nwor`: the commits that it has been told of.

    last: what the rank had counted by then. held: drafts of the last step. carried: the counters when statistics last
    took them, and carried_at: when, in seconds. checks, mismatches: steps that were compared, and that differed.
    warned: when.
    """

    last: Totals | None = None
    held: int = 0
    carried: dict[str, int] = field(default_factory=dict)
    carried_at: float = -math.inf
    checks: int = 0
    mismatches: int = 0
    warned: float = -math.inf


def _make_update(original: Callable, settings: Settings) -> Callable:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        totals: Totals | None = vars(model_runner_output).pop("nwor_commit", None)
        commits: _Commits | None = vars(self).get("nwor")
        if commits is None:
            if totals is None:
                return outputs
            commits = self.nwor = _Commits()
        stats = None
        for output in outputs.values():  # one for each front end, of which one is sent statistics
            stats = stats or output.scheduler_stats
        if totals is not None:
            last, commits.last = commits.last, totals
            windows, commits.held, kept = totals.since(last)
            follows = totals.commits == 1 + (last.commits if last else 0)
            if follows and stats is not None and stats.spec_decoding_stats is not None:
                _compare(commits, windows, kept, stats.spec_decoding_stats, settings.debug_sync)
        if settings.emit_metrics and stats is not None:
            now = time.monotonic()
            # Not in every step: it takes as long as a step's hooks. Behind the last request no other may come.
            if now - commits.carried_at >= _SECONDS_BETWEEN_STATISTICS or not self.has_unfinished_requests():
                _carry(commits, stats, now)
        return outputs

    return update_from_output


def _compare(commits: _Commits, windows: int, kept: int, vllms: Any, stop: bool) -> None:
    """Hold a step's commits against vLLM's `SpecDecodingStats`.

    Not where vLLM counts other windows: a request has ended meanwhile, or drafts fell back to vLLM's own write.
    """
    if windows != vllms.num_drafts:
        return
    commits.checks += 1
    if kept == vllms.num_accepted_tokens:
        return
    commits.mismatches += 1
    if stop:
        raise AssertionError(f"{kept} drafts of a step were committed, but vLLM accepted {vllms.num_accepted_tokens}")
    now = time.monotonic()
    if now - commits.warned >= _SECONDS_BETWEEN_WARNINGS:
        commits.warned = now
        from vllm.logger import init_logger

        init_logger("vllm.nwor").warning(
            "NWOR: %s drafts of a step were committed, but vLLM accepted %d; %d such steps since start-up, each of "
            "which leaves wrong rows in the cache: run with VLLM_NWOR_MODE=off, and report this",
            kept, vllms.num_accepted_tokens, commits.mismatches,
        )  # fmt: skip


def _carry(commits: _Commits, stats: Any, now: float) -> None:
    """Let a step's statistics carry what counters rose by since others did."""
    assert commits.last is not None
    counters = asdict(commits.last.counters())
    counters |= {"scheduler_checks": commits.checks, "scheduler_mismatches": commits.mismatches}
    if counters != commits.carried:
        risen = {name: value - commits.carried.get(name, 0) for name, value in counters.items()}
        add_to_statistics(stats, risen | {"unique_tokens": commits.held})
    commits.carried, commits.carried_at = counters, now


def add_to_statistics(scheduler_stats: Any, counters: dict[str, int]) -> None:
    """Put counters on a step's statistics, a fixed schema with one open dict of whole numbers: there, with a prefix."""
    scheduler_stats.num_kv_fetch_reqs_by_stage.update({_PREFIX + name: value for name, value in counters.items()})


def take_from_statistics(scheduler_stats: Any) -> dict[str, int]:
    """Take the counters off scheduler statistics again."""
    carried = scheduler_stats.num_kv_fetch_reqs_by_stage
    if not carried:
        return {}
    names = [name for name in carried if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): carried.pop(name) for name in names}
