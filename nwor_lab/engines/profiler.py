# SPDX-License-Identifier: Apache-2.0
"""Kernel times of a worker, by torch's profiler; both functions go to every rank by vLLM's ``collective_rpc``."""

from typing import Any


def start_profiler(worker: Any) -> None:
    """Record this worker's kernels from here on: those of its GPU, or on a CPU torch's operators."""
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
