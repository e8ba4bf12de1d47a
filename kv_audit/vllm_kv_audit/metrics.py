# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's own: ``vllm:kv_audit_slots_checked_total`` and ``vllm:kv_audit_findings_total{kind}``.

What a worker counts travels on messages that vLLM sends anyway: on the output of a step to the scheduler, from there on
its statistics, in whose open dict of whole numbers each count has a prefix, to one front end of perhaps several. Those
of the rank whose output vLLM reads arrive; the other ranks' are in their log and in ``kv_audit_report``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .auditor import auditor_of
from .hooks import wrap
from .settings import KINDS

PREFIX = "kv_audit:"


def install() -> None:
    """Patch the scheduler's process and the front end's."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    wrap(Scheduler, "update_from_output", "self scheduler_output model_runner_output", _update_from_output)
    wrap(PrometheusStatLogger, "__init__", "self vllm_config engine_indexes", _init)
    wrap(StatLoggerManager, "record", "self scheduler_stats iteration_stats mm_cache_stats engine_idx", _record)


def around_sample_tokens(original: Callable, self: Any, grammar_output: Any) -> Any:
    """Around either runner's `sample_tokens`: its output carries what was counted since the last one."""
    output = original(self, grammar_output)
    auditor = auditor_of(self)
    if auditor is not None and output is not None and (counts := auditor.reporter.take()):
        # Where vLLM finishes the output later, it holds what it will return.
        inner = getattr(output, "model_runner_output", None) or getattr(output, "_model_runner_output", output)
        inner.kv_audit = counts
    return output


def _update_from_output(original: Callable, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    outputs = original(self, scheduler_output, model_runner_output)
    if risen := vars(model_runner_output).pop("kv_audit", None):
        vars(self).setdefault("kv_audit", Counter()).update(risen)
    if not (counts := vars(self).get("kv_audit")):
        return outputs
    stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
    if stats is not None:
        stats.num_kv_fetch_reqs_by_stage.update({PREFIX + name: value for name, value in counts.items()})
        counts.clear()
    return outputs


def _init(original: Callable, self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
    original(self, vllm_config, engine_indexes)
    labels = ["model_name", "engine"]
    checked = self._counter_cls(
        name="vllm:kv_audit_slots_checked", documentation="Slots of the KV cache that were checked.", labelnames=labels
    )
    findings = self._counter_cls(
        name="vllm:kv_audit_findings",
        documentation="Slots that were not what a request needs, by kind.",
        labelnames=[*labels, "kind"],
    )
    self.kv_audit_metrics = {
        engine: {"checked": checked.labels(*values), **{kind: findings.labels(*values, kind) for kind in KINDS}}
        for engine, values in self.per_engine_labelvalues.items()
    }


def _record(
    original: Callable,
    self: Any,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int | None = None,
) -> None:
    carried = {} if scheduler_stats is None else scheduler_stats.num_kv_fetch_reqs_by_stage
    risen = {name: carried.pop(name) for name in list(carried) if name.startswith(PREFIX)} if carried else {}
    for logger in self.stat_loggers if risen else ():
        if (metrics := getattr(logger, "kv_audit_metrics", None)) is not None:
            for name, value in risen.items():
                metrics[engine_idx or 0][name.removeprefix(PREFIX)].inc(value)
    original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
