# SPDX-License-Identifier: Apache-2.0
"""Patch of the worker: apply the runner's and the CPU attention's hooks in this process, and answer for it.

Why: runners and backends are imported only inside workers, after the plugin has been loaded.
How: `WorkerWrapperBase.init_device` runs once per worker, before either is instantiated.
When it can go: when vLLM offers a hook between loading and initialising a worker.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from nwor.settings import Settings
from nwor.vllm.patch import wrap, wrapped


@dataclass
class Status:
    """One rank's answer to: what is active here, and what has it done?

    mode is what was asked for; serving is what is active: ``cow``, ``stage``, ``stage (emulated)`` or ``off``;
    reason says why they differ.
    """

    rank: int
    mode: str
    serving: str
    reason: str = ""
    target_layers: int = 0
    hooks: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    audit: dict[str, int] = field(default_factory=dict)
    dirty_examples: list[str] = field(default_factory=list)


def install(settings: Settings) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def make(original: Callable) -> Callable:
        def init_device(self: Any) -> Any:
            from nwor.vllm import audit, cpu, cpu_sampling, eagle_bias, runner_v1, runner_v2

            eagle_bias.install(settings.eagle_bias)
            if settings.fix_cpu_sampling:
                cpu_sampling.install()
            on_cpu = self.vllm_config.device_config.device_type == "cpu"
            if self.vllm_config.use_v2_model_runner:
                if settings.audit:
                    audit.install_v2()
                runner_v2.install(settings)
            else:
                runner_v1.install(settings)
                if settings.audit:
                    audit.install_v1()
            if not on_cpu:
                _reset_after_warm_up()
            elif settings.mode == "stage":
                cpu.install()
            return original(self)

        return init_device

    wrap(WorkerWrapperBase, "init_device", ("self",), make)


def _reset_after_warm_up() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def make(original: Callable) -> Callable:
        def compile_or_warm_up_model(self: Any) -> Any:
            result = original(self)
            for name in ("nwor", "nwor_audit"):  # the V2 runner's warm-up runs real steps
                if (counting := getattr(self.model_runner, name, None)) is not None:
                    counting.reset_counters()
            return result

        return compile_or_warm_up_model

    wrap(Worker, "compile_or_warm_up_model", ("self",), make)


def status(worker: Any) -> dict[str, Any]:
    """This worker's `Status` as a dict; sent to every rank through vLLM's ``collective_rpc``."""
    settings = Settings.from_env()
    runner = worker.model_runner
    manager, audit = getattr(runner, "nwor", None), getattr(runner, "nwor_audit", None)
    serving = "off" if manager is None else manager.mode + (" (emulated)" if manager.emulate else "")
    return asdict(
        Status(
            rank=worker.rank,
            mode=settings.mode,
            serving=serving,
            reason=getattr(runner, "nwor_reason", ""),
            target_layers=0 if manager is None else manager.layout.num_layers,
            hooks=wrapped(),
            counters={} if manager is None else asdict(manager.read_counters()),
            audit={} if audit is None else asdict(audit.report),
            dirty_examples=[] if audit is None else audit.examples,
        )
    )


def stop_audit(worker: Any) -> None:
    """End this worker's audit, if it has one; sent like `status`."""
    if (audit := getattr(worker.model_runner, "nwor_audit", None)) is not None:
        audit.enabled = False


def start_profiler(worker: Any) -> None:
    """Record this worker's kernels from here on: those of its GPU, or on a CPU torch's operators;
    sent like `status`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    worker.nwor_profiler = profile(activities=[kind])
    worker.nwor_profiler.start()


def stop_profiler(worker: Any) -> dict[str, float]:
    """Microseconds by kernel name since `start_profiler`, all that was launched by then included."""
    import torch
    from torch.autograd import DeviceType

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    worker.nwor_profiler.stop()
    events = worker.nwor_profiler.key_averages()
    del worker.nwor_profiler
    if on_gpu:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
        return {event.key: float(event.self_device_time_total) for event in events}
    return {event.key: float(event.self_cpu_time_total) for event in events}
