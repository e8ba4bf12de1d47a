# SPDX-License-Identifier: Apache-2.0
"""What a soak serves: engine configurations by seed, and scripts of arrivals and aborts, which hypothesis draws."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nwor_lab import pair, paths
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.traffic import Event
from nwor_lab.machine import on_cpu
from nwor_lab.run import results

ROOM = 256
"""Tokens of a request, at most."""
DRAFTERS = ("eagle", "every draft accepted", "no draft accepted", "ngram")
"""Who proposes: the pair's head, the target itself, `worst_drafter`, or ngram, whose windows have any length to k."""


def configuration(seed: int, tp: int = 0) -> EngineSpec:
    """The engines of a seed, but for their mode; four seeds in a row have one of each of `DRAFTERS`.

    On a GPU all are of bfloat16, which its attention wants, and most with CUDA graphs.

    tp: tensor-parallel ranks, or 0 for two with every fifth seed and one with the others.
    """
    draw, drafter = random.Random(seed), DRAFTERS[seed % len(DRAFTERS)]
    proposes = {
        "eagle": {"draft": str(paths.PAIR_EAGLE)},
        "every draft accepted": {"method": "draft_model", "draft": str(paths.PAIR_TARGET)},
        "no draft accepted": {"method": "draft_model"},
        "ngram": {"method": "ngram"},
    }[drafter]
    if drafter == "no draft accepted":
        proposes["draft"] = str(worst_drafter())
    block_size, batch = draw.choice((32, 32, 64)), draw.randint(3, 8)
    spec = EngineSpec(
        model=str(paths.PAIR_TARGET),
        draft=proposes.get("draft", ""),
        method=proposes.get("method", "eagle"),
        k=draw.randint(2 if drafter == "eagle" else 1, 6),  # of two drafts one may be accepted and one rejected
        tp=tp or 1 + (seed % 5 == 3),
        dtype=draw.choice(("float32", "float32", "bfloat16")),
        batch=batch,
        max_num_batched_tokens=draw.choice((32, 48, 96, 192)),
        max_model_len=ROOM,
        # Room for one request of the longest, and for less than the others may come to ask for.
        num_blocks=1 + (ROOM + batch * draw.randint(24, 64)) // block_size,
        block_size=block_size,
        prefix_caching=draw.random() < 0.75,
        seed=seed,
    )
    if on_cpu():
        return spec
    # The scheduler runs no step ahead: then no window is run after its request has ended, and all counts are the same.
    eager = draw.random() < 0.25
    return replace(spec, dtype="bfloat16", enforce_eager=eager, async_scheduling=False, kv_cache_memory=512)


def worst_drafter() -> Path:
    """The folder of a drafter that proposes what the target finds least likely: the target, its last norm negated."""
    from safetensors.torch import load_file, save_file

    folder = paths.RESULTS / "shapes" / "worst_drafter"
    if not (folder / "model.safetensors").is_file():
        weights = load_file(paths.PAIR_TARGET / "model.safetensors")
        weights["model.norm.weight"] = -weights["model.norm.weight"]
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            results.write_text(folder / name, (paths.PAIR_TARGET / name).read_text(encoding="utf-8"))
        with results.whole_file(folder / "model.safetensors") as part:
            save_file(weights, part, metadata={"format": "pt"})
    return folder


# -- what hypothesis draws -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request of a script.

    when: engine steps from the arrival before it to its own, and from there to its abort; 0 if it may end.
    prompt: token ids.
    sampling: fields of vLLM's `SamplingParams`.
    follows: it begins with the answer of the greedy request that lies so many greedy ones back; 0: of none.
    """

    when: tuple[int, int]
    prompt: list[int]
    sampling: dict[str, Any]
    follows: int


def events(requests: Sequence[Request], logprobs: int) -> list[Event]:
    """The script of these requests. Greedy ones ask for log-probabilities, by which a near tie is known."""
    script: list[Event] = []
    greedy: list[str] = []
    step = 0
    for number, request in enumerate(requests):
        (pause, abort), name, sampling = request.when, f"r{number}", request.sampling
        step += pause
        follows = greedy[-request.follows] if 0 < request.follows <= len(greedy) else ""
        if sampling["temperature"] == 0:
            greedy.append(name)
            sampling = sampling | {"logprobs": logprobs}
        script.append(Event(step, name, request.prompt, sampling, follows))
        if abort:
            script.append(Event(step + abort, name))
    return script


@functools.cache
def prompts() -> list[list[int]]:
    """Token ids from the shipped prompts, shortest first: some begin alike, some go on as they began, which ngram
    foresees."""
    draw = random.Random(0)
    tokens = [token for each in pair.load_tokenizer().encode_batch(pair.load_prompts()) for token in each.ids]
    found = []
    for _ in range(96):
        stem, at = 100 * draw.randrange(3), draw.randrange(len(tokens) - 40)
        prompt = tokens[stem : stem + draw.randint(0, 100)] + tokens[at : at + draw.randint(1, 40)]
        found.append(3 * prompt[:40] if draw.random() < 0.25 else prompt)
    return sorted(found, key=len)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["class", "function"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
ENDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"ignore_eos": True, "stop": ["\n", "e"]},
    {"ignore_eos": True, "stop": ["self", "):"]},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": r"(\n|[ -~]){12,40}"}},
    {"structured_outputs": {"choice": ["return self", "return None", "raise ValueError"]}},
]
"""What ends an answer, beside its length."""
LENGTHS = (1, 7, 20, 48)
SAMPLING: list[dict[str, Any]] = [
    *({"temperature": 0.0, "max_tokens": length, **end} for end in ENDS for length in LENGTHS),
    *({"temperature": 1.0, "max_tokens": length, "n": n, "ignore_eos": True} for n in (1, 3) for length in LENGTHS),
]
# A choice a field: of a list whose elements take more than five, hypothesis leaves hardly any out when it shrinks.
REQUESTS = st.builds(
    Request,
    when=st.sampled_from([(pause, abort) for abort in (0, 0, 0, 0, 1, 3, 7, 12) for pause in (0, 0, 1, 2, 5)]),
    prompt=st.integers(0, 95).map(lambda number: prompts()[number]),
    sampling=st.sampled_from(SAMPLING),
    follows=st.sampled_from((0, 0, 0, 1, 2)),
)
SCRIPTS = st.lists(REQUESTS, min_size=1, max_size=16)
