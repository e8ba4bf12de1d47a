# SPDX-License-Identifier: Apache-2.0
"""Patch of the front end's statistics: ``vllm:nwor_*`` beside vLLM's own, for `/metrics` and `LLM.get_metrics`.

Why: worker counts have no way into vLLM's metrics of their own.
How: the output rank's cumulative counters come along with the scheduler's statistics (`carrier`). Where these arrive,
before any of vLLM's loggers sees them, the counters are taken off again and become the increments of Prometheus
counters and a gauge.
When it can go: when vLLM carries a plugin's worker metrics.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from nwor.counters import Counters
from nwor.vllm.carrier import take_from_statistics
from nwor.vllm.patch import wrap

HELP = {
    "windows": "Verify windows opened, one a request and step.",
    "staged_tokens": "Draft tokens held back.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected, whose slots hold what they held before.",
    "stage_operations": "Rows held back, counted once a layer.",
    "bytes_written": "Bytes written to cache pages for held rows, on one rank.",
    "bytes_avoided": "Bytes vLLM would have written for rows that were rejected, on one rank.",
    "fallbacks": "Windows that vLLM's own write served.",
    "cancelled": "Windows closed without a commit.",
    "scheduler_checks": "Steps in which commits were held against the scheduler's accepted drafts.",
    "scheduler_mismatches": "Requests whose commits and accepted drafts differed.",
}
assert {field.name for field in fields(Counters)} <= HELP.keys()


def install() -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    wrap(PrometheusStatLogger, "__init__", _make_init)
    wrap(StatLoggerManager, "record", _make_record)


def _make_init(original: Callable) -> Callable:
    def __init__(self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        original(self, vllm_config, engine_indexes)
        labels = ["model_name", "engine"]
        self.nwor_counters = {
            name: self._counter_cls(name=f"vllm:nwor_{name}", documentation=text, labelnames=labels)
            for name, text in HELP.items()
        }
        self.nwor_acceptance_rate = self._gauge_cls(
            name="vllm:nwor_acceptance_rate",
            documentation="Committed over staged draft tokens since start-up.",
            labelnames=labels,
        )
        self.nwor_last = {engine: dict.fromkeys(HELP, 0) for engine in self.engine_indexes}
        for values in self.per_engine_labelvalues.values():
            for counter in self.nwor_counters.values():
                counter.labels(*values)

    return __init__


def _make_record(original: Callable) -> Callable:
    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int | None = None
    ) -> None:
        if scheduler_stats is not None:
            counters = take_from_statistics(scheduler_stats)
            for logger in self.stat_loggers:
                if hasattr(logger, "nwor_counters"):  # vLLM's Prometheus logger, or a kind of it
                    _observe(logger, counters, engine_idx or 0)
        original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return record


def _observe(logger: Any, counters: dict[str, int], engine: int) -> None:
    if not counters:
        return
    labels, last = logger.per_engine_labelvalues[engine], logger.nwor_last[engine]
    for name, value in counters.items():
        if (
            value > last[name]
        ):  # one that fell is a fault that the scheduler's check reports: a server must not die of it
            logger.nwor_counters[name].labels(*labels).inc(value - last[name])
            last[name] = value
    if last["staged_tokens"]:
        rate = last["committed_tokens"] / last["staged_tokens"]
        logger.nwor_acceptance_rate.labels(*labels).set(rate)
