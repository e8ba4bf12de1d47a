# SPDX-License-Identifier: Apache-2.0
"""What a soak serves, drawn from its seed: engine configurations, and scripts of arrivals and aborts."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nwor_lab import pair, paths, results
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.traffic import Event
from nwor_lab.machine import on_cpu

_ROOM = 256  # tokens of a request, at most
DRAFTERS = ("eagle", "every draft accepted", "no draft accepted", "ngram")
"""Who proposes: the pair's head; the target itself; `contrary`; or ngram, whose windows have every length up to k."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["class", "function"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"(\n|[ -~]){12,40}"},
    {"choice": ["return self", "return None", "raise ValueError"]},
]
STOPS = ["\n", "self", "):", "e"]


def configuration(seed: int, episode: int, tp: int = 0) -> EngineSpec:
    """The engines of an episode, but for their mode; as many episodes as there are drafters have one of each.

    The first has the pair's head and two drafts or more, of which one window accepts some and rejects others; then come
    the drafters that are always right and always wrong. So all that may become of drafts occurs in a short run too.

    On a GPU all are of bfloat16, which its attention wants, and most with CUDA graphs.

    tp: tensor-parallel ranks, or 0 for two in every fifth episode and one in the others.
    """
    draw = random.Random(f"{seed} {episode}")
    extremes = random.Random(seed).sample(DRAFTERS[1:3], 2)
    drafters = (DRAFTERS[0], *extremes, *DRAFTERS[3:])
    block_size = draw.choice((32, 32, 64))
    batch = draw.randint(3, 8)
    spec = EngineSpec(
        model=str(paths.PAIR_TARGET),
        **_drafter(drafters[episode % len(DRAFTERS)]),
        k=draw.randint(1 if episode else 2, 6),
        tp=tp or 1 + (episode % 5 == 3),
        dtype=draw.choice(("float32", "float32", "bfloat16")),
        batch=batch,
        max_num_batched_tokens=draw.choice((32, 48, 96, 192)),
        max_model_len=_ROOM,
        # Room for one request of the longest, and for less than the others may come to ask for.
        num_blocks=1 + (_ROOM + batch * draw.randint(24, 64)) // block_size,
        block_size=block_size,
        prefix_caching=draw.random() < 0.75,
        seed=seed,
    )
    if on_cpu():
        return spec
    # The scheduler runs no step ahead: then no window is run after its request has ended, and all counts are the same.
    eager = draw.random() < 0.25
    return replace(spec, dtype="bfloat16", enforce_eager=eager, async_scheduling=False, kv_cache_memory=512)


def _drafter(name: str) -> dict[str, Any]:
    """Fields of a configuration for one of `DRAFTERS`."""
    if name == "eagle":
        return {"draft": str(paths.PAIR_EAGLE)}
    if name == "ngram":
        return {"method": "ngram"}
    draft = contrary() if name == "no draft accepted" else paths.PAIR_TARGET
    return {"method": "draft_model", "draft": str(draft)}


def contrary() -> Path:
    """The folder of a drafter that proposes what the target finds least likely: the target, its last norm negated."""
    from safetensors.torch import load_file, save_file

    folder = paths.RESULTS / "shapes" / "contrary"
    if not (folder / "model.safetensors").is_file():
        weights = load_file(paths.PAIR_TARGET / "model.safetensors")
        weights["model.norm.weight"] = -weights["model.norm.weight"]
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            results.write_text(folder / name, (paths.PAIR_TARGET / name).read_text(encoding="utf-8"))
        with results.whole_file(folder / "model.safetensors") as part:
            save_file(weights, part, metadata={"format": "pt"})
    return folder


def script(seed: int, spec: EngineSpec) -> list[Event]:
    """Arrivals and aborts for one engine, some dozens of steps long."""
    draw = random.Random(seed)
    stems = [_text(draw, draw.randint(1, 100)) for _ in range(3)]
    # A near tie is known by its log-probabilities, and they cost time: float32 has hardly any.
    logprobs = {"logprobs": 5 if spec.dtype == "float32" else 20}
    events: list[Event] = []
    greedy: list[str] = []
    step = 0
    for number in range(draw.randint(8, 14)):
        step += draw.choice((0, 0, 1, 2, 5))
        name = f"r{number}"
        prompt = draw.choice(stems) + _text(draw, draw.randint(1, 40))
        if draw.random() < 0.25:
            prompt = 3 * prompt[:40]  # goes on as it began, which ngram foresees
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw.randint(1, 48), "ignore_eos": True}
        follows, kind = "", draw.random()
        if kind < 0.12:
            sampling["temperature"] = 1.0
        elif kind < 0.24:
            sampling |= {"temperature": 1.0, "n": draw.randint(2, 4)}
        else:
            sampling |= logprobs
            if kind < 0.40:
                sampling |= {"structured_outputs": draw.choice(GRAMMARS), "ignore_eos": False}
            elif kind < 0.52:
                sampling["stop"] = draw.sample(STOPS, 2)
            elif kind < 0.70 and greedy:
                follows, prompt = draw.choice(greedy[-3:]), prompt[-draw.randint(1, 20) :]
            greedy.append(name)
        events.append(Event(step, name, prompt, sampling, follows))
        if draw.random() < 0.15:
            events.append(Event(step + draw.randint(1, 12), name))
    return events


def kinds(events: Sequence[Event]) -> Counter[str]:
    """How many requests of each kind a script has; a request may be of several."""
    found: Counter[str] = Counter()
    for event in events:
        if event.prompt is None:
            found["aborts"] += 1
            continue
        fields = event.sampling
        found["requests"] += 1
        found["sampled"] += fields["temperature"] > 0
        found["n > 1"] += fields.get("n", 1) > 1
        found["structured"] += "structured_outputs" in fields
        found["stop strings"] += "stop" in fields
        found["joining"] += bool(event.follows)
    return found


@functools.cache
def _corpus() -> list[list[int]]:
    tokenizer = pair.load_tokenizer()
    return [encoding.ids for encoding in tokenizer.encode_batch(pair.load_prompts())]


def _text(draw: random.Random, length: int) -> list[int]:
    """Tokens from somewhere in the pair's prompts, at least one."""
    tokens = draw.choice(_corpus())
    start = draw.randrange(len(tokens))
    return tokens[start : start + length]
