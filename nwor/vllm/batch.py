# SPDX-License-Identifier: Apache-2.0
"""What the hooks of both model runners ask of a step's batch; and a patch of the scheduler, which alone knows it.

Why: only the scheduler knows who shares a block; where attention stores rows, one that joins may read them too early.
How: `Scheduler.schedule`'s output says whether a request reads what another writes in that step.
When it can go: when vLLM publishes a block behind the step that fills it.
"""

import collections
from typing import Any

from nwor.manager import DraftCommitManager
from nwor.vllm.patch import wrap

_READS = "nwor_reads_rows"  # of a scheduler's output: what `finds_rows_of_this_step` said


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "schedule", make_schedule)


def admitted(scheduler_output: Any) -> dict[str, int]:
    """The requests that are new in this step, or back, each with its positions that are computed already."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    if cached.resumed_req_ids:
        computed |= {
            request: tokens
            for request, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request in cached.resumed_req_ids
        }
    return computed


def admits_requests(scheduler_output: Any) -> bool:
    """Whether a request is new in this step, or back: others may have written its slots since, under its very id."""
    return bool(scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids)


def finds_rows_of_this_step(scheduler: Any, scheduler_output: Any) -> bool:
    """Whether an admitted request shares a block whose last row is written in this very step, by another request.

    vLLM publishes a block to the prefix cache while it schedules the step that fills it, by tokens that the scheduler
    knows: of the prompt, or the one sampled last. Those that it does not know yet fill no block that it has published:
    0.33 publishes those once it has read what was accepted, when their rows are in the pages, since each commit is
    queued before the step's tokens go to the host. With EAGLE no block is found before that either: 0.32 drops the last
    match, and in 0.33 a block's hash covers the token behind it.
    """
    new = admitted(scheduler_output)
    joiners = [request for request, tokens in new.items() if tokens > 0]
    if not joiners:
        return False
    blocks_of = scheduler.kv_cache_manager.get_block_ids
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    users = [collections.Counter[int]() for _ in sizes]  # of each block, by group: joiners alone
    for request in joiners:
        for of_group, ids in zip(users, blocks_of(request), strict=True):
            of_group.update(ids)
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) | new
    for request, rows in scheduler_output.num_scheduled_tokens.items():
        known, own = scheduler.requests[request].num_tokens, int(request in joiners)
        begun = computed.get(request, known)
        filled = [
            [*range(begun // size, min(begun + rows, known) // size)]  # by a part of a prompt
            + [known // size - 1] * (known % size == 0)
            for size in sizes
        ]
        if not any(filled):
            continue  # vLLM makes a list of a request's blocks anew, of each one
        for of_group, ids, of_request in zip(users, blocks_of(request), filled, strict=True):
            if any(of_group[ids[at]] > own for at in of_request if 0 <= at < len(ids)):
                return True
    return False


def make_schedule(original: Any) -> Any:
    """A wrapper of the scheduler's `schedule`: its output says what `finds_rows_of_this_step` says."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        setattr(output, _READS, admits_requests(output) and finds_rows_of_this_step(self, output))
        return output

    return schedule


def reads_rows_of_this_step(manager: DraftCommitManager | None, scheduler_output: Any) -> bool:
    """Whether a request may attend to rows that another writes in this step, where our attention stores rows.

    As the scheduler said; of a scheduler that says nothing every request that joins with computed positions may.
    """
    if manager is None or manager.attention is None or not admits_requests(scheduler_output):
        return False
    said = getattr(scheduler_output, _READS, None)
    return any(admitted(scheduler_output).values()) if said is None else said
