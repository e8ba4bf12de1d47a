# SPDX-License-Identifier: Apache-2.0
"""Clock and power of the GPUs while something runs: what makes two passes of the same kernels differ."""

from __future__ import annotations

import functools
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PERIOD = 0.1
"""Seconds between two samples. The clock is that of the moment; the power is the driver's mean of up to a second."""


@contextmanager
def watched(gpus: int) -> Iterator[list[dict[str, Any]]]:
    """Tidy rows `sm_clock` (MHz) and `power` (W) of each GPU, `rank` 0 to `gpus` - 1; there once the block has ended.

    Each is the median of samples that a thread of this process takes during the block, and of one at its end. There are
    none, and standard error says so once, where the driver does not answer.
    """
    rows: list[dict[str, Any]] = []
    if not (sensors := _sensors(gpus)):
        yield rows
        return
    samples: list[list[float]] = []
    over = threading.Event()

    def sample() -> None:
        last = False
        while not last:
            last = over.wait(PERIOD)
            samples.append([read() for _, read in sensors])

    thread = threading.Thread(target=sample, name="clocks", daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()
    for (columns, _), values in zip(sensors, zip(*samples, strict=True), strict=True):
        rows.append({**columns, "value": statistics.median(values)})


@functools.cache
def _sensors(gpus: int) -> list[tuple[dict[str, Any], Callable[[], float]]]:
    """Columns of each sensor, and what reads it, by the NVML that vLLM brings."""
    if not gpus:
        return []
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    def sensors_of(rank: int) -> list[tuple[dict[str, Any], Callable[[], float]]]:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(current_platform.visible_device_id_to_physical_device_id(rank))
        return [
            (
                {"rank": rank, "metric": "sm_clock", "unit": "MHz"},
                lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            ),
            ({"rank": rank, "metric": "power", "unit": "W"}, lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
        ]

    try:
        pynvml.nvmlInit()
        found = [sensor for rank in range(gpus) for sensor in sensors_of(rank)]
        for _, read in found:  # a driver that does not answer fails here, before anything is timed
            read()
        return found
    except pynvml.NVMLError as error:
        print(f"clock and power are left out: {error}", file=sys.stderr)
        return []
