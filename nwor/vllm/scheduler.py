# SPDX-License-Identifier: Apache-2.0
"""Patch of the engine core: stop unless every rank serves the mode, and hold each step's commits to the scheduler's.

Why: vLLM logs and skips a plugin that fails in a worker, and a clean baseline would then carry the treatment's name.
How: after the caches are initialised every rank is asked for its `Status`. Where vLLM keeps statistics the drafts that
a worker committed travel on each step's output, and are compared with those that the scheduler counts as accepted, in
all, in steps where it counts the windows that were held; a difference is a warning, at most one a minute. Under
``VLLM_NWOR_DEBUG_SYNC`` they are compared request by request, and a difference is an error. And where attention stores
rows, the scheduler says of each step whether a request reads what another writes in it (`batch`).
When it can go: when vLLM makes a failing plugin an error.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nwor.counters import Totals
from nwor.settings import ATTENDING, CLEAN, Settings
from nwor.vllm.batch import make_schedule
from nwor.vllm.carrier import add_to_statistics, take_from_output
from nwor.vllm.patch import wrap
from nwor.vllm.worker import send_counts, status

_SECONDS_BETWEEN_WARNINGS = 60.0
_SECONDS_BETWEEN_STATISTICS = 0.5


class ModeNotActive(RuntimeError):
    """A rank does not serve the mode that was asked for."""


def install(settings: Settings) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "_initialize_kv_caches", make_initialize(settings))
    if settings.mode == "off":
        return
    if settings.mode in ATTENDING:
        wrap(Scheduler, "schedule", lambda original: make_schedule(original))  # as this module's wrapper
    if settings.debug_sync:
        wrap(Scheduler, "make_spec_decoding_stats", _make_spec_decoding_stats)
    wrap(
        Scheduler,
        "update_from_output",
        lambda original: _make_update(original, settings.debug_sync, settings.emit_metrics),
    )


def make_initialize(settings: Settings) -> Callable[[Callable], Callable]:
    """A wrapper of the engine core's start: every rank has to serve the mode, and learns whether counts are wanted."""

    def make(original: Callable) -> Callable:
        def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
            result = original(self, vllm_config)
            require_mode(settings.mode, self.model_executor.collective_rpc(status))
            wanted = settings.debug_sync or (settings.emit_metrics and self.log_stats)
            counts = wanted and settings.mode in CLEAN, settings.debug_sync
            self.model_executor.collective_rpc(send_counts, args=counts)
            return result

        return _initialize_kv_caches

    return make


def require_mode(mode: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise `ModeNotActive` unless all ranks were asked for `mode` and agree on what serves it.

    A model that no mode can serve is served by vLLM's own write, on all ranks alike: a fallback, not an error.
    """
    asked = {rank["mode"] for rank in ranks}
    serving = {(rank["serving"], *rank["ways"]) for rank in ranks}
    if asked != {mode}:
        raise ModeNotActive(f"VLLM_NWOR_MODE={mode} was asked for, but not on all ranks: {_by_rank(ranks, 'mode')}")
    if len(serving) != 1:
        raise ModeNotActive(
            f"the ranks disagree on what serves VLLM_NWOR_MODE={mode}: {_by_rank(ranks, 'serving', 'reason')}"
        )
    if unexplained := [rank["rank"] for rank in ranks if rank["serving"] != mode and not rank["reason"]]:
        raise ModeNotActive(
            f"VLLM_NWOR_MODE={mode} is not active on ranks {unexplained}; "
            "see whether the nwor plugin loads there (`nwor doctor`)"
        )


def _by_rank(ranks: Sequence[dict[str, Any]], *names: str) -> str:
    return "; ".join(
        f"rank {rank['rank']} {': '.join(str(rank[name]) for name in names if rank[name])}" for rank in ranks
    )


@dataclass
class _Commits:
    """`scheduler.nwor`: the commits that it has been told of.

    last: what the rank had counted by then. carried: the counters when statistics last took them, and carried_at: when,
    in seconds. checks, mismatches: steps that were compared, and that differed. warned: when. accepted: drafts of the
    step under way, by request. held: drafts of the last step.
    """

    last: Totals | None = None
    held: int = 0
    carried: dict[str, int] = field(default_factory=dict)
    carried_at: float = -math.inf
    checks: int = 0
    mismatches: int = 0
    warned: float = -math.inf
    accepted: dict[str, int] = field(default_factory=dict)


def _commits(scheduler: Any) -> _Commits:
    try:
        return scheduler.nwor
    except AttributeError:
        scheduler.nwor = _Commits()
        return scheduler.nwor


def _make_spec_decoding_stats(original: Callable) -> Callable:
    def make_spec_decoding_stats(self: Any, spec_decoding_stats: Any, **counts: Any) -> Any:
        _commits(self).accepted[counts["request_id"]] = counts["num_accepted_tokens"]
        return original(self, spec_decoding_stats, **counts)

    return make_spec_decoding_stats


def _make_update(original: Callable, by_request: bool, emit: bool) -> Callable:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        commits, carried = _commits(self), take_from_output(model_runner_output)
        accepted = commits.accepted
        if by_request:
            commits.accepted = {}
        stats = _statistics(outputs)
        if carried is not None:
            totals, committed = carried
            follows = totals.commits == 1 + (commits.last.commits if commits.last else 0)
            windows, commits.held, kept = totals.since(commits.last)
            commits.last = totals
            if by_request:
                _compare_requests(commits, committed, accepted)
            elif follows and stats is not None and stats.spec_decoding_stats is not None:
                _compare(commits, windows, kept, stats.spec_decoding_stats)
        if emit and stats is not None and commits.last is not None:
            now = time.monotonic()
            # Not in every step: it takes as long as a step's hooks. Behind the last request no other may come.
            if now - commits.carried_at >= _SECONDS_BETWEEN_STATISTICS or not self.has_unfinished_requests():
                _carry(commits, stats, now)
        return outputs

    return update_from_output


def _carry(commits: _Commits, stats: Any, now: float) -> None:
    """Let a step's statistics carry what counters rose by since others did."""
    assert commits.last is not None
    counters = asdict(commits.last.counters())
    counters |= {"scheduler_checks": commits.checks, "scheduler_mismatches": commits.mismatches}
    if counters != commits.carried:
        risen = {name: value - commits.carried.get(name, 0) for name, value in counters.items()}
        add_to_statistics(stats, risen | {"unique_tokens": commits.held})
    commits.carried, commits.carried_at = counters, now


def _statistics(outputs: dict[int, Any]) -> Any:
    """The statistics of a step, which go to one front end; None where there are none."""
    for output in outputs.values():
        if output.scheduler_stats is not None:
            return output.scheduler_stats
    return None


def _compare(commits: _Commits, windows: int, kept: int, vllms: Any) -> None:
    """Hold a step's commits against vLLM's `SpecDecodingStats`.

    Not where vLLM counts other windows: a request has ended meanwhile, or drafts fell back to vLLM's own write.
    """
    if windows != vllms.num_drafts:
        return
    commits.checks += 1
    if kept != vllms.num_accepted_tokens:
        commits.mismatches += 1
        _warn(commits, kept, vllms.num_accepted_tokens)


def _compare_requests(commits: _Commits, committed: dict[str, int], accepted: dict[str, int]) -> None:
    """The same, request by request; of one that fell back nothing was committed."""
    wrong = {
        request: (committed[request], number)
        for request, number in accepted.items()
        if committed.get(request, number) != number
    }
    commits.checks += 1
    if wrong:
        raise AssertionError(f"committed and accepted drafts differ, by request: {wrong}")


def _warn(commits: _Commits, committed: int, accepted: int) -> None:
    from vllm.logger import init_logger

    now = time.monotonic()
    if now - commits.warned < _SECONDS_BETWEEN_WARNINGS:
        return
    commits.warned = now
    init_logger("vllm.nwor").warning(
        "NWOR: %s drafts of a step were committed, but vLLM accepted %d; %d such steps since start-up, each of which "
        "leaves wrong rows in the cache: run with VLLM_NWOR_MODE=off, and report this",
        committed, accepted, commits.mismatches,
    )  # fmt: skip
