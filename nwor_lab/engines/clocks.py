# SPDX-License-Identifier: Apache-2.0
"""Clock and power of the GPUs while something runs: what makes two turns of the same kernels differ."""

import functools
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PERIOD = 0.1
"""Seconds between two samples. The clock is that of the moment; the power is the driver's mean of up to a second."""


@contextmanager
def watched(gpus: int) -> Iterator[list[dict[str, Any]]]:
    """Tidy rows `sm_clock` (MHz) and `power` (W) of each GPU, `rank` 0 to `gpus` - 1; there once the block has ended.

    Each is the median of samples that a thread of this process takes during the block, and of one at its end. There are
    none, and standard error says so once, where the driver does not tell.
    """
    rows: list[dict[str, Any]] = []
    if not (sensors := _sensors(gpus)):
        yield rows
        return
    samples: dict[tuple[int, str, str], list[float]] = {}
    over = threading.Event()

    def sample() -> None:
        for rank, (clock, power) in enumerate(sensors):
            samples.setdefault((rank, "sm_clock", "MHz"), []).append(clock())
            samples.setdefault((rank, "power", "W"), []).append(power() / 1e3)

    def keep_sampling() -> None:
        while not over.wait(PERIOD):
            sample()

    thread = threading.Thread(target=keep_sampling, name="clocks", daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()
    sample()
    for (rank, metric, unit), values in samples.items():
        rows.append({"rank": rank, "metric": metric, "unit": unit, "value": statistics.median(values)})


@functools.cache
def _sensors(gpus: int) -> list[tuple[functools.partial[int], functools.partial[int]]]:
    """Of each GPU what reads its SM clock in MHz, and its power in mW; by the NVML that vLLM brings."""
    if not gpus:
        return []
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    found = []
    try:
        pynvml.nvmlInit()
        for rank in range(gpus):
            index = current_platform.visible_device_id_to_physical_device_id(rank)
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            clock = functools.partial(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
            power = functools.partial(pynvml.nvmlDeviceGetPowerUsage, handle)
            clock(), power()  # a driver that does not tell says so here, before anything is timed
            found.append((clock, power))
    except pynvml.NVMLError as error:
        print(f"clock and power are left out: {error}", file=sys.stderr)
        return []
    return found
