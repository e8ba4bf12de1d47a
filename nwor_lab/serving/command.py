# SPDX-License-Identifier: Apache-2.0
"""Modes as people meet them: requests that arrive while others decode, by vLLM's own server and client.

    nwor serving --modes off,stage,cow --concurrency 1,16,64 --rates 8
    nwor serving --modes off --audit sample=16      # what the sampled auditor costs

One server a mode, all up at once and one loaded at a time, so that modes alternate within each load; each pass over the
loads reverses their order. The baseline `off` is vLLM that never loads NWOR's plugin. Every mode gets the same
requests in the same order: held-out Python text, greedy, prefix caching off unless asked for. The table is written
behind each pass, so that one that is stopped or fails leaves those before it.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import machine, pair, paths, progress
from nwor_lab.bench import bench, options
from nwor_lab.bench.audit_cost import AuditedSpec, require_installed
from nwor_lab.engines.engine import EngineError
from nwor_lab.engines.spec import EngineOptions, EngineSpec
from nwor_lab.run import results
from nwor_lab.serving.load import Client, Load, ServingPlan, draw_prompts, equal_rows, read_report
from nwor_lab.serving.server import AUDITED, Server, ended
from nwor_lab.serving.table import summary, verdict

Rows = list[dict[str, Any]]
PATIENCE = 600.0
"""Seconds that servers may take to come up."""


def run(
    spec: EngineSpec, plan: ServingPlan, prompts: Sequence[Mapping[str, Any]], directory: Path, name: str = "serving"
) -> Generator[tuple[Rows, dict[str, Any]], None, None]:
    """Start the servers, load them, and end them in any case; behind each pass over the loads say what there is so far.

    `vllm.benchmarks.sweep` is not used: it runs one server at a time to the end of all its loads, without an
    environment or a log of its own for each, so that a slow minute of the machine would be taken for a mode's doing.
    `vllm bench throughput` neither: it samples at temperature 1 and reports no text and no acceptance, so nothing would
    stand beside its speed. All requests at once (`--rates inf`) are its load, with both.

    Args:
        prompts: as `draw_prompts` gives them.
        directory: folder for the requests and, below `logs`, for what servers and client print.
        name: of the run, with which its files begin.

    Yields:
        Rows of metrics of all passes so far, and a report: `served`, by mode the proof of treatment; `interrupted`
        while passes are to come.

    Raises:
        EngineError: a server died or was not up in time, a mode is not active, or a request failed.
    """
    logs, data = directory / "logs", directory / f"{name}-requests.jsonl"
    results.write_text(data, "".join(json.dumps({"prompt": one["prompt"]}) + "\n" for one in prompts))
    until = time.monotonic() + PATIENCE
    rows, before = Rows(), dict[str, list[str]]()
    with ended({}) as servers:
        progress.say(f"starting {len(plan.servers)} servers: {', '.join(plan.servers)} (a minute or two)")
        for mode in plan.servers:
            of_mode = AuditedSpec(**vars(spec), audit=plan.audit) if mode == AUDITED else spec
            servers[mode] = Server.of(of_mode, mode, logs / f"{name}-{mode.replace(' ', '-')}.log")
        client = Client(spec.model, data, plan.answer, logs / f"{name}-client.log")
        for mode, server in servers.items():
            server.wait(until - time.monotonic())
            server.proof(loaded=False)
            progress.say(f"{mode}: server up")
        for server in servers.values():
            client.ask(server, Load(max(load.at_once for load in plan.loads), math.inf, plan.warmup), warm=0)
        for number in range(plan.orders):
            rows += [row for load in plan.loads for row in one_pass(client, servers, plan, load, number, before)]
            served = {mode: server.proof(loaded=True) for mode, server in servers.items()}
            counted = [
                {"mode": mode, "metric": f"nwor.{of}", "value": value, "unit": "count"}
                for mode, proof in served.items()
                for of, value in proof.items()
            ]
            more = number + 1 < plan.orders
            yield rows + counted, {"served": served} | ({"interrupted": True} if more else {})


def one_pass(
    client: Client,
    servers: Mapping[str, Server],
    plan: ServingPlan,
    load: Load,
    number: int,
    before: dict[str, list[str]],
) -> Rows:
    """Rows of one load on every server. before: `off`'s texts of the pass before, by load; replaced by this one's."""
    rows, texts = Rows(), dict[str, list[str]]()
    at = {"load": load.name, "repeat": number, "requests": load.requests}
    for mode in plan.in_order(number):
        report = client.ask(servers[mode], load)
        found = {row["metric"]: row for row in read_report(report, load, mode, plan.answer)}
        rows += [{**at, "mode": mode, **row} for row in found.values()]
        texts[mode], speed = report["generated_texts"], found["tokens_per_s"]["value"]
        progress.say(f"pass {number + 1} of {plan.orders}, {load.name}: {mode}, {speed:.1f} tokens a second")
    rows += [{**at, **row} for row in equal_rows(texts, before.get(load.name))]
    before[load.name] = texts["off"]
    return rows


def engine_here() -> EngineOptions:
    """What a server's engine is where nothing is asked: compiled as vLLM does, for texts may part anyway."""
    on_cpu = machine.on_cpu()
    return EngineOptions(
        batch=64, max_num_batched_tokens=2048, max_model_len=2048, enforce_eager=on_cpu, deterministic=False,
        kv_cache_memory=0 if on_cpu else 4096,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Serving:
    k: int = 4
    """drafts a request brings to a step"""
    prompts: str = str(paths.PROMPTS)
    """JSONL file with a `prompt` a line, of which requests are cut"""
    plan: ServingPlan = field(default_factory=ServingPlan)
    engine: EngineOptions = field(default_factory=engine_here)
    output: options.Output = field(default_factory=partial(options.Output, name="serving"))


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, as `bench.run_command` does."""
    return bench.run_command("serving", Serving, __doc__, argv, parse_config, measure)


def parse_config(asked: Serving) -> tuple[EngineSpec, list[dict[str, Any]]]:
    """The spec and the requests that the options describe.

    Raises:
        ValueError, OSError: an option is impossible here, or a file cannot be read.
    """
    plan, engine, texts = asked.plan, asked.engine, pair.load_prompts(asked.prompts)
    if plan.audit:
        require_installed()
        from vllm_kv_audit.settings import Settings as Audited

        Audited.from_env({"VLLM_KV_AUDIT": plan.audit})
    if (room := engine.max_model_len - plan.answer) < plan.longest:
        raise ValueError(f"max_model_len {engine.max_model_len} leaves room for {room} tokens of a prompt: raise it")
    if (most := max(plan.concurrency, default=1)) > engine.batch:
        raise ValueError(f"a server that runs {engine.batch} requests at once is asked {most}: raise --batch")
    if not engine.draft and engine.method != "ngram":
        raise ValueError(f"method {engine.method} needs a --draft")
    spec = EngineSpec(**vars(options.with_model(engine)), k=asked.k)
    return spec, draw_prompts(texts, options.load_tokenizer(spec.model), plan)


def measure(asked: Serving, prepared: tuple[EngineSpec, list[dict[str, Any]]], directory: Path) -> int:
    """Load the servers, write what was found and print it."""
    (spec, prompts), plan = prepared, asked.plan
    lengths = [one["tokens"] for one in prompts]
    median = statistics.median_low(lengths)
    print(f"prompts of {min(lengths)} to {max(lengths)} tokens, median {median}, answers of {plan.answer}", flush=True)
    written: tuple[pd.DataFrame, Path] | None = None
    why = ""
    with progress.moving(), contextlib.closing(run(spec, plan, prompts, directory, asked.output.name)) as passes:
        try:
            for rows, report in passes:
                written = bench.write_results(directory, asked, spec, plan, rows, report)
        except (KeyboardInterrupt, EngineError) as stopped:
            if written is None:
                raise
            why = str(stopped) or bench.STOPPED
    assert written is not None
    frame, path = written
    table = summary(frame)
    said = verdict(table) + "\nOne pass does not tell noise." * (frame["repeat"].nunique() == 1)
    results.write_table(f"{path.with_suffix('')}-summary.csv", table)
    results.write_text(f"{path.with_suffix('')}-verdict.txt", said + "\n")
    print(table.to_string(index=False, na_rep="", float_format="{:.3f}".format))
    print(f"{said}\nwritten: {path}, .json, and beside it this table and the verdict")
    return bench.fail_kept("serving", why, "passes") if why else 0
