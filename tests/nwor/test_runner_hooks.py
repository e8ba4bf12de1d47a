# SPDX-License-Identifier: Apache-2.0
"""The hooks in both of vLLM's model runners, on light stand-ins; no engine is started."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.worker.gpu.model_runner import BatchReqState

from nwor.counters import Counters
from nwor.manager import DraftCommitManager
from nwor.vllm import runner_v1, runner_v2
from nwor.vllm.context import make_cancelling
from tests.nwor.stepping import DECODES, DRAFTS, MIXED, Stepping, SteppingV2, scheduled
from tests.nwor.steps import ways

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


# -- one step of the V2 runner, up to what needs a stream --------------------------------------------------------------


@ways
def test_the_v2_runner_opens_a_window_on_the_slots_of_its_batch(way):
    """In every real step, by the batch's own tensors; what it returns is vLLM's."""
    made = SteppingV2(way)
    tables, mappings = runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(sum(DRAFTS)))
    assert (tables, mappings.shape) == (("tables",), (1, made.batch.num_tokens + 3))
    made.step.assert_pool()
    assert made.manager.way.name == ("staged" if way == "staged" else "logged")
    held = made.batch.held()
    found = sorted(slot for slot in made.manager.slots.flatten().tolist() if slot >= 0)
    assert found == sorted(made.batch.slots[row] for row in held)
    with pytest.raises(MemoryError):
        make_cancelling(lambda self: (_ for _ in ()).throw(MemoryError()))(made)
    assert not made.manager.is_open, "a step that fails leaves no window behind"


@ways
def test_the_v2_runner_closes_the_window_before_its_tokens_go_to_the_host(way):
    """The tokens may end a request, and another machine may then read its pages: they are committed first."""
    made = SteppingV2(way)
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
    batch = second.input_batch(sum(DRAFTS), num_tokens=sum(rows))
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


def test_v2_steps_without_drafts_and_dummy_runs_hold_nothing():
    """What a captured kernel reads is set in each of them."""
    made = SteppingV2()
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, made.input_batch(0))
    assert not made.manager.is_open
    assert made.manager.page_slots[: made.batch.num_tokens].tolist() == made.batch.slots
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


# Of each step its rows, whether somebody in it reads what another writes, and whether it is of windows alone.
STEPS = {
    "windows alone": (DECODES, False, True),
    "a reader among windows": (DECODES, True, False),
    "a prefill beside windows": (MIXED, False, False),
}
STEPS_OF_WAYS = pytest.mark.parametrize(
    ("way", "attends"), [("staged", True), ("direct", True), ("cow", False)], ids=["stage", "direct", "cow"]
)


def output_of_step(case: str) -> SimpleNamespace:
    rows, reads, _ = STEPS[case]
    step = scheduled({"q": 32}, {}, {"p": 40, "r": 40}, dict(zip("pqr", rows, strict=True)))
    step.nwor_reads_rows = reads
    return step


def way_of(case: str, way: str) -> str | None:
    """What a manager takes for a step."""
    if way == "cow":
        return "logged"
    windows, others = ("written through", None) if way == "direct" else ("staged", "logged")
    return windows if STEPS[case][2] else others


@STEPS_OF_WAYS
@pytest.mark.parametrize("case", STEPS)
def test_the_v1_runner_replays_a_graph_of_decodes_for_windows_alone(case, way, attends):
    """In such a graph our kernel attends and stores at once; a batch that is as long may hold something else."""
    rows, _, windows_alone = STEPS[case]
    made = Stepping(way)
    made.manager.attention = "a workspace" if attends else None
    metadata = made.nwor.metadata
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(made, output_of_step(case), np.array(rows))
    batch = runner_v1._make_batch(lambda self, *arguments, **options: (arguments, options))
    forced = {"force_uniform_decode": False} if attends and not windows_alone else {}
    assert batch(made, 8, num_reqs=3) == ((8,), {"num_reqs": 3} | forced)
    made.run([[7, -1, -1, -1]] * 3)
    assert made.way_during == way_of(case, way)
    dummy = runner_v1._make_dummy(lambda self, number, **options: batch(self, number, **options))
    for uniform in (True, False, None):
        assert dummy(made, 8, force_uniform_decode=uniform) == ((8,), {"force_uniform_decode": uniform})


@pytest.mark.parametrize("dummy", [False, True])
@STEPS_OF_WAYS
@pytest.mark.parametrize("case", STEPS)
def test_the_v2_runner_replays_a_graph_of_decodes_for_windows_alone(case, way, attends, dummy):
    """In a FULL graph our kernel attends and stores at once; the drafter replays none of that length either."""
    rows, reads, _ = STEPS[case]
    reads = reads and attends and not dummy
    made = SteppingV2("logged" if rows == MIXED and way == "staged" else way)
    made.manager.attention = "a workspace" if attends else None
    state = BatchReqState(**dict.fromkeys(BatchReqState._fields) | {"decode_graph_eligible": rows == DECODES})
    gather = runner_v2._make_gather(lambda self, scheduler_output, dummy_run: (state, 4))
    found, uniform = gather(made, output_of_step(case), dummy)
    assert uniform == (None if reads else 4)
    assert found == (state._replace(decode_graph_eligible=False) if reads else state)
    if dummy:
        return
    batch = made.input_batch(sum(DRAFTS), num_tokens=sum(rows), decode_graph_eligible=found.decode_graph_eligible)
    runner_v2._make_prepare(SteppingV2.prepare_attn)(made, batch)
    assert (made.manager.way and made.manager.way.name) == way_of(case, way)


def test_a_graph_of_decodes_that_would_serve_other_rows_stops_the_step():
    """Its kernel would take a prefill's rows for drafts; vLLM says that it is eligible, and must be wrong."""
    made = SteppingV2("logged")
    with pytest.raises(RuntimeError, match="graph"):
        batch = made.input_batch(sum(DRAFTS), decode_graph_eligible=True)
        runner_v2._make_prepare(SteppingV2.prepare_attn)(made, batch)
    assert not made.manager.is_open
