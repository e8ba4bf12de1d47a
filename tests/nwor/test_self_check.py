# SPDX-License-Identifier: Apache-2.0
"""The window that a mode runs at start-up, without an engine; with one: tests/nwor/test_vllm_modes.py."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from nwor import ops
from nwor.attention.configs import H200, plan
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.settings import Settings
from nwor.vllm import attention_cpu, initialize, self_check, worker
from nwor.vllm.context import LayerContext, context_of
from tests.nwor import faults
from tests.nwor.paged import Paged, write_rows
from tests.nwor.runners import gpu_layer, make_runner

CPUS = type("CPUAttentionBackend", (), {})


class Impl:
    """An attention of vLLM's on a CPU, behind our hooks: it writes where it is told, and is not to attend itself."""

    num_heads, head_size, scale, kv_cache_dtype = 4, 8, 0.5, "auto"
    logits_soft_cap, sliding_window, alibi_slopes, sinks = 0.0, -1, None, None

    def __init__(self, packing: torch.Tensor | None) -> None:
        def write(self, layer, key, value, cache, slots):
            write_rows(cache, slots, torch.cat([key, value], dim=-1), packing)

        def attend(*arguments):
            pytest.fail("vLLM's attention has run")

        self.do_kv_cache_update = partial(attention_cpu._make_update(write), self)
        self.forward = partial(attention_cpu._make_forward(attend), self)


def packed() -> Paged:
    """As vLLM's caches on a CPU are: our attention there reads no others."""
    return Paged(packed=True, width=2 * Impl.head_size)


def layers_of(paged: Paged) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            kv_cache=cache, impl=Impl(paged.packing), layer_name=f"layers.{number}", dtype=torch.bfloat16,
            query_quant=None, _k_scale_float=1.0, _v_scale_float=1.0, nwor=None,
        )
        for number, cache in enumerate(paged.targets())
    ]  # fmt: skip


def check(paged: Paged, max_drafts: int = 3, max_requests: int = 4, mode: str = "cow", attends: bool = True) -> str:
    layout = CacheLayout.from_kv_caches(paged.targets(), paged.packing)
    manager = DraftCommitManager(layout, mode, max_requests, max_drafts, 64, attends=attends)
    before, layers = paged.pool.clone(), layers_of(paged)
    found = self_check.failure(manager, layers)
    assert torch.equal(paged.pool, before), "no page of the model's is touched"
    assert not manager.is_open and manager.counters.read().windows == 0
    assert all(layer.nwor is None for layer in layers)
    return found


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
@pytest.mark.parametrize("max_requests", [1, 4])
@pytest.mark.parametrize("order", ["LBHN", "LBNH", "BLHN", "BLNH", "packed"])
def test_what_works_is_served(order, max_drafts, max_requests):
    paged = packed() if order == "packed" else Paged(order=order)
    assert check(paged, max_drafts, max_requests) == ""
    assert check(paged, max_drafts, max_requests, "stage", attends=False) == ""
    for mode in ("stage", "direct") if paged.packed else ():
        assert check(paged, max_drafts, max_requests, mode) == ""


LOGGING, STAGING = ("log_all_layers", "restore_all_layers"), ("commit_all_layers", "verify_attention")
# By the mode that is checked, and whether our attention can serve: what it does with the pages in its ways.
USED = {
    ("cow", True): LOGGING,
    ("stage", False): LOGGING,
    ("stage", True): LOGGING + STAGING,
    ("direct", True): ("verify_attention",),
}


def nothing(run, arguments) -> None:
    """It leaves out what it is for."""


def one_layer(run, arguments) -> None:
    """It takes the first layer alone."""
    offsets = arguments["layer_offsets"]
    run(**arguments | {"layer_offsets": offsets[:1].expand_as(offsets).contiguous()})


def fail(run, arguments) -> None:
    raise RuntimeError("no kernel image is available")


FAULTS = [(operator, do) for operator in LOGGING + STAGING for do in (nothing, fail)]
FAULTS += [(operator, one_layer) for operator in (*LOGGING, "commit_all_layers")]


@pytest.mark.parametrize(("operator", "do"), FAULTS)
@pytest.mark.parametrize(("mode", "attends"), USED, ids=["cow", "stage that logs", "stage", "direct"])
def test_what_does_not_is_said(mode, attends, operator, do, monkeypatch):
    """Whichever way of a mode is at fault: a step of another kind than the check's would leave wrong rows."""
    used = operator in USED[mode, attends]
    if operator == "verify_attention":
        monkeypatch.setattr(ops, operator, lambda *arguments, **more: do(None, {}))
    else:
        faults.instead_of(operator, do, monkeypatch)
    found = check(packed(), mode=mode, attends=attends)
    assert bool(found) is used
    if used and do is fail:
        assert "no kernel image" in found
    elif used and mode == "stage":
        assert ("logged" if operator in LOGGING else "staged") in found, "and which"


@pytest.mark.parametrize(("mode", "operator"), [("cow", "log_all_layers"), ("stage", "commit_all_layers")])
def test_no_room_is_no_fault_of_the_operators(mode, operator, monkeypatch):
    """It is an error that says what would make room, where the manager is built."""

    def no_room(run, arguments):
        raise torch.cuda.OutOfMemoryError

    faults.instead_of(operator, no_room, monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        check(packed(), mode=mode)


# -- what comes of a failure -------------------------------------------------------------------------------------------


# The mode, the ways in which its check fails, and the ways that serve then and whose reason is given.
FAILURES = {
    "nothing fails": ("stage", (), ["staged", "logged"], ""),
    "our attention fails": ("stage", ("staged",), ["logged"], "staged"),
    "both ways fail": ("stage", ("staged", "logged"), None, "logged"),
    "the log fails": ("stage", ("logged",), None, "logged"),
    "the control's attention fails": ("direct", ("written through",), None, "written through"),
    "the control needs no log": ("direct", ("logged",), ["written through"], ""),
    "cow needs no attention": ("cow", ("staged",), ["logged"], ""),
    "cow's log fails": ("cow", ("logged",), None, "logged"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_where_our_attention_fails_its_check_every_step_is_logged(case, monkeypatch):
    """A fallback to vLLM's own write would leave rejected drafts in the pages, which a log can still keep out."""
    mode, failing, serving, reason = FAILURES[case]

    def failure(manager, layers):
        return next((f"the {way.name} one fails" for way in manager.ways if way.name in failing), "")

    monkeypatch.setattr(self_check, "failure", failure)
    monkeypatch.setattr(attention_cpu, "find_packing", lambda layer: Paged(packed=True).packing)
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    paged, layers = Paged(packed=True), {"a": gpu_layer(attn_backend=CPUS), "b": gpu_layer(attn_backend=CPUS)}
    for number, (layer, cache) in enumerate(zip(layers.values(), paged.targets(), strict=False)):
        layer.kv_cache, layer.number = cache, number
    runner = make_runner(compilation_config__static_forward_context=layers)
    runner.vllm_config.scheduler_config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
    made = initialize.make_initialize(lambda self, *arguments, **more: None, Settings(mode=mode))
    made(runner, is_profiling=True)
    said = worker.status(SimpleNamespace(rank=0, model_runner=runner))
    assert said["serving"] == ("off" if serving is None else mode) and said["ways"] == (serving or [])
    assert said["reason"] == (f"the {reason} one fails" if reason else "")
    manager = context_of(runner).manager
    for layer in layers.values():
        assert vars(layer).get("nwor") == (manager and LayerContext(manager, layer.number))
    assert manager is None or manager.attends == (serving[0] != "logged")


# -- which batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "most"), [(32, 8, 16), (32, 32, 16), (16, 16, 18), (8, 8, 19), (8, 2, 19)]
)
@pytest.mark.parametrize("max_drafts", [1, 4, 8])
@pytest.mark.parametrize("max_requests", [1, 7, 256])
def test_every_kernel_that_a_batch_can_need_is_compiled_at_start_up(max_requests, max_drafts, heads, kv_heads, most):
    """Batches of every size up to the largest, on an H200; a power of two is not enough, and few kernels are."""
    manager = SimpleNamespace(
        slots=torch.zeros(max_requests, max_drafts), layout=SimpleNamespace(num_heads=kv_heads),
        attention=SimpleNamespace(device=H200, partials=range(1 << 16)), max_query_len=max_drafts + 1,
    )  # fmt: skip
    impl = SimpleNamespace(num_heads=heads, head_size=128)
    layer = SimpleNamespace(impl=impl, kv_cache=torch.zeros(0, dtype=torch.bfloat16), query_quant=None)
    found = self_check._batches(manager, [layer])

    def compiled(requests: int) -> object:
        shape = requests, heads, kv_heads, 128, 2, max_drafts + 1
        return plan(H200, 1 << 16, *shape, False).compiled

    needed = {compiled(requests) for requests in range(1, max_requests + 1)}
    assert {compiled(requests) for requests in found} == needed
    assert len(found) == len(needed) <= most and max(found) <= max_requests
