# SPDX-License-Identifier: Apache-2.0
"""The auditor as a vLLM plugin: poison the target's caches before each forward, compare them after sampling.

Nothing here imports `nwor`: the proof shares no code with what it proves, and holds vanilla vLLM to the same rule.
Layers, slots and rejections come from vLLM's own model, block tables and sampler output. Other plugins' hooks lie
inside this one's: on the V1 runner these go on last; the V2 runner makes its slots in the very method in which a
window may open, so there they go on first, next to vLLM. Only the hook of the cache write goes on last in both (on V2
before the warm-up): it sees what vLLM hands to its writer, whatever a mode does with it, and lets vLLM's own writer
make the same bytes in scratch.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nwor_lab.audit import AUDIT
from nwor_lab.audit.auditor import CacheAudit
from nwor_lab.audit.groups import GroupsAudit
from nwor_lab.audit.layers import cache_of, incomplete, recurrent_groups, slot_parts, target_groups

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

    Raises:
        RuntimeError: an audit was asked for, and there is none.
    """
    audit = getattr(worker.model_runner, "cache_audit", None)
    if audit is None:
        if os.environ.get(AUDIT) == "1":
            raise RuntimeError(f"nothing was audited: {AUDIT}=1 was set after this process had made its first engine")
        return {"audit": {}, "dirty_examples": [], "history": []}
    if audit.enabled:
        audit.look_between_steps()
    return {"audit": asdict(audit.report), "dirty_examples": audit.examples, "history": audit.history}


def stop_audit(worker: Any) -> None:
    """End this worker's audit, if it has one; sent like `report`."""
    if (audit := getattr(worker.model_runner, "cache_audit", None)) is not None:
        audit.enabled = False


def rejected(sampled_token_ids: Tensor, metadata: Any) -> list[int]:
    """Rejected drafts of each request on the V1 runner, whose sampler writes -1 for them; none without drafts."""
    if metadata is None:
        return [0] * len(sampled_token_ids)
    accepted = (sampled_token_ids != -1).sum(dim=1) - 1
    return [max(0, drafts - taken) for drafts, taken in zip(metadata.num_draft_tokens, accepted.tolist(), strict=True)]


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
            f"install vllm==0.32.0 or vllm==0.33.0, or unset {AUDIT}"
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
    if getattr(self.model_runner, "cache_audit", None) is not None:
        _watch_writes(self.model_runner)
    result = original(self)
    if (audit := getattr(self.model_runner, "cache_audit", None)) is not None:
        audit.reset()  # the V2 runner's warm-up runs real steps
    return result


_INITIALIZE = "self kv_cache_config is_profiling kv_cache_allocation_context"


def install_v1() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    forward = "self input_ids positions intermediate_tensors inputs_embeds model_kwargs"
    _wrap(Runner, "initialize_kv_cache", _INITIALIZE, _initialize)
    _wrap(Runner, "_update_states", "self scheduler_output", _update)
    _wrap(Runner, "_model_forward", forward, _forward)
    _wrap(Runner, "_sample", "self logits spec_decode_metadata", _sample)


def install_v2() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner

    sampled = "self idx_mapping sampled_tokens num_sampled num_rejected query_start_loc"
    _wrap(Runner, "initialize_kv_cache", _INITIALIZE, _initialize)
    _wrap(Runner, "update_requests", "self scheduler_output", _update)
    _wrap(Runner, "prepare_attn", "self input_batch", _prepare_attn)
    _wrap(Runner, "postprocess_sampled", sampled, _postprocess_sampled, optional="draft_tokens")


def _initialize(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    self.cache_audit = None
    original(self, *args, **kwargs)
    groups, config = target_groups(self), self.kv_cache_config
    audits = {}
    for group, layers in groups.items():
        first = next(iter(layers.values()))
        parts = slot_parts(first) if self.device.type == "cpu" and first.kv_cache.dim() == 4 else None
        audits[group] = CacheAudit([cache_of(layer) for layer in layers.values()], parts)
    sizes = [spec.kv_cache_spec.block_size for spec in config.kv_cache_groups]
    self.cache_audit = GroupsAudit(audits, sizes, config.num_blocks, recurrent_groups(self))
    for group, layers in groups.items():
        for index, layer in enumerate(layers.values()):
            layer.cache_audit = self.cache_audit, group, index
    if not self.vllm_config.use_v2_model_runner:  # there a mode's hooks go on around this one, and would lie outside
        _watch_writes(self)
    _watch_connector(self)


def _watch_writes(runner: Any) -> None:
    """Let the audit see what vLLM hands to its writer, outside whatever hooks of it there are by now."""
    for layers in target_groups(runner).values():
        for layer in layers.values():
            if layer.kv_cache.dim() == 3:
                latent = "self kv_c_normed k_pe kv_cache slot_mapping attn_metadata kv_cache_dtype k_scale"
                _wrap(type(layer), "update_kv_cache", latent, _write_latent)
            elif not layer.attn_backend.forward_includes_kv_cache_update:
                kind = _definer(layer.impl, "do_kv_cache_update")
                _wrap(kind, "do_kv_cache_update", "self layer key value kv_cache slot_mapping", _write)


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
            raise incomplete(f"{kind} may write to pages, and it follows {' and '.join(_WATCHED)} alone")
        _WATCHED[kind](runner, each)


def _watch_offloading(runner: Any, connector: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

    config, worker = runner.kv_cache_config, connector.connector_worker.worker
    if worker is None:  # not yet: vLLM only measures what graphs cost
        return
    worker.cache_audit, ids = runner.cache_audit, get_offloading_group_ids(config)
    worker.audited_groups = [
        (audit, ids.index(group), config.kv_cache_groups[group].kv_cache_spec.block_size)
        for group, audit in runner.cache_audit.audits.items()
    ]
    for name, around in (("submit_store", _store), ("submit_load", _load)):
        _wrap(_definer(worker, name), name, "self job_id src_spec dst_spec", around)


def _watch_example(runner: Any, connector: Any) -> None:
    if len(runner.cache_audit.audits) > 1:
        raise incomplete("ExampleConnector's slots are of one cache group, and the target has several")
    connector.cache_audit = runner.cache_audit
    connector.layers = runner.compilation_config.static_forward_context
    _wrap(type(connector), "start_load_kv", "self forward_context kwargs", _load_requests)
    _wrap(type(connector), "save_kv_layer", "self layer_name kv_layer attn_metadata kwargs", _save_layer)


_WATCHED = {"OffloadingConnector": _watch_offloading, "ExampleConnector": _watch_example}


def _slots(blocks: Any, group: int, size: int) -> Tensor:
    """int64 [n], the slots of a transfer's blocks of `size` that are of this group."""
    begin = sum(blocks.group_sizes[:group])
    chosen = torch.as_tensor(blocks.block_ids[begin : begin + blocks.group_sizes[group]]).long()
    return (chosen[:, None] * size + torch.arange(size)).flatten()


def _store(original: Callable, self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
    if self.cache_audit.enabled:
        for audit, *group in self.audited_groups:
            audit.ship(_slots(src_spec, *group))
    return original(self, job_id, src_spec, dst_spec)


def _load(original: Callable, self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
    started = original(self, job_id, src_spec, dst_spec)
    if self.cache_audit.enabled:
        self.wait({job_id})
        for audit, *group in self.audited_groups:
            audit.accept(_slots(dst_spec, *group))
    return started


def _load_requests(original: Callable, self: Any, forward_context: Any, **kwargs: Any) -> None:
    original(self, forward_context, **kwargs)
    for request in self._get_connector_metadata().requests:
        if self.cache_audit.enabled and not request.is_store:
            for audit in self.cache_audit.audits.values():
                audit.accept(request.slot_mapping)


def _save_layer(original: Callable, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:
    audit, group, index = getattr(self.layers[layer_name], "cache_audit", (None, 0, 0))
    for request in self._get_connector_metadata().requests:
        if audit is not None and audit.enabled and request.is_store:
            audit.audits[group].ship(request.slot_mapping, index)
    original(self, layer_name, *args, **kwargs)


def _copy(layer: Any, write: Callable[[Tensor, Tensor], None], rows: Tensor, slot_mapping: Tensor) -> None:
    """`CacheAudit.copy_write`, where the layer has an audit that looks; not while a graph is captured."""
    audit, group, index = getattr(layer, "cache_audit", (None, 0, 0))
    if audit is not None and audit.enabled and not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
        audit.audits[group].copy_write(index, write, slot_mapping)


def _write(
    original: Callable, self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> None:
    _copy(layer, functools.partial(inspect.unwrap(original), self, layer, key, value), key, slot_mapping)
    original(self, layer, key, value, kv_cache, slot_mapping)


def _write_latent(
    original: Callable, self: Any, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Any, *more: Any
) -> None:
    def write(cache: Tensor, slots: Tensor) -> None:
        inspect.unwrap(original)(self, kv_c_normed, k_pe, cache.squeeze(1), slots, *more)

    if slot_mapping is not None:
        _copy(self, write, kv_c_normed, slot_mapping)
    original(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *more)


def _update(original: Callable, self: Any, scheduler_output: Any) -> Any:
    result = original(self, scheduler_output)
    if self.cache_audit.enabled and (zeroed := scheduler_output.new_block_ids_to_zero):
        self.cache_audit.accept(zeroed)
    return result


def _forward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.cache_audit.enabled:
        requests, tables = self.input_batch.num_reqs, self.input_batch.block_table.block_tables
        starts = self.query_start_loc.np[: requests + 1].tolist()
        slots = {index: table.slot_mapping.gpu for index, table in enumerate(tables)}
        rows = {
            index: [table.block_table.np[row, : table.num_blocks_per_row[row]].tolist() for row in range(requests)]
            for index, table in enumerate(tables if len(tables) > 1 else ())
        }
        self.cache_audit.before(starts, slots, rows)
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
        rows = {
            index: [row[:count].tolist() for row, count in zip(block_tables[index].cpu(), counts, strict=False)]
            for index, counts in enumerate(self.block_tables.num_blocks.np[:, input_batch.idx_mapping_np])
            if len(slot_mappings) > 1
        }
        self.cache_audit.before(starts, dict(enumerate(slot_mappings)), rows)
    return block_tables, slot_mappings


def _postprocess_sampled(
    original: Callable, self: Any, idx_mapping: Any, sampled: Any, num_sampled: Any, num_rejected: Tensor,
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    original(self, idx_mapping, sampled, num_sampled, num_rejected, *args, **kwargs)
    if self.cache_audit.enabled:
        self.cache_audit.after(num_rejected.tolist())
