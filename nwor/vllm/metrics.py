# SPDX-License-Identifier: Apache-2.0
"""Patch of the front end's statistics: ``vllm:nwor_*`` beside vLLM's own, for `/metrics` and `LLM.get_metrics`.

Why: vLLM asks plugins for a logger of statistics in a server alone (``vllm.stat_logger_plugins``), not in an `LLM`.
How: a logger of ours, of vLLM's own kind, comes before all others, and takes what counters rose by off the scheduler's
statistics (`stats`). Whenever vLLM logs its statistics, it says in a line how many drafts were committed.
When it can go: when vLLM asks plugins for loggers in an `LLM` too.
"""

import collections
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.utils import create_metric_per_engine

from nwor.counters import Counters
from nwor.vllm.patch import wrap
from nwor.vllm.stats import UNSEEN, take_from_statistics

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
assert {field.name for field in fields(Counters)} - UNSEEN <= COUNTERS.keys() | GAUGES.keys()


def install() -> None:
    wrap(StatLoggerManager, "__init__", _make_init)


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
