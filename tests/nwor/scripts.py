# SPDX-License-Identifier: Apache-2.0
"""What vLLM's features do to requests in flight, as scripts for one engine that serves them after each other.

A script asks for requests before given steps and does something to the engine before others. What it returns is the
same in every mode: `Answer` by request, and whatever else vLLM said.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from nwor_lab import pair, paths
from nwor_lab.engines.child import Served
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.traffic import sampling_params
from tests.nwor.specs import With

K, BLOCK, LONGEST = 4, 32, 192
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


def spec() -> EngineSpec:
    """Four requests of at most six blocks each share fifteen: batches that grow preempt."""
    plain = EngineSpec(
        str(paths.PAIR_TARGET),
        str(paths.PAIR_EAGLE),
        k=K,
        dtype="float32",
        batch=4,
        block_size=BLOCK,
        num_blocks=16,
        max_model_len=LONGEST,
        max_num_batched_tokens=96,
        prefix_caching=True,
    )
    return With(**vars(plain), arguments={"scheduling_policy": "priority"})


def same_ids(patch: pytest.MonkeyPatch) -> None:
    """Requests keep their names, which come again: vLLM's random ids change the order in which blocks are freed."""
    patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")


@dataclass(frozen=True)
class Ask:
    """A request that arrives before step `step`; the lower its priority, the sooner it runs."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    priority: int = 0


@dataclass
class Answer:
    """What came of a request: `ended` is vLLM's reason and what stopped it, both None where it was aborted.

    logprobs: by place those of the best tokens. cached: tokens of its prompt
    that were in the prefix cache. place: how many had ended before.
    """

    tokens: list[int]
    text: str
    ended: tuple[str | None, Any]
    logprobs: list[dict[int, float]]
    cached: int
    place: int


@dataclass
class Found:
    """What a script found: answers in the order of its requests, and preemptions."""

    answers: list[Answer]
    preemptions: int


Act = Callable[[Served], Any]


def drive(served: Served, asked: Sequence[Ask], acts: Mapping[int, Act] | None = None) -> Found:
    """Step the engine until all requests have ended, with an empty prefix cache to begin with.

    acts: what is done before which step.
    """
    engine = served.engine
    engine.reset_prefix_cache()
    before, waiting, latest, ended = _preemptions(served), dict(enumerate(asked)), dict[int, Any](), list[int]()
    for step in range(400):
        for name in [name for name, ask in waiting.items() if ask.step <= step]:
            _add(engine, name, waiting.pop(name))
        (acts or {}).get(step, lambda _: None)(served)
        for output in engine.step():
            latest[int(output.request_id)] = output
            ended += [int(output.request_id)] * output.finished
        if not waiting and not engine.has_unfinished_requests():
            break
    else:
        raise RuntimeError(f"not all have ended: {sorted(set(range(len(asked))) - set(ended))}")
    answers = [_answer(latest.get(name), ended.index(name) if name in ended else -1) for name in range(len(asked))]
    return Found(answers, _preemptions(served) - before)


def _add(engine: Any, name: int, ask: Ask) -> None:
    """It arrives in the order of its name: of equal priorities the scheduler takes the one that came first."""
    how = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, "logprobs": 5, **ask.sampling}
    prompt = {"prompt_token_ids": ask.prompt}
    engine.add_request(str(name), prompt, sampling_params(how), arrival_time=float(name), priority=ask.priority)


def _answer(output: Any, place: int) -> Answer:
    if output is None:
        return Answer([], "", (None, None), [], 0, place)
    [made] = output.outputs
    logprobs = [{token: entry.logprob for token, entry in (best or {}).items()} for best in made.logprobs or []]
    ended = made.finish_reason, made.stop_reason
    return Answer(list(made.token_ids), made.text, ended, logprobs, output.num_cached_tokens or 0, place)


def _preemptions(served: Served) -> int:
    return sum(metric.value for metric in served.llm.get_metrics() if metric.name == "vllm:num_preemptions")


@cache
def texts() -> list[list[int]]:
    """Tokens of the shipped prompts, each as long as a request may be."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(paths.PAIR_TARGET / "tokenizer.json"))
    found = [tokenizer.encode(text).ids for text in pair.load_prompts()]
    return [(ids * LONGEST)[:LONGEST] for ids in found]


def lengths(served: Served) -> Found:
    """Every length there is inside two windows, by `max_tokens` and by the room that a prompt leaves."""
    by_limit = [Ask(texts()[i][: 20 + i], {"max_tokens": 1 + i}) for i in range(2 * K + 2)]
    by_room = [Ask(texts()[i][: LONGEST - 1 - i], {"max_tokens": None}) for i in range(2 * K + 2)]
    return drive(served, by_limit + by_room)


def priorities(served: Served) -> Found:
    """Urgent requests take the blocks and the places of those that run."""
    patient = [Ask(text[:70], {"max_tokens": 80}, priority=5) for text in texts()[:4]]
    return drive(served, patient + [Ask(text[:100], step=8 + i) for i, text in enumerate(texts()[4:7])])


def grammars(served: Served) -> Found:
    """Grammars go on where a preempted request comes back, whose drafts were thrown away."""
    kinds: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": REGEX.replace("12,60", "80,110")}]
    served.engine.engine_core.engine_core.structured_output_manager._use_async_grammar_compilation = False
    bound = [
        Ask(text[:90], {"structured_outputs": kinds[i % 2], "max_tokens": 96, "ignore_eos": False})
        for i, text in enumerate(texts()[:4])
    ]
    return drive(served, [*bound, *(Ask(text[:60], step=5) for text in texts()[4:6])])


def resets_and_pauses(served: Served) -> Found:
    """The prefix cache is reset under running requests, and the engine pauses, keeping them or recomputing them."""
    acts: dict[int, Act] = {
        6: lambda served: served.engine.reset_prefix_cache(reset_running_requests=True),
        14: lambda served: served.engine.sleep(0, "keep"),
        17: lambda served: served.engine.wake_up(),
        20: lambda served: served.engine.sleep(1, "keep"),
        22: lambda served: served.engine.wake_up(),
    }
    return drive(served, [Ask(text[:50], {"max_tokens": 70}) for text in texts()[:4]], acts)


def aborts_beside_a_stem(served: Served) -> Found:
    """Requests share their first blocks; some of them are aborted as others decode, and more come for the same."""
    stem = texts()[0][:70]
    asked = [Ask([*stem, *texts()[i][:9]], {"max_tokens": 48}, step=3 * i) for i in range(8)]
    acts: dict[int, Act] = {step: _abort(step // 3 - 1) for step in (7, 10, 16)}
    return drive(served, asked, acts)


def asked_again_by_its_id(served: Served) -> Found:
    """A request is aborted and asked again at once by its own id: the batch's ids are those of the step before."""
    ask = Ask(texts()[0][: 2 * BLOCK + 1], {"max_tokens": 10})

    def again(served: Served) -> None:
        served.engine.abort_request(["0"])
        _add(served.engine, 0, ask)

    return drive(served, [ask], {3: again})


def _abort(name: int) -> Act:
    return lambda served: served.engine.abort_request([str(name)])


SCRIPTS = lengths, priorities, grammars, resets_and_pauses, aborts_beside_a_stem
