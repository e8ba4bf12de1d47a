# SPDX-License-Identifier: Apache-2.0
"""Run engines of several modes side by side on the same prompts, and say which is faster and whether texts are equal.

    nwor bench --modes vllm,off,cow,direct,stage --k 4,8 --batches 1,4

All engines of a draft length are up at once. A first greedy pass shows whether each mode gives the baseline's tokens,
under the audit of the whole cache; a mode that does not gets no step time. Then the modes are timed, interleaved
within each repeat in an order that the next repeat reverses, so that a slow minute of the machine hits all alike. It
ends with a table and a sentence a mode, which says so where the repeats do not agree. `--repeats 0` stops after the
first pass.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.settings import MODES, Settings
from nwor_lab import command_line, machine, progress
from nwor_lab.bench import options, survival
from nwor_lab.bench.bench_table import kernel_rows, rows_of_generation, rows_of_ranks, summary, verdicts
from nwor_lab.bench.parity import Parity, compare
from nwor_lab.bench.plan import UNPATCHED, Plan, Timing, settings_of
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec, Generation
from nwor_lab.engines.spec import EngineOptions
from nwor_lab.engines.widened_pair import PAIR_AT
from nwor_lab.gpu import held_out
from nwor_lab.progress import say
from nwor_lab.run import results

Rows = list[dict[str, Any]]
COMPARED = 8
"""Requests of each load that parity is checked on at least."""


def run(spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]], logs: str = "") -> tuple[Rows, dict[str, Any]]:
    """Run the plan.

    Args:
        prompts: token ids.
        logs: where engines log, as a path that ends in the beginning of their files' names; empty: temporary files.

    Returns:
        Tidy rows, and a report by engine: every rank's status, metrics, parity and first answers. An engine is named
        by its mode, and by its draft length where there are several.

    Raises:
        EngineError: an engine failed, or a rank does not serve the mode that was asked for.
    """
    if plan.count:
        return count(spec, plan, prompts, logs)
    rows: Rows = []
    report: dict[str, Any] = {}
    for k in plan.ks:
        of_k = f", k={k}" if len(plan.ks) > 1 else ""
        of_length = replace(spec, k=k)
        specs = {
            mode + of_k: (
                replace(of_length, plugins="nwor_lab") if mode == UNPATCHED else of_length,
                settings_of(mode, plan.audit),
                0,
            )
            for mode in plan.modes
        }
        with started(specs, logs) as engines:
            more, found = Session(list(engines.values()), of_length, plan, prompts).run()
        rows += [{"k": k, **row} for row in more]
        for section, by_name in found.items():
            report.setdefault(section, {}).update({name + of_k: value for name, value in by_name.items()})
    return rows, report


@contextmanager
def started(specs: Mapping[str, tuple[EngineSpec, Settings, int]], logs: str) -> Iterator[dict[str, Engine]]:
    """Engines by name, all started at once, each up and proven to serve its mode.

    specs: by name, the configuration, settings and first core of each.
    """
    say(f"starting {len(specs)} engine{'s' * (len(specs) > 1)}: {', '.join(specs)} (up to a minute or two)")
    with ExitStack() as stack:
        engines = {}
        for name, (spec, settings, core) in specs.items():
            log = Path(f"{logs}-{re.sub('[^a-z0-9]+', '-', name)}.log") if logs else None
            engines[name] = stack.enter_context(Engine(spec, settings, core=core, log=log))
        for name, engine in engines.items():
            engine.wait()
            ranks = engine.report()
            require_served(specs[name][1].mode, ranks)
            if specs[name][0].plugins and (hooks := [hook for rank in ranks for hook in rank["hooks"]]):
                raise EngineError(f"{name}: vLLM without the plugin is patched all the same: {hooks}")
            say(f"{name}: engine up")
        yield engines


def count(spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]], logs: str = "") -> tuple[Rows, dict[str, Any]]:
    """Rows `survival.COUNTS` of vanilla by draft length, temperature and repeat, and every rank's status.

    One engine a draft length: side by side on a GPU, on a CPU as many as have cores of their own.
    """
    settings = settings_of("off", audit=False)
    specs = {f"k={k}": (replace(spec, k=k), settings, i * spec.tp) for i, k in enumerate(plan.ks)}
    prompts, passes = prompts[: plan.num_prompts], plan.passes(spec.seed)
    with started(specs, logs) as engines:

        def count_one(name: str) -> Rows:
            rows: Rows = []
            for number, (temperature, repeat, seed) in enumerate(passes, 1):
                say(f"{name}: pass {number} of {len(passes)}, temperature {temperature:g}")
                done = engines[name].generate(prompts, plan.max_tokens, temperature, seed)
                where = {"mode": "off", "k": specs[name][0].k, "temperature": temperature}
                where |= {"repeat": repeat, "seed": seed}
                rows += [{**where, **row} for row in rows_of_generation(done) if row["metric"] in survival.COUNTS]
            return rows

        at_once = max(1, len(os.sched_getaffinity(0)) // spec.tp) if machine.on_cpu() else len(engines)
        with ThreadPoolExecutor(at_once) as pool:
            rows = list(itertools.chain.from_iterable(pool.map(count_one, engines)))
        return rows, {"ranks": {name: engine.report() for name, engine in engines.items()}}


class Session:
    """Engines of one draft length, all up, by mode, and the prompts that they share.

    A load is the length of prompts, none of which is longer, and their number; first is that of the first pass.

    parity: by mode and load, of all passes compared so far. answers: the first texts of each mode's last pass.
    """

    def __init__(self, engines: list[Engine], spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]]) -> None:
        self.spec, self.plan = spec, plan
        self.engines = dict(zip(plan.modes, engines, strict=True))
        longest, most = spec.max_model_len - plan.max_tokens, max(plan.num_prompts, *plan.sizes)
        self.prompts = [prompt[:longest] for prompt in (list(prompts) * most)[:most]]
        self.loads = plan.loads(longest, min(engine.capacity() for engine in engines))
        self.shortest = min(plan.random_prompts, default=longest)
        self.first = (self.shortest, plan.num_prompts)
        self.parity: dict[str, dict[tuple[int, int], Parity]] = {mode: {} for mode in plan.modes}
        self.answers: dict[str, list[str]] = {}

    def run(self) -> tuple[Rows, dict[str, dict[str, Any]]]:
        """Rows and report of all passes: the first, the timed ones, a profile."""
        plan, rows, begin, longest = self.plan, Rows(), time.monotonic(), 0.0
        self.check_parity(*self.first)
        for repeat in range(plan.repeats):
            now = time.monotonic()
            if repeat and 0 < 60 * plan.max_minutes < now - begin + longest:
                progress.note(f"{plan.max_minutes:g} minutes hold {repeat} of {plan.repeats} repeats", sys.stderr)
                break
            for temperature in plan.temperatures:
                rows += self.timed(temperature, repeat)
            longest = max(longest, time.monotonic() - now)
        ranks = {mode: engine.report() for mode, engine in self.engines.items()}
        metrics = {mode: engine.metrics() for mode, engine in self.engines.items()}
        try:
            rows += self.profiled() if plan.profile else []
        except EngineError as error:  # a probe that fails must not cost the run its times
            say(f"no profile: {error}")
        for mode in plan.modes:
            by_load = self.parity[mode]
            rows += [{"mode": mode, **self.load(*load), **row} for load in by_load for row in by_load[load].rows()]
            rows += [{"mode": mode, "batch": self.spec.batch, **row} for row in rows_of_ranks(ranks[mode])]
        parity = {mode: asdict(sum(by_load.values(), Parity())) for mode, by_load in self.parity.items()}
        return rows, {"ranks": ranks, "metrics": metrics, "parity": parity, "answers": self.answers}

    def prompts_of(self, length: int, size: int) -> list[list[int]]:
        """The prompts of a load."""
        return [prompt[:length] for prompt in self.prompts[:size]]

    def load(self, length: int, size: int) -> dict[str, int]:
        """Columns that identify a load."""
        load = {"batch": min(size, self.spec.batch)}
        return load | ({"prompt": length} if self.plan.random_prompts else {})

    def check_parity(self, length: int, size: int) -> None:
        """A greedy pass of a load by every mode, compared with the first one's. An audit, if there is one, ends with
        the first pass.

        A load of few requests is run with other prompts too, until there are `COMPARED`: one text may part too early.
        """
        prompts, tokens = self.prompts_of(length, max(size, COMPARED)), self.plan.max_tokens
        batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        if self.spec.prefix_caching:
            for engine, batch in itertools.product(self.engines.values(), batches):
                engine.generate(batch, 1)  # every mode finds the prompts cached: its sums are as in the others
        passes: dict[str, list[Generation]] = {}
        for mode, engine in self.engines.items():
            say(f"parity: {mode}, {len(prompts)} prompts")
            passes[mode] = [engine.generate(batch, tokens, logprobs=20) for batch in batches]  # as many as vLLM gives
            engine.stop_audit()
        for mode, generations in passes.items():
            self.answers[mode] = generations[0].text[:4]
            alike = partial(compare, drafted=self.spec.acceptance_length > 0)
            found = sum(map(alike, passes[self.plan.modes[0]], generations), Parity())
            self.parity[mode][length, size] = self.parity[mode].get((length, size), Parity()) + found

    def timed(self, temperature: float, repeat: int) -> Rows:
        """Rows of one repeat: every load, by every mode.

        Parity is checked first for loads that have not been compared: others than the first pass's, and where prompts
        are cached all of them, since the first mode alone would find none, and the chip cool.
        """
        rows: Rows = []
        plan = self.plan
        for length, size in self.loads:
            if self.spec.prefix_caching or (length, size) not in self.parity[plan.modes[0]]:
                self.check_parity(length, size)
            prompts = self.prompts_of(length, size)
            load = {"repeat": repeat, "temperature": temperature, **self.load(length, size)}
            for mode, engine in self.in_order(repeat):
                say(f"repeat {repeat + 1} of {plan.repeats}: {mode}, {size} prompts")
                done = engine.generate(prompts, plan.max_tokens, temperature, self.spec.seed + 1000 * repeat)
                rows += [{"mode": mode, **load, **row} for row in rows_of_generation(done)]
        return rows

    def profiled(self) -> Rows:
        """Rows `kernel_us` of every mode and batch, once in each order: GPU microseconds of a decode step by kind of
        kernel.
        """
        rows: Rows = []
        for size, repeat in itertools.product(self.plan.sizes, range(2)):
            load = {"repeat": repeat, **self.load(self.shortest, size)}
            for mode, engine in self.in_order(repeat):
                say(f"profile {repeat + 1} of 2: {mode}, {size} prompts")
                found = kernel_rows(*engine.kernel_times(self.prompts_of(self.shortest, size), self.plan.max_tokens))
                rows += [{"mode": mode, **load, "unit": "us", **row} for row in found]
        return rows

    def in_order(self, repeat: int) -> list[tuple[str, Engine]]:
        """The modes in the order of a repeat: each repeat reverses the one before."""
        return [*self.engines.items()][:: -1 if repeat % 2 else 1]


def require_served(mode: str, ranks: list[dict[str, Any]]) -> None:
    """Proof of treatment: raise `EngineError` unless `mode` itself is active on every rank."""
    wrong = [rank for rank in ranks if rank["mode"] != mode or rank["serving"] != mode]
    if wrong or not ranks:
        found = [{name: rank.get(name) for name in ("rank", "mode", "serving", "reason")} for rank in wrong]
        raise EngineError(
            f"mode {mode} is not active on every rank, so nothing may be measured under its name: {found}"
        )


@dataclass(frozen=True, kw_only=True)
class Bench(options.Models):
    modes: options.Modes = MODES
    """modes to compare, of off, cow, direct, stage, and vllm without the plugin; the first is the baseline"""
    ks: options.Ks = (4,)
    """draft lengths; engines of one length are up at once, lengths follow each other"""
    workload: options.Prompts = field(default_factory=options.Prompts)
    timing: Timing = field(default_factory=Timing)
    engine: EngineOptions = field(default_factory=EngineOptions)
    output: options.Output = field(default_factory=partial(options.Output, name="bench"))


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status, as `run_command` does."""
    return run_command("bench", Bench, __doc__, argv, show_summary)


def run_command(
    command: str,
    kind: type[Any],
    description: str | None,
    argv: list[str] | None,
    show: Callable[[pd.DataFrame, Plan, dict[str, Any]], int],
    **fixed: Any,
) -> int:
    """Run a command of the family and return its exit status: 2 for wrong input, 1 for an engine that failed.

    Args:
        kind: its options. fixed: fields of the plan that are none.
        show: prints what was found, from the table, the plan and the report, and returns the exit status.
    """
    fail = partial(command_line.fail, f"nwor {command}")
    try:
        try:
            asked = command_line.parse(kind, argv, f"nwor {command}", description or "")
            given = options.flat(asked) | fixed
            with progress.moving():
                progress.say("reading models and prompts", plain=False)
                spec, plan, prompts = options.parse_config(given)
            directory = results.check_folder(options.folder(asked.output))
        except (ValueError, OSError) as error:
            return fail(error)
        logs = directory / "logs" / given["name"]
        print(f"weights and cache in {machine.summary(given['dtype'])}; engines' logs: {logs}-*.log", flush=True)
        with progress.moving():
            rows, report = run(spec, plan, prompts, str(logs))
        frame, path = write_results(directory, given, spec, plan, rows, report)
    except (EngineError, OSError) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return fail("interrupted before its end, no results were written; start it again", 130)
    status = show(frame, plan, report)
    print(f"written: {path} and .json")
    return status


def show_summary(frame: pd.DataFrame, plan: Plan, report: Mapping[str, Any]) -> int:
    """Print one line a mode and load, and a sentence a mode that says what follows."""
    table = summary(frame, plan)
    print(table.to_string(index=False, na_rep="", float_format="{:.3f}".format))
    print(*verdicts(table, plan), sep="\n")
    return 0


def write_results(
    directory: Path,
    given: Mapping[str, Any],
    spec: EngineSpec,
    plan: Any,
    rows: Rows,
    report: Mapping[str, Any],
) -> tuple[pd.DataFrame, Path]:
    """Write a run's table and, beside it, its report; returns the table and its path. `plan` is a dataclass."""
    named = given["shape"] or (given["model"] if given["model"].startswith(PAIR_AT) else "")
    model = named or (Path(spec.model).name if Path(spec.model).is_dir() else spec.model)
    common = {"run_id": directory.name, "model": model, "tp": spec.tp, "batch": spec.batch, "seed": spec.seed}
    common |= {"k": spec.k, "kv_cache_dtype": spec.kv_cache_dtype}
    if spec.flash_attn_version:
        common["attention"] = f"flash{spec.flash_attn_version}"
    if shape := shapes.SHAPES.get(given["shape"]):
        common["kv_heads"] = shape["num_key_value_heads"]
    frame = results.tidy(rows, **common)
    if shape and "prompt" in frame:
        frame = held_out.mark_steps(frame, shape["num_attention_heads"], shape["head_dim"])
    path = results.write_table(directory / f"{given['name']}.parquet", frame)
    made_by = {"spec": asdict(spec), "plan": asdict(plan), "provenance": results.provenance(dict(given))}
    results.write_json(path.with_suffix(".json"), {**report, **made_by})
    return frame, path


if __name__ == "__main__":
    sys.exit(main())
