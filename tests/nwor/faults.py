# SPDX-License-Identifier: Apache-2.0
"""Faults injected in a child's process, each one a way this has failed before; a test that stays green is no test."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nwor import ops
from nwor.manager import DraftCommitManager
from nwor.step import Step
from nwor.vllm import self_check
from nwor_lab.engines.child import Served
from tests.nwor.host_offload import ship_last_slots


def _behind_the_check(patch: pytest.MonkeyPatch) -> None:
    """A fault that the check at start-up would see, and fall back for, as if it came later."""
    patch.setattr(self_check, "failure", lambda *arguments: "")


def no_commit(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)

    def close_without_commit(self: DraftCommitManager, num_rejected: object) -> None:
        self.way = None

    patch.setattr(DraftCommitManager, "commit", close_without_commit)


def instead_of(operator: str, do: Callable[[Callable, dict[str, Any]], None], patch: pytest.MonkeyPatch) -> None:
    """Let ``do(operator, arguments by name)`` stand for the operator of all layers in each step that runs it."""
    run, opens, closes = getattr(ops, operator), Step.open, Step.close

    def named(step: Step, requests: int) -> dict[str, Any]:
        some = {name: step.tensors[name][:requests] for name in ("slots", "num_drafts", "kept")}
        return {name: given for name, given in (step.tensors | some).items() if name in ops.OPERATORS[operator]}

    def opened(self: Step, *batch: Tensor, stages: bool = False, logs: bool = False) -> None:
        opens(self, *batch, stages=stages)
        if logs:
            do(run, named(self, batch[1].numel() - 1))

    def closed(
        self: Step, num_rejected: Tensor, counts: Tensor, published: Tensor | None = None, restores: bool = False
    ) -> None:
        if restores is not (operator == "restore_all_layers"):
            return closes(self, num_rejected, counts, published, restores=restores)
        given = {"num_rejected": num_rejected, "counts": counts, "published": published}
        do(run, named(self, len(num_rejected)) | given)

    patch.setattr(Step, *(("open", opened) if operator == "log_all_layers" else ("close", closed)))


def no_restore(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    instead_of("restore_all_layers", lambda restore, arguments: None, patch)


def no_log(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    instead_of("log_all_layers", lambda log, arguments: None, patch)


def masked_for_the_drafter(patch: pytest.MonkeyPatch) -> None:
    """Held rows masked in vLLM's own slots, and not unmasked: what a window in place would be without its end."""
    _behind_the_check(patch)
    begin = DraftCommitManager.begin

    def mask(self, query_start_loc, cu_num_logits, slot_mapping, *rest, **named):  # type: ignore[no-untyped-def]
        opened = begin(self, query_start_loc, cu_num_logits, slot_mapping, *rest, **named)
        if self.serves_attention:
            slot_mapping.copy_(self.page_slots[: slot_mapping.numel()])
        return opened

    patch.setattr(DraftCommitManager, "begin", mask)


def commit_one_layer(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)

    def first_only(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: arguments[name][:1] for name in ("layer_offsets", "rows")}

    moved_with("commit_all_layers", first_only, patch)


def blind_attention(patch: pytest.MonkeyPatch) -> None:
    """The second generation's flaw: the staged tail is not seen."""
    _behind_the_check(patch)
    blind_from_the_start(patch)


def blind_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """The same, so that the check at start-up sees it."""
    attend = ops.verify_attention

    def blind(query, kv_cache, staging, *rest, **named):  # type: ignore[no-untyped-def]
        attend(query, kv_cache, staging.new_zeros(staging.shape), *rest, **named)

    patch.setattr(ops, "verify_attention", blind)


def attention_fails(patch: pytest.MonkeyPatch) -> None:
    def out_of_resources(*arguments, **named):  # type: ignore[no-untyped-def]
        raise ValueError("out of resource: shared memory")

    patch.setattr(ops, "verify_attention", out_of_resources)


def one_byte_too_many(operator: str, patch: pytest.MonkeyPatch) -> None:
    """The operator does its work, and flips a byte of a slot that is nobody's."""

    def do(move: Callable, arguments: dict[str, Any]) -> None:
        move(**arguments)
        arguments["pool"][-1] ^= 1

    instead_of(operator, do, patch)


def small_capacity(patch: pytest.MonkeyPatch) -> None:
    init = DraftCommitManager.__init__

    def small(self, layout, mode, max_requests, *rest, **named):  # type: ignore[no-untyped-def]
        init(self, layout, mode, 3, *rest, **named)

    patch.setattr(DraftCommitManager, "__init__", small)


def unattended(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import support

    patch.setattr(support, "unknown_mask", lambda layer, config: "a feature our attention lacks")


def unreadable_packing(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "find_packing", lambda layer: None)


def broken_extension(patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the operators do not load")

    patch.setattr(ops, "load", fail)


def plugin_missing_in_worker(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import worker

    patch.setattr(worker, "install", lambda settings: None)


def unknown_vllm(patch: pytest.MonkeyPatch) -> None:
    import vllm

    patch.setattr(vllm, "__version__", "0.99.0")


def changed_signature(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch.setattr(GPUModelRunner, "_sample", lambda self, logits, metadata, extra: None)


def changed_body(patch: pytest.MonkeyPatch) -> None:
    """A vLLM that someone has changed: the same parameters, another function."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner._sample

    def changed(self, logits, spec_decode_metadata):  # type: ignore[no-untyped-def]
        return sample(self, logits, spec_decode_metadata)

    patch.setattr(GPUModelRunner, "_sample", changed)


def layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "install", lambda: None)


def scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import runner_v1

    count = runner_v1.count_rejected
    patch.setattr(runner_v1, "count_rejected", lambda sampled, drafts: count(sampled, drafts) + 1)


def changed_v2_signature(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    patch.setattr(GPUModelRunner, "sample", lambda self, hidden_states: None)


def gpu_layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_gpu

    patch.setattr(attention_gpu, "install", lambda layers: None)


def v2_scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    commit = DraftCommitManager.commit
    patch.setattr(DraftCommitManager, "commit", lambda self, num_rejected: commit(self, num_rejected + 1))


def ships_last_slots(patch: pytest.MonkeyPatch) -> None:
    """A fault of vLLM's own: blocks are offloaded with a slot that no step has kept."""
    init = Served.__init__

    def start(self, spec):  # type: ignore[no-untyped-def]
        init(self, spec)
        self.on_scheduler(ship_last_slots)

    patch.setattr(Served, "__init__", start)


def one_layer_of_another_class(patch: pytest.MonkeyPatch) -> None:
    """No fault: a model one of whose layers has an attention of its own, in the same cache group."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import llama

    class OfThisModel(Attention):
        pass

    def make(*args, prefix, **named):  # type: ignore[no-untyped-def]
        return (OfThisModel if prefix == "model.layers.1.self_attn.attn" else Attention)(*args, prefix=prefix, **named)

    patch.setattr(llama, "Attention", make)


def unknown_mask(patch: pytest.MonkeyPatch) -> None:
    """No fault: an attention that looks back by chunks, as far as its attributes say."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    init = CPUAttentionBackendImpl.__init__

    def with_lookback(self, *args, **named):  # type: ignore[no-untyped-def]
        init(self, *args, **named)
        self.chunk_lookback = 1

    patch.setattr(CPUAttentionBackendImpl, "__init__", with_lookback)


def writes_its_own(patch: pytest.MonkeyPatch) -> None:
    """No fault: a model that ropes and writes in one kernel, and calls its attention with queries alone."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write, attend = CPUAttentionBackendImpl.do_kv_cache_update, Attention.forward

    def forward(self, query, key, value):  # type: ignore[no-untyped-def]
        _, _, cache, slots = get_attention_context(self.layer_name)
        if slots is not None:
            shape = -1, self.num_kv_heads, self.head_size
            write(self.impl, self, key.view(shape), value.view(shape), cache, slots)
        return attend(self, query, None, None)

    patch.setattr(Attention, "forward", forward)


# -- of what a mode moves, for one call of an engine that has started; most are invisible in the count of rows ---------


def none(patch: pytest.MonkeyPatch) -> None:
    """No fault."""


def moved_with(operator: str, change: Callable[[dict[str, Any]], dict[str, Any]], patch: pytest.MonkeyPatch) -> None:
    """The operator of all layers works with some arguments changed."""
    instead_of(operator, lambda move, arguments: move(**(arguments | change(arguments))), patch)


def _laid_out_as(rows: Tensor, changed: Tensor) -> Tensor:
    """The changed rows with the strides of `rows`, which the operators hold to be those of the cache."""
    return torch.empty_like(rows).copy_(changed)


def another_layer(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"rows": _laid_out_as(arguments["rows"], arguments["rows"].roll(1, 0))}


def another_head(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"rows": _laid_out_as(arguments["rows"], arguments["rows"].flip(2))}


def another_request(arguments: dict[str, Any]) -> dict[str, Any]:
    """Pairs of requests with as many drafts, kept and rejected, have each other's."""
    slots, alone = arguments["slots"].clone(), {}
    decisions = torch.stack([arguments["num_drafts"][: len(slots)], arguments["num_rejected"]], dim=1).tolist()
    for request, decision in enumerate(map(tuple, decisions)):
        if (other := alone.pop(decision, None)) is None:
            alone[decision] = request
        else:
            slots[[other, request]] = slots[[request, other]]
    return {"slots": slots}


def one_less_rejected(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"num_rejected": (arguments["num_rejected"] - 1).clamp(min=0)}


def one_more_rejected(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"num_rejected": torch.minimum(arguments["num_rejected"] + 1, arguments["num_drafts"])}


def requantised(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fp8 rows read as scaled numbers, rounded to bf16, and written towards zero."""
    rows = arguments["rows"].view(torch.float8_e4m3fn)
    numbers = (rows.float() * 0.37).bfloat16().float() / 0.37
    nearest = numbers.to(torch.float8_e4m3fn)
    return {"rows": nearest.view(torch.uint8) - (nearest.float().abs() > numbers.abs()).byte()}


def _part_committed(part: str, patch: pytest.MonkeyPatch) -> None:

    def of_a_part(commit: Callable, arguments: dict[str, Any]) -> None:
        pool, offsets, slots, packing, rows = (
            arguments[name] for name in ("pool", "layer_offsets", "slots", "packing", "rows")
        )
        strides, before = arguments["cache_strides"], pool.clone()
        commit(**arguments)
        _, _, heads, size, width = rows.shape
        blocks = int(slots.max()) // size + 1
        if packing is None:  # a slot's bytes lie together, keys first
            shape, each = (blocks, heads, size, width), (*strides, 1)
            values = (..., slice(width // 2, None))
        else:
            shape = blocks, heads, packing.numel(), width // packing.shape[1]
            each = (*strides[:2], shape[3], 1)
            values = (slice(None), slice(None), packing[:, packing.shape[1] // 2 :].flatten().long())
        for offset in offsets.tolist():
            now, then = (torch.as_strided(memory, shape, each, offset) for memory in (pool, before))
            if part == "keys":
                now[values] = then[values]
            else:
                now[:, 1:] = then[:, 1:]

    instead_of("commit_all_layers", of_a_part, patch)


keys_without_values = partial(_part_committed, "keys")
one_head_only = partial(_part_committed, "head 0")


def late_commit(patch: pytest.MonkeyPatch) -> None:
    """In the next step, once that one has begun."""
    begin, waiting = DraftCommitManager.begin, []

    def later(commit: Callable, arguments: dict[str, Any]) -> None:
        copied = {name: given.clone() for name, given in arguments.items() if isinstance(given, Tensor)}
        waiting.append(arguments | copied | {"pool": arguments["pool"], "published": None})

    def begin_and_commit(self, *arguments, **named):  # type: ignore[no-untyped-def]
        opened = begin(self, *arguments, **named)
        while waiting:
            ops.commit_all_layers(**waiting.pop())
        return opened

    instead_of("commit_all_layers", later, patch)
    patch.setattr(DraftCommitManager, "begin", begin_and_commit)


def commits_behind_the_save(ships: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch) -> None:
    """Every commit comes in the next step, when a connector has shipped what this one completed."""
    _behind_the_check(patch)
    late_commit(patch)
    ships(patch)


def write_between_steps(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import carrier

    commit, add_to_output, committed = DraftCommitManager.commit, carrier.add_to_output, []

    def commit_and_remember(self, num_rejected):  # type: ignore[no-untyped-def]
        commit(self, num_rejected)
        committed.append(self.layout)

    def add_and_write(*arguments: Any) -> None:
        add_to_output(*arguments)
        while committed:
            layout = committed.pop()
            layout.pool[layout.layer_offsets[-1]] ^= 1

    patch.setattr(DraftCommitManager, "commit", commit_and_remember)
    patch.setattr(carrier, "add_to_output", add_and_write)


def stale_log(patch: pytest.MonkeyPatch) -> None:
    """The log says that it holds a slot's bytes, and holds those of the first step."""
    logged_once: list[bool] = []

    def log_once(log: Callable, arguments: dict[str, Any]) -> None:
        log(**(arguments | ({"rows": arguments["rows"].clone()} if logged_once else {})))
        logged_once.append(True)

    instead_of("log_all_layers", log_once, patch)
