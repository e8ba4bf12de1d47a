# SPDX-License-Identifier: Apache-2.0
"""What a mode's bytes and launches cost on a chip, and so where it is faster; `predicted` holds it against runs.

The model of time has two terms, as that of the kernels has (`nwor_lab.gpu.kernel_times`): a launch, and the bytes read
and written at the bandwidth of a large copy. Nothing overlaps, nothing is fitted, and the attention kernel is taken
to be as fast in each mode, so this is what the write policy alone makes; the bookkeeping of the host is not in it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

import pandas as pd
from scipy.optimize import brentq

from nwor_lab import paths
from nwor_lab.cost.traffic import Moved, Shape, Window, served_traffic

MODES = ("cow", "stage")

MODELS = {
    "llama-2-7b": Shape(32, 32, 128),
    "vicuna-7b": Shape(32, 32, 128),
    "llama-3.1-8b": Shape(32, 8, 128),
    "llama-3.3-70b": Shape(80, 8, 128),
    "qwen3-8b": Shape(36, 8, 128),
    "gpt-oss-20b": Shape(24, 8, 64),
}
"""Caches of published models in bf16: layers, KV heads and head size of their `config.json`."""


def model_shape(model: str, tp: int = 1) -> Shape:
    """One of `MODELS` on `tp` ranks.

    Raises:
        ValueError: its heads do not spread evenly over the ranks.
    """
    return replace(MODELS[model], tp=tp)


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


def differences(
    shapes: Mapping[str, Shape],
    ks: Sequence[int],
    acceptances: Iterable[float],
    batches: Sequence[int],
    chip: Chip = H200,
) -> pd.DataFrame:
    """What a step in each of `MODES` costs beyond vanilla's, over (model, k, acceptance, batch).

    Args:
        shapes: caches by name, such as `MODELS`.
        acceptances: of each draft, given that those before it were accepted.

    Returns:
        One row a point: `model`, `mode`, `k`, `acceptance`, `batch`, and `launches`, `bytes` and `us` of one step on
        one rank over vanilla's.
    """
    return pd.DataFrame(
        {"model": model, "acceptance": acceptance, **point}
        for (model, shape), k, acceptance in product(shapes.items(), ks, acceptances)
        for point in _points(shape, survival_of(acceptance, k), batches, chip)
    )


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


def published_differences(survival: pd.DataFrame, batches: Sequence[int], chip: Chip = H200) -> pd.DataFrame:
    """`differences` at published acceptance, each k up to the positions that were published; nothing extrapolated.

    Args:
        survival: as `published_survival` returns it. Models that are not in `MODELS` are left out: those with
            multi-head latent attention have no rows of keys and values, and no mode serves them.

    Returns:
        Those columns with `source` and `drafter`; `acceptance` is the constant one that keeps as many rows.
    """
    rows: list[dict[str, Any]] = []
    for (source, label), group in survival.groupby(["source", "model"], sort=False):
        name, drafter = str(label).rsplit(", ", 1)
        if (shape := known_shape(name)) is None:
            continue
        values = group.sort_values("position")["value"].tolist()
        for k in range(1, len(values) + 1):
            about = {"source": source, "drafter": drafter, "model": name}
            about["acceptance"] = constant_acceptance(values[:k])
            rows += [about | point for point in _points(shape, values[:k], batches, chip)]
    return pd.DataFrame(rows)


def _points(shape: Shape, survival: Sequence[float], batches: Sequence[int], chip: Chip) -> Iterable[dict[str, Any]]:
    for batch, mode in product(batches, MODES):
        moved = step_difference(mode, shape, Window.expected(batch, survival))
        yield {
            "mode": mode, "k": len(survival), "batch": batch,
            "launches": moved.launches, "bytes": moved.read + moved.written, "us": chip.us(moved),
        }  # fmt: skip


def constant_acceptance(survival: Sequence[float]) -> float:
    """The acceptance, the same at each position, under which as many of these drafts are accepted."""
    return brentq(lambda each: sum(survival_of(each, len(survival))) - sum(survival), 0, 1)


def known_shape(model: str) -> Shape | None:
    """The cache of a model in `MODELS`, or of the shipped pair (`target`), by its name, path or repository; or None."""
    name = re.sub(r"-(chat|instruct|hf)\b", "", model.rsplit("/", 1)[-1].lower())
    if name == "target":
        config = json.loads((paths.PAIR_TARGET / "config.json").read_text())
        return Shape(config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    return next((shape for known, shape in MODELS.items() if name.startswith(known)), None)
