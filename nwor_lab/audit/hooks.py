# SPDX-License-Identifier: Apache-2.0
"""The auditor as a vLLM plugin: poison the target's caches before each forward, compare them after sampling.

Nothing here imports `nwor`: the proof shares no code with what it proves, and holds vanilla vLLM to the same rule.
Layers, slots and rejections come from vLLM's own model, block tables and sampler output. Other plugins' hooks lie
inside this one's: on the V1 runner these go on last; the V2 runner makes its slots in the very method in which a
window may open, so there they go on first, next to vLLM. Only the hook of the cache write goes on last in both: it sees
what vLLM hands to its writer, whatever a mode does with it, and lets vLLM's own writer make the same bytes in scratch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nwor_lab.audit.auditor import CacheAudit

_wrapped: dict[tuple[type, str], Callable] = {}


def install() -> None:
    """Let every worker of this process and of its children audit its cache from the first step on."""
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _wrap(WorkerWrapperBase, "init_device", "self", _init_device)
    _wrap(Worker, "compile_or_warm_up_model", "self", _warm_up)


def uninstall() -> None:
    """Restore every method that was wrapped in this process."""
    while _wrapped:
        (owner, name), original = _wrapped.popitem()
        setattr(owner, name, original)


def report(worker: Any) -> dict[str, Any]:
    """What this worker's audit found up to now, sent to every rank through vLLM's ``collective_rpc``.

    ``audit`` is an `AuditReport` as a dict, empty without an audit; ``dirty_examples`` and ``history`` are
    those of `CacheAudit`.
    """
    audit = getattr(worker.model_runner, "cache_audit", None)
    if audit is None:
        return {"audit": {}, "dirty_examples": [], "history": []}
    if audit.enabled:
        audit.look_between_steps()
    return {"audit": asdict(audit.report), "dirty_examples": audit.examples, "history": audit.history}


def stop_audit(worker: Any) -> None:
    """End this worker's audit, if it has one; sent like `report`."""
    if (audit := getattr(worker.model_runner, "cache_audit", None)) is not None:
        audit.enabled = False


def target_layers(runner: Any) -> dict[str, Any]:
    """The attention layers that are modules of the target model, by name, in order.

    Raises:
        RuntimeError: a part of the target's cache would not be seen. It is a layer of neither the target's nor the
            drafter's model, or of a class that does not write each row to one slot, or there are several cache groups.
    """
    from vllm.model_executor.layers import attention

    known = {
        attention.Attention,
        attention.ChunkedLocalAttention,
        attention.PrefillPrefixLMAttention,
        attention.RSWAAttention,
    }
    target, drafter = runner.get_model(), runner.get_draft_model()
    modules = {id(module) for module in target.modules()}
    drafting = {id(module) for module in drafter.modules()} if drafter is not None else set()
    context = runner.compilation_config.static_forward_context
    layers: dict[str, Any] = {}
    for spec in runner.kv_cache_config.kv_cache_groups:
        own = {name: context.get(name) for name in spec.layer_names if id(context.get(name)) not in drafting}
        for name, layer in own.items():
            if id(layer) not in modules or type(layer) not in known:
                raise _incomplete(f"{name} is a {type(layer).__name__}, no attention layer of the target that it knows")
        if own and layers:
            raise _incomplete("a hybrid model: the target's layers lie in several cache groups")
        layers |= own
    return layers


def slot_parts(layer: Any) -> Tensor:
    """int64 [N * 2 * head_size], for each element of a (block, head) chunk twice its slot, and 1 more for a value's.

    vLLM's CPU caches transpose or tile keys inside a block, by instruction set, so vLLM's own writer is asked: it
    writes the keys or values of one slot of a scratch block at a time, and what is no longer zero is theirs.

    Raises:
        RuntimeError: an element is written with no slot's keys or values, or with several.
    """
    _, heads, block_size, width = layer.kv_cache.shape
    dtype = layer.kv_cache.dtype if layer.kv_cache.is_floating_point() else torch.bfloat16
    rows = torch.eye(2, dtype=dtype).view(2, 2, 1, 1, 1).expand(2, 2, 1, heads, width // 2).contiguous()
    written = torch.zeros(block_size, 2, block_size * width, dtype=torch.bool)
    for offset in range(block_size):
        for half, (key, value) in enumerate(rows):
            scratch = torch.zeros_like(layer.kv_cache[:1])
            layer.impl.do_kv_cache_update(layer, key, value, scratch, torch.tensor([offset]))
            written[offset, half] = scratch[0, 0].flatten() != 0
    if not (written.flatten(0, 1).sum(0) == 1).all():
        raise _incomplete("this CPU cache's layout has elements that belong to no slot or to several")
    return written.flatten(0, 1).int().argmax(0)


def rejected(sampled_token_ids: Tensor, metadata: Any) -> list[int]:
    """Rejected drafts of each request on the V1 runner, whose sampler writes -1 for them; none without drafts."""
    if metadata is None:
        return [0] * len(sampled_token_ids)
    accepted = (sampled_token_ids != -1).sum(dim=1) - 1
    return [max(0, drafts - taken) for drafts, taken in zip(metadata.num_draft_tokens, accepted.tolist(), strict=True)]


def _incomplete(why: str) -> RuntimeError:
    return RuntimeError(f"the audit would not see the whole cache: {why}: unset VLLM_NWOR_AUDIT")


def _wrap(owner: type, name: str, parameters: str, around: Callable[..., Any], optional: str = "") -> None:
    """Let ``around(original, self, ...)`` run in place of ``owner.name``, once.

    parameters: those it must take. optional: one more, the last, which it has in some of the releases that are known.
    """
    if (owner, name) in _wrapped:
        return
    original = vars(owner).get(name)
    found = " ".join(inspect.signature(original).parameters) if original else "nothing, it is missing"
    if original is None or found not in (parameters, f"{parameters} {optional}"):
        raise RuntimeError(
            f"{owner.__name__}.{name} takes {found}; the audit knows {parameters}: "
            "install vllm==0.32.0 or vllm==0.33.0, or unset VLLM_NWOR_AUDIT"
        )

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    _wrapped[owner, name] = original
    setattr(owner, name, method)


def _definer(made: Any, name: str) -> type:
    """The class that defines what `made` calls by this name."""
    return next(kind for kind in type(made).__mro__ if name in vars(kind))


def _init_device(original: Callable, self: Any) -> Any:
    if self.vllm_config.use_v2_model_runner:
        install_v2()
        return original(self)  # installs the other plugins' hooks
    result = original(self)
    install_v1()
    return result


def _warm_up(original: Callable, self: Any) -> Any:
    result = original(self)
    if (audit := getattr(self.model_runner, "cache_audit", None)) is not None:
        audit.reset()  # the V2 runner's warm-up runs real steps
    return result


_INITIALIZE = "self kv_cache_config is_profiling kv_cache_allocation_context"


def install_v1() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    forward = "self input_ids positions intermediate_tensors inputs_embeds model_kwargs"
    _wrap(Runner, "initialize_kv_cache", _INITIALIZE, _initialize)
    _wrap(Runner, "_model_forward", forward, _forward)
    _wrap(Runner, "_sample", "self logits spec_decode_metadata", _sample)


def install_v2() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner

    sampled = "self idx_mapping sampled_tokens num_sampled num_rejected query_start_loc"
    _wrap(Runner, "initialize_kv_cache", _INITIALIZE, _initialize)
    _wrap(Runner, "prepare_attn", "self input_batch", _prepare_attn)
    _wrap(Runner, "postprocess_sampled", sampled, _postprocess_sampled, optional="draft_tokens")


def _initialize(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    self.cache_audit = None
    original(self, *args, **kwargs)
    layers = target_layers(self)
    parts = slot_parts(next(iter(layers.values()))) if self.device.type == "cpu" else None
    caches, limits = [layer.kv_cache for layer in layers.values()], self.vllm_config.scheduler_config
    self.cache_audit = CacheAudit(caches, parts, limits.max_num_batched_tokens, limits.max_num_seqs)
    for index, layer in enumerate(layers.values()):
        layer.cache_audit = self.cache_audit, index
        if not layer.attn_backend.forward_includes_kv_cache_update:
            kind = _definer(layer.impl, "do_kv_cache_update")
            _wrap(kind, "do_kv_cache_update", "self layer key value kv_cache slot_mapping", _write)
    groups = self.kv_cache_config.kv_cache_groups
    self.audited_group = next(n for n, spec in enumerate(groups) if layers.keys() & set(spec.layer_names))
    _watch_connector(self)


def _watch_connector(runner: Any) -> None:
    """Let the audit see which blocks vLLM's `OffloadingConnector` and `ExampleConnector` copy out and bring back.

    Raises:
        RuntimeError: another connector is loaded, which may write to pages.
    """
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return
    connector = kv_transfer.get_kv_transfer_group()
    for each in getattr(connector, "_connectors", [connector]):
        if (kind := type(each).__name__) not in _WATCHED:
            raise _incomplete(f"{kind} may write to pages, and it follows {' and '.join(_WATCHED)} alone")
        _WATCHED[kind](runner, each)


def _watch_offloading(runner: Any, connector: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

    config, worker = runner.kv_cache_config, connector.connector_worker.worker
    if worker is None:  # not yet: vLLM only measures what graphs cost
        return
    worker.cache_audit = runner.cache_audit
    worker.audited_group = get_offloading_group_ids(config).index(runner.audited_group)
    worker.audited_block_size = config.kv_cache_groups[runner.audited_group].kv_cache_spec.block_size
    for name, around in (("submit_store", _store), ("submit_load", _load)):
        _wrap(_definer(worker, name), name, "self job_id src_spec dst_spec", around)


def _watch_example(runner: Any, connector: Any) -> None:
    connector.cache_audit = runner.cache_audit
    connector.layers = runner.compilation_config.static_forward_context
    _wrap(type(connector), "start_load_kv", "self forward_context kwargs", _load_requests)
    _wrap(type(connector), "save_kv_layer", "self layer_name kv_layer attn_metadata kwargs", _save_layer)


_WATCHED = {"OffloadingConnector": _watch_offloading, "ExampleConnector": _watch_example}


def _slots(worker: Any, blocks: Any) -> Tensor:
    """int64 [n], the slots of a transfer's blocks that are of the audited group."""
    group, size = worker.audited_group, worker.audited_block_size
    begin = sum(blocks.group_sizes[:group])
    chosen = torch.as_tensor(blocks.block_ids[begin : begin + blocks.group_sizes[group]]).long()
    return (chosen[:, None] * size + torch.arange(size)).flatten()


def _store(original: Callable, self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
    if self.cache_audit.enabled:
        self.cache_audit.ship(_slots(self, src_spec))
    return original(self, job_id, src_spec, dst_spec)


def _load(original: Callable, self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
    started = original(self, job_id, src_spec, dst_spec)
    if self.cache_audit.enabled:
        self.wait({job_id})
        self.cache_audit.accept(_slots(self, dst_spec))
    return started


def _load_requests(original: Callable, self: Any, forward_context: Any, **kwargs: Any) -> None:
    original(self, forward_context, **kwargs)
    for request in self._get_connector_metadata().requests:
        if self.cache_audit.enabled and not request.is_store:
            self.cache_audit.accept(request.slot_mapping)


def _save_layer(original: Callable, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:
    audit, index = getattr(self.layers[layer_name], "cache_audit", (None, 0))
    for request in self._get_connector_metadata().requests:
        if audit is not None and audit.enabled and request.is_store:
            audit.ship(request.slot_mapping, index)
    original(self, layer_name, *args, **kwargs)


def _write(
    original: Callable, self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> None:
    audit, index = getattr(layer, "cache_audit", (None, 0))
    if audit is not None and audit.enabled and not (key.is_cuda and torch.cuda.is_current_stream_capturing()):
        audit.copy_write(index, functools.partial(inspect.unwrap(original), self, layer, key, value), slot_mapping)
    original(self, layer, key, value, kv_cache, slot_mapping)


def _forward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.cache_audit.enabled:
        starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1].tolist()
        self.cache_audit.before(starts, self.input_batch.block_table[self.audited_group].slot_mapping.gpu)
    return original(self, *args, **kwargs)


def _sample(original: Callable, self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
    output = original(self, logits, spec_decode_metadata)
    if self.cache_audit.enabled:
        self.cache_audit.after(rejected(output.sampled_token_ids, spec_decode_metadata))
    return output


def _prepare_attn(original: Callable, self: Any, input_batch: Any) -> Any:
    block_tables, slot_mappings = original(self, input_batch)
    if self.cache_audit.enabled:
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1].tolist()
        self.cache_audit.before(starts, slot_mappings[self.audited_group])
    return block_tables, slot_mappings


def _postprocess_sampled(
    original: Callable,
    self: Any,
    idx_mapping: Tensor,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs)
    if self.cache_audit.enabled:
        self.cache_audit.after(num_rejected.tolist())
