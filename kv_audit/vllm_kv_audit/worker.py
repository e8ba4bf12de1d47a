# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's workers: those of the runner are put on, and the auditor follows start-up, sleep and shutdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .auditor import auditor_of
from .hooks import wrap
from .report import logger, verdict
from .settings import Settings
from .start import forget, make_auditor


def install() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    wrap(EngineCore, "_initialize_kv_caches", "self vllm_config", _initialize_kv_caches)
    wrap(WorkerWrapperBase, "init_device", "self", _init_device)
    wrap(WorkerWrapperBase, "shutdown", "self", _shutdown)
    WorkerBase.kv_audit_report = report


def report(worker: Any) -> dict[str, Any]:
    """What this rank has found (`report.Reporter.as_dict`), and the faults it planted; empty without an auditor.

    Any worker answers to ``llm.collective_rpc("kv_audit_report")``. It waits for the device.
    """
    auditor = auditor_of(worker.model_runner)
    if auditor is None:
        return {}
    planted = {} if auditor.perturb is None else dict(auditor.perturb.planted)
    return {**auditor.look().as_dict(), "planted": planted, "bytes_held": auditor.nbytes}


def _initialize_kv_caches(original: Callable, self: Any, vllm_config: Any) -> Any:
    result = original(self, vllm_config)
    if Settings.from_env() is not None:
        ranks = self.model_executor.collective_rpc(has_auditor)
        if missing := [rank for rank, there in enumerate(ranks) if not there]:
            raise RuntimeError(f"kv audit: ranks {missing} have no auditor; is vllm-kv-audit installed there, too?")
    return result


def has_auditor(worker: Any) -> bool:
    """Whether this rank is audited; sent to every rank."""
    return auditor_of(worker.model_runner) is not None


def _init_device(original: Callable, self: Any) -> Any:
    from . import runner_v1, runner_v2

    (runner_v2 if self.vllm_config.use_v2_model_runner else runner_v1).install()
    if self.vllm_config.device_config.device_type == "cpu":
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    wrap(Worker, "compile_or_warm_up_model", "self", _warm_up)
    wrap(Worker, "sleep", "self level", _sleep)
    return original(self)


def _warm_up(original: Callable, self: Any) -> Any:
    """Make the auditor behind it: the V2 runner warms up with steps whose requests have no rows, and what is allocated
    with the cache is gone while the engine sleeps.
    """
    result = original(self)
    if (settings := Settings.from_env()) is not None:
        with torch.inference_mode(False):
            self.model_runner.kv_auditor = make_auditor(self.model_runner, settings)
    return result


def _sleep(original: Callable, self: Any, level: int = 1) -> None:
    original(self, level)
    if level:
        forget(self.model_runner)


def _shutdown(original: Callable, self: Any) -> None:
    runner = getattr(getattr(self, "worker", None), "model_runner", None)
    if runner is not None and (auditor := auditor_of(runner)) is not None:
        try:
            line = verdict([auditor.look().as_dict()])
            logger().log(40 if auditor.reporter.found else 20, "%s; rank %d", line, auditor.reporter.rank)
        except RuntimeError as error:  # the GPU is gone, say: vLLM has to close what else it holds
            logger().warning("kv audit: the last steps could not be looked at: %s", error)
        runner.kv_auditor = None
    original(self)
