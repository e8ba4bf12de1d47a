# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's runner, engine and metrics, on light stand-ins (R4, R16-R20); no engine is started."""

import ast
import importlib.util
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paged import Batch, Paged, write_rows

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from nwor.manager import CacheLayout, Counters, DraftCommitManager, LayerContext
from nwor.settings import Settings
from nwor.vllm import audit, cpu, cpu_sampling, eagle_bias, engine, metrics, patch, runner_v1, worker

# -- what was rejected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "num_drafts", "expected"),
    [
        ([[5, -1, -1, -1]], [3], [3]),
        ([[5, 6, 7, 8]], [3], [0]),
        ([[5, 6, -1, -1], [9, -1, -1, -1], [1, 2, 3, -1]], [3, 0, 2], [2, 0, 0]),
        ([[5, -1, -1, -1], [4, 7, -1, -1]], [1, 1], [1, 0]),
        ([[0, 0, -1]], [2], [1]),  # token 0 is a token
    ],
)
def test_rejected(sampled, num_drafts, expected):
    """Accepted drafts and one token more, then -1: rejected is what the drafts lack."""
    found = runner_v1.rejected(torch.tensor(sampled), torch.tensor(num_drafts, dtype=torch.int32))
    assert found.tolist() == expected
    assert found.dtype == torch.int32


@pytest.mark.parametrize("sampled", [torch.int32, torch.int64])
def test_kept_slots_of_the_audit(sampled):
    """The audit works out the kept rows for itself: all of a query but its rejected rows; without drafts, all."""
    slots = torch.arange(100, 110)
    tokens = torch.tensor([[1, -1, -1], [2, 3, -1], [4, 5, 6]], dtype=sampled)
    metadata = SimpleNamespace(num_draft_tokens=[0, 2, 2])
    kept = audit.kept_slots([0, 4, 7, 10], slots, tokens, metadata)
    assert kept.tolist() == [100, 101, 102, 103, 104, 105, 107, 108, 109]
    assert audit.kept_slots([0, 4, 7, 10], slots, tokens, None).tolist() == slots.tolist()


# -- what can be served ------------------------------------------------------------------------------------------------


def make_runner(names: tuple[str, ...] = ("a", "b"), **changes) -> SimpleNamespace:
    """A V1 runner as far as `unsupported` looks at it; a change of a dotted name goes inside."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
    )
    groups = [SimpleNamespace(layer_names=[*names, "draft"])]
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(), kv_transfer_config=None, parallel_config=parallel
        ),
        shared_kv_cache_layers={},
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = runner
        for part in owners:
            owner = getattr(owner, part)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return runner


def test_cow_needs_neither_attention_nor_a_whole_batch():
    runner = make_runner(device=torch.device("cuda"), vllm_config__parallel_config__use_ubatching=True)
    assert runner_v1.unsupported(runner, {"a": None, "b": None}, "cow") == ""


def groups_of(*names: list[str]) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=group) for group in names])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kv_cache_config": groups_of(["draft"], ["a", "b"])}, ""),
        ({"vllm_config__speculative_config": None}, "no speculative decoding"),
        ({"vllm_config__kv_transfer_config": SimpleNamespace()}, "a KV connector reads the pages before the commit"),
        ({"vllm_config__parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"vllm_config__parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"vllm_config__parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"device": torch.device("cuda")}, "stage has an attention hook on the CPU alone"),
        ({"vllm_config__parallel_config__use_ubatching": True}, "micro-batches"),
        ({"shared_kv_cache_layers": {"b": "a"}}, "layers that share another layer's KV cache"),
        ({"kv_cache_config": groups_of(["a"], ["b", "draft"])}, "a hybrid model: its target layers lie in 2 cache"),
        ({"kv_cache_config": groups_of(["a", "draft"])}, "a hybrid model"),
        ({"kv_cache_config": groups_of(["draft"])}, "a hybrid model: its target layers lie in 0 cache"),
    ],
)
def test_unsupported(changes, why):
    """R19: each configuration that no mode serves is named, and vLLM's own write serves it."""
    found = runner_v1.unsupported(make_runner(**changes), {"a": None, "b": None}, "stage")
    assert found.startswith(why) and bool(found) == bool(why)


def test_target_layers_are_attention_and_not_the_drafters():
    """R3, R22: "staged tokens 0 < accepted 6 for layer 32" was the drafter's layer taken for a target's."""
    from vllm.model_executor.layers.attention import Attention

    layers = {name: object.__new__(Attention) for name in ("model.0", "model.1", "model.2")}
    context = {
        "model.0": layers["model.0"],
        "mamba": object(),
        "model.2": layers["model.2"],
        "model.1": layers["model.1"],
    }
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        drafter=SimpleNamespace(_draft_attn_layer_names={"model.2"}),
    )
    assert list(runner_v1.target_layers(runner)) == ["model.0", "model.1"]
    runner.drafter = SimpleNamespace()  # n-gram: a drafter without layers
    assert list(runner_v1.target_layers(runner)) == ["model.0", "model.2", "model.1"]
    del runner.drafter
    assert len(runner_v1.target_layers(runner)) == 3


# -- one step of the runner --------------------------------------------------------------------------------------------

QUERIES, DRAFTS = (5, 4, 3), (0, 3, 2)


class Stepping:
    """A stand-in for the V1 runner whose forward writes three layers, and whose sampler accepts as told."""

    def __init__(self, monkeypatch, mode: str = "stage", capacity: int = 16) -> None:
        self.paged, batch = Paged(), Batch(QUERIES, DRAFTS)
        self.batch, self.before = batch, batch.slot_mapping.clone()
        self.device = torch.device("cpu")
        self.query_start_loc = SimpleNamespace(np=torch.tensor([*batch.query_start_loc, 99, 99]).numpy())
        self.input_batch = SimpleNamespace(num_reqs=3, req_ids=["p", "q", "r"])
        self.nwor = DraftCommitManager(CacheLayout.of(self.paged.targets()), mode, capacity, 32)
        self.nwor_metadata, self.nwor_committed = SimpleNamespace(num_draft_tokens=list(DRAFTS)), {}
        self.layers = [SimpleNamespace(nwor=LayerContext(self.nwor, index)) for index in range(3)]
        monkeypatch.setattr(runner_v1, "target_slot_mapping", lambda runner: runner.batch.slot_mapping)

    def forward(self, fail: bool = False) -> None:
        rows = self.paged.new_rows(self.batch.num_tokens, 5)
        for index, cache in enumerate(self.paged.targets()):
            if fail and index == 2:
                raise MemoryError("in the third layer")
            slots = self.batch.slot_mapping[: self.batch.num_tokens]
            if self.nwor.holding:
                self.nwor.stage(index, lambda cache, slots: write_rows(cache, slots, rows, None), cache, slots)
            else:
                write_rows(cache, slots, rows, None)

    def run(self, sampled: list[list[int]] | None, **options) -> SimpleNamespace:
        """One step through the hooks; `sampled` None: the sampler raises."""
        runner_v1._make_forward(Stepping.forward)(self, **options)
        self.window_during = self.nwor.window

        def sample(self, logits, metadata):
            if sampled is None:
                raise MemoryError("in the sampler")
            return SimpleNamespace(sampled_token_ids=torch.tensor(sampled))

        return runner_v1._make_sample(sample)(self, None, self.nwor_metadata)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_step_of_the_runner(mode, monkeypatch):
    """R4, R20: begun once before the forward, committed once after sampling, and the commits of each request told."""
    runner = Stepping(monkeypatch, mode)
    output = runner.run([[7, -1, -1, -1], [7, 8, 9, -1], [7, -1, -1, -1]])
    assert runner.window_during.num_drafts == DRAFTS
    assert output.sampled_token_ids.shape == (3, 4)
    assert runner.nwor_committed == {"p": 0, "q": 2, "r": 0}
    counters = runner.nwor.read_counters()
    assert (counters.windows, counters.staged_tokens, counters.committed_tokens) == (2, 5, 2)
    assert torch.equal(runner.batch.slot_mapping, runner.before)
    assert runner.nwor.window is None


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_step_that_fails_is_cancelled(where, mode, monkeypatch):
    """R2, R4: the error goes on to vLLM; no window stays open, the drafts' slots are as they were."""
    runner = Stepping(monkeypatch, mode)
    pool = runner.paged.pool.clone()
    with pytest.raises(MemoryError, match=where.replace("forward", "third layer")):
        runner.run(None, **({"fail": True} if where == "forward" else {}))
    assert runner.nwor.window is None
    assert runner.nwor.read_counters() == Counters(cancelled=1)
    assert torch.equal(runner.batch.slot_mapping, runner.before)
    held = runner.batch.held(mode)
    for before, after in zip(runner.paged.targets(pool), runner.paged.targets(), strict=True):
        for row in held:
            block, offset = divmod(runner.batch.slots[row], 4)
            assert torch.equal(before[block, :, offset].view(torch.int16), after[block, :, offset].view(torch.int16))


def test_steps_without_a_window(monkeypatch):
    """#4, #10, #22: no drafts, a window too large, no manager: vLLM's own step, nothing told, nothing staged."""
    runner = Stepping(monkeypatch)
    runner.nwor_committed = {"an": "older step"}
    runner.nwor_metadata = None
    runner.run([[7], [7], [7]])
    assert runner.window_during is None
    assert runner.nwor_committed == {}
    assert runner.nwor.read_counters() == Counters()

    runner = Stepping(monkeypatch, capacity=6)
    runner.run([[7, -1, -1, -1]] * 3)
    assert runner.nwor_committed == {}
    assert runner.nwor.read_counters() == Counters(fallbacks=1)

    manager, runner.nwor, calls = runner.nwor, None, []
    runner_v1._make_forward(lambda self: calls.append("forward"))(runner)
    runner_v1._make_sample(lambda self, logits, metadata: calls.append("sample"))(runner, None, None)
    assert calls == ["forward", "sample"]
    assert manager.window is None


# -- every rank serves the mode ----------------------------------------------------------------------------------------


def rank(number: int, mode: str = "stage", serving: str = "stage", reason: str = "") -> dict:
    return asdict(worker.Status(number, mode, serving, reason))


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0), rank(1)],
        [rank(0, serving="off", reason="a KV connector"), rank(1, serving="off", reason="a KV connector")],
        [rank(0, serving="stage (emulated)", reason="ALiBi")],
    ],
    ids=["active", "fallback with a reason", "emulation with a reason"],
)
def test_require_mode(ranks):
    engine.require_mode("stage", ranks)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([rank(0), rank(1, mode="off", serving="off")], "was asked for, but the ranks have .'off', 'stage'."),
        ([rank(0, mode="cow", serving="cow")], "MODE=stage was asked for, but the ranks have .'cow'."),
        ([rank(0), rank(1, serving="off", reason="a hybrid model")], "the ranks disagree on what serves"),
        ([rank(0, serving="off"), rank(1, serving="off")], r"not active on ranks \[0, 1\]; see whether .* doctor"),
        ([rank(0, serving="off", reason="x"), rank(1, serving="off")], r"not active on ranks \[1\]"),
        ([], "was asked for, but the ranks have"),
    ],
    ids=["a rank lacks the plugin", "another mode", "ranks disagree", "not active", "one unexplained", "no rank"],
)
def test_a_mode_that_is_not_active_stops_the_run(ranks, message):
    """#18, #19: a clean baseline must not carry the treatment's name."""
    with pytest.raises(engine.ModeNotActive, match=message):
        engine.require_mode("stage", ranks)


# -- counters on their way to the front end ----------------------------------------------------------------------------


def test_carried_counters_arrive_and_leave_no_trace():
    """R20, #18: out of the worker, along with vLLM's own statistics, and off them again before vLLM counts them."""
    counters = asdict(Counters(windows=3, staged_tokens=12, bytes_written=2**40))
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"prefill": 2})
    silent, speaking = SimpleNamespace(scheduler_stats=None), SimpleNamespace(scheduler_stats=stats)
    engine.carry({0: silent, 1: speaking}, counters)
    assert stats.num_kv_fetch_reqs_by_stage.keys() > {"prefill"}
    assert metrics.take(stats.num_kv_fetch_reqs_by_stage) == counters
    assert stats.num_kv_fetch_reqs_by_stage == {"prefill": 2}
    assert metrics.take(stats.num_kv_fetch_reqs_by_stage) == {}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("committed", "mismatches"), [({"p": 0, "q": 2}, 0), ({"p": 0, "q": 1}, 1), ({"p": 0}, 1)])
def test_commits_are_held_against_the_scheduler(committed, mismatches, strict):
    """R20: in every step, each request's commits are what the scheduler accepts; a difference is counted, or stops."""
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={})
    note = engine._make_spec_decoding_stats(lambda self, spec_decoding_stats, **counts: spec_decoding_stats)

    def update(self, scheduler_output, model_runner_output):
        note(self, None, request_id="q", num_accepted_tokens=2)
        return {0: SimpleNamespace(scheduler_stats=stats)}

    hook, scheduler = engine._make_update(update, strict), SimpleNamespace()
    output = SimpleNamespace(nwor_committed=committed, nwor_counters=asdict(Counters(windows=1)))
    if strict and mismatches:
        with pytest.raises(AssertionError, match="committed and accepted drafts differ, by request: {'q'"):
            hook(scheduler, None, output)
        return
    hook(scheduler, None, output)
    carried = metrics.take(stats.num_kv_fetch_reqs_by_stage)
    assert carried == asdict(Counters(windows=1)) | {"scheduler_checks": 1, "scheduler_mismatches": mismatches}
    hook(scheduler, None, SimpleNamespace())  # a step without a window has nothing to hold
    assert stats.num_kv_fetch_reqs_by_stage == {}


def test_the_carrier_is_vllms():
    """The field must stay a dict of names to numbers, or counters would be lost on the way."""
    from vllm.v1.metrics.stats import SchedulerStats

    carrier = {field.name: field for field in fields(SchedulerStats)}["num_kv_fetch_reqs_by_stage"]
    assert carrier.type == dict[str, int] or carrier.type == "dict[str, int]"
    assert SchedulerStats().num_kv_fetch_reqs_by_stage == {}


# -- vLLM is the one the hooks were written for ------------------------------------------------------------------------


def test_every_hook_fits_the_installed_vllm():
    """R17: each patch names the signature it was written for, and is refused by another."""
    settings = Settings(mode="stage", audit=True)
    try:
        for module in (worker, engine, runner_v1):
            module.install(settings)
        for module in (cpu, cpu_sampling, audit, metrics, eagle_bias):
            module.install()
        assert {"CPUAttentionBackendImpl.do_kv_cache_update", "CPUAttentionBackendImpl.forward"} < {*patch.wrapped()}
        assert {"GPUModelRunner._model_forward", "GPUModelRunner._sample"} < {*patch.wrapped()}
    finally:
        patch.undo_all()


UPDATE = ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
FORWARD = ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
FORWARD += ["output_scale", "output_block_scale"]


@pytest.mark.parametrize(
    ("backend", "implementation"),
    [
        ("flash_attn", "FlashAttentionImpl"),
        ("triton_attn", "TritonAttentionImpl"),
        ("flashinfer", "FlashInferImpl"),
        ("rocm_aiter_unified_attn", "RocmAiterUnifiedAttentionImpl"),
        ("cpu_attn", "CPUAttentionBackendImpl"),
    ],
)
def test_all_backends_have_one_hook(backend, implementation):
    """R17: read from the source, so that no GPU package is needed; names in their order, none of them packed."""
    source = Path(importlib.util.find_spec("vllm").origin).parent / f"v1/attention/backends/{backend}.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == implementation]
    methods = {node.name: node.args for node in found.body if isinstance(node, ast.FunctionDef)}
    for name, expected in (("do_kv_cache_update", UPDATE), ("forward", FORWARD)):
        arguments = methods[name]
        assert [argument.arg for argument in arguments.posonlyargs + arguments.args] == expected
        assert not arguments.kwonlyargs and arguments.vararg is None and arguments.kwarg is None
