# SPDX-License-Identifier: Apache-2.0
"""Requests of several kinds, for one engine to serve after each other, and what must hold of what it gave."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nwor_lab.bench.parity import compare
from nwor_lab.bench.survival import mean_accepted
from tests.engines import Outcome

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "public": {"type": "boolean"},
        "kind": {"enum": ["class", "function", "module"]},
    },
    "required": ["name", "public", "kind"],
    "additionalProperties": False,
}
REGEX = r"(\n|[ -~]){12,60}"
GRAMMARS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": REGEX}]
KINDS = ["structured", "stopped", "after aborts", "sampled"]


def calls(prompts: list[list[int]], stop_token_ids: list[int]) -> list[dict[str, Any]]:
    """One generation of each of `KINDS`.

    Grammars cut drafts short, beside requests without one. Stops fall inside a window. Aborted requests leave blocks
    that the next ones fill. Temperature 1 is seeded.
    """
    structured = [{"structured_outputs": grammar, "ignore_eos": False} for grammar in GRAMMARS]
    return [
        {"prompts": prompts, "max_tokens": 64, "logprobs": 5, "sampling": [*structured, {}]},
        {"prompts": prompts, "max_tokens": 96, "logprobs": 5, "sampling": [{"stop_token_ids": stop_token_ids}]},
        {"prompts": prompts, "max_tokens": 24, "logprobs": 5, "abandon": 4},
        {"prompts": 2 * prompts, "max_tokens": 48, "temperature": 1.0, "seed": 7},
    ]


def assert_meaningful(outcome: Outcome, stop_token_ids: list[int], k: int, target: Path) -> None:
    """That grammars bound the text and cut drafts, and that stops fell inside accepted runs."""
    structured, stopped = outcome.generations[:2]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    for index, tokens in enumerate(structured.tokens):
        kind, text, finished = index % 3, tokenizer.decode(tokens), tokens[-1] == 0
        if kind == 0:  # white space may take all of its tokens
            assert list(json.loads(text)) == SCHEMA["required"] if finished else re.match(r'\{\s*"name"', text), text
        elif kind == 1:
            assert finished and re.fullmatch(REGEX, text), text
    assert structured.counters["draft_tokens"] < k * structured.counters["drafts"], "no draft was cut by a grammar"
    sampled = len(stopped.tokens) + stopped.counters["drafts"] + stopped.counters["accepted_tokens"]
    by_length = sum(tokens[-1] not in stop_token_ids for tokens in stopped.tokens)
    cut = sampled - sum(map(len, stopped.tokens))
    assert cut > k * by_length, "no stop inside an accepted run"


def assert_like(vanilla: Outcome, outcome: Outcome, mode: str, gap: float) -> None:
    """Vanilla's tokens: all of them under cow, but for near ties under stage, whose acceptance is vanilla's."""
    for kind, theirs, ours in zip(KINDS, vanilla.generations, outcome.generations, strict=True):
        if mode == "cow":
            assert ours.tokens == theirs.tokens, kind
        elif kind != "sampled":
            parity = compare(theirs, ours)
            assert parity.within(gap), (kind, parity)
    sampled = (made.generations[-1] for made in (vanilla, outcome))
    (was, error), (now, other_error) = (mean_accepted(made.accepted_at, made.counters["drafts"]) for made in sampled)
    assert abs(now - was) <= 4 * math.hypot(error, other_error), (was, now, error, other_error)
