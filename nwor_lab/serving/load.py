# SPDX-License-Identifier: Apache-2.0
"""What the servers are asked, by vLLM's own client, and what its reports say as tidy rows."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from nwor.settings import MODES
from nwor_lab import command_line
from nwor_lab.engines.engine import EngineError
from nwor_lab.serving.server import AUDITED, SERVED, Server

WARM = 2
"""Requests before each load, not measured."""
TIMES = [f"{of}_{what}_ms" for what in ("ttft", "tpot", "itl") for of in ("mean", "median", "p99")]
COLUMNS = {
    "request_throughput": ("requests_per_s", "requests/s"),
    "output_throughput": ("tokens_per_s", "tokens/s"),
    **{name: (name, "ms") for name in TIMES},
    "spec_decode_acceptance_length": ("acceptance_length", "tokens"),
    "spec_decode_num_drafts": ("windows", "windows"),
    "spec_decode_accepted_tokens": ("accepted_tokens", "tokens"),
    "max_concurrent_requests": ("most_at_once", "requests"),
    "duration": ("wall", "s"),
    "failed": ("failed", "requests"),
}
"""Metric and unit of each number that is taken from a report of vLLM's client."""


@dataclass(frozen=True)
class Load:
    """Requests of one measurement: `at_once` of them in flight, or where that is 0 `rate` a second."""

    at_once: int
    rate: float
    requests: int

    @property
    def name(self) -> str:
        if self.at_once:
            return f"{self.at_once} at once"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} a second"


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What the servers are asked, and how often."""

    modes: Annotated[tuple[str, ...], arg(aliases=("--mode",))] = ("off", "stage", "cow", "direct")
    """modes to compare, of off, cow, direct and stage; the first is off, the baseline, vLLM never patched"""
    audit: str = ""
    """also a server in which nothing but the sampled auditor (kv_audit/) is, this its VLLM_KV_AUDIT: sample=16"""
    concurrency: tuple[int, ...] = (1, 16, 64)
    """requests in flight of each closed loop, in which an answer's end sends the next request"""
    rates: tuple[float, ...] = ()
    """requests a second of each open load, whose arrivals are a Poisson process; inf for all at once"""
    requests: tuple[int, ...] = (64,)
    """requests of each load, those of the loops first; the last number holds for all that follow"""
    answer: int = 128
    """tokens of every answer; a model's own end is ignored"""
    shortest: int = 60
    """tokens of the shortest prompt; lengths are drawn so that each doubling is as likely as the next"""
    longest: int = 1500
    """tokens of the longest prompt"""
    orders: int = 3
    """passes over all loads; each reverses the order of the modes"""
    warmup: int = 8
    """requests by which every server is warmed up before the first load"""

    def __post_init__(self) -> None:
        command_line.check_names("--modes", self.modes, MODES)
        if self.modes[:1] != ("off",) or len(set(self.modes)) != len(self.modes):
            raise ValueError(f"modes must be different ones, off first, got {','.join(self.modes)}")
        if not self.requests or not self.concurrency + self.rates:
            raise ValueError("there is no load: give --concurrency or --rates, and --requests")
        for name in ("concurrency", "rates"):
            values = getattr(self, name)
            if not all(value > 0 for value in values) or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different values, above 0, got {','.join(map(str, values))}")
        if min(self.requests) < 1:
            raise ValueError(f"requests must be at least 1, got {min(self.requests)}")
        at_least = {"answer": 2, "shortest": 1, "longest": self.shortest, "orders": 1, "warmup": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def loads(self) -> list[Load]:
        kinds = [(n, math.inf) for n in self.concurrency] + [(0, rate) for rate in self.rates]
        numbers = itertools.chain(self.requests, itertools.repeat(self.requests[-1]))
        return [Load(n, 0.0 if n else rate, number) for (n, rate), number in zip(kinds, numbers, strict=False)]

    @property
    def servers(self) -> tuple[str, ...]:
        """The modes, and `AUDITED` where an audit is asked for."""
        return self.modes + (AUDITED,) * bool(self.audit)

    def in_order(self, number: int) -> tuple[str, ...]:
        """The servers in the order of a pass: each reverses the one before."""
        return self.servers[:: -1 if number % 2 else 1]


def draw_prompts(texts: Sequence[str], tokenizer: Any, plan: ServingPlan) -> list[dict[str, Any]]:
    """`prompt` and its `tokens` for as many requests as the largest load has, the same ones each time.

    A prompt is a text's end, and where that is too short others before it, so that it ends as the text does.

    Raises:
        ValueError: there are no texts, or none can be cut to such a length.
    """
    draw, made = random.Random(0), list[dict[str, Any]]()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    between = tokenizer.encode("\n\n\n", add_special_tokens=False)
    for number in range(max(plan.warmup, *(load.requests for load in plan.loads))):
        wanted = round(math.exp(draw.uniform(math.log(plan.shortest), math.log(plan.longest))))
        for _ in range(50 * bool(ids)):
            tokens = ids[number % len(ids)]
            while len(tokens) < wanted:
                tokens = draw.choice(ids) + between + tokens
            prompt = tokenizer.decode(tokens[-wanted:])
            length = len(tokenizer.encode(prompt))  # where it was cut, it may be read as other tokens
            if plan.shortest <= length <= plan.longest:
                break
            wanted += 1 if length < plan.shortest else -1
        else:
            raise ValueError(f"no prompts of {plan.shortest} to {plan.longest} tokens can be made of {len(ids)} texts")
        made.append({"prompt": prompt, "tokens": length})
    return made


class Client:
    """vLLM's `vllm bench serve`, called in this process: a process of its own would take ten seconds a load.

    Args:
        tokenizer: folder or name of the model whose tokenizer counts.
        data: JSONL file with a `prompt` a line, which are sent in its order.
        answer: tokens of every answer.
        log: file for what the client prints.
    """

    def __init__(self, tokenizer: str, data: Path, answer: int, log: Path) -> None:
        self._log = open(log, "a", buffering=1)  # noqa: SIM115 - vLLM's loggers keep it
        with self._to_log():
            from vllm.benchmarks import serve
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            self._serve, self._parser = serve, FlexibleArgumentParser()
            serve.add_cli_args(self._parser)
        self._common = ["--model", tokenizer, "--served-model-name", SERVED, "--dataset-path", str(data)]
        self._common += ["--custom-output-len", str(answer), "--backend", "openai", "--endpoint", "/v1/completions"]
        self._common += ["--dataset-name", "custom", "--disable-shuffle", "--skip-chat-template", "--no-oversample"]
        self._common += ["--ignore-eos", "--temperature", "0", "--save-detailed", "--disable-tqdm"]
        self._common += ["--ready-check-timeout-sec", "0"]

    @contextlib.contextmanager
    def _to_log(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._log), contextlib.redirect_stderr(self._log):
            yield

    def ask(self, server: Server, load: Load, warm: int = WARM) -> dict[str, Any]:
        """The client's report of one load on one server.

        Raises:
            EngineError: the server died.
        """
        how = ["--max-concurrency", str(load.at_once)] if load.at_once else ["--request-rate", str(load.rate)]
        how += ["--num-prompts", str(load.requests), "--num-warmups", str(warm), "--base-url", server.url]
        server.check(f"before the load of {load.name}")
        with self._to_log():
            report = self._serve.main(self._parser.parse_args([*self._common, *how]))
        time.sleep(2.0 * bool(report["failed"]))  # in which a server ends whose engine died
        server.check(f"under the load of {load.name}")
        return report


def read_report(report: Mapping[str, Any], load: Load, mode: str, answer: int) -> list[dict[str, Any]]:
    """Metrics, values and units of a report, by `COLUMNS`.

    Raises:
        EngineError: a request failed, an answer has not its length, or no draft was verified.
    """
    errors = [str(error).strip().splitlines() for error in report["errors"] if error]
    if report["failed"] or errors or report["completed"] != load.requests:
        first = f": {errors[0][-1]}" if errors else ""
        raise EngineError(
            f"{mode}, {load.name}: {load.requests - report['completed']} of {load.requests} requests failed{first}"
        )
    if set(report["output_lens"]) != {answer}:
        raise EngineError(f"{mode}, {load.name}: answers of {sorted(set(report['output_lens']))} tokens, not {answer}")
    if not report.get("spec_decode_num_drafts"):
        raise EngineError(f"{mode}, {load.name}: the server verified no draft")
    return [{"metric": name, "value": float(report[key]), "unit": unit} for key, (name, unit) in COLUMNS.items()]


def equal_rows(texts: Mapping[str, Sequence[str]], before: Sequence[str] | None) -> list[dict[str, Any]]:
    """By mode the share of requests with `off`'s text; for `off` with its own of the pass before, if there was one."""
    others = {mode: before if mode == "off" else texts["off"] for mode in texts}
    return [
        {"mode": mode, "metric": "equal", "value": sum(map(str.__eq__, texts[mode], other)) / len(other), "unit": ""}
        for mode, other in others.items()
        if other
    ]
