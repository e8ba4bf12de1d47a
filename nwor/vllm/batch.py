# SPDX-License-Identifier: Apache-2.0
"""What the hooks of both model runners ask of a step's batch."""

from typing import Any

from nwor.manager import DraftCommitManager


def has_drafts_alone(num_scheduled_tokens: Any, num_drafts: int) -> bool:
    """Whether all rows of a batch but one a request are drafts: nothing is prefilled.

    num_scheduled_tokens: int32 array [num_reqs], each request's rows.
    """
    return int(num_scheduled_tokens.sum()) == num_drafts + len(num_scheduled_tokens)


def admits_requests(scheduler_output: Any) -> bool:
    """Whether a request is new in this step, or back: others may have written its slots since, under its very id."""
    return bool(scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids)


def reads_rows_of_this_step(manager: DraftCommitManager | None, scheduler_output: Any) -> bool:
    """Whether a request may attend to rows that another request of this step writes, where our attention stores rows.

    vLLM publishes a block to the prefix cache while it schedules the step that fills it, so a request admitted in this
    step may find it there. vLLM 0.33 publishes blocks once more, when it has read what was accepted: their rows are in
    the pages by then, since each commit is queued before the step's tokens go to the host. With EAGLE no block is found
    before that: 0.32 drops the last match, and in 0.33 a block's hash covers the token behind it. Of a query longer
    than a window vLLM's own attention takes care, behind vLLM's own writer.
    """
    if manager is None or manager.attention is None:
        return False
    resumed = scheduler_output.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    computed |= {
        request: tokens
        for request, tokens in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True)
        if request in resumed.resumed_req_ids
    }
    return any(
        tokens > 0 and scheduler_output.num_scheduled_tokens[request] <= manager.max_query_len
        for request, tokens in computed.items()
    )
