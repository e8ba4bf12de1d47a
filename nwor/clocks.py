# SPDX-License-Identifier: Apache-2.0
"""Clock and power of the GPUs while something runs: what makes two turns of the same kernels differ."""

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PERIOD = 0.1
"""Seconds between two samples. The clock is that of the moment; the power is the driver's mean of up to a second."""


@contextmanager
def watched(gpus: int) -> Iterator[list[dict[str, Any]]]:
    """Tidy rows `sm_clock` (MHz) and `power` (W) of each GPU, `rank` 0 to `gpus` - 1; there once the block has ended.

    Each is the median of samples taken in a thread of this process, at least one.

    Raises:
        ModuleNotFoundError: torch finds no ``nvidia-ml-py``; pip installs it.
    """
    rows: list[dict[str, Any]] = []
    if not gpus:
        yield rows
        return
    import torch

    samples: dict[tuple[int, str, str], list[float]] = {}
    over = threading.Event()

    def sample() -> None:
        for rank in range(gpus):
            samples.setdefault((rank, "sm_clock", "MHz"), []).append(torch.cuda.clock_rate(rank))
            samples.setdefault((rank, "power", "W"), []).append(torch.cuda.power_draw(rank) / 1e3)

    def keep_sampling() -> None:
        while not over.wait(PERIOD):
            sample()

    sample()  # here, so that what cannot be sampled is raised
    thread = threading.Thread(target=keep_sampling, name="clocks", daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()
    for (rank, metric, unit), values in samples.items():
        rows.append({"rank": rank, "metric": metric, "unit": unit, "value": statistics.median(values)})
