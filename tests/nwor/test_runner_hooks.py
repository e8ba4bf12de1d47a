# SPDX-License-Identifier: Apache-2.0
"""The hooks in both of vLLM's model runners, on light stand-ins; no engine is started."""

import gc
import weakref
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.worker.gpu.model_runner import BatchReqState

from nwor.counters import Counters
from nwor.manager import DraftCommitManager
from nwor.vllm import runner_v1, runner_v2
from nwor.vllm.batch import reads_rows_of_this_step
from nwor.vllm.carrier import add_to_output, make_sample_tokens, take_from_output
from nwor.vllm.context import make_cancelling
from tests.nwor.stepping import DRAFTS, QUERIES, Stepping, SteppingV2

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
    found = runner_v1.count_rejected(torch.tensor(sampled), cu_num_draft_tokens)
    assert found.tolist() == expected
    assert found.dtype == torch.int32


# -- one step of the runner --------------------------------------------------------------------------------------------


def output_of(made: Stepping) -> SimpleNamespace:
    """What `sample_tokens` gives its caller."""
    return make_sample_tokens(lambda self, grammar_output: SimpleNamespace())(made, None)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_step_of_the_runner(mode):
    """Begun once before the forward, committed once after sampling, and the commits of each request carried."""
    made = Stepping(mode)
    output = made.run([[7, -1, -1, -1], [7, 8, 9, -1], [7, -1, -1, -1]])
    assert made.open_during
    assert output.sampled_token_ids.shape == (3, 4)
    counters, committed = take_from_output(output_of(made))
    assert committed == {"q": 2, "r": 0}, "of p no draft was held"
    assert counters == asdict(made.manager.counters.read())
    counters = made.manager.counters.read()
    assert (counters.windows, counters.staged_tokens, counters.committed_tokens) == (2, 5, 2)
    made.step.expect(made.batch.kept((0, 1, 2)))
    made.step.assert_pool()
    assert not made.manager.is_open
    assert not vars(output_of(made)), "carried once"


def test_steps_without_a_window():
    """No drafts, a batch too large, no manager: vLLM's own step, nothing carried, nothing staged."""
    made = Stepping()
    metadata = made.nwor.metadata
    metadata.num_draft_tokens = [0, 0, 0]  # vLLM makes metadata for such a step too
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(made, scheduled({}, {}, {}, {}), np.array([5, 1, 1]))
    made.run([[7], [7], [7]])
    assert not made.open_during
    assert made.manager.page_slots[: len(made.batch.slots)].tolist() == made.batch.slots
    assert not vars(output_of(made))
    assert made.manager.counters.read() == Counters()

    made = Stepping(max_requests=2)
    made.run([[7, -1, -1, -1]] * 3)
    assert not vars(output_of(made))
    assert made.manager.counters.read() == Counters(fallbacks=sum(drafts > 0 for drafts in DRAFTS))

    made.nwor.groups, calls = (), []
    runner_v1._make_forward(lambda self: calls.append("forward"))(made)
    runner_v1._make_sample(lambda self, logits, metadata: calls.append("sample"))(made, None, None)
    assert calls == ["forward", "sample"]
    assert not made.manager.is_open


class Asynchronous:
    """vLLM's output of a step whose tokens are on their way: it keeps buffers on the device and pinned ones."""

    def get_output(self) -> SimpleNamespace:
        return SimpleNamespace(sampled_token_ids=[[1]])


def test_an_asynchronous_output_goes_when_it_was_asked_for():
    """Its buffers are free for the next step at once, not when cycles are collected."""
    output = Asynchronous()
    gone = weakref.ref(output)
    add_to_output(output, SimpleNamespace(read=lambda ids: (Counters(), {})), [])
    gc.disable()
    try:
        output.get_output()
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_an_asynchronous_output_carries_counts_when_it_is_asked_for():
    """Nobody waits for the device before the scheduler does."""
    read = []
    counts = SimpleNamespace(read=lambda ids: (read.append(ids), (Counters(windows=1), {"p": 2, "q": 0}))[1])
    output = Asynchronous()
    add_to_output(output, counts, ["p", "q"])
    assert not read
    result = output.get_output()
    assert result.sampled_token_ids == [[1]] and read == [["p", "q"]]
    assert take_from_output(result) == (asdict(Counters(windows=1)), {"p": 2, "q": 0})
    assert take_from_output(result) is None


# -- one step of the V2 runner, up to what needs a stream --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_the_v2_runner_opens_a_window_on_the_slots_of_its_batch(mode):
    """In every real step, by the batch's own tensors; what it returns is vLLM's."""
    made = SteppingV2(mode)
    tables, mappings = runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(sum(DRAFTS)))
    assert (tables, mappings.shape) == (("tables",), (1, 15))
    made.step.assert_pool()
    assert made.manager.is_open
    held = made.batch.held()
    found = sorted(slot for slot in made.manager.slots.flatten().tolist() if slot >= 0)
    assert found == sorted(made.batch.slots[row] for row in held)
    with pytest.raises(MemoryError):
        make_cancelling(lambda self: (_ for _ in ()).throw(MemoryError()))(made)
    assert not made.manager.is_open, "a step that fails leaves no window behind"


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_the_v2_runner_closes_the_window_before_its_tokens_go_to_the_host(mode):
    """The tokens may end a request, and another machine may then read its pages: they are committed first."""
    made = SteppingV2(mode)
    output = "tokens", torch.tensor([1, 3, 3]), torch.tensor([0, 1, 0], dtype=torch.int32)
    sample = runner_v2._make_sample(lambda self, hidden_states, input_batch, grammar_output: output)
    assert sample(made, None, None, grammar_output=None) is output, "a step without a window"
    assert made.manager.counters.read() == Counters()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(sum(DRAFTS)))
    made.step.forward()
    assert sample(made, None, None, None) is output
    assert not made.manager.is_open
    assert made.manager.counters.read().committed_tokens == sum(DRAFTS) - 1


LOGS = {
    "the same requests": ({}, {}, (1, 4, 3), True),
    "one prefills": ({}, {}, (5, 4, 3), False),
    "one is new, by an id that was there before": ({"q": 0}, {}, (1, 4, 3), False),
    "one comes back": ({}, {"q": 32}, (1, 4, 3), False),
}


@pytest.mark.parametrize("case", LOGS)
def test_requests_are_named_where_a_log_still_holds(case, monkeypatch):
    """Of a step that prefills or admits somebody the requests go unnamed, under both runners: slots may be others'."""
    new, resumed, rows, named = LOGS[case]
    step = scheduled(new, resumed, {"p": 40, "r": 40}, dict(zip("pqr", rows, strict=True)))
    asked = []
    begin = DraftCommitManager.begin
    monkeypatch.setattr(
        DraftCommitManager, "begin", lambda *args, **named: (asked.append(args[4]), begin(*args, **named))[1]
    )
    first, second = Stepping("cow"), SteppingV2("cow")
    metadata = first.nwor.metadata
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(first, step, np.array(rows))
    first.run([[7, -1, -1, -1]] * 3)
    batch = second.input_batch(sum(DRAFTS))
    batch.num_scheduled_tokens = np.array(rows)
    runner_v2._make_gather(lambda self, scheduler_output, dummy_run: ("state", None))(second, step, False)
    runner_v2._make_prepare(SteppingV2.prepare_attn)(second, batch)
    assert [list(requests) for requests in asked] == 2 * [["p", "q", "r"] if named else []]


def test_more_drafts_than_there_is_room_for_are_said_once(caplog):
    """Whether vLLM keeps statistics or not: the cache is not clean then."""
    made = Stepping("cow")
    made.manager.max_drafts = 2  # as if the drafter had been asked for two, and brought three
    for _ in range(2):
        made.run([[7, -1, -1, -1]] * 3)
    assert [line for line in caplog.messages if "3 drafts" in line] == caplog.messages and len(caplog.messages) == 1


def test_dummy_runs_of_the_v1_runner_hold_nothing():
    """Before the caches are there, and after a step."""
    calls = []
    run = runner_v1._make_dummy(lambda self, num_tokens: calls.append(num_tokens))
    run(SimpleNamespace(), 8)
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    run(made, 16)
    assert calls == [8, 16]
    assert made.manager.page_slots.eq(-1).all()


def test_v2_steps_without_drafts_and_dummy_runs_hold_nothing():
    """What a captured kernel reads is set in each of them."""
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    assert not made.manager.is_open
    assert made.manager.page_slots[:12].tolist() == made.batch.slots
    assert made.manager.staging_rows.eq(-1).all()
    runner_v2._make_dummy(lambda self, input_batch, valid_state_slots: "dummy")(made, None)
    assert made.manager.page_slots.eq(-1).all()


def test_v2_captures_launch_all_that_a_replay_may_need():
    """vLLM warms up with real steps before, the last of them without drafts."""
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    capture = runner_v2._make_capture(lambda self, *, profile_only: (self.manager.is_dummy_or_capture, profile_only))
    assert capture(made, profile_only=True) == (True, True)
    assert made.manager.page_slots.eq(-1).all()
    made.nwor.groups = ()
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
    assert reads_rows_of_this_step(manager, scheduled(*arguments)) is expected
    assert not reads_rows_of_this_step(SimpleNamespace(attention=None), scheduled(*arguments)), "a CPU"
    assert not reads_rows_of_this_step(None, scheduled(*arguments))


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("case", ["decodes alone", "a new request with a cached prefix"])
def test_such_a_step_replays_no_graph_of_decodes(case, dummy):
    """In a FULL graph our kernel attends and stores at once; both runners leave it, and only in this step."""
    arguments, reads = READS[case]
    reads = reads and not dummy
    step = scheduled(*arguments)

    second = SteppingV2()
    second.manager.attention = "a workspace"
    state = BatchReqState(**dict.fromkeys(BatchReqState._fields) | {"decode_graph_eligible": True})
    gather = runner_v2._make_gather(lambda self, scheduler_output, dummy_run: (state, 4))
    found, uniform = gather(second, step, dummy)
    assert uniform == (None if reads else 4)
    assert found == state._replace(decode_graph_eligible=not reads), "the drafter replays none either"
    runner_v2._make_prepare(SteppingV2.prepare_attn)(second, second.input_batch(sum(DRAFTS)))
    assert second.manager.writes_first is reads
    if dummy:
        return

    first = Stepping()
    first.manager.attention = "a workspace"
    metadata = first.nwor.metadata
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(first, step, np.array(QUERIES))
    batch = runner_v1._make_batch(lambda self, **options: options)
    assert batch(first, num_tokens=8) == {"num_tokens": 8} | ({"force_eager": True} if reads else {})
    first.run([[7, -1, -1, -1]] * 3)
    assert first.manager.writes_first is reads
    assert batch(first, num_tokens=8) == {"num_tokens": 8}, "a dummy run behind it is free to replay"
