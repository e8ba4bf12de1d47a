# SPDX-License-Identifier: Apache-2.0
"""Patch of the front end's statistics: ``vllm:nwor_*`` beside vLLM's own, for `/metrics` and `LLM.get_metrics`.

Why: worker counts have no way into vLLM's metrics of their own.
How: what the output rank's counters rose by comes along with the scheduler's statistics (`carrier`), which go to one
front end of perhaps several. Where these arrive, before any of vLLM's loggers sees them, it is taken off again and
added to Prometheus counters and gauges. Whenever vLLM logs its statistics, a line says how many drafts were committed.
When it can go: when vLLM carries a plugin's worker metrics.
"""

import collections
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from nwor.counters import Counters
from nwor.vllm.carrier import take_from_statistics
from nwor.vllm.patch import wrap

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
UNSEEN = {"cancelled"}  # a step without a commit has failed, and with it a server's engine
assert {field.name for field in fields(Counters)} - UNSEEN <= COUNTERS.keys() | GAUGES.keys()


def install() -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    wrap(PrometheusStatLogger, "__init__", _make_init)
    wrap(StatLoggerManager, "record", _make_record)


def _make_init(original: Callable) -> Callable:
    def __init__(self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        original(self, vllm_config, engine_indexes)
        common = {"labelnames": ["model_name", "engine"]}
        metrics = {
            name: self._counter_cls(name=f"vllm:nwor_{name}", documentation=text, **common)
            for name, text in COUNTERS.items()
        } | {
            name: self._gauge_cls(name=f"vllm:nwor_{name}", documentation=text, multiprocess_mode=mode, **common)
            for name, (mode, text) in GAUGES.items()
        }
        self.nwor_metrics = {  # looked up once: in each step it would take as long as all the counting
            engine: {name: metric.labels(*values) for name, metric in metrics.items()}
            for engine, values in self.per_engine_labelvalues.items()
        }
        self.nwor_sums = {engine: collections.Counter() for engine in self.engine_indexes}
        self.log = _and_log(self, self.log)

    return __init__


def _make_record(original: Callable) -> Callable:
    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int | None = None
    ) -> None:
        if scheduler_stats is not None and (risen := take_from_statistics(scheduler_stats)):
            for logger in self.stat_loggers:
                if hasattr(logger, "nwor_metrics"):  # vLLM's Prometheus logger, or a kind of it
                    _observe(logger, risen, engine_idx or 0)
        original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return record


def _observe(logger: Any, risen: dict[str, int], engine: int) -> None:
    sums, metrics = logger.nwor_sums[engine], logger.nwor_metrics[engine]
    sums.update(risen)
    for name in COUNTERS.keys() & risen.keys():
        if risen[name] > 0:  # one that fell is a fault that the scheduler's check reports: no server must die of it
            metrics[name].inc(risen[name])
    gauges = {"bytes_avoided": sums["bytes_avoided"], "unique_tokens": risen.get("unique_tokens", 0)}
    if sums["staged_tokens"]:
        gauges["acceptance_rate"] = sums["committed_tokens"] / sums["staged_tokens"]
    for name, value in gauges.items():
        metrics[name].set(value)


def _and_log(logger: Any, original: Callable) -> Callable:
    """A logger's own `log`, which vLLM calls whenever it logs its statistics, and a line of ours if there were drafts.

    It says what was committed since the last such line, of all engines behind this front end.
    """
    from vllm.logger import init_logger

    then = [0, 0]

    def log() -> None:
        original()
        now = [sum(sums[name] for sums in logger.nwor_sums.values()) for name in ("committed_tokens", "staged_tokens")]
        committed, drafts = now[0] - then[0], now[1] - then[1]
        if drafts > 0:
            then[:] = now
            text = "NWOR: committed %d of %d drafts (acceptance %.1f %%)"
            init_logger("vllm.nwor").info(text, committed, drafts, 100 * committed / drafts)

    return log
