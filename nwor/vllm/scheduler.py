# SPDX-License-Identifier: Apache-2.0
"""Patch of the engine core: stop unless every rank serves the mode, and hold each step's commits to the scheduler's.

Why: vLLM logs and skips a plugin that fails in a worker, and a clean baseline would then carry the treatment's name.
How: after the caches are initialised every rank is asked for its `Status`. Where vLLM keeps statistics, or under
``VLLM_NWOR_DEBUG_SYNC``, the drafts that a worker committed travel on each step's output, and are compared with those
that the scheduler counts as accepted, of the requests whose drafts were held back. A difference is a warning, at most
one a minute, or under ``VLLM_NWOR_DEBUG_SYNC`` an error.
When it can go: when vLLM makes a failing plugin an error.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from nwor.settings import CLEAN, Settings
from nwor.vllm.carrier import add_to_statistics, take_from_output
from nwor.vllm.patch import wrap
from nwor.vllm.worker import send_counts, status

_SECONDS_BETWEEN_WARNINGS = 60.0


class ModeNotActive(RuntimeError):
    """A rank does not serve the mode that was asked for."""


def install(settings: Settings) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "_initialize_kv_caches", make_initialize(settings))
    if settings.mode == "off":
        return
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
            self.model_executor.collective_rpc(send_counts, args=(wanted and settings.mode in CLEAN,))
            return result

        return _initialize_kv_caches

    return make


def require_mode(mode: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise `ModeNotActive` unless all ranks were asked for `mode` and agree on what serves it.

    A model that no mode can serve is served by vLLM's own write, on all ranks alike: a fallback, not an error.
    """
    asked = {rank["mode"] for rank in ranks}
    serving = {rank["serving"] for rank in ranks}
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


def _make_spec_decoding_stats(original: Callable) -> Callable:
    def make_spec_decoding_stats(self: Any, spec_decoding_stats: Any, **counts: Any) -> Any:
        vars(self).setdefault("nwor_accepted", {})[counts["request_id"]] = counts["num_accepted_tokens"]
        return original(self, spec_decoding_stats, **counts)

    return make_spec_decoding_stats


def _make_update(original: Callable, strict: bool, emit: bool) -> Callable:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.nwor_accepted = {}
        outputs = original(self, scheduler_output, model_runner_output)
        if (carried := take_from_output(model_runner_output)) is not None:
            counters, committed = carried
            steps, mismatches = getattr(self, "nwor_checked", (0, 0))
            wrong = {
                request: (committed[request], accepted)
                for request, accepted in self.nwor_accepted.items()
                if committed.get(request, accepted) != accepted
            }
            self.nwor_checked = steps + 1, mismatches + len(wrong)
            counters["scheduler_checks"], counters["scheduler_mismatches"] = self.nwor_checked
            if wrong and strict:
                raise AssertionError(f"committed and accepted drafts differ, by request: {wrong}")
            if wrong:
                _warn(self, wrong)
            last = getattr(self, "nwor_carried", {})
            risen = {name: value - last.get(name, 0) for name, value in counters.items()}
            if emit and add_to_statistics(outputs, risen):
                self.nwor_carried = counters
        return outputs

    return update_from_output


def _warn(scheduler: Any, wrong: dict[str, tuple[int, int]]) -> None:
    from vllm.logger import init_logger

    now = time.monotonic()
    if now - getattr(scheduler, "nwor_warned", -_SECONDS_BETWEEN_WARNINGS) < _SECONDS_BETWEEN_WARNINGS:
        return
    scheduler.nwor_warned = now
    request, (committed, accepted) = next(iter(wrong.items()))
    init_logger("vllm.nwor").warning(
        "NWOR: %s drafts of request %s were committed, but vLLM accepted %d; %d such differences since start-up, each "
        "of which leaves wrong rows in the cache: run with VLLM_NWOR_MODE=off, and report this",
        committed, request, accepted, scheduler.nwor_checked[1],
    )  # fmt: skip
