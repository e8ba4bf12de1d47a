# SPDX-License-Identifier: Apache-2.0
"""Run engines of several modes side by side on the same prompts, and say which is faster and whether texts are equal.

    nwor bench --modes vllm,off,cow,direct,stage --k 4,8 --batches 1,4

All engines of a draft length are up at once. A greedy pass of each load shows whether each mode gives the baseline's
tokens, the first under the audit of the whole cache; where a mode does not it gets no step time. Then the modes are
timed, interleaved within each repeat in an order that the next repeat reverses, so that a slow minute of the machine
hits all alike. It ends with a table and a sentence a mode, which says so where the repeats do not agree. `--repeats 0`
times nothing. A run that is stopped or fails behind the first repeat keeps the repeats that are whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.settings import MODES, Settings
from nwor_lab import command_line, machine, progress
from nwor_lab.audit import hooks
from nwor_lab.bench import options
from nwor_lab.bench.bench_table import kernel_rows, rows_of_generation, rows_of_ranks, summary, verdicts
from nwor_lab.bench.parity import Parity, compare
from nwor_lab.bench.plan import UNPATCHED, Plan, Timing, Workload, settings_of
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec, Generation
from nwor_lab.engines.spec import EngineOptions
from nwor_lab.progress import say
from nwor_lab.run import results

Rows = list[dict[str, Any]]
Load = tuple[int, int]
"""The length of prompts, none of which is longer, and their number."""
COMPARED = 8
"""Requests of each load that parity is checked on at least."""
STOPPED = "interrupted"
"""Why a run ended that Ctrl-C or SIGTERM stopped."""


def run(spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]], logs: str = "") -> tuple[Rows, dict[str, Any]]:
    """Run the plan. Timed repeats that are whole stay, whatever ends the run behind them.

    Args:
        prompts: token ids.
        logs: where engines log, as a path that ends in the beginning of their files' names; empty: temporary files.

    Returns:
        Tidy rows, and a report by engine: every rank's status, metrics and parity. An engine is named by its mode, and
        by its draft length where there are several. A report of a run that was stopped or failed says why, as
        `interrupted`.

    Raises:
        EngineError: no repeat is whole, and an engine failed or a rank does not serve the mode that was asked for.
    """
    kept: dict[int, tuple[Rows, dict[str, Any]]] = {}
    rows: Rows = []
    report: dict[str, Any] = {}
    try:
        for k in plan.ks:
            of_k = f", k={k}" if len(plan.ks) > 1 else ""
            of_length = replace(spec, k=k)
            specs = {
                mode + of_k: (
                    replace(of_length, plugins="nwor_lab") if mode == UNPATCHED else of_length,
                    settings_of(mode, plan.audit, repaired=UNPATCHED not in plan.modes),
                    0,
                )
                for mode in plan.modes
            }
            with started(specs, logs) as engines:
                for more, found in Session(list(engines.values()), of_length, plan, prompts).run():
                    named = {of: {name + of_k: value for name, value in found[of].items()} for of in found}
                    kept[k] = [{"k": k, **row} for row in more], named
    except (KeyboardInterrupt, EngineError) as stopped:
        if not kept or not plan.repeats:
            raise
        report["interrupted"] = str(stopped) or STOPPED
    for more, found in kept.values():
        rows += more
        for section, by_name in found.items():
            report.setdefault(section, {}).update(by_name)
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


class Session:
    """Engines of one draft length, all up, by mode, and the prompts that they share.

    parity: by mode and load.
    audited: by mode, what vLLM's scheduler and rank 0 had counted when the audit ended, if there was one.
    """

    def __init__(self, engines: list[Engine], spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]]) -> None:
        self.spec, self.plan = spec, plan
        self.engines = dict(zip(plan.modes, engines, strict=True))
        most = max(plan.num_prompts, *plan.sizes)
        self.prompts = (list(prompts) * most)[:most]
        room = spec.max_model_len - plan.max_tokens
        self.loads: list[Load] = plan.loads(room, min(engine.capacity() for engine in engines))
        self.parity: dict[str, dict[Load, Parity]] = {mode: {} for mode in plan.modes}
        self.audited: dict[str, dict[str, float]] = {}

    def run(self) -> Iterator[tuple[Rows, dict[str, dict[str, Any]]]]:
        """Run all passes: those that are compared, the first of them audited, the timed ones, a profile. Yields all
        rows and the report behind each repeat, and at the end.

        Raises:
            EngineError: the caches hold no load.
        """
        if not self.loads:
            raise EngineError("the caches hold none of the loads: give fewer --batches or shorter prompts")
        for load in self.loads:
            self.check_parity(load)
        timed, report = Rows(), self.report()
        for repeat in range(self.plan.repeats):
            timed += [row for load in self.loads for row in self.timed(load, repeat)]
            report = self.report()  # now, as Ctrl-C ends the engines too
            yield timed + self.rows(report), report
        profile = Rows()
        try:
            profile = self.profiled() if self.plan.profile else []
        except EngineError as error:  # a probe that fails must not cost the run its times
            say(f"no profile: {error}")
        yield timed + profile + self.rows(report), report

    def report(self) -> dict[str, dict[str, Any]]:
        """By mode every rank's status, metrics, parity and what was counted when the audit ended."""
        ranks = {mode: engine.report() for mode, engine in self.engines.items()}
        metrics = {mode: engine.metrics() for mode, engine in self.engines.items()}
        parity = {mode: asdict(sum(by_load.values(), Parity())) for mode, by_load in self.parity.items()}
        return {"ranks": ranks, "metrics": metrics, "parity": parity, "audited": self.audited}

    def rows(self, report: dict[str, dict[str, Any]]) -> Rows:
        """Rows of parity and of the ranks of a report."""
        rows: Rows = []
        for mode, by_load in self.parity.items():
            rows += [{"mode": mode, **self.columns(load), **row} for load in by_load for row in by_load[load].rows()]
            rows += [{"mode": mode, "batch": self.spec.batch, **row} for row in rows_of_ranks(report["ranks"][mode])]
        return rows

    def columns(self, load: Load) -> dict[str, int]:
        """Columns that identify a load."""
        length, size = load
        return {"batch": min(size, self.spec.batch)} | ({"prompt": length} if self.plan.random_prompts else {})

    def cache_prompts(self, prompts: list[list[int]]) -> None:
        """Let every engine have the prompts in its cache, where it keeps them: else the first mode alone would not."""
        for engine in self.engines.values() if self.spec.prefix_caching else ():
            engine.generate(prompts, 1)

    def check_parity(self, load: Load) -> None:
        """A greedy pass of a load by every mode, compared with the first one's. An audit, if there is one, ends with
        the first load, for the others are timed, or where nothing is, with the last.

        A load of few requests is run with other prompts too, until there are `COMPARED`: one text may part too early.
        """
        length, size = load
        prompts = [prompt[:length] for prompt in self.prompts[: max(size, COMPARED)]]
        batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        for batch in batches:
            self.cache_prompts(batch)
        passes: dict[str, list[Generation]] = {}
        for mode, engine in self.engines.items():
            say(f"parity: {mode}, {len(prompts)} prompts")
            passes[mode] = [engine.generate(batch, self.plan.max_tokens, logprobs=20) for batch in batches]
            if load == self.loads[0 if self.plan.repeats else -1]:
                engine.on_every_rank(hooks.stop_audit)
                self.audited[mode] = {**engine.metrics(), **engine.report()[0]["counters"]}
        alike = partial(compare, drafted=self.spec.acceptance_length > 0)
        for mode, generations in passes.items():
            self.parity[mode][load] = sum(map(alike, passes[self.plan.modes[0]], generations), Parity())

    def timed(self, load: Load, repeat: int) -> Rows:
        """Rows of one load and repeat, by every mode."""
        rows: Rows = []
        length, size = load
        prompts = [prompt[:length] for prompt in self.prompts[:size]]
        self.cache_prompts(prompts)
        for mode, engine in self.in_order(repeat):
            say(f"repeat {repeat + 1} of {self.plan.repeats}: {mode}, {size} prompts")
            done = engine.generate(prompts, self.plan.max_tokens, 0.0, self.spec.seed + 1000 * repeat)
            common = {"mode": mode, "repeat": repeat, **self.columns(load)}
            rows += [{**common, **row} for row in rows_of_generation(done)]
        return rows

    def profiled(self) -> Rows:
        """Rows `kernel_us` of every mode and batch, once in each order, with prompts of the first length: GPU
        microseconds of a decode step by kind of kernel.
        """
        rows: Rows = []
        loads = [load for load in self.loads if load[0] == self.loads[0][0]]
        for (length, size), repeat in itertools.product(loads, range(2)):
            prompts = [prompt[:length] for prompt in self.prompts[:size]]
            for mode, engine in self.in_order(repeat):
                say(f"profile {repeat + 1} of 2: {mode}, {size} prompts")
                common = {"mode": mode, "repeat": repeat, **self.columns((length, size)), "unit": "us"}
                found = kernel_rows(*engine.kernel_times(prompts, self.plan.max_tokens))
                rows += [{**common, **row} for row in found]
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


# -- the command -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    modes: options.Modes = MODES
    """modes to compare, of off, cow, direct, stage, and vllm without the plugin; the first is the baseline"""
    ks: options.Ks = (4,)
    """draft lengths; engines of one length are up at once, lengths follow each other"""
    workload: Workload = field(default_factory=Workload)
    timing: Timing = field(default_factory=Timing)
    engine: EngineOptions = field(default_factory=EngineOptions)
    output: options.Output = field(default_factory=partial(options.Output, name="bench"))

    @property
    def plan(self) -> Plan:
        return Plan(modes=self.modes, ks=self.ks, **vars(self.workload), **vars(self.timing))


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status, as `run_command` does."""
    return bench_command("bench", Bench, __doc__, argv, show_summary)


def bench_command(
    command: str,
    kind: type[Any],
    description: str | None,
    argv: list[str] | None,
    show: Callable[[pd.DataFrame, Plan, dict[str, Any]], int],
    run: Callable[..., tuple[Rows, dict[str, Any]]] = run,
) -> int:
    """`run_command` for what runs a plan.

    Args:
        show: prints what was found, from the table, the plan and the report, and returns the exit status.
        run: as the `run` of this module, which it is if not given.
    """

    def measure(asked: Any, prepared: tuple[EngineSpec, Plan, list[list[int]]], directory: Path) -> int:
        spec, plan, prompts = prepared
        with progress.moving():
            rows, report = run(spec, plan, prompts, str(directory / "logs" / asked.output.name))
        frame, path = write_results(directory, asked, spec, plan, rows, report)
        if why := report.get("interrupted"):
            plan = replace(plan, repeats=int(frame.groupby("k")["repeat"].nunique().min()))
        status = show(frame, plan, report)
        print(f"written: {path} and .json")
        return fail_kept(command, why, "repeats") if why else status

    return run_command(command, kind, description, argv, options.parse_config, measure)


def fail_kept(command: str, why: str, parts: str) -> int:
    """Say in one line why a run ended early and that its parts are kept; return the exit status."""
    return command_line.fail(
        f"nwor {command}", f"{why}; the {parts} that are whole are kept", 130 if why == STOPPED else 1
    )


def run_command(
    command: str,
    kind: type[Any],
    description: str | None,
    argv: list[str] | None,
    prepare: Callable[[Any], Any],
    measure: Callable[[Any, Any, Path], int],
) -> int:
    """Run a command that starts engines and return its exit status: 2 for wrong input, 1 for an engine that failed.

    Args:
        kind: its options, with the groups `engine` and `output`.
        prepare: makes of the options what is measured, or raises ValueError or OSError for wrong input.
        measure: measures it, given the options, what `prepare` made and the folder of the results.
    """
    fail = partial(command_line.fail, f"nwor {command}")
    try:
        with ExitStack() as held:
            try:
                asked = command_line.parse(kind, argv, f"nwor {command}", description or "")
                with progress.moving():
                    progress.say("reading models and prompts", plain=False)
                    prepared = prepare(asked)
                name = asked.output.name
                directory = held.enter_context(results.alone(asked.output.folder, "--name or --run-dir", f"{name}."))
            except (ValueError, OSError) as error:
                return fail(error)
            logs = directory / "logs" / f"{name}-*.log"
            print(f"weights and cache in {machine.summary(asked.engine.dtype)}; logs: {logs}", flush=True)
            return measure(asked, prepared, directory)
    except (EngineError, OSError) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return fail("interrupted before its end, no results were written; start it again", 130)


def show_summary(frame: pd.DataFrame, plan: Plan, report: Mapping[str, Any]) -> int:
    """Print one line a mode and load, and a sentence a mode that says what follows."""
    table = summary(frame, plan)
    print(table.to_string(index=False, na_rep="", float_format="{:.3f}".format))
    print(*verdicts(table, plan), sep="\n")
    return 0


def write_results(
    directory: Path, asked: Any, spec: EngineSpec, plan: Any, rows: Rows, report: Mapping[str, Any]
) -> tuple[pd.DataFrame, Path]:
    """Write a run's table and, beside it, its report; returns the table and its path.

    asked: the options of the command; `plan` is a dataclass.
    """
    name, model = getattr(plan, "shape", ""), asked.engine.model
    model = name or (Path(model).name if Path(model).is_dir() else model)
    common = {"run_id": directory.name, "model": model, "tp": spec.tp, "batch": spec.batch, "seed": spec.seed}
    common |= {"k": spec.k, "kv_cache_dtype": spec.kv_cache_dtype}
    if forced := f"flash{spec.flash_attn_version}" if spec.flash_attn_version else spec.attention_backend.lower():
        common["attention"] = forced
    if spec.load_format != "auto" and not name:  # a shape's weights are always random
        common["load_format"] = spec.load_format
    if name:
        common["kv_heads"] = shapes.SHAPES[name]["num_key_value_heads"]
    frame = results.tidy(rows, **common)
    path = results.write_table(directory / f"{asked.output.name}.parquet", frame)
    made_by = {"spec": asdict(spec), "plan": asdict(plan), "provenance": results.provenance(asdict(asked))}
    results.write_json(path.with_suffix(".json"), {**report, **made_by})
    return frame, path
