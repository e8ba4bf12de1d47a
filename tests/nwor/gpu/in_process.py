# SPDX-License-Identifier: Apache-2.0
"""What tests watch inside an engine's own process on a GPU: functions for a child (`tests.engines.in_child`)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nwor.settings import Settings
from nwor_lab.engines.spec import EngineSpec
from tests.engines import started

Drafts = dict[tuple[str, int], tuple[bool, list[int]]]


def kernels_compiled_in_service(spec: EngineSpec, settings: Settings, batches: Sequence[int]) -> list[str]:
    """Names of the kernels that Triton compiles, or loads, once the engine has started, over batches of these sizes."""
    served, _ = started(spec, settings)
    from triton import knobs

    before, found = knobs.runtime.jit_post_compile_hook, list[str]()

    def hook(*args: Any, fn: Any, **named: Any) -> Any:
        found.append(fn.name)
        return before(*args, fn=fn, **named) if before else None

    knobs.runtime.jit_post_compile_hook = hook
    prompts = [[(7 * i + 13 * j) % 90 + 3 for j in range(12)] for i in range(max(batches))]
    for size in batches:
        served.generate(prompts[:size], 6)
    served.engine.engine_core.shutdown()
    return found


def drafts_of_each_step(
    spec: EngineSpec,
    settings: Settings,
    prompts: Sequence[list[int]],
    answers: Sequence[int],
    fault: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> Drafts:
    """What the V2 runner's drafter proposes, by request and length, and whether NWOR alone kept the step from a graph.

    answers: tokens of each request; where one ends the next is admitted.
    """
    if fault:
        fault(pytest.MonkeyPatch())
    served, worker = started(spec, settings)
    runner, found = worker.model_runner, Drafts()
    propose = runner.speculator.propose

    def proposing(input_batch: Any, *more: Any, **named: Any) -> Any:
        drafts = propose(input_batch, *more, **named)
        lengths = input_batch.seq_lens[: input_batch.num_reqs].tolist()
        left = runner.nwor.reads_rows and len(set(input_batch.num_scheduled_tokens.tolist())) == 1
        for name, length, tokens in zip(input_batch.req_ids, lengths, drafts.tolist(), strict=False):
            found["-".join(name.split("-")[:2]), length] = left, tokens
        return drafts

    runner.speculator.propose = proposing
    served.generate(prompts, 1, sampling=[{"max_tokens": length} for length in answers])
    served.engine.engine_core.shutdown()
    return found


def serve_a_full_load(spec: EngineSpec, settings: Settings) -> tuple[int, int, float]:
    """Requests that an engine may run at once, the most that ran, and GiB of the GPU that were taken at most."""
    import torch

    served, _ = started(spec, settings)
    scheduler = served.engine.engine_core.engine_core.scheduler
    most = served.engine.vllm_config.scheduler_config.max_num_seqs
    served.add_requests([[i % 900 + 3] * 16 for i in range(most + 50)], 24)
    ran, taken = 0, 0
    while served.engine.has_unfinished_requests():
        served.engine.step()
        free, total = torch.cuda.mem_get_info()
        ran, taken = max(ran, len(scheduler.running)), max(taken, total - free)
    served.engine.engine_core.shutdown()
    return most, ran, taken / 2**30
