# SPDX-License-Identifier: Apache-2.0
"""What the sampled auditor (`kv_audit/`) costs: decode steps with it over steps without, and its hooks' host time.

Engines without an audit, with a sample and with all slots are up at once and take turns, in reverse order in every
other repeat. Host time is summed inside the hooks of another engine, less what vLLM does inside them. The distribution
has to be installed (``pip install --no-deps ./kv_audit``).

    python -m nwor_lab.bench.audit_cost [--shape pair@llama-2-7b-8kv] [--batch 1 16 64] [--out cost.parquet]
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.settings import Settings
from nwor_lab import command_line, pair, paths
from nwor_lab.bench.bench import started
from nwor_lab.cost.ratios import abba_ratio
from nwor_lab.engines.hook_time import Clock
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.widened_pair import write_widened
from nwor_lab.machine import on_cpu
from nwor_lab.run import results

AUDITS = {"off": "", "sample=16": "sample=16", "full": "full"}
TOKENS, WARM_UP = 120, 12  # of each answer; steps at a generation's begin that are not timed


@dataclass(frozen=True)
class AuditedSpec(EngineSpec):
    """audit, perturb: as ``VLLM_KV_AUDIT`` and ``VLLM_KV_AUDIT_PERTURB``."""

    audit: str = ""
    perturb: str = ""

    def environ(self, core: int = 0) -> dict[str, str]:
        asked = {"VLLM_KV_AUDIT": self.audit, "VLLM_KV_AUDIT_PERTURB": self.perturb}
        return {**super().environ(core), **asked}


def require_installed() -> None:
    """Raise a ValueError where vLLM would not find the auditor."""
    if "kv_audit" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise ValueError("vllm-kv-audit is not installed: pip install --no-deps ./kv_audit")


def spec_of(shape: str, batch: int, audit: str, folder: Path) -> AuditedSpec:
    """The shipped pair with EAGLE, or written at a shape to `folder`; on a GPU in CUDA graphs."""
    dtype = "float32" if on_cpu() else "bfloat16"
    target, head = write_widened(shape, folder, dtype) if shape else (paths.PAIR_TARGET, paths.PAIR_EAGLE)
    more: dict[str, Any] = {"num_blocks": 8 * batch} if on_cpu() else {
        "enforce_eager": False, "num_blocks": 64 * batch, "kv_cache_memory": 10240, "gpu_memory_utilization": 0.31,
    }  # fmt: skip
    return AuditedSpec(
        str(target), str(head), batch=batch, max_num_batched_tokens=2048, max_model_len=1024, dtype=dtype, audit=audit,
        **more,
    )  # fmt: skip


def step_times(shape: str, batches: Sequence[int], repeats: int, folder: Path) -> pd.DataFrame:
    """Median decode steps: columns batch, repeat, audit, step_ms, and checked and findings of all ranks by then.

    Raises:
        RuntimeError: an audit that was asked for did not run.
    """
    lines = []
    wanted = {name: (spec_of(shape, max(batches), asked, folder), Settings(), 0) for name, asked in AUDITS.items()}
    with started(wanted, "") as engines:
        prompts = next(iter(engines.values())).encode(pair.load_prompts())
        for batch in batches:
            texts = [prompts[i % len(prompts)][:256] for i in range(batch)]
            for repeat in range(-1, repeats):  # one before, for what is compiled
                for name in list(engines)[:: 1 if repeat % 2 else -1]:
                    made = engines[name].generate(texts, TOKENS)
                    steps = made.step_seconds[WARM_UP:-WARM_UP]
                    reports = engines[name].on_every_rank(report) if AUDITS[name] else []
                    counts = [each["counts"] for each in reports]
                    if AUDITS[name] and not all(each["checked"] for each in counts):
                        raise RuntimeError(f"{name}: nothing was audited on some rank: {counts}")
                    if repeat >= 0:
                        line = {"batch": batch, "repeat": repeat, "audit": name}
                        line |= {"step_ms": 1e3 * statistics.median(steps)}
                        line |= {"checked": sum(each["checked"] for each in counts)}
                        line |= {"findings": sum(each[kind] for each in counts for kind in KINDS)}
                        lines.append(line)
    return pd.DataFrame(lines)


KINDS = ("bytes", "token", "rejected", "unwritten")


def report(worker: Any) -> dict[str, Any]:
    """A rank's report, sent to each."""
    return worker.kv_audit_report()


def host_time(batch: int, audit: str, folder: Path) -> dict[str, float]:
    """Microseconds of a decode step inside the auditor's hooks, by method of vLLM, of an engine in this process."""
    spec, clock = spec_of("", batch, audit, folder), Clock()
    os.environ.update({**spec.environ(), **Settings().environ()})
    from vllm_kv_audit import hooks, metrics, runner_v1, runner_v2, worker

    wrap = hooks.wrap

    def timing(owner: type, name: str, parameters: str, around: Callable[..., Any], optional: str = "") -> None:
        def timed(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(clock.timed("", original), self, *args, **kwargs)

        wrap(owner, name, parameters, clock.timed(name, timed), optional)

    for module in (metrics, runner_v1, runner_v2, worker):
        module.wrap = timing  # type: ignore[attr-defined]
    from nwor_lab.engines.child import Served

    served = Served(spec)
    prompts = served.encode(pair.load_prompts())
    return clock.decode_times(served, [prompts[i % len(prompts)][:256] for i in range(batch)], TOKENS)


@dataclass(frozen=True)
class AuditCost:
    shape: str = "" if on_cpu() else "pair@llama-2-7b-8kv"
    """whose steps are timed, pair@SHAPE; empty: the shipped pair's own"""
    batch: tuple[int, ...] = (1, 16, 64)
    """requests at once; host time is of the shipped pair with the one in the middle"""
    repeats: int = 6
    """timed generations of each engine and batch"""
    out: str = ""
    """a parquet file for the steps"""


def main(argv: list[str] | None = None) -> int:
    try:
        asked = command_line.parse(AuditCost, argv, "audit_cost", __doc__ or "")
        require_installed()
    except ValueError as error:
        return command_line.fail("audit_cost", error)
    with tempfile.TemporaryDirectory() as folder:
        steps = step_times(asked.shape, asked.batch, asked.repeats, Path(folder))
        if asked.out:
            table = results.write_table(asked.out, steps)
            results.write_provenance(table, {"shape": asked.shape, "batch": asked.batch, "repeats": asked.repeats})
        for batch, every in steps.groupby("batch"):
            medians = every.pivot(index="repeat", columns="audit", values="step_ms")
            for name in AUDITS:
                ratios = medians[name] / medians["off"]
                found = int(every.loc[every.audit == name, "findings"].max())
                print(
                    f"batch {batch}, {name}: {medians[name].median():.3f} ms a step, {abba_ratio(ratios):.4f} of off's "
                    f"({ratios.min():.4f} to {ratios.max():.4f}), {found} findings",
                    flush=True,
                )
        batch = asked.batch[len(asked.batch) // 2]
        for name in list(AUDITS)[1:]:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                times = pool.submit(host_time, batch, AUDITS[name], Path(folder)).result()
            parts = ", ".join(f"{key} {value:.1f}" for key, value in sorted(times.items(), key=lambda x: -x[1])[:4])
            print(f"batch {batch}, {name}: {sum(times.values()):.0f} us of host time a step ({parts})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
