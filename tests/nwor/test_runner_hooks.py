# SPDX-License-Identifier: Apache-2.0
"""The hooks in both of vLLM's model runners, on light stand-ins; no engine is started."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.worker.gpu.model_runner import BatchReqState

from nwor.counters import Counters
from nwor.manager import DraftCommitManager
from nwor.vllm import runner_v1, runner_v2
from nwor.vllm.batch import finds_rows_of_this_step, make_schedule, reads_rows_of_this_step
from nwor.vllm.carrier import add_to_output, make_sample_tokens, take_from_output
from nwor.vllm.context import make_cancelling
from tests.nwor.stepping import DECODES, DRAFTS, MIXED, Stepping, SteppingV2
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


# -- one step of the runner --------------------------------------------------------------------------------------------


def output_of(made: Stepping) -> SimpleNamespace:
    """What `sample_tokens` gives its caller."""
    return make_sample_tokens(lambda self, grammar_output: SimpleNamespace())(made, None)


@pytest.mark.parametrize("by_request", [True, False])
@ways
def test_a_step_of_the_runner(way, by_request):
    """Begun once before the forward, committed once after sampling, and what was committed is carried."""
    made = Stepping(way)
    made.nwor.counts_by_request = by_request
    output = made.run([[7, -1, -1, -1], [7, 8, 9, -1], [7, -1, -1, -1]])
    assert made.way_during == ("staged" if way == "staged" else "logged")
    assert output.sampled_token_ids.shape == (3, 4)
    totals, committed = take_from_output(output_of(made))
    assert committed == ({"q": 2, "r": 0} if by_request else {}), "of p no draft was held"
    assert totals.commits == 1 and totals.counters() == made.manager.counters.read()
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
    step = scheduled({}, {}, {}, {"p": 5, "q": 1, "r": 1})
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(made, step, np.array([5, 1, 1]))
    made.run([[7], [7], [7]])
    assert made.way_during is None
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
    add_to_output(output, SimpleNamespace(read=Counters), None)
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
    counts = SimpleNamespace(
        read=lambda: (read.append("totals"), "the totals")[1],
        by_request=lambda ids: (read.append(ids), {"p": 2, "q": 0})[1],
    )
    output = Asynchronous()
    add_to_output(output, counts, ["p", "q"])
    assert not read
    result = output.get_output()
    assert result.sampled_token_ids == [[1]] and read == ["totals", ["p", "q"]]
    assert take_from_output(result) == ("the totals", {"p": 2, "q": 0})
    assert take_from_output(result) is None


def test_counts_that_a_later_commit_has_overtaken_are_not_carried():
    """They are another commit's by then."""
    output = Asynchronous()
    add_to_output(output, SimpleNamespace(read=lambda: None, by_request=None), ["p"])
    assert take_from_output(output.get_output()) is None


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
        total_num_scheduled_tokens=sum(rows.values()),
    )


class Scheduler:
    """A stand-in of vLLM's scheduler: each request's known tokens, and its blocks in each cache group.

    asked: the requests whose blocks were asked for.
    """

    def __init__(self, tokens: dict[str, int], blocks: dict[str, tuple[list[int], ...]], sizes=(16,)) -> None:
        self.asked: list[str] = []
        self.requests = {name: SimpleNamespace(num_tokens=tokens.get(name, 49)) for name in blocks}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: (self.asked.append(name), blocks[name])[1])
        specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=specs)


A, ROWS = {"a": ([7, 8, 9],)}, {"a": 4, "b": 4}
# What the scheduler has (known tokens, blocks, block sizes), what it scheduled (new, resumed, running, rows), and
# whether a joiner reads a row of this step. Blocks 7 and 8 of `a` are full at 32 tokens.
FINDS = {
    "it shares the block just filled": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({"b": 32}, {}, {"a": 31}, ROWS), True),
    "it has shared an earlier block": (({"a": 32}, A | {"b": ([7, 5],)}), ({"b": 16}, {}, {"a": 31}, ROWS), False),
    "its cached tokens lie elsewhere, as on a decode instance of P/D": (
        ({"a": 32}, A | {"b": ([3, 4, 5],)}), ({"b": 47}, {}, {"a": 31}, ROWS), False
    ),
    "no block ends with the known tokens": (
        ({"a": 33}, A | {"b": ([7, 8, 5],)}), ({"b": 32}, {}, {"a": 32}, ROWS), False
    ),
    "a step is under way, whose tokens are not known": (
        ({"a": 32}, A | {"b": ([7, 8, 5],)}), ({"b": 32}, {}, {"a": 36}, ROWS), True
    ),
    "it comes back": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({}, {"b": 32}, {"a": 31}, ROWS), True),
    "it comes back with nothing": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({}, {"b": 0}, {"a": 31}, ROWS), False),
    "its prefix is computed anew": (({"a": 32}, A | {"b": ([3, 4],)}), ({"b": 0}, {}, {"a": 31}, ROWS), False),
    "the other is not in this step": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({"b": 32}, {}, {}, {"b": 4}), False),
    "the second of two joiners": (
        ({"a": 32}, A | {"b": ([3, 4],), "c": ([7, 8],)}), ({"b": 16, "c": 31}, {}, {"a": 31}, ROWS | {"c": 4}), True
    ),
    "one joiner fills what another has found": (
        ({"b": 32, "c": 36}, {"b": ([7, 8],), "c": ([7, 8, 9],)}), ({"b": 31, "c": 32}, {}, {}, {"b": 1, "c": 4}), True
    ),
    "a joiner fills its own block": (({"b": 32}, A | {"b": ([3, 4],)}), ({"b": 31}, {}, {"a": 40}, ROWS), False),
    "the second of two running": (
        ({"a": 32, "d": 16}, A | {"b": ([6, 5],), "d": ([6, 4],)}),
        ({"b": 16}, {}, {"a": 31, "d": 15}, ROWS | {"d": 4}), True,
    ),
    "in the group of larger blocks, which 48 tokens do not fill": (
        ({"a": 48}, {"a": ([1, 2, 3], [11, 12]), "b": ([4, 5, 6], [11, 12])}, (16, 32)),
        ({"b": 32}, {}, {"a": 47}, ROWS), False,
    ),
    "in the group of smaller blocks": (
        ({"a": 48}, {"a": ([1, 2, 3], [11, 12]), "b": ([1, 2, 3], [13, 14])}, (16, 32)),
        ({"b": 48}, {}, {"a": 47}, ROWS), True,
    ),
    "in both": (
        ({"a": 64}, {"a": ([1, 2, 3, 4], [11, 12]), "b": ([5, 6, 7, 8], [11, 12])}, (16, 32)),
        ({"b": 64}, {}, {"a": 63}, ROWS), True,
    ),
    "one number in two groups is two blocks": (
        ({"a": 32}, {"a": ([1, 2], [3]), "b": ([3, 4], [2])}, (16, 32)), ({"b": 16}, {}, {"a": 31}, ROWS), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDS)
def test_a_joiner_shares_the_block_that_this_step_fills(case):
    """vLLM publishes a block as it schedules the token that fills it; nothing else of a step can be found in it."""
    has, scheduled_now, expected = FINDS[case]
    output = scheduled(*scheduled_now)
    assert finds_rows_of_this_step(Scheduler(*has), output) is expected
    made, throttles = Scheduler(*has), []
    schedule = make_schedule(lambda self, throttle_prefills=False: (throttles.append(throttle_prefills), output)[1])
    assert schedule(made, throttle_prefills=True) is output and throttles == [True]
    with_a_workspace = SimpleNamespace(attention="a workspace")
    assert reads_rows_of_this_step(with_a_workspace, output) is expected


@pytest.mark.parametrize(
    "output",
    [({}, {}, {"a": 31, "b": 31}, ROWS), ({"b": 0}, {}, {"a": 31}, ROWS)],
    ids=["nobody joins", "without a cached prefix"],
)
def test_a_step_that_nobody_joins_costs_the_scheduler_nothing(output):
    """The scheduler is asked in every step, in the time that no GPU works."""
    made = Scheduler({"a": 32, "b": 32}, A | {"b": ([7, 8],)})
    assert not finds_rows_of_this_step(made, scheduled(*output)) and not made.asked


READS = {
    "decodes alone": (({}, {}, {"a": 40}, {"a": 4}), False),
    "a new request with a cached prefix": (({"b": 32}, {}, {"a": 40}, {"a": 4, "b": 4}), True),
    "one that comes back": (({}, {"b": 32}, {"a": 40}, {"a": 4, "b": 1}), True),
    "one without a cached prefix": (({"b": 0}, {}, {"a": 40}, {"a": 4, "b": 3}), False),
    "one of two has a cached prefix": (({"b": 0, "c": 16}, {}, {}, {"b": 5, "c": 2}), True),
}


@pytest.mark.parametrize("case", READS)
@pytest.mark.parametrize("said", [None, False, True])
def test_what_the_scheduler_says_of_readers_counts(case, said):
    """Of one that says nothing, as another's subclass may, every joiner with computed tokens may read."""
    arguments, unsaid = READS[case]
    output = scheduled(*arguments)
    if said is not None:
        output.nwor_reads_rows = said
    joined = case != "decodes alone"
    assert reads_rows_of_this_step(SimpleNamespace(attention="a workspace"), output) is (
        joined and (unsaid if said is None else said)
    )
    assert not reads_rows_of_this_step(SimpleNamespace(attention=None), output), "nothing is stored while it attends"
    assert not reads_rows_of_this_step(None, output)


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


def test_the_v1_runner_leaves_graphs_to_vllm_where_no_mode_serves():
    batch = runner_v1._make_batch(lambda self, **options: options)
    made = Stepping("logged")
    made.nwor.in_step, made.nwor.groups = True, ()
    assert batch(made, num_tokens=8) == batch(SimpleNamespace(), num_tokens=8) == {"num_tokens": 8}


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
