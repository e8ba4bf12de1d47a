# SPDX-License-Identifier: Apache-2.0
"""How a commit's counts reach the scheduler and the front end: on messages that vLLM sends anyway.

Each has a pair of functions here, one that adds and one that takes off again what was added, so that nothing of ours
is left for vLLM to meet.
"""

from collections.abc import Callable, Sequence
from typing import Any

from nwor.counters import CommitCounts, Totals
from nwor.vllm.context import context_of, make_cancelling

_PREFIX = "nwor:"


def add_to_output(output: Any, counts: CommitCounts | None, req_ids: Sequence[str] | None) -> None:
    """Let a model runner's output carry a commit's counts, which are there once vLLM has the step's tokens.

    req_ids: the ids of the batch's requests where counts are to go by request too, else None.
    """
    if counts is None or output is None:
        return

    def add(result: Any) -> Any:
        if (totals := counts.read()) is not None:
            result.nwor_commit = totals, {} if req_ids is None else counts.by_request(req_ids)
        return result

    original = getattr(output, "get_output", None)
    if original is None:
        add(output)
        return

    def get_output() -> Any:
        del output.get_output  # an output that refers to itself would keep its buffers until cycles are collected
        return add(original())

    output.get_output = get_output


def make_sample_tokens(original: Callable) -> Callable:
    """A wrapper of either runner's `sample_tokens`, whose output carries the counts of the commit within."""
    original = make_cancelling(original)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output, context = original(self, grammar_output), context_of(self)
        add_to_output(output, context.counts, context.requests if context.counts_by_request else None)
        context.counts = None
        return output

    return sample_tokens


def take_from_output(output: Any) -> tuple[Totals, dict[str, int]] | None:
    """Take the counts off a model runner's output: the rank's totals, and the committed drafts by request.

    Those where they were wanted; requests of which no draft was held back are left out.
    """
    return vars(output).pop("nwor_commit", None)


def add_to_statistics(scheduler_stats: Any, counters: dict[str, int]) -> None:
    """Put counters on a step's scheduler statistics, which cross to one front end as a fixed schema.

    One of their fields is an open dict of whole numbers: there they go, each with a prefix.
    """
    scheduler_stats.num_kv_fetch_reqs_by_stage.update({_PREFIX + name: value for name, value in counters.items()})


def take_from_statistics(scheduler_stats: Any) -> dict[str, int]:
    """Take the counters off scheduler statistics again."""
    carried = scheduler_stats.num_kv_fetch_reqs_by_stage
    if not carried:
        return {}
    names = [name for name in carried if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): carried.pop(name) for name in names}
