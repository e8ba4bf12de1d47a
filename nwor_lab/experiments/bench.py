# SPDX-License-Identifier: Apache-2.0
"""`nwor bench`: run engines of several modes side by side on the same prompts and write what they did.

Every mode's engine is up at once and they take turns within each repeat, in an order that is turned round from one to
the next, so that a slow minute of the machine hits all of them alike. Parity comes first: a mode whose tokens are
neither the baseline's nor explained gets no step time. An engine that takes turns with its mode paused is its own
baseline.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from nwor.settings import MODES, Settings
from nwor_lab import machine, pair, paths, results
from nwor_lab.engines import clocks, shapes
from nwor_lab.engines.engine import Engine, EngineSpec, Generation, on_cpu
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.experiments.bench_table import counted, kernel_rows, measured, summary
from nwor_lab.experiments.parity import Parity, compare, near_tie
from nwor_lab.experiments.plan import Plan

T = TypeVar("T")
_BEGIN = time.monotonic()


def run(
    spec: EngineSpec, plan: Plan, prompts: Sequence[str | list[int]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the plan.

    Returns:
        Tidy rows, and a report: each mode's status on every rank, its metrics, its parity and its first answers.

    Raises:
        RuntimeError: an engine failed, or a rank does not serve the mode that was asked for.
    """
    if plan.profile and on_cpu():
        raise ValueError("--profile sees the kernels of a GPU: leave it out here")
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    with ExitStack() as stack:
        session = Session(stack, spec, plan, prompts)
        session.judge(*session.first)
        longest = 0.0
        for repeat in range(plan.repeats):
            now = time.monotonic()
            if repeat and 0 < 60 * plan.max_minutes < now - begin + longest:
                print(f"{plan.max_minutes:g} minutes hold {repeat} of {plan.repeats} repeats", file=sys.stderr)
                break
            for temperature in plan.temperatures:
                if plan.paused:  # where a capture puts its buffers must not pass for the mode's doing
                    session.capture_anew()
                rows += session.timed(temperature, repeat)
            longest = max(longest, time.monotonic() - now)
        reports = {mode: engine.report() for mode, engine in session.engines.items()}
        metrics = {mode: engine.metrics() for mode, engine in session.engines.items()}
        failed = ""
        try:
            rows += session.profiled() if plan.profile else []
        except RuntimeError as error:  # a probe that fails must not cost the run its times
            failed = str(error)
    parity: dict[str, Parity] = {}
    for turn in plan.turns:
        by_load = session.parity[turn.name]
        rows += [{**turn.columns, **session.load(*load), **row} for load in by_load for row in by_load[load].rows()]
        ranks = [] if turn.paused else reports[turn.engine]
        rows += [{**turn.columns, "batch": spec.batch, **row} for row in counted(ranks)]
        parity[turn.name] = sum(by_load.values(), Parity())
    report = {
        "ranks": reports,
        "metrics": metrics,
        "parity": {name: asdict(found) for name, found in parity.items()},
        "answers": {turn.engine: session.given[turn.name].text[:4] for turn in plan.turns if not turn.paused},
        "profile_failed": failed,
    }
    return rows, report


def say(doing: str) -> None:
    """Print what begins or has ended, with the seconds since this process began: a notebook's cell shows it at once."""
    print(f"{time.monotonic() - _BEGIN:6.1f} s  {doing}", flush=True)


class Session:
    """The engines of a plan, all up, and the prompts that they take turns with.

    A load is the length of prompts, none of which is longer, and their number; first is that of the first pass.

    parity: by turn and load, of all passes judged so far. given: what the last of them gave, by turn.
    """

    def __init__(self, stack: ExitStack, spec: EngineSpec, plan: Plan, prompts: Sequence[str | list[int]]) -> None:
        self.spec, self.plan = spec, plan
        self.engines = {mode: stack.enter_context(Engine(spec, settings_of(mode, plan.audit))) for mode in plan.modes}
        for mode, engine in self.engines.items():
            engine.wait()
            say(f"{mode}: engine up")
            require_served(mode, engine.report())
        self.turns = [(turn, self.engines[turn.engine]) for turn in plan.turns]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        given = [prompt for prompt in prompts if not isinstance(prompt, str)]
        tokens = given + (self.engines[plan.modes[0]].encode(texts) if texts else [])
        longest = spec.max_model_len - plan.max_tokens
        self.prompts = [prompt[:longest] for prompt in (tokens * plan.most_prompts)[: plan.most_prompts]]
        self.loads = plan.loads(longest, min(engine.capacity() for engine in self.engines.values()))
        self.shortest = min(plan.random_prompts, default=longest)
        # One mode alone has nothing to be compared with: a short pass warms it up.
        self.alone = len(self.turns) == 1 and not plan.audit
        self.first = (self.shortest, 2 if self.alone else plan.num_prompts)
        self.parity: dict[str, dict[tuple[int, int], Parity]] = {turn.name: {} for turn in plan.turns}
        self.given: dict[str, Generation] = {}

    def cut(self, length: int, size: int) -> list[list[int]]:
        """The prompts of a load."""
        return [prompt[:length] for prompt in self.prompts[:size]]

    def load(self, length: int, size: int) -> dict[str, int]:
        """What rows of a load are told by."""
        load = {"batch": min(size, self.spec.batch)}
        return load | ({"prompt": length} if self.plan.random_prompts else {})

    def judge(self, length: int, size: int) -> None:
        """A greedy pass of a load by every turn, compared with the baseline's, for an engine that pauses with its own
        paused. An audit, if there is one, ends with the first.
        """
        prompts = self.cut(length, size)
        if self.spec.prefix_caching:
            for engine in self.engines.values():
                engine.generate(prompts, 1)  # every turn finds the prompts cached: its sums are as in the others
        max_tokens, logprobs = (8, 0) if self.alone else (self.plan.max_tokens, 20)  # as many as vLLM gives
        served_first = sorted(self.turns, key=lambda pair: pair[0].paused)  # an audit is over before its mode pauses
        for turn, engine in served_first:
            with turn.on(engine):
                if turn.paused:
                    require_served("off", engine.report(), turn.engine)
                say(f"{turn.name}: {len(prompts)} prompts, to be judged")
                self.given[turn.name] = engine.generate(prompts, max_tokens, logprobs=logprobs)
            engine.stop_audit()
        for turn in self.plan.turns:
            baseline = replace(turn, paused=True) if turn.pauses else self.plan.turns[0]
            drafted = self.spec.acceptance_length > 0
            found = compare(self.given[baseline.name], self.given[turn.name], drafted=drafted)
            by_load = self.parity[turn.name]
            by_load[length, size] = by_load.get((length, size), Parity()) + found

    def capture_anew(self) -> None:
        """New graphs for every engine whose graphs hold the mode that pauses."""
        for turn, engine in self.turns:
            if turn.paused:
                engine.capture_anew()

    def timed(self, temperature: float, repeat: int) -> list[dict[str, Any]]:
        """Rows of one repeat: every load, by every turn.

        What has not been judged is, first: other loads than the first pass's, and all in graphs that are new. And where
        prompts are cached: else the first turn alone would find none, and the chip cool.
        """
        rows: list[dict[str, Any]] = []
        plan = self.plan
        for length, size in self.loads:
            if plan.paused or self.spec.prefix_caching or (repeat == 0 and (length, size) != self.first):
                self.judge(length, size)
            cut = self.cut(length, size)
            load = {"repeat": repeat, "temperature": temperature, **self.load(length, size)}
            for turn, engine in self.turns[:: -1 if repeat % 2 else 1]:
                say(f"{turn.name}: {size} prompts, repeat {repeat + 1} of {plan.repeats}")
                with turn.on(engine), clocks.watched(0 if on_cpu() else self.spec.tp) as seen:
                    generation = engine.generate(cut, plan.max_tokens, temperature, plan.seed + 1000 * repeat)
                rows += [{**turn.columns, **load, **row} for row in [*measured(generation), *seen]]
        return rows

    def profiled(self) -> list[dict[str, Any]]:
        """Rows `kernel_us` of every turn and batch: GPU microseconds of a decode step by kind of kernel.

        Once in each order of turns.
        """
        rows: list[dict[str, Any]] = []
        for size, repeat in itertools.product(self.plan.sizes, range(2)):
            cut = self.cut(self.shortest, size)
            load = {"repeat": repeat, **self.load(self.shortest, size)}
            for turn, engine in self.turns[:: -1 if repeat else 1]:
                with turn.on(engine):
                    found = kernel_rows(*engine.kernel_times(cut, self.plan.max_tokens))
                rows += [{**turn.columns, **load, "unit": "us", **row} for row in found]
        return rows


def settings_of(mode: str, audit: bool) -> Settings:
    """A mode's settings; what repairs vLLM's loading and sampling is the same in all modes, the baseline too."""
    return Settings(mode=mode, audit=audit, debug_sync=mode != "off", eagle_bias=True, fix_cpu_sampling=on_cpu())


def require_served(mode: str, ranks: list[dict[str, Any]], asked: str = "") -> None:
    """Proof of treatment: raise `RuntimeError` unless `mode` itself is active on every rank.

    asked: the mode that the engine was asked for, if it is another.
    """
    wrong = [rank for rank in ranks if rank["mode"] != (asked or mode) or rank["serving"] != mode]
    if wrong or not ranks:
        raise RuntimeError(
            f"mode {mode} is not active on every rank, so nothing may be measured under its name: {wrong}"
        )


def parser(command: str = "bench") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"nwor {command}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--mode", default="off,cow,stage", help=f"modes to compare, of {', '.join(MODES)}; first is baseline"
    )
    made.add_argument("--temperature", default="0", help="temperatures, comma-separated")
    made.add_argument("--prompts", default=str(paths.PROMPTS), help="JSONL file with a `prompt` a line")
    made.add_argument("--shape", default="", help=f"random weights of a shape: {', '.join(shapes.SHAPES)}")
    made.add_argument("--run-dir", default="", help="folder to write to (default: a new one under results/)")
    made.add_argument("--name", default="bench", help="name of the table and report")
    add_fields(made, EngineSpec, {"model": str(paths.PAIR_TARGET), "draft": str(paths.PAIR_EAGLE), "dtype": ""})
    add_fields(made, Plan, {"logit_gap": 0.0}, skip=("modes", "temperatures", "seed"))
    return made


def add_fields(made: argparse.ArgumentParser, kind: type, defaults: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
    """An option for each field of the dataclass `kind`, but for those in `skip`; `defaults` win over its own."""
    for field in fields(kind):
        if field.name in skip:
            continue
        default = defaults.get(field.name, field.default)
        name = "--" + field.name.replace("_", "-")
        if isinstance(default, tuple):
            shown = ",".join(map(str, default)) or "none"
            made.add_argument(name, type=_integers, default=default, help=f"comma-separated; default: {shown}")
        elif isinstance(default, bool):
            made.add_argument(name, action=argparse.BooleanOptionalAction, default=default)
        else:
            made.add_argument(name, type=type(default), default=default, help="default: %(default)s")


def from_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of options as `add_fields` made them; fields that are not among them keep their defaults."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})  # type: ignore[arg-type]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.split(",") if value)


def suit(arguments: argparse.Namespace) -> argparse.Namespace:
    """The same options with a dtype for this machine, which is said, where none was asked for.

    Raises:
        SystemExit: with code 2, and one line on stderr, where vLLM has no cache of the dtype asked for here.
    """
    if refused := machine.refuse_cache(arguments.kv_cache_dtype):
        print(f"--kv-cache-dtype {arguments.kv_cache_dtype}: {refused}", file=sys.stderr)
        raise SystemExit(2)
    if not arguments.dtype:
        print(f"dtype {machine.summary()}", flush=True)
    return argparse.Namespace(**{**vars(arguments), "dtype": machine.model_dtype(arguments.dtype)})


def read(arguments: argparse.Namespace, **fixed: Any) -> tuple[EngineSpec, Plan, list[Any]]:
    """The spec, the plan and the prompts that the arguments describe; `fixed` fields of the plan win.

    A `logit_gap` of 0 is the `near_tie` of the dtype.
    """
    given = vars(arguments)
    if arguments.shape:
        target, head = shapes.write_shape(arguments.shape, paths.RESULTS / "shapes", arguments.max_model_len)
        given = given | {"model": str(target), "draft": str(head), "load_format": FORMAT}
    chosen = {
        "modes": tuple(arguments.mode.split(",")),
        "temperatures": tuple(float(value) for value in arguments.temperature.split(",")),
        "logit_gap": arguments.logit_gap or near_tie(arguments.dtype),
    }
    spec, plan = from_options(EngineSpec, given), from_options(Plan, given | chosen | fixed)
    return spec, plan, random_prompts(plan) if plan.random_prompts else pair.load_prompts(arguments.prompts)


def main(argv: list[str] | None = None) -> int:
    arguments = suit(parser().parse_args(argv))
    spec, plan, prompts = read(arguments)
    rows, report = run(spec, plan, prompts)
    common = {"k": spec.k, "seed": spec.seed, "kv_cache_dtype": spec.kv_cache_dtype}
    if arguments.shape:
        common |= {"model": arguments.shape, "kv_heads": shapes.SHAPES[arguments.shape]["num_key_value_heads"]}
    frame, path = keep(vars(arguments), spec, plan, rows, report, **common)
    table = summary(frame, plan)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    print(f"written: {path} and .json")
    return 0


def keep(
    given: Mapping[str, Any],
    spec: EngineSpec,
    plan: Any,
    rows: Sequence[dict[str, Any]],
    report: Mapping[str, Any],
    **common: Any,
) -> tuple[pd.DataFrame, Path]:
    """Write a run's table and report where the options `run_dir` and `name` say; returns the table and its path.

    common: columns of all rows, beside the run's folder, model, ranks and batch.
    """
    directory = Path(given["run_dir"]) if given["run_dir"] else paths.RESULTS / given["name"]
    model = Path(spec.model).name if Path(spec.model).is_dir() else spec.model
    common = {"run_id": directory.name, "model": model, "tp": spec.tp, "batch": spec.batch} | common
    frame = results.tidy(rows, **common)
    path = results.write_table(directory / f"{given['name']}.parquet", frame)
    made_by = {"spec": asdict(spec), "plan": asdict(plan), "provenance": results.provenance(dict(given))}
    results.write_json(path.with_suffix(".json"), {**report, **made_by})
    return frame, path


def random_prompts(plan: Plan) -> list[list[int]]:
    """Prompts of random token ids, the longest that the plan asks for."""
    import random

    draw = random.Random(plan.seed)
    return [[draw.randrange(10, 250) for _ in range(max(plan.random_prompts))] for _ in range(plan.most_prompts)]


if __name__ == "__main__":
    sys.exit(main())
