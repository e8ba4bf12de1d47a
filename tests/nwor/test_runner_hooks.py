# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's runner, engine and metrics, on light stand-ins; no engine is started."""

from dataclasses import asdict, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.nwor.paged import Batch, Paged, write_rows

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from nwor.manager import CacheLayout, Counters, DraftCommitManager, LayerContext
from nwor.settings import Settings
from nwor.vllm import attention_cpu, metrics, patch, runner, runner_v1, runner_v2, worker
from nwor.vllm import scheduler as vllm_scheduler
from nwor.vllm.workarounds import cpu_sampling, eagle_bias
from nwor_lab.audit import hooks

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
    cu_num_draft_tokens = torch.tensor(num_drafts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = runner_v1.rejected(torch.tensor(sampled), cu_num_draft_tokens)
    assert found.tolist() == expected
    assert found.dtype == torch.int32
    metadata = SimpleNamespace(num_draft_tokens=num_drafts)
    assert hooks.rejected(torch.tensor(sampled), metadata) == expected, "the audit works it out for itself"
    assert hooks.rejected(torch.tensor(sampled), None) == [0] * len(expected)


# -- one step of the runner --------------------------------------------------------------------------------------------

QUERIES, DRAFTS = (5, 4, 3), (0, 3, 2)


class Stepping:
    """A stand-in for the V1 runner whose forward writes three layers, and whose sampler accepts as told."""

    def __init__(self, monkeypatch, mode: str = "stage", max_requests: int = 4) -> None:
        self.paged, batch = Paged(), Batch(QUERIES, DRAFTS)
        self.batch, self.before = batch, batch.slot_mapping.clone()
        self.device = torch.device("cpu")
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([*batch.query_start_loc, 99, 99], dtype=torch.int32))
        self.input_batch = SimpleNamespace(num_reqs=3, req_ids=["p", "q", "r"])
        self.nwor = DraftCommitManager(CacheLayout.of(self.paged.targets()), mode, max_requests, 3, 32)
        drafts = torch.tensor(DRAFTS, dtype=torch.int32)
        self.nwor_metadata = SimpleNamespace(
            cu_num_sampled_tokens=(drafts + 1).cumsum(0, dtype=torch.int32),
            cu_num_draft_tokens=drafts.cumsum(0, dtype=torch.int32),
        )
        self.nwor_requests, self.nwor_stored_first = (), False
        self.nwor_receipts, self.nwor_receipt = True, None
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
        self.open_during = self.nwor.is_open

        def sample(self, logits, metadata):
            if sampled is None:
                raise MemoryError("in the sampler")
            return SimpleNamespace(sampled_token_ids=torch.tensor(sampled))

        return runner_v1._make_sample(sample)(self, None, self.nwor_metadata)


def told(made: Stepping) -> SimpleNamespace:
    """What `sample_tokens` gives its caller."""
    return runner_v1._make_sample_tokens(lambda self, grammar_output: SimpleNamespace())(made, None)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_step_of_the_runner(mode, monkeypatch):
    """Begun once before the forward, committed once after sampling, and the commits of each request told."""
    made = Stepping(monkeypatch, mode)
    output = made.run([[7, -1, -1, -1], [7, 8, 9, -1], [7, -1, -1, -1]])
    assert made.open_during
    assert output.sampled_token_ids.shape == (3, 4)
    found = told(made)
    assert found.nwor_committed == {"p": 0, "q": 2, "r": 0}
    assert found.nwor_counters == asdict(made.nwor.read_counters())
    counters = made.nwor.read_counters()
    assert (counters.windows, counters.staged_tokens, counters.committed_tokens) == (2, 5, 2)
    assert torch.equal(made.batch.slot_mapping, made.before)
    assert not made.nwor.is_open
    assert not vars(told(made)), "told once"


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_step_that_fails_is_cancelled(where, mode, monkeypatch):
    """The error goes on to vLLM; no window stays open, the drafts' slots are as they were."""
    made = Stepping(monkeypatch, mode)
    pool = made.paged.pool.clone()
    with pytest.raises(MemoryError, match=where.replace("forward", "third layer")):
        made.run(None, **({"fail": True} if where == "forward" else {}))
    assert not made.nwor.is_open
    assert made.nwor.read_counters() == Counters(cancelled=1)
    assert torch.equal(made.batch.slot_mapping, made.before)
    held = made.batch.held()
    for before, after in zip(made.paged.targets(pool), made.paged.targets(), strict=True):
        for row in held:
            block, offset = divmod(made.batch.slots[row], 4)
            assert torch.equal(before[block, :, offset].view(torch.int16), after[block, :, offset].view(torch.int16))


def test_steps_without_a_window(monkeypatch):
    """No drafts, a batch too large, no manager: vLLM's own step, nothing told, nothing staged."""
    made = Stepping(monkeypatch)
    made.nwor_metadata = None
    made.run([[7], [7], [7]])
    assert not made.open_during
    assert not vars(told(made))
    assert made.nwor.read_counters() == Counters()

    made = Stepping(monkeypatch, max_requests=2)
    made.run([[7, -1, -1, -1]] * 3)
    assert not vars(told(made))
    assert made.nwor.read_counters() == Counters(fallbacks=sum(drafts > 0 for drafts in DRAFTS))

    manager, made.nwor, calls = made.nwor, None, []
    runner_v1._make_forward(lambda self: calls.append("forward"))(made)
    runner_v1._make_sample(lambda self, logits, metadata: calls.append("sample"))(made, None, None)
    assert calls == ["forward", "sample"]
    assert not manager.is_open


def test_an_asynchronous_output_is_told_when_it_is_asked_for():
    """Nobody waits for the device before the scheduler does."""
    read = []
    receipt = SimpleNamespace(read=lambda: (read.append(1), (Counters(windows=1), [2, 0, 9]))[1])
    output = SimpleNamespace(get_output=lambda: SimpleNamespace(sampled_token_ids=[[1]]))
    runner.attach(output, receipt, ["p", "q"])
    assert not read
    result = output.get_output()
    assert result.sampled_token_ids == [[1]]
    assert result.nwor_committed == {"p": 2, "q": 0}
    assert result.nwor_counters == asdict(Counters(windows=1))


# -- one step of the V2 runner, up to what needs a stream --------------------------------------------------------------


class SteppingV2:
    """A stand-in for the V2 runner as far as its slots: a padded batch of the three requests above."""

    nwor_group = 0
    nwor_stored_first = False

    def __init__(self, mode: str = "stage") -> None:
        self.paged, self.batch = Paged(), Batch(QUERIES, DRAFTS)
        self.nwor = DraftCommitManager(CacheLayout.of(self.paged.targets()), mode, 4, 3, 32)

    def input_batch(self, num_draft_tokens: int) -> SimpleNamespace:
        starts = torch.tensor([*self.batch.query_start_loc, 12], dtype=torch.int32)  # a padded request behind
        logits = torch.tensor([0, 1, 5, 8] if num_draft_tokens else [0, 1, 2, 3], dtype=torch.int32)
        return SimpleNamespace(
            num_draft_tokens=num_draft_tokens, query_start_loc=starts, cu_num_logits=logits,
            req_ids=["p", "q", "r"], num_scheduled_tokens=np.array(QUERIES),
        )  # fmt: skip

    def prepare_attn(self, input_batch):
        return ("tables",), self.batch.slot_mapping[None]


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_the_v2_runner_opens_a_window_on_the_slots_of_its_batch(mode):
    """In every real step, by the batch's own tensors; what it returns is vLLM's."""
    made = SteppingV2(mode)
    slots = made.batch.slot_mapping.clone()
    tables, mappings = runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(sum(DRAFTS)))
    assert (tables, mappings.shape) == (("tables",), (1, 15))
    assert torch.equal(made.batch.slot_mapping, slots)
    assert made.nwor.is_open
    held = made.batch.held()
    found = sorted(slot for slot in made.nwor.slots.flatten().tolist() if slot >= 0)
    assert found == sorted(made.batch.slots[row] for row in held)
    with pytest.raises(MemoryError):
        runner_v2._make_execute(lambda self: (_ for _ in ()).throw(MemoryError()))(made)
    assert not made.nwor.is_open, "a step that fails leaves no window behind"


@pytest.mark.parametrize(("rows", "named"), [((1, 4, 3), True), ((5, 4, 3), False)])
def test_requests_are_named_where_all_other_rows_are_drafts(rows, named, monkeypatch):
    """A step that prefills may write slots that a log still holds: its requests go unnamed, under both runners."""
    asked = []
    begin = DraftCommitManager.begin
    monkeypatch.setattr(
        DraftCommitManager, "begin", lambda *args, **named: (asked.append(args[4]), begin(*args, **named))[1]
    )
    scheduled = np.array(rows)
    first, second = Stepping(monkeypatch, "cow"), SteppingV2("cow")
    metadata = first.nwor_metadata
    metadata.num_draft_tokens = list(DRAFTS)
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(first, None, scheduled)
    first.run([[7, -1, -1, -1]] * 3)
    batch = second.input_batch(sum(DRAFTS))
    batch.num_scheduled_tokens = scheduled
    runner_v2._make_prepare(SteppingV2.prepare_attn)(second, batch)
    assert [list(requests) for requests in asked] == 2 * [["p", "q", "r"] if named else []]


def test_dummy_runs_of_the_v1_runner_hold_nothing():
    """Before the caches are there, and after a step."""
    calls = []
    run = runner_v1._make_dummy(lambda self, num_tokens: calls.append(num_tokens))
    run(SimpleNamespace(), 8)
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    run(made, 16)
    assert calls == [8, 16]
    assert made.nwor.page_slots.eq(-1).all()


def test_v2_steps_without_drafts_and_dummy_runs_hold_nothing():
    """What a captured kernel reads is set in each of them."""
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    assert not made.nwor.is_open
    assert made.nwor.page_slots[:12].tolist() == made.batch.slots
    assert made.nwor.staging_rows.eq(-1).all()
    runner_v2._make_dummy(lambda self, input_batch, valid_state_slots: "dummy")(made, None)
    assert made.nwor.page_slots.eq(-1).all()


def test_v2_captures_launch_all_that_a_replay_may_need():
    """Though vLLM warms up with real steps before, the last of them without drafts."""
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    capture = runner_v2._make_capture(lambda self, *, profile_only: (self.nwor.rehearsing, profile_only))
    assert capture(made, profile_only=True) == (True, True)
    assert made.nwor.page_slots.eq(-1).all()
    made.nwor = None
    capture = runner_v2._make_capture(lambda self: "captured")
    assert capture(made) == "captured"


# -- requests that read what another writes in the same step -----------------------------------------------------------


def scheduled(new: dict[str, int], resumed: dict[str, int], running: dict[str, int], rows: dict[str, int]):
    """A `SchedulerOutput`: computed tokens of requests by id, and the rows of each."""
    cached = {**resumed, **running}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=tokens) for name, tokens in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*cached], num_computed_tokens=[*cached.values()], resumed_req_ids={*resumed}
        ),
        num_scheduled_tokens=rows,
    )


READS = {
    "decodes alone": (({}, {}, {"a": 40}, {"a": 4}), False),
    "a new request with a cached prefix": (({"b": 32}, {}, {"a": 40}, {"a": 4, "b": 4}), True),
    "one that comes back": (({}, {"b": 32}, {"a": 40}, {"a": 4, "b": 1}), True),
    "one without a cached prefix": (({"b": 0}, {}, {"a": 40}, {"a": 4, "b": 3}), False),
    "one with a long query": (({"b": 32}, {}, {"a": 40}, {"a": 4, "b": 5}), False),
    "long and short ones": (({"b": 32, "c": 16}, {}, {}, {"b": 5, "c": 2}), True),
}


@pytest.mark.parametrize("case", READS)
def test_steps_in_which_a_query_may_read_another_requests_new_row(case):
    """Only what is admitted in the step can find a block that the step fills, and only short queries are ours."""
    arguments, expected = READS[case]
    manager = SimpleNamespace(attention="a workspace", max_query_len=4)
    assert runner.reads_rows_of_this_step(manager, scheduled(*arguments)) is expected
    assert not runner.reads_rows_of_this_step(SimpleNamespace(attention=None), scheduled(*arguments)), "a CPU"
    assert not runner.reads_rows_of_this_step(None, scheduled(*arguments))


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("case", ["decodes alone", "a new request with a cached prefix"])
def test_such_a_step_replays_no_graph_of_decodes(case, dummy, monkeypatch):
    """In a FULL graph our kernel attends and stores at once; both runners leave it, and only in this step."""
    arguments, reads = READS[case]
    reads = reads and not dummy
    step = scheduled(*arguments)

    second = SteppingV2()
    second.nwor.attention = "a workspace"
    gather = runner_v2._make_gather(lambda self, scheduler_output, dummy_run: ("state", 4))
    assert gather(second, step, dummy) == ("state", None if reads else 4)
    runner_v2._make_prepare(SteppingV2.prepare_attn)(second, second.input_batch(sum(DRAFTS)))
    assert second.nwor.stored_first is reads
    if dummy:
        return

    first = Stepping(monkeypatch)
    first.nwor.attention = "a workspace"
    metadata = first.nwor_metadata
    metadata.num_draft_tokens = list(DRAFTS)
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(first, step, np.array(QUERIES))
    batch = runner_v1._make_batch(lambda self, **options: options)
    assert batch(first, num_tokens=8) == {"num_tokens": 8} | ({"force_eager": True} if reads else {})
    first.run([[7, -1, -1, -1]] * 3)
    assert first.nwor.stored_first is reads
    assert batch(first, num_tokens=8) == {"num_tokens": 8}, "a dummy run behind it is free to replay"


# -- every rank serves the mode ----------------------------------------------------------------------------------------


def rank(number: int, mode: str = "stage", serving: str = "stage", reason: str = "") -> dict:
    return asdict(worker.Status(number, mode, serving, reason))


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0), rank(1)],
        [rank(0, serving="off", reason="a KV connector"), rank(1, serving="off", reason="a KV connector")],
    ],
    ids=["active", "fallback with a reason"],
)
def test_require_mode(ranks):
    vllm_scheduler.require_mode("stage", ranks)


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
    """A clean baseline must not carry the treatment's name."""
    with pytest.raises(vllm_scheduler.ModeNotActive, match=message):
        vllm_scheduler.require_mode("stage", ranks)


# -- counters on their way to the front end ----------------------------------------------------------------------------


def test_carried_counters_arrive_and_leave_no_trace():
    """Out of the worker, along with vLLM's own statistics, and off them again before vLLM counts them."""
    counters = asdict(Counters(windows=3, staged_tokens=12, bytes_written=2**40))
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"prefill": 2})
    silent, speaking = SimpleNamespace(scheduler_stats=None), SimpleNamespace(scheduler_stats=stats)
    metrics.carry({0: silent, 1: speaking}, counters)
    assert stats.num_kv_fetch_reqs_by_stage.keys() > {"prefill"}
    assert metrics.take(stats.num_kv_fetch_reqs_by_stage) == counters
    assert stats.num_kv_fetch_reqs_by_stage == {"prefill": 2}
    assert metrics.take(stats.num_kv_fetch_reqs_by_stage) == {}


def test_no_logger_of_the_front_end_sees_a_carried_counter(monkeypatch):
    """Whichever comes first: only the Prometheus logger took them off, after all others had read vLLM's dict."""
    seen, observed = [], []

    class Logger:
        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            seen.append((dict(scheduler_stats.num_kv_fetch_reqs_by_stage), engine_idx))

    prometheus = Logger()
    prometheus.nwor_counters = {}
    monkeypatch.setattr(metrics, "_observe", lambda logger, *what: observed.append((logger, *what)))
    manager = object.__new__(StatLoggerManager)
    manager.stat_loggers = [Logger(), prometheus, Logger()]
    try:
        metrics.install()
        for number in (1, 2):  # two data-parallel engines
            stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 3})
            metrics.carry({0: SimpleNamespace(scheduler_stats=stats)}, {"windows": number})
            manager.record(stats, None, engine_idx=number)
    finally:
        patch.undo_all()
    assert seen == [({"waiting": 3}, number) for number in (1, 2) for _ in range(3)]
    assert observed == [(prometheus, {"windows": number}, number) for number in (1, 2)]


def test_nothing_is_carried_where_nobody_takes_it_off():
    """With metrics off, the scheduler's check still runs; its counts stayed in vLLM's own dict."""
    stats = SchedulerStats()
    hook = vllm_scheduler._make_update(lambda *_: {0: SimpleNamespace(scheduler_stats=stats)}, strict=True, emit=False)
    scheduler = SimpleNamespace()
    hook(scheduler, None, SimpleNamespace(nwor_committed={}, nwor_counters=asdict(Counters(windows=1))))
    assert stats.num_kv_fetch_reqs_by_stage == {}
    assert scheduler.nwor_checked == (1, 0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("committed", "mismatches"), [({"p": 0, "q": 2}, 0), ({"p": 0, "q": 1}, 1), ({"p": 0}, 1)])
def test_commits_are_held_against_the_scheduler(committed, mismatches, strict):
    """In every step, each request's commits are what the scheduler accepts; a difference is counted, or stops."""
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={})
    note = vllm_scheduler._make_spec_decoding_stats(lambda self, spec_decoding_stats, **counts: spec_decoding_stats)

    def update(self, scheduler_output, model_runner_output):
        note(self, None, request_id="q", num_accepted_tokens=2)
        return {0: SimpleNamespace(scheduler_stats=stats)}

    hook, scheduler = vllm_scheduler._make_update(update, strict, emit=True), SimpleNamespace()
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
    carrier = {field.name: field for field in fields(SchedulerStats)}["num_kv_fetch_reqs_by_stage"]
    assert carrier.type == dict[str, int] or carrier.type == "dict[str, int]"
    assert SchedulerStats().num_kv_fetch_reqs_by_stage == {}


# -- one drafter in all modes ------------------------------------------------------------------------------------------


class Head(torch.nn.Module):
    """An EAGLE head as vLLM builds it: `fc` without a bias, attention with one where the config promises it."""

    def __init__(self, promised: bool) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"fc": torch.nn.Linear(4, 2, bias=False), "qkv_proj": torch.nn.Linear(2, 2, bias=promised)}
        )

    def load_weights(self, weights):
        return {name for name, _ in weights}


@pytest.mark.parametrize(
    ("bias", "promised", "said"),
    [(0.0, False, ""), (1.0, False, "fc.bias, which vLLM's EAGLE head drops"), (0.0, True, "qkv_proj.bias, which ")],
)
def test_a_head_is_repaired_when_asked_for_and_only_then(bias, promised, said, monkeypatch):
    """Modes repaired the head unasked, and were compared with a baseline that drafts otherwise."""
    warned = []
    logger = SimpleNamespace(warning=lambda text, *values: warned.append(text % values))
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
    weights = [("fc.weight", torch.ones(2, 4)), ("fc.bias", torch.full((2,), bias))]
    head = Head(promised)
    before = {name: parameter.clone() for name, parameter in head.named_parameters()}
    assert eagle_bias._make_watch(Head.load_weights)(head, iter(weights)) == {"fc.weight", "fc.bias"}
    after = dict(head.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert len(warned) == bool(said)
    if said:
        assert said in warned[0] and "VLLM_NWOR_EAGLE_BIAS=1 repairs it" in warned[0]
    eagle_bias._make_load(Head.load_weights)(head, iter(weights))
    assert ("model.fc.bias" in dict(head.named_parameters())) == bool(bias)
    assert not promised or not head.model["qkv_proj"].bias.any()


@pytest.mark.parametrize("mode", ["off", "cow", "stage"])
@pytest.mark.parametrize("asked", [False, True])
def test_no_mode_has_a_drafter_of_its_own(mode, asked, monkeypatch):
    """The same switch, whatever the mode."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    installed = []
    monkeypatch.setattr(eagle_bias, "install", installed.append)
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
    made = object.__new__(WorkerWrapperBase)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), use_v2_model_runner=False)
    try:
        worker.install(Settings(mode=mode, eagle_bias=asked))
        made.init_device()
    finally:
        patch.undo_all()
    assert installed == [asked]


# -- vLLM is the one the hooks were written for ------------------------------------------------------------------------


def test_every_hook_fits_the_installed_vllm():
    """Each patch names the signature it was written for, and is refused by another."""
    settings = Settings(mode="stage", audit=True)
    try:
        for module in (worker, vllm_scheduler, runner_v1):
            module.install(settings)
        for module in (attention_cpu, cpu_sampling, metrics):
            module.install()
        eagle_bias.install(repair=True)
        hooks.install_v1()
        assert {"CPUAttentionBackendImpl.do_kv_cache_update", "CPUAttentionBackendImpl.forward"} < {*patch.wrapped()}
        assert {"GPUModelRunner._model_forward", "GPUModelRunner._sample"} < {*patch.wrapped()}
    finally:
        patch.undo_all()
