# SPDX-License-Identifier: Apache-2.0
"""What a KV connector ships out of each mode's cache: whole blocks, and the rejected rows that lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
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
NOW, ONCE = "as vLLM ships", "as before its repair"
COUNTED = ("shipped_slots", "shipped_rejected", "shipped_unwritten")


def measure(given: Sequence[object], logs: Path) -> pd.DataFrame:
    """Count what vLLM's `OffloadingConnector` ships of answers that end with a block, in engines of `MODES`.

    Each engine answers the same prompts twice: as its vLLM ships blocks, and as vLLM did before its repair. Each prompt
    is cut three quarters into each of its blocks, and answered to the end of that block.

    given: options of `nwor bench`; those of answers and times do not matter. logs: beginning of the logs' paths.

    Returns rows of the metrics `COUNTED`, over layers and ranks, by mode and `watermark` (`NOW` or `ONCE`).
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
    block, lines = engine.on_scheduler(attrgetter("block_size")), []
    tokens, room = block // 4, engine.spec.max_model_len - engine.spec.k
    ends = [range(block, max(block, min(len(prompt), room)) + 1, block) for prompt in prompts]
    asked = [(prompt * block)[: end - tokens] for prompt, each in zip(prompts, ends, strict=True) for end in each]
    for watermark in (NOW, ONCE):
        engine.on_scheduler(_forget_blocks)
        if watermark == ONCE:
            engine.on_scheduler(ship_last_slots)
        engine.on_every_rank(partial(begin, seed=engine.spec.seed))
        engine.generate(asked, tokens)
        engine.generate([asked[0][:1]], 1)  # steps in which the last blocks leave
        audits = [rank["audit"] for rank in engine.report()]
        counts = {metric: sum(audit[metric] for audit in audits) for metric in COUNTED}
        lines += [{"watermark": watermark, "metric": metric, "value": counts[metric]} for metric in COUNTED]
    return pd.DataFrame(lines).assign(unit="slots")


def _forget_blocks(scheduler: Any) -> None:
    if not scheduler.reset_prefix_cache(reset_connector=True):
        raise RuntimeError("vLLM still holds blocks of requests that have ended, and would not ship them anew")


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """One line a watermark and mode, a column a metric."""
    wide = table.pivot_table(index=["watermark", "mode"], columns="metric", values="value", aggfunc="sum", sort=False)
    return wide[[*COUNTED]].astype(int).rename_axis(columns=None)


def claim(run: Run, where: str, table: pd.DataFrame) -> None:
    """Record that no mode ships a row that was not kept, however vLLM ships, and what vanilla does."""
    counts = overview(table)
    faults = counts["shipped_rejected"] + counts["shipped_unwritten"]
    for mode in MODES[1:]:
        slots, wrong = counts.xs(mode, level="mode")["shipped_slots"], int(faults.xs(mode, level="mode").sum())
        text = f"{where}: rejected or unwritten rows that leave under {mode}, of {slots.sum()} slots shipped"
        run.claim(text, 0, wrong, bool((slots > 0).all()) and wrong == 0)
    slots, wrong = counts.loc[(NOW, "off"), "shipped_slots"], int(faults[NOW, "off"])
    run.claim(f"{where}: such rows that leave vanilla {NOW}, of {slots} slots", 0, wrong, slots > 0 and wrong == 0)
    left = int(counts.loc[(ONCE, "off"), "shipped_rejected"])
    run.expect(f"{where}: rejected rows that leave vanilla {ONCE}", "> 0", left, left > 0)
