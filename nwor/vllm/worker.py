# SPDX-License-Identifier: Apache-2.0
"""Patches of the worker, which apply the other hooks there, and of the engine core, which stops unless all serve.

Why: runners and backends are imported only inside workers, after the plugin has been loaded; the cache is sized there,
which has to leave room for what a mode holds beside it; and vLLM logs and skips a plugin that fails in a worker: a
clean baseline would then carry the treatment's name.
How: `WorkerWrapperBase.init_device` runs once per worker, before either is instantiated; of what
`determine_available_memory` finds, the mode's share is taken. When the caches are initialised the engine core asks
every rank for its `status`.
When it can go: when vLLM offers a hook between loading and initialising a worker, and makes a failing plugin an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from nwor.settings import ATTENDING, CLEAN, Settings
from nwor.vllm.context import context_of, manager_of
from nwor.vllm.initialize import planned_bytes
from nwor.vllm.patch import wrap, wrapped


class ModeNotActive(RuntimeError):
    """A rank does not serve the mode that was asked for."""


def install(settings: Settings) -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def make(original: Callable) -> Callable:
        def init_device(self: Any) -> Any:
            from nwor.vllm import attention_cpu, runner_v1, runner_v2
            from nwor.vllm.workarounds import cpu_sampling, eagle_bias

            eagle_bias.install(settings.eagle_bias)
            if settings.fix_cpu_sampling:
                cpu_sampling.install()
            on_cpu = self.vllm_config.device_config.device_type == "cpu"
            if settings.mode != "off":
                runner = runner_v2 if self.vllm_config.use_v2_model_runner else runner_v1
                runner.install(settings)
                _watch_memory(settings.mode, on_cpu)
                if on_cpu and settings.mode in ATTENDING:
                    attention_cpu.install()
            return original(self)

        return init_device

    wrap(WorkerWrapperBase, "init_device", make)
    wrap(EngineCore, "_initialize_kv_caches", lambda original: make_initialize(original, settings))


def _watch_memory(mode: str, on_cpu: bool) -> None:
    if on_cpu:
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker

        wrap(Worker, "compile_or_warm_up_model", _make_warm_up)
    wrap(Worker, "determine_available_memory", lambda original: _make_available(original, mode))


def _make_warm_up(original: Callable) -> Callable:
    def compile_or_warm_up_model(self: Any) -> Any:
        result = original(self)
        if (manager := manager_of(self.model_runner)) is not None:
            manager.counters.reset()  # the V2 runner's warm-up runs real steps
        return result

    return compile_or_warm_up_model


def _make_available(original: Callable, mode: str) -> Callable:
    def determine_available_memory(self: Any) -> int:
        asked_for = self.cache_config.kv_cache_memory_bytes is not None
        available = original(self)
        if asked_for:  # a user's number for the cache stands, whatever else there is
            return available
        held = planned_bytes(self.model_runner, mode)
        if held >= available > 0:
            raise RuntimeError(
                f"NWOR mode {mode} holds {held / 2**30:.1f} GiB beside the cache, for which vLLM has "
                f"{available / 2**30:.1f} GiB left: lower max_num_seqs, or raise gpu_memory_utilization"
            )
        if hasattr(self, "total_consumed"):  # vLLM's advice on the cache's size starts from these
            self.total_consumed += held
            self.available_kv_cache_memory_bytes -= held
        return available - held

    return determine_available_memory


def make_initialize(original: Callable, settings: Settings) -> Callable:
    """A wrapper of the engine core's start: every rank has to serve the mode, and learns whether counts are wanted."""

    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        self.log_stats |= settings.debug_sync  # before the scheduler is made, whose own counts commits are held to
        result = original(self, vllm_config)
        require_mode(settings.mode, self.model_executor.collective_rpc(status))
        wanted = settings.debug_sync or (settings.emit_metrics and self.log_stats)
        self.model_executor.collective_rpc(send_counts, args=(wanted and settings.mode in CLEAN,))
        return result

    return _initialize_kv_caches


def require_mode(mode: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise `ModeNotActive` unless all ranks were asked for `mode` and agree on what serves it.

    A model that no mode can serve is served by vLLM's own write, on all ranks alike: a fallback, not an error.
    """

    def by_rank(*names: str) -> str:
        return "; ".join(f"rank {r['rank']} {': '.join(str(r[name]) for name in names if r[name])}" for r in ranks)

    if {rank["mode"] for rank in ranks} != {mode}:
        raise ModeNotActive(f"VLLM_NWOR_MODE={mode} was asked for, but not on all ranks: {by_rank('mode')}")
    if len({(rank["serving"], *rank["ways"]) for rank in ranks}) != 1:
        raise ModeNotActive(f"the ranks disagree on what serves VLLM_NWOR_MODE={mode}: {by_rank('serving', 'reason')}")
    if unexplained := [rank["rank"] for rank in ranks if rank["serving"] != mode and not rank["reason"]]:
        raise ModeNotActive(
            f"VLLM_NWOR_MODE={mode} is not active on ranks {unexplained}; "
            "see whether the nwor plugin loads there (`nwor doctor`)"
        )


def send_counts(worker: Any, wanted: bool) -> None:
    """Let each commit's counts go to the scheduler, from the one rank whose output the engine asks for."""
    if (manager := manager_of(worker.model_runner)) is not None:
        manager.counters.publishes = wanted and worker.is_driver_worker


def status(worker: Any) -> dict[str, Any]:
    """What is active on this rank, and what it has done; sent to every rank through vLLM's ``collective_rpc``.

    mode is what was asked for; serving is what is active, ``off`` where vLLM's own write is; ways are those of its
    steps. reason says why they are not the mode's own. counters: as `nwor.counters.Counters`.
    """
    context = context_of(worker.model_runner)
    manager = context.manager
    return {
        "rank": worker.rank,
        "mode": Settings.from_env().mode,
        "serving": "off" if manager is None else manager.mode,
        "ways": [] if manager is None else [way.name for way in manager.ways],
        "reason": context.reason,
        "target_layers": 0 if manager is None else manager.counters.num_layers,
        "hooks": wrapped(),
        "counters": {} if manager is None else asdict(manager.counters.read()),
    }
