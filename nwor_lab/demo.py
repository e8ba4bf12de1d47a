# SPDX-License-Identifier: Apache-2.0
"""`make demo`: vanilla vLLM and `stage` side by side under the cache auditor, and what each leaves in the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.settings import Settings
from nwor_lab import command_line, pair, paths, progress
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.bench.bench import started
from nwor_lab.engines.engine import EngineSpec, Generation

MODES = ("off", "stage")
BLOCK_SIZE = 32


@dataclass
class Audited:
    """What one mode generated, and what rank 0 reported of it: the audit among it (`nwor_lab.audit.hooks.report`)."""

    generation: Generation
    report: dict[str, Any]


def side_by_side(
    prompts: Sequence[str],
    *,
    model: str | Path = paths.PAIR_TARGET,
    draft: str | Path = paths.PAIR_EAGLE,
    k: int = 4,
    max_tokens: int = 64,
    dtype: str = "float32",
) -> dict[str, Audited]:
    """Decode `prompts` greedily with an engine of each of `MODES`, all steps audited; prints what it is doing.

    Raises:
        RuntimeError: an engine does not start, and the message names its log; or a mode does not serve here.
    """
    batch = min(8, len(prompts))
    spec = EngineSpec(
        str(model), str(draft), k=k, dtype=dtype, batch=batch, num_blocks=17 * batch, block_size=BLOCK_SIZE
    )
    found = {}
    with started({mode: (spec, Settings(mode=mode, audit=True), 0) for mode in MODES}, "") as engines:
        for mode, engine in engines.items():
            progress.say(f"{mode:5} decodes {max_tokens} tokens after each of {len(prompts)} prompts, audited")
            generation = engine.generate(engine.encode(prompts), max_tokens)
            found[mode] = Audited(generation, engine.report()[0])
    return found


def pages(runs: dict[str, Audited]) -> pd.DataFrame:
    """The pages of the batch's first request after its first step with a rejection, from each mode's audit.

    Returns:
        A row for each mode and slot: `mode, line` (the request's block, in order), `block`, `column`, `state`.

    Raises:
        ValueError: no draft of the request was rejected in the steps that the audit remembers.
    """
    frame = pages_by_step(runs)
    rejected = frame[frame["num_rejected"] > 0]
    if missing := [mode for mode in runs if mode not in set(rejected["mode"])]:
        raise ValueError(f"{missing[0]}: every draft of the first request was accepted; decode more tokens")
    first = frame["mode"].map(rejected.groupby("mode")["step"].min())
    return frame[(frame["step"] == first) & frame["used"]].drop(columns=["step", "num_rejected", "used"])


def pages_by_step(runs: dict[str, Audited]) -> pd.DataFrame:
    """The pages of the batch's first request after each step that the audit remembers.

    Returns:
        A row for each mode, step and slot: `mode, step, line, block, column, state`, the step's `num_rejected`, and
        whether the block was `used` by then.
    """
    rows = []
    for mode, run in runs.items():
        history, state = run.report["history"], dict[int, str]()
        blocks = list(dict.fromkeys(slot // BLOCK_SIZE for step in history for slot in step["slots"]))
        for n, step in enumerate(history):
            state = {slot: "context" for slot, held in state.items() if held != "empty"}
            kept = len(step["slots"]) - step["num_rejected"]
            for row, (slot, changed) in enumerate(zip(step["slots"], step["changed"], strict=True)):
                state[slot] = "empty" if not changed else "kept" if row < kept else "rejected"
            used = {slot // BLOCK_SIZE for slot in state}
            common = {"mode": mode, "step": n, "num_rejected": step["num_rejected"]}
            for line, block in enumerate(blocks):
                place = {**common, "line": line, "block": block, "used": block in used}
                slots = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
                rows += [{**place, "column": c, "state": state.get(slot, "empty")} for c, slot in enumerate(slots)]
    return pd.DataFrame(rows)


def verdict(runs: dict[str, Audited]) -> list[str]:
    """What the modes left in the cache and generated, in plain words."""
    lines = []
    for mode, run in runs.items():
        name, audit, counters = "vanilla" if mode == "off" else mode, run.report["audit"], run.generation.counters
        drafts, rejected = counters["draft_tokens"], counters["draft_tokens"] - counters["accepted_tokens"]
        layers, written = audit["layer_steps"] // audit["steps"], audit["kept_rows"] - audit["unwritten_rows"]
        left = f"{audit['dirty_slots'] or 'No'} rejected rows are left in the KV cache"
        lines.append(f"{name}: the verifier rejected {rejected} of {drafts} drafts, in each of {layers} layers.")
        lines.append(f"{'':{len(name)}}  {left}; {written} of {audit['kept_rows']} rows to be kept were written.")
    texts = [run.generation.tokens for run in runs.values()]
    same = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
    return [*lines, f"{same} of {len(texts[0])} texts are equal, token for token."]


def main() -> int:
    """Run the demo on the shipped pair; 0 when `stage` left nothing behind and every text is vanilla's."""
    print("A drafter proposes, the target verifies; what it rejects should not stay in the KV cache.", flush=True)
    try:
        with progress.moving():
            runs = side_by_side(pair.load_prompts(count=4))
    except (OSError, RuntimeError) as error:
        return command_line.fail("demo", error)
    except KeyboardInterrupt:
        return command_line.fail("demo", "stopped; `make demo` starts it again", 130)
    print("\n" + "\n".join(verdict(runs)))
    off, stage = (runs[mode] for mode in MODES)
    clean = AuditReport(**stage.report["audit"]).clean
    return 0 if clean and off.generation.tokens == stage.generation.tokens else 1


if __name__ == "__main__":
    sys.exit(main())
