# SPDX-License-Identifier: Apache-2.0
"""What a mode's bytes and launches cost on a chip, and so where it is faster; `predicted` holds it against runs.

The model of time has two terms, as that of the kernels has (`nwor_lab.gpu.kernel_times`): a launch, and the bytes read
and written at the bandwidth of a large copy. Nothing overlaps, nothing is fitted, and the attention kernel is taken
to be as fast in each mode, so this is what the write policy alone makes; the bookkeeping of the host is not in it.
"""

from dataclasses import dataclass
from math import inf

import pandas as pd

from nwor_lab import paths
from nwor_lab.cost.traffic import Moved, Shape, Window, served_traffic

MODELS = {
    "llama-2-7b": Shape(32, 32, 128),
    "vicuna-7b": Shape(32, 32, 128),
    "llama-3.1-8b": Shape(32, 8, 128),
    "llama-3.3-70b": Shape(80, 8, 128),
    "qwen3-8b": Shape(36, 8, 128),
    "gpt-oss-20b": Shape(24, 8, 64),
}
"""Caches of published models in bf16: layers, KV heads and head size of their `config.json`."""


@dataclass(frozen=True)
class Chip:
    """What moving costs on a chip.

    Attributes:
        launch_us: microseconds of one launch more in a CUDA graph.
        copy_bytes_per_s: bytes read plus bytes written a second, of a copy too large for any cache.
        source: where the two are from.
        flop_per_s: operations of a matrix product in bf16 a second, at most; where none is given they take no time.
    """

    name: str
    launch_us: float
    copy_bytes_per_s: float
    source: str = "given"
    flop_per_s: float = inf

    def us(self, moved: Moved) -> float:
        """Microseconds: launches x `launch_us` + bytes / `copy_bytes_per_s`. A difference may be negative."""
        return moved.launches * self.launch_us + (moved.read + moved.written) / self.copy_bytes_per_s * 1e6


H200 = Chip(
    "H200",
    launch_us=3.9,
    copy_bytes_per_s=4.24e12,
    source="measured: each further launch of vLLM's writer, and a copy of 4 GiB (data/recorded/kernel_times.parquet)",
    flop_per_s=989e12,
)
"""`flop_per_s` is the data sheet's peak, without sparsity."""


def survival_of(acceptance: float, k: int) -> list[float]:
    """Survival over k positions when each draft is accepted with `acceptance`, given that those before it were."""
    return [acceptance ** (position + 1) for position in range(k)]


def step_difference(mode: str, shape: Shape, window: Window) -> Moved:
    """Bytes and launches of a step in `mode`, less those of vanilla's."""
    return served_traffic(mode, shape, window).total() - served_traffic("off", shape, window).total()


def published_survival() -> pd.DataFrame:
    """The published acceptance of chain drafts as survival: columns `source`, `model` ("<model>, <drafter>"),
    `position` (0 is the first draft) and `value`.

    A conditional acceptance is turned into survival by the running product over positions.
    """
    table = pd.read_csv(paths.PUBLISHED_ACCEPTANCE)
    rows = table[table["draft"].str.startswith("chain") & table["metric"].isin(["survival", "conditional_acceptance"])]
    rows = rows.sort_values("position").astype({"position": int})
    product = rows.groupby(["source", "model", "drafter"])["value"].cumprod()
    rows["value"] = product.where(rows["metric"] == "conditional_acceptance", rows["value"])
    rows["model"] = rows["model"].str.removesuffix("-Instruct") + ", " + rows["drafter"]
    return rows[["source", "model", "position", "value"]].reset_index(drop=True)
