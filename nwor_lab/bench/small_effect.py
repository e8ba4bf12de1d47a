# SPDX-License-Identifier: Apache-2.0
"""Find an effect smaller than what two engines differ by: each mode's engine beside itself with the mode paused.

    python -m nwor_lab.bench.small_effect --modes direct,stage --shape llama-2-7b --random-prompts 512 --k 8

Paused, an engine is vanilla. Each repeat captures graphs anew, since where a capture puts its buffers must not pass for
the mode's doing, and reverses the order. With two modes the second is also held against the first, each over itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import pandas as pd

from nwor_lab import command_line, progress
from nwor_lab.bench import options
from nwor_lab.bench.bench import started
from nwor_lab.bench.plan import Plan, settings_of
from nwor_lab.cost.ratios import abba_ratio
from nwor_lab.engines import pause
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.engines.spec import EngineOptions


def measure(spec: EngineSpec, plan: Plan, prompts: list[list[int]]) -> pd.DataFrame:
    """Median milliseconds of a step, `paused` and `served`, and whether their texts are `equal`: a line a mode and
    `repeat`."""
    specs = {mode: (spec, settings_of(mode, audit=False), 0) for mode in plan.modes}
    lines = []
    with started(specs, "") as engines:
        for repeat in range(plan.repeats):
            turn = slice(None, None, -1 if repeat % 2 else 1)
            for engine in engines.values():
                engine.on_every_rank(pause.recapture_graphs)
                engine.generate(prompts, 1)
            for mode, engine in [*engines.items()][turn]:
                passes = {}
                for how in ("paused", "served")[turn]:
                    if how == "paused":
                        engine.on_every_rank(pause.pause)
                    passes[how] = engine.generate(prompts, plan.max_tokens, 0.0, spec.seed)
                    if how == "paused":
                        engine.on_every_rank(pause.resume)
                ms = {how: 1e3 * median(done.step_seconds) for how, done in passes.items()}
                equal = passes["paused"].tokens == passes["served"].tokens
                lines.append({"repeat": repeat, "mode": mode, **ms, "equal": equal})
    return pd.DataFrame(lines)


def verdicts(table: pd.DataFrame, modes: Sequence[str]) -> list[str]:
    """A sentence a mode, and one for each other beside the first: the ratio and its range over repeats."""
    own = table.assign(ratio=table["served"] / table["paused"]).pivot(index="repeat", columns="mode", values="ratio")
    each = {f"{mode} over itself paused": own[mode] for mode in modes}
    each |= {f"{mode} over {modes[0]}, each over itself paused": own[mode] / own[modes[0]] for mode in modes[1:]}
    return [
        f"{words}: {abba_ratio(ratios):.4f} of a step (repeats from {ratios.min():.4f} to {ratios.max():.4f}"
        + (", which do not agree on which is faster)" if ratios.min() <= 1 <= ratios.max() else ")")
        for words, ratios in each.items()
    ]


@dataclass(frozen=True, kw_only=True)
class SmallEffect(options.Models):
    modes: options.Modes = ("stage",)
    """modes, each held against its own engine paused"""
    ks: options.Ks = (4,)
    """drafts a request brings to a step"""
    repeats: int = 5
    """timed pairs of passes of each mode"""
    workload: options.Prompts = field(default_factory=options.Prompts)
    engine: EngineOptions = field(default_factory=EngineOptions)


def main(argv: list[str] | None = None) -> int:
    try:
        asked = command_line.parse(SmallEffect, argv, "small_effect", __doc__ or "")
        spec, plan, prompts = options.parse_config(options.flat(asked))
        with progress.moving():
            table = measure(spec, plan, prompts[: plan.num_prompts])
    except (ValueError, OSError, EngineError) as error:
        return command_line.fail("small_effect", error, 1 if isinstance(error, EngineError) else 2)
    print(table.round(4).to_string(index=False))
    print(*verdicts(table, plan.modes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
