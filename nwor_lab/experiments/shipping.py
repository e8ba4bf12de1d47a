# SPDX-License-Identifier: Apache-2.0
"""What a KV connector ships out of each mode's cache: whole blocks, and the rejected rows that lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab.engines.engine import Engine
from nwor_lab.engines.offload import ship_last_slots
from nwor_lab.engines.traffic import begin
from nwor_lab.experiments import options
from nwor_lab.experiments.bench import started
from nwor_lab.experiments.plan import settings_of
from nwor_lab.results import Run

MODES = ("off", "cow", "stage")
NOW, ONCE = "as vLLM ships", "as it did before"
COUNTED = {"shipped_slots": "slots", "shipped_rejected": "rows", "shipped_unwritten": "rows"}


def measure(given: Sequence[object], logs: Path) -> pd.DataFrame:
    """Count what vLLM's `OffloadingConnector` ships of answers that end with a block, in engines of `MODES`.

    Each engine answers the same prompts twice: as its vLLM ships blocks, and as vLLM did before its repair, when it
    took the token sampled last for one whose keys and values are in the cache. Each prompt is cut three quarters
    into each of its blocks, and answered to the end of that block.

    Args:
        given: options of `nwor bench`; those of answers and times do not matter.
        logs: beginning of the paths of the engines' logs.

    Returns:
        One row a mode, `watermark` (`NOW` or `ONCE`) and metric: those of `COUNTED`, over layers and ranks, and
        `last_slots`, the slots of the answers' last tokens among them if all were shipped.
    """
    spec, plan, prompts = options.parse_config(options.parser("bench", "").parse_args([*map(str, given)]))
    # A step ahead of the scheduler, a GPU would write the row of the token sampled last after all.
    spec = replace(spec, prefix_caching=True, offload=256, async_scheduling=False)
    specs = {mode: (spec, settings_of(mode, audit=True), n * spec.tp) for n, mode in enumerate(MODES)}
    with started(specs, str(logs)) as engines, ThreadPoolExecutor() as pool:
        parts = pool.map(partial(_shipped, prompts=prompts[: plan.num_prompts]), engines.values())
        return pd.concat(part.assign(mode=mode) for mode, part in zip(engines, parts, strict=True))


def _shipped(engine: Engine, prompts: list[list[int]]) -> pd.DataFrame:
    """The rows of one engine."""
    block, lines = engine.on_scheduler(_block_size), []
    tokens, room = block // 4, engine.spec.max_model_len - engine.spec.k
    asked = [prompt[: end - tokens] for prompt in prompts for end in range(block, min(len(prompt), room) + 1, block)]
    for watermark, prepare in {NOW: _forget_blocks, ONCE: _ship_last_slots}.items():
        engine.on_scheduler(prepare)
        engine.on_every_rank(partial(begin, seed=engine.spec.seed))
        engine.generate(asked, tokens)
        engine.generate([asked[0][:1]], 1)  # steps in which the last blocks leave
        audits = [rank["audit"] for rank in engine.report()]
        counts = {name: (sum(audit[name] for audit in audits), unit) for name, unit in COUNTED.items()}
        layers = sum(audit["layer_steps"] // audit["steps"] for audit in audits)
        counts["last_slots"] = len(asked) * layers, "slots"
        lines += [
            {"watermark": watermark, "metric": name, "value": n, "unit": unit} for name, (n, unit) in counts.items()
        ]
    return pd.DataFrame(lines)


def _block_size(scheduler: Any) -> int:
    return scheduler.block_size


def _forget_blocks(scheduler: Any) -> None:
    if not scheduler.reset_prefix_cache(reset_connector=True):
        raise RuntimeError("vLLM still holds blocks of requests that have ended, and would not ship them anew")


def _ship_last_slots(scheduler: Any) -> None:
    _forget_blocks(scheduler)
    ship_last_slots(scheduler)


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """One line a watermark and mode, a column a metric."""
    wide = table.pivot_table(index=["watermark", "mode"], columns="metric", values="value", aggfunc="sum", sort=False)
    return wide[[*COUNTED, "last_slots"]].astype(int).rename_axis(columns=None)


def claim(run: Run, where: str, table: pd.DataFrame) -> None:
    """Record that no mode ships a row that was not kept, however vLLM ships, and what vanilla does."""
    counts = overview(table)
    faults = counts["shipped_rejected"] + counts["shipped_unwritten"]
    for mode in MODES[1:]:
        slots, wrong = counts.xs(mode, level="mode")["shipped_slots"], int(faults.xs(mode, level="mode").sum())
        text = f"{where}: rejected or unwritten rows that leave under {mode}, of {slots.sum()} slots shipped"
        run.claim(text, 0, wrong, bool((slots > 0).all()) and wrong == 0)
    slots, wrong = int(counts.loc[(NOW, "off"), "shipped_slots"]), int(faults[NOW, "off"])
    run.claim(f"{where}: those that leave vanilla as vLLM ships, of {slots}", 0, wrong, slots > 0 and wrong == 0)
    most, left = int(counts.loc[(ONCE, "off"), "last_slots"]), int(counts.loc[(ONCE, "off"), "shipped_rejected"])
    text = f"{where}: rejected rows that leave vanilla as vLLM shipped before its repair, each an answer's last slot"
    run.expect(text, f"1 to {most}", left, 1 <= left <= most)
