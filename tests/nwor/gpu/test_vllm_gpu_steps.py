# SPDX-License-Identifier: Apache-2.0
"""Start-up and single steps of real engines on a GPU: what is compiled, what memory is taken, what the drafter sees."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nwor.settings import Settings
from nwor.vllm import batch
from nwor_lab.engines import shapes
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.engines.spec import EngineSpec
from tests.checkpoints import random_pair
from tests.engines import in_child, started
from tests.nwor.gpu.on_gpu import spec_of
from tests.nwor.specs import With, with_connector

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

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


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("k", [1, 3, 4, 8])
def test_nothing_is_compiled_in_service(tmp_path, k, graphs):
    """Batches of every size. With one KV head, plans change most often, and between powers of two."""
    random_pair(tmp_path, noise=0.3, num_attention_heads=8, num_key_value_heads=1, head_dim=64, num_hidden_layers=2)
    stack = "v2 FA graphs" if graphs else "v2 FA eager"
    spec = spec_of(tmp_path, stack, k=k, batch=96, max_num_batched_tokens=96 * (k + 1), num_blocks=1000)
    found = in_child(kernels_compiled_in_service, spec, Settings(mode="stage"), range(1, 97))
    assert "verify_windows" not in found, f"{found.count('verify_windows')} times"


def every_joiner_reads(patch: pytest.MonkeyPatch) -> None:
    """No fault: the scheduler finds that whoever joins reads what the step writes."""
    patch.setattr(batch, "finds_rows_of_this_step", lambda scheduler, output: True)


@pytest.mark.parametrize("leaves", [True, False], ids=["readers", "admissions"])
@pytest.mark.parametrize("requests", [4, 12])
@pytest.mark.parametrize("k", [4, 8])
def test_drafts_of_steps_that_admit_requests_are_an_eager_engines(model, k, requests, leaves):
    """Whoever is admitted comes with a whole prompt but one token, as on the decoding side of P/D: its step stays in
    the graphs of decodes. Where somebody reads what the step writes it leaves them, and the drafter must not replay
    one. Nothing is compiled, so that rounding is the same."""
    prompts = [[(5 * i + 3 * j) % 90 + 3 for j in range(40)] for i in range(3 * requests)]
    answers, found = [10 + 7 * i % 23 for i in range(len(prompts))], []
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        spec = with_connector(
            spec_of(model, "v2 FA eager", k=k, batch=requests, num_blocks=96, enforce_eager=False),
            "DecodeBenchConnector", {"fill_mean": 0.015, "fill_std": 0.0},
        )  # fmt: skip
        arguments = spec.arguments | {"compilation_config": {"mode": 0, "cudagraph_mode": mode}}
        spec = With(**(vars(spec) | {"arguments": arguments}))
        settings = Settings(mode="stage")
        fault = every_joiner_reads if leaves else None
        found.append(in_child(drafts_of_each_step, spec, settings, prompts, answers, fault))
    eager, graphs = found
    left = [place for place, (left, _) in graphs.items() if left and place in eager]
    equal = sum(graphs[place][1] == eager[place][1] for place in left)
    print(f"{k} drafts, {requests} requests: {equal} of {len(left)} equal where a step left the graphs")
    assert len(left) >= requests if leaves else not left
    assert equal >= 0.9 * len(left)
    others = [place for place in graphs.keys() & eager.keys() if place not in left]
    assert sum(graphs[place][1] == eager[place][1] for place in others) > 0.9 * len(others)


def test_a_7b_with_vllms_defaults_serves_a_full_load(tmp_path):
    """What a mode holds for 1,024 requests of 8 drafts, 4 GiB, comes out of the memory that vLLM plans: a mode takes no
    more of the GPU than vLLM alone."""
    free, total = torch.cuda.mem_get_info()
    if free < 0.96 * total or total < 70 << 30:
        pytest.skip("needs a GPU of 80 GB alone")
    target, head = shapes.write_shape("llama-2-7b", tmp_path, max_model_len=512)
    spec = EngineSpec(str(target), str(head), load_format=FORMAT, k=8, gpu_memory_utilization=0.95)
    spec = With(**vars(spec), arguments={"max_num_seqs": None, "max_num_batched_tokens": None})
    taken = {}
    for mode in ("off", "stage", "cow"):
        most, ran, taken[mode] = in_child(serve_a_full_load, spec, Settings(mode=mode))
        assert ran == most >= 256
    assert max(taken.values()) < taken["off"] + 0.5, taken
