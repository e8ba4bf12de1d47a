# SPDX-License-Identifier: Apache-2.0
"""Patches of scheduler and front end: hold each step's commits to vLLM's own count, and show the counters.

Why: worker counts have no way into vLLM's metrics of their own, and a commit that differs from what vLLM has accepted
leaves wrong rows in the cache; vLLM asks plugins for a logger of statistics in a server alone
(``vllm.stat_logger_plugins``), not in an `LLM`.
How: a commit's counts come on the model runner's output, which vLLM sends anyway, and are there once vLLM has the
step's tokens. The drafts that were committed are compared with those that the scheduler counts as accepted, in all, in
steps where it counts the windows that were held: the first difference is a warning, and under
``VLLM_NWOR_DEBUG_SYNC`` an error. Twice a second what the counters rose by goes on with the scheduler's statistics, to
one front end of perhaps several. There a logger of ours, of vLLM's own kind, comes before all others, takes it off
again, and shows it as ``vllm:nwor_*``; whenever vLLM logs its statistics, it says how many drafts were committed.
When it can go: when vLLM carries a plugin's worker metrics, and asks plugins for loggers in an `LLM` too.
"""

import collections
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.utils import create_metric_per_engine

from nwor.counters import Totals
from nwor.settings import Settings
from nwor.vllm.context import context_of, make_cancelling
from nwor.vllm.patch import wrap

_SECONDS_BETWEEN_STATISTICS = 0.5
_PREFIX = "nwor:"
COUNTERS = {
    "windows": "Verify windows opened, one a request and step.",
    "staged_tokens": "Draft tokens held back.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected, whose slots hold what they held before.",
    "restored_tokens": "Rejected draft tokens that had been written, and whose slots were restored.",
    "stage_operations": "Rows held back, counted once a layer.",
    "bytes_written": "Bytes of windows' rows written to pages, staging and log, on one rank.",
    "bytes_read": "Bytes of windows' rows read from pages, staging and log, on one rank.",
    "fallbacks": "Windows that vLLM's own write served.",
    "cancelled": "Steps that failed before their commit, and left no row of a draft.",
    "staged_steps": "Steps with drafts whose rows waited outside the pages until they were accepted.",
    "logged_steps": "Steps with drafts that were written, and restored where they were rejected.",
    "scheduler_checks": "Steps in which commits were held against the scheduler's accepted drafts.",
    "scheduler_mismatches": "Steps whose commits and accepted drafts differed.",
}
GAUGES = {  # each with how several front ends are one
    "bytes_avoided": ("sum", "Bytes vanilla would have read and written for windows' rows, less the mode's; may fall."),
    "unique_tokens": ("mostrecent", "Draft tokens held back in the last step that had drafts."),
    "acceptance_rate": ("mostrecent", "Committed over staged draft tokens since start-up, as this front end saw them."),
}


def install(settings: Settings) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", lambda original: _make_update(original, settings))
    if settings.emit_metrics:
        wrap(StatLoggerManager, "__init__", _make_init)


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
    """

    last: Totals | None = None
    held: int = 0
    carried: dict[str, int] = field(default_factory=dict)
    carried_at: float = -math.inf
    checks: int = 0
    mismatches: int = 0


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
                drafts = scheduler_output.scheduled_spec_decode_tokens
                _compare(commits, windows, kept, drafts, stats.spec_decoding_stats, settings.debug_sync)
        if settings.emit_metrics and stats is not None:
            now = time.monotonic()
            # Not in every step: it takes as long as a step's hooks. Behind the last request no other may come.
            if now - commits.carried_at >= _SECONDS_BETWEEN_STATISTICS or not self.has_unfinished_requests():
                _carry(commits, stats, now)
        return outputs

    return update_from_output


def _compare(commits: _Commits, windows: int, kept: int, drafts: dict, vllms: Any, stop: bool) -> None:
    """Hold a step's commits against vLLM's `SpecDecodingStats`.

    Not where vLLM counts other windows: a request has ended meanwhile, or drafts fell back to vLLM's own write. Where
    both happened these may be as many by chance; then fewer drafts were held than the scheduler's, by request.
    """
    if windows != vllms.num_drafts:
        return
    differ = kept != vllms.num_accepted_tokens
    if differ and commits.held != sum(map(len, drafts.values())):
        return
    commits.checks += 1
    if not differ:
        return
    commits.mismatches += 1
    if stop:
        raise AssertionError(f"{kept} drafts of a step were committed, but vLLM accepted {vllms.num_accepted_tokens}")
    if commits.mismatches == 1:
        init_logger("vllm.nwor").warning(
            "NWOR: %d drafts of a step were committed, but vLLM accepted %d: wrong rows are in the cache. Said "
            "once, and counted (nwor_scheduler_mismatches): run with VLLM_NWOR_MODE=off, and report this",
            kept, vllms.num_accepted_tokens,
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


# -- in the front end --------------------------------------------------------------------------------------------------


def _make_init(original: Callable) -> Callable:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vllms = [logger for logger in self.stat_loggers if isinstance(logger, PrometheusStatLogger)]
        self.stat_loggers.insert(0, CountsLogger(vllms[0]))  # else others would read what it takes off

    return __init__


class CountsLogger(AggregateStatLoggerBase):
    """Metrics of the kind of vLLM's Prometheus logger, with its labels; it has been made, and removed those of before.

    sums: of each engine, what this front end was told.
    """

    def __init__(self, vllms: PrometheusStatLogger) -> None:
        labels, values = {"labelnames": ["model_name", "engine"]}, vllms.per_engine_labelvalues
        made = {
            name: vllms._counter_cls(name=f"vllm:nwor_{name}", documentation=text, **labels)
            for name, text in COUNTERS.items()
        } | {
            name: vllms._gauge_cls(name=f"vllm:nwor_{name}", documentation=text, multiprocess_mode=mode, **labels)
            for name, (mode, text) in GAUGES.items()
        }
        self.metrics = {name: create_metric_per_engine(metric, values) for name, metric in made.items()}
        self.sums: dict[int, collections.Counter[str]] = {engine: collections.Counter() for engine in values}
        self._logged = 0, 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        risen = {} if scheduler_stats is None else take_from_statistics(scheduler_stats)
        if not risen:
            return
        (sums := self.sums[engine_idx]).update(risen)
        for name in COUNTERS.keys() & risen.keys():
            if risen[name] > 0:  # one that fell is a fault that the scheduler's check reports: no server must die of it
                self.metrics[name][engine_idx].inc(risen[name])
        self.metrics["bytes_avoided"][engine_idx].set(sums["bytes_avoided"])
        self.metrics["unique_tokens"][engine_idx].set(risen.get("unique_tokens", 0))
        if sums["staged_tokens"]:
            self.metrics["acceptance_rate"][engine_idx].set(sums["committed_tokens"] / sums["staged_tokens"])

    def log(self) -> None:
        """A line of what was committed since the last one, of all engines behind this front end, if it was any."""
        committed, drafts = (
            sum(of[name] for of in self.sums.values()) for name in ("committed_tokens", "staged_tokens")
        )
        before, self._logged = self._logged, (committed, drafts)
        if (drafts := drafts - before[1]) > 0:
            committed -= before[0]
            init_logger("vllm.nwor").info(
                "NWOR: committed %d of %d drafts (acceptance %.1f %%)", committed, drafts, 100 * committed / drafts
            )

    def log_engine_initialized(self) -> None:
        """There is nothing to say yet."""
