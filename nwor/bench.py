# SPDX-License-Identifier: Apache-2.0
"""`python -m nwor bench`: run engines of several modes side by side on the same prompts and write what they did.

Every mode's engine is up at once and they take turns within each repeat, in an order that is turned round from one to
the next, so that a slow minute of the machine hits all of them alike. Parity comes first: a mode whose tokens are
neither the baseline's nor explained gets no step time. An engine that takes turns with its mode paused is its own
baseline.
"""

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from nwor import clocks, pair, paths, results, shapes
from nwor.engine import Engine, EngineSpec, Generation, on_cpu
from nwor.parity import Parity, compare
from nwor.ratios import crossover
from nwor.settings import MODES, Settings
from nwor.vllm.random_weights import FORMAT

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What takes a turn: the engine of a mode, as it is or with its mode paused, which makes it vanilla.

    engine: the mode of the engine that serves. pauses: whether this engine takes turns of both kinds.
    """

    engine: str
    pauses: bool = False
    paused: bool = False

    @property
    def name(self) -> str:
        return self.engine + " paused" * self.paused

    @property
    def columns(self) -> dict[str, str]:
        """What its rows are told by: the mode that serves, and an engine that is to be compared with itself."""
        return {"mode": "off" if self.paused else self.engine, "engine": self.engine if self.pauses else ""}

    @contextmanager
    def on(self, engine: Engine) -> Iterator[None]:
        """The mode of `engine` paused, if this is such a turn."""
        if self.paused:
            engine.pause()
        yield
        if self.paused:
            engine.resume()


@dataclass(frozen=True)
class Plan:
    """What is run on the engines.

    modes: the first is the baseline that engines without turns of their own as vanilla are compared with.
    temperatures: 0 is greedy; parity of tokens is judged there alone.
    num_prompts: prompts of the first pass, and of the timed ones where `batches` is empty.
    batches: prompts of each timed generation, one after the other; the engine's `batch` is the most that run at once.
    random_prompts: lengths of prompts of random token ids, each timed with every batch that the caches hold; none for
        the prompts given.
    profile: also take GPU time by kind of kernel in one untimed generation a batch and mode (on a GPU).
    paused: let each treated engine take turns with its mode paused as well: it is compared with itself as vanilla, in
        graphs that, where they hold the mode, are captured anew for every repeat.
    audit: hold the first pass, which is not timed, to the whole-cache audit.
    max_minutes: into the run, from when on no repeat but the first begins; 0 for no limit.
    logit_gap: the bound in nats below which a differing token is a near tie, and which no log-probability may shift by.
    """

    modes: tuple[str, ...] = ("off", "cow", "stage")
    temperatures: tuple[float, ...] = (0.0,)
    num_prompts: int = 8
    batches: tuple[int, ...] = ()
    random_prompts: tuple[int, ...] = ()
    max_tokens: int = 64
    repeats: int = 5
    max_minutes: float = 0.0
    logit_gap: float = 0.25
    seed: int = 0
    profile: bool = False
    paused: bool = False
    audit: bool = True

    @property
    def turns(self) -> list[Turn]:
        """Those of each repeat, in order."""
        turns = []
        for mode in self.modes:
            pauses = self.paused and mode != "off"
            turns += [Turn(mode, pauses, paused) for paused in ((True, False) if pauses else (False,))]
        return turns

    @property
    def sizes(self) -> tuple[int, ...]:
        """Prompts of each timed generation."""
        return self.batches or (self.num_prompts,)

    @property
    def most_prompts(self) -> int:
        return max(self.num_prompts, *self.sizes)

    def loads(self, longest: int, capacity: int) -> list[tuple[int, int]]:
        """Length of the prompts (at most `longest`) and number of them, of each timed generation.

        Those that the caches (`capacity` positions) would not hold at once are left out, and said.
        """
        lengths = [min(longest, length) for length in self.random_prompts] or [longest]
        every = list(itertools.product(lengths, self.sizes))
        if not self.random_prompts:
            return every
        fits = [(length, size) for length, size in every if size * (length + self.max_tokens) <= capacity]
        for length, size in every:
            if (length, size) not in fits:
                print(f"left out: {size} prompts of {length} tokens, the cache has {capacity} slots", file=sys.stderr)
        return fits

    def __post_init__(self) -> None:
        for mode in self.modes:
            Settings(mode=mode)
        if len(set(self.modes)) != len(self.modes):
            raise ValueError(f"modes repeat: {','.join(self.modes)}")
        if self.repeats < 0 or min(self.num_prompts, *self.sizes, *self.random_prompts) < 1:
            raise ValueError("repeats must be at least 0, num_prompts, batches and random_prompts at least 1")
        if self.max_minutes < 0:
            raise ValueError(f"max_minutes must be at least 0, no limit, got {self.max_minutes}")


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
        session.judge(session.few, session.shortest)
        for repeat in range(plan.repeats):
            if repeat and 0 < 60 * plan.max_minutes < time.monotonic() - begin:
                print(f"{plan.max_minutes:g} minutes are over: {repeat} of {plan.repeats} repeats", file=sys.stderr)
                break
            for temperature in plan.temperatures:
                if plan.paused:  # where a capture puts its buffers must not pass for the mode's doing
                    session.capture_anew()
                rows += session.timed(temperature, repeat)
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
        rows += [{**turn.columns, **session.load(*load), **row} for load in by_load for row in judged(by_load[load])]
        ranks = [] if turn.paused else reports[turn.engine]
        rows += [{**turn.columns, "batch": spec.batch, **row} for row in counted(ranks)]
        parity[turn.name] = sum(by_load.values(), Parity(0, 0, 0.0))
    report = {
        "ranks": reports,
        "metrics": metrics,
        "parity": {name: asdict(found) for name, found in parity.items()},
        "answers": {turn.engine: session.given[turn.name].text[:4] for turn in plan.turns if not turn.paused},
        "profile_failed": failed,
    }
    return rows, report


class Session:
    """The engines of a plan, all up, and the prompts that they take turns with.

    few: prompts of the first pass. parity: by turn and load, of all passes judged so far.
    given: what the last of them gave, by turn.
    """

    def __init__(self, stack: ExitStack, spec: EngineSpec, plan: Plan, prompts: Sequence[str | list[int]]) -> None:
        self.spec, self.plan = spec, plan
        self.engines = {mode: stack.enter_context(Engine(spec, settings_of(mode, plan.audit))) for mode in plan.modes}
        for mode, engine in self.engines.items():
            engine.wait()
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
        self.few = [prompt[: self.shortest] for prompt in self.prompts[: 2 if self.alone else plan.num_prompts]]
        self.parity: dict[str, dict[tuple[int, int], Parity]] = {turn.name: {} for turn in plan.turns}
        self.given: dict[str, Generation] = {}

    def load(self, length: int, size: int) -> dict[str, int]:
        """What rows of `size` prompts of this length are told by."""
        load = {"batch": min(size, self.spec.batch)}
        return load | ({"prompt": length} if self.plan.random_prompts else {})

    def judge(self, prompts: list[list[int]], length: int) -> None:
        """A greedy pass of every turn, compared with the baseline's, for an engine that pauses with its own paused.

        An audit, if there is one, ends with the first.

        length: of the prompts, none of which is longer.
        """
        if self.spec.prefix_caching:
            for engine in self.engines.values():
                engine.generate(prompts, 1)  # every turn finds the prompts cached: its sums are as in the others
        max_tokens, logprobs = (8, 0) if self.alone else (self.plan.max_tokens, 20)  # as many as vLLM gives
        served_first = sorted(self.turns, key=lambda pair: pair[0].paused)  # an audit is over before its mode pauses
        for turn, engine in served_first:
            with turn.on(engine):
                if turn.paused:
                    require_served("off", engine.report(), turn.engine)
                self.given[turn.name] = engine.generate(prompts, max_tokens, logprobs=logprobs)
            engine.stop_audit()
        for turn in self.plan.turns:
            baseline = replace(turn, paused=True) if turn.pauses else self.plan.turns[0]
            drafted = self.spec.acceptance_length > 0
            found = compare(self.given[baseline.name], self.given[turn.name], drafted=drafted)
            by_load, load = self.parity[turn.name], (length, len(prompts))
            by_load[load] = by_load[load] + found if load in by_load else found

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
            cut = [prompt[:length] for prompt in self.prompts[:size]]
            if plan.paused or self.spec.prefix_caching or (repeat == 0 and cut != self.few):
                self.judge(cut, length)
            load = {"repeat": repeat, "temperature": temperature, **self.load(length, size)}
            for turn, engine in self.turns[:: -1 if repeat % 2 else 1]:
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
            cut = [prompt[: self.shortest] for prompt in self.prompts[:size]]
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
    wrong = [rank for rank in ranks if rank["mode"] != (asked or mode) or not rank["serving"].startswith(mode)]
    if wrong or not ranks:
        raise RuntimeError(
            f"mode {mode} is not active on every rank, so nothing may be measured under its name: {wrong}"
        )


def measured(generation: Generation) -> list[dict[str, Any]]:
    """Tidy rows of one generation: step times, tokens, acceptance by position."""
    count = generation.counters
    rows = [
        {"metric": "step_ms", "value": 1e3 * seconds, "unit": "ms", "step": step}
        for step, seconds in enumerate(generation.step_seconds)
    ]
    rows += [
        {"metric": "tokens", "value": sum(map(len, generation.tokens)), "unit": "tokens"},
        {"metric": "wall", "value": sum(generation.step_seconds), "unit": "s"},
        {"metric": "windows", "value": count["drafts"], "unit": "windows"},
        {"metric": "draft_tokens", "value": count["draft_tokens"], "unit": "tokens"},
        {"metric": "accepted_tokens", "value": count["accepted_tokens"], "unit": "tokens"},
    ]
    rows += [
        {"metric": "accepted_at", "value": accepted, "unit": "windows", "position": position}
        for position, accepted in enumerate(generation.accepted_at)
    ]
    return rows


KINDS = {
    "KV write": r"reshape_and_cache",
    "attention": r"flash|unified_attention|verify_windows|fmha|FlashAttn",
    "NWOR": r"nwor::",
    "communication": r"nccl|(?i:all_?reduce)|cross_device_reduce|multimem",
    "matmul": r"gemm|nvjet|cutlass|cublas|splitK",
}


def kernel_rows(ranks: Sequence[dict[str, float]], steps: int) -> list[dict[str, Any]]:
    """GPU microseconds of a step by kind of kernel, mean of the ranks; what a name does not tell is ``other``."""
    sums = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, microseconds in itertools.chain.from_iterable(times.items() for times in ranks):
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        sums[kind] += microseconds / steps / len(ranks)
    return [{"metric": "kernel_us", "value": value, "kind": kind} for kind, value in sums.items()]


def judged(parity: Parity) -> list[dict[str, Any]]:
    """Tidy rows of how tokens compare."""
    return [
        {"metric": "equal_requests", "value": parity.equal, "unit": "requests"},
        {"metric": "requests", "value": parity.requests, "unit": "requests"},
        {"metric": "largest_gap", "value": parity.largest_gap, "unit": "nats"},
        {"metric": "largest_shift", "value": parity.largest_shift, "unit": "nats"},
    ]


def parity_of(rows: pd.DataFrame) -> Parity:
    """What rows of `judged` say together; of none that nothing differs."""
    values = rows.groupby("metric")["value"]
    total, most = values.sum(), values.max()
    counts = (int(total.get(name, 0)) for name in ("equal_requests", "requests"))
    return Parity(*counts, *(float(most.get(name, 0.0)) for name in ("largest_gap", "largest_shift")))


def counted(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tidy rows of what holds for the whole run: each rank's counters and audit."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        for kind in ("counters", "audit"):
            for name, value in rank[kind].items():
                if isinstance(value, list):
                    continue
                unit = "bytes" if name.startswith("bytes") else "count"
                rows.append({"metric": f"{kind}.{name}", "value": value, "unit": unit, "rank": rank["rank"]})
    return rows


def summary(frame: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """One line a turn, batch and length of prompts: parity, acceptance, step time and its ratio to the baseline's.

    That is the first mode, and for an engine that takes turns with its mode paused, itself so. A step's time is the
    median over steps; repeats give its spread, and the ratio is their `crossover`. Where a turn is without
    parity its speed columns stay empty, and everywhere if a pass that is not timed, as the first, is without.
    """
    lines: list[dict[str, Any]] = []
    timed = frame[frame.metric == "step_ms"]
    load = [name for name in ("prompt", "batch") if name in timed]
    loads = timed[load].drop_duplicates()
    for _, found in loads.iterrows() if len(timed) else [(0, pd.Series())]:
        bases: dict[str, pd.Series] = {}
        for turn in plan.turns:
            part = frame[(frame[list(turn.columns)] == pd.Series(turn.columns)).all(axis=1)]
            here = part[(part[found.index] == found).all(axis=1)]
            untimed = part.merge(loads, on=load, how="left", indicator=True)["_merge"].eq("left_only").to_numpy()
            parity, total = parity_of(here), here.groupby("metric")["value"].sum()
            steps = here[here.metric == "step_ms"].groupby("repeat").value.median()
            clock = here.loc[here.metric == "sm_clock", "value"]
            good = (parity + parity_of(part[untimed])).explained(plan.logit_gap)
            base = bases.setdefault(turn.columns["engine"], steps)
            line = {name: int(value) for name, value in found.items()}
            lines.append(
                {
                    "mode": turn.name,
                    **line,
                    "equal": f"{parity.equal}/{parity.requests}",
                    "gap_nats": parity.largest_gap,
                    "shift_nats": parity.largest_shift,
                    "acceptance_length": 1 + total.get("accepted_tokens", 0) / max(1, total.get("windows", 0)),
                    "step_ms": steps.median() if good else math.nan,
                    "spread_ms": steps.max() - steps.min() if good else math.nan,
                    "ratio": crossover(steps / base) if good and len(steps) else math.nan,
                    **({"clock_mhz": clock.median()} if len(clock) else {}),
                }
            )
    return pd.DataFrame(lines)


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
    add_fields(made, EngineSpec, {"model": str(paths.PAIR_TARGET), "draft": str(paths.PAIR_EAGLE)})
    add_fields(made, Plan, {}, skip=("modes", "temperatures", "seed"))
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


def read(arguments: argparse.Namespace, **fixed: Any) -> tuple[EngineSpec, Plan, list[Any]]:
    """The spec, the plan and the prompts that the arguments describe; `fixed` fields of the plan win."""
    given = vars(arguments)
    if arguments.shape:
        target, head = shapes.write_shape(arguments.shape, paths.RESULTS / "shapes", arguments.max_model_len)
        given = given | {"model": str(target), "draft": str(head), "load_format": FORMAT}
    chosen = {
        "modes": tuple(arguments.mode.split(",")),
        "temperatures": tuple(float(value) for value in arguments.temperature.split(",")),
    }
    spec, plan = from_options(EngineSpec, given), from_options(Plan, given | chosen | fixed)
    return spec, plan, random_prompts(plan) if plan.random_prompts else pair.load_prompts(arguments.prompts)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
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
