# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's model runners as far as engines on a CPU do not go through them: V2's, failing steps, memory."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.model_runner import BatchReqState

from nwor.counters import Counters
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm import runner_v1, runner_v2, worker
from nwor.vllm.context import (
    RunnerContext,
    ServedGroup,
    context_of,
    make_cancelling,
    make_holding_nothing,
    make_releasing,
    set_served_groups,
)
from nwor.vllm.initialize import _log, held_bytes
from tests.nwor import faults
from tests.nwor.paged import Batch, Paged
from tests.nwor.steps import Step, ways
from tests.nwor.test_batch import scheduled

DRAFTS = (0, 3, 2)
MIXED, DECODES = (5, 4, 3), (1, 4, 3)


class Runner:
    """A stand-in for the V2 runner as far as its slots: a padded batch of three requests, of a step of this way."""

    def __init__(self, way: str = "staged") -> None:
        queries = DECODES if way == "staged" else MIXED
        self.step = Step("HND", way, "cpu", Batch(queries, DRAFTS), max_requests=4, max_drafts=3)
        self.batch, self.manager = self.step.batch, self.step.manager
        self.nwor = RunnerContext(groups=[ServedGroup(0, (), self.manager)])

    def input_batch(self, num_draft_tokens: int, **changes) -> SimpleNamespace:
        rows = self.batch.num_tokens
        starts = torch.tensor([*self.batch.query_start_loc, rows], dtype=torch.int32)  # a padded request behind
        logits = torch.tensor([0, 1, 5, 8] if num_draft_tokens else [0, 1, 2, 3], dtype=torch.int32)
        eligible = rows == sum(DRAFTS) + len(DRAFTS)
        given = {"num_draft_tokens": num_draft_tokens, "num_tokens": rows, "decode_graph_eligible": eligible}
        return SimpleNamespace(**given | changes, query_start_loc=starts, cu_num_logits=logits, req_ids=["p", "q", "r"])

    def prepare_attn(self, input_batch):
        return ("tables",), self.batch.slot_mapping[None]

    def prepare(self, num_draft_tokens: int = sum(DRAFTS), **changes):
        """What vLLM is given of a step."""
        return runner_v2._make_prepare(Runner.prepare_attn)(self, self.input_batch(num_draft_tokens, **changes))

    def fail(self, layers: int) -> None:
        """A step that fails behind so many layers."""

        def execute(self):
            self.prepare()
            for layer in range(layers):
                self.step.forward_layer(layer)
            raise MemoryError

        make_cancelling(execute)(self)


@ways
def test_the_v2_runner_has_a_window_on_the_slots_of_its_batch_until_it_has_sampled(way):
    """In every real step, by the batch's own tensors, and what it returns is vLLM's. The tokens may end a request, and
    another machine may then read its pages: they are committed before the tokens go to the host."""
    made = Runner(way)
    output = "tokens", torch.tensor([1, 3, 3]), torch.tensor([0, 1, 0], dtype=torch.int32)
    sample = runner_v2._make_sample(lambda self, hidden_states, input_batch, grammar_output: output)
    assert sample(made, None, None, grammar_output=None) is output, "a step without a window"
    assert made.manager.counters.read() == Counters()
    tables, mappings = made.prepare()
    assert (tables, mappings.shape) == (("tables",), (1, made.batch.num_tokens + 3))
    made.step.assert_pool()
    assert made.manager.way.name == ("staged" if way == "staged" else "logged")
    found = sorted(slot for slot in made.manager.slots.flatten().tolist() if slot >= 0)
    assert found == sorted(made.batch.slots[row] for row in made.batch.held())
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
    """Of a step that prefills or admits somebody the requests go unnamed: slots may be others'."""
    new, resumed, rows, named = LOGS[case]
    step = scheduled(new, resumed, {"p": 40, "r": 40}, dict(zip("pqr", rows, strict=True)))
    asked, made = [], Runner("cow")
    monkeypatch.setattr(DraftCommitManager, "begin", lambda *args, **named: asked.append(list(args[4])))
    runner_v2._make_gather(lambda self, scheduler_output, dummy_run: ("state", None))(made, step, False)
    made.prepare(num_tokens=sum(rows))
    assert asked == [["p", "q", "r"] if named else []]


def test_v2_steps_without_drafts_and_dummy_runs_hold_nothing():
    """What a captured kernel reads is set in each of them, and a capture launches all that a replay may need."""
    made = Runner()
    made.prepare(0)
    assert not made.manager.is_open
    assert made.manager.page_slots[: made.batch.num_tokens].tolist() == made.batch.slots
    assert made.manager.staging_rows.eq(-1).all()
    make_holding_nothing(lambda self, input_batch: "dummy")(made, None)
    assert made.manager.page_slots.eq(-1).all()
    made.prepare(0)
    capture = make_holding_nothing(lambda self, *, profile_only: (self.manager.is_dummy_or_capture, profile_only))
    assert capture(made, profile_only=True) == (True, True)
    assert made.manager.page_slots.eq(-1).all()


# -- graphs of decodes -------------------------------------------------------------------------------------------------

# Of each step its rows, whether somebody in it reads what another writes, and whether it is of windows alone.
STEPS = {
    "windows alone": (DECODES, False, True),
    "a reader among windows": (DECODES, True, False),
    "a prefill beside windows": (MIXED, False, False),
}
# The ways of a mode: of windows alone, and of every other step.
WAYS = {"staged": ("staged", "logged"), "direct": ("written through", None), "cow": ("logged", "logged")}
each_step = pytest.mark.parametrize("case", STEPS)
each_mode = pytest.mark.parametrize("way", WAYS)


def output_of_step(case: str) -> SimpleNamespace:
    rows, reads, _ = STEPS[case]
    step = scheduled({"q": 32}, {}, {"p": 40, "r": 40}, dict(zip("pqr", rows, strict=True)))
    step.nwor_reads_rows = reads
    return step


@each_mode
@each_step
def test_the_v1_runner_replays_a_graph_of_decodes_for_windows_alone(case, way):
    """In such a graph our kernel attends and stores at once; a batch that is as long may hold something else."""
    rows, _, windows_alone = STEPS[case]
    made, attends = Runner(way), way != "cow"
    made.manager.attention = "a workspace" if attends else None
    made.input_batch = SimpleNamespace(req_ids=["p", "q", "r"])
    metadata = SimpleNamespace(num_draft_tokens=list(DRAFTS))
    runner_v1._make_prepare(lambda *args: (None, metadata, 0))(made, output_of_step(case), np.array(rows))
    batch = runner_v1._make_batch(lambda self, *arguments, **options: (arguments, options))
    forced = {"force_uniform_decode": False} if attends and not windows_alone else {}
    assert batch(made, 8, num_reqs=3) == ((8,), {"num_reqs": 3} | forced)
    dummy = make_holding_nothing(lambda self, number, **options: batch(self, number, **options))
    for uniform in (True, False, None):
        assert dummy(made, 8, force_uniform_decode=uniform) == ((8,), {"force_uniform_decode": uniform})


@pytest.mark.parametrize("dummy", [False, True])
@each_mode
@each_step
def test_the_v2_runner_replays_a_graph_of_decodes_for_windows_alone(case, way, dummy):
    """In a FULL graph our kernel attends and stores at once; the drafter replays none of that length either."""
    rows, reads, windows_alone = STEPS[case]
    reads = reads and way != "cow" and not dummy
    made = Runner("logged" if rows == MIXED and way == "staged" else way)
    made.manager.attention = None if way == "cow" else "a workspace"
    state = BatchReqState(**dict.fromkeys(BatchReqState._fields) | {"decode_graph_eligible": rows == DECODES})
    gather = runner_v2._make_gather(lambda self, scheduler_output, dummy_run: (state, 4))
    found, uniform = gather(made, output_of_step(case), dummy)
    assert uniform == (None if reads else 4)
    assert found == (state._replace(decode_graph_eligible=False) if reads else state)
    if not dummy:
        made.prepare(num_tokens=sum(rows), decode_graph_eligible=found.decode_graph_eligible)
        assert (made.manager.way and made.manager.way.name) == WAYS[way][not windows_alone]


def test_a_graph_of_decodes_that_would_serve_other_rows_stops_the_step():
    """Its kernel would take a prefill's rows for drafts; vLLM says that it is eligible, and must be wrong."""
    made = Runner("logged")
    with pytest.raises(RuntimeError, match="graph"):
        made.prepare(decode_graph_eligible=True)
    assert not made.manager.is_open


# -- cache groups ------------------------------------------------------------------------------------------------------

HELD = {0: {9, 10, 17}, 2: {29, 30, 25}}  # slots by group


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_each_window_opens_on_its_own_groups_slots_wherever_they_lie(mode):
    """Of groups 0 and 2. V2's tensor is one, and another where it moved or where the batch is padded to more tokens."""
    starts = torch.tensor([0, 3, 5, 6], dtype=torch.int32)  # requests with 2 drafts, 1 and none
    slots = torch.tensor([[8, 9, 10, 16, 17, 20], 6 * [0], [28, 29, 30, 24, 25, 4]])
    moved, padded = slots + 1, torch.nn.functional.pad(slots + 2, (0, 2), value=-1)
    layouts = {index: CacheLayout.from_kv_caches(Paged().targets()[:2]) for index in HELD}
    groups = [
        ServedGroup(index, [SimpleNamespace(), SimpleNamespace()], DraftCommitManager(layout, mode, 4, 2, 16))
        for index, layout in layouts.items()
    ]
    runner = SimpleNamespace()
    set_served_groups(runner, groups)
    context = context_of(runner)
    context.windows_alone = True
    for given, by in ((slots, 0), (moved, 1), (padded, 2), (slots, 0), (padded[:, :7], 2)):
        context.begin(starts, starts, given, 2)
        for group in groups:
            found = group.manager.slots[group.manager.slots >= 0]
            assert set(found.tolist()) == {slot + by for slot in HELD[group.index]} and group.manager.is_open
            assert all(layer.nwor.manager is group.manager for layer in group.layers)
        context.cancel()
        assert not any(group.manager.is_open for group in groups)
    set_served_groups(runner, ())
    assert context.manager is None and all(layer.nwor is None for group in groups for layer in group.layers)


# -- steps that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cow", "logged"])
@pytest.mark.parametrize("failing", ["log_all_layers", "restore_all_layers"])
def test_what_fails_in_a_logged_window_leaves_none_open(failing, way, monkeypatch):
    """Neither a log that was never taken nor one that cannot be restored hides the error, or stops the next step."""

    def fail(run: object, arguments: object) -> None:
        raise RuntimeError(failing)

    made, logs = Runner(way), failing == "log_all_layers"
    faults.instead_of(failing, fail, monkeypatch)
    with pytest.raises(RuntimeError if logs else MemoryError) as error:
        made.fail(2)
    assert not made.manager.is_open
    assert [failing in note for note in getattr(error.value, "__notes__", [])] == ([] if logs else [True])
    if logs:
        made.step.assert_pool()  # nothing is restored from a log that was not taken
    monkeypatch.undo()
    assert made.step.begin(), "the next step has a window"


def test_all_groups_are_cancelled_though_one_fails():
    open_groups = [Runner("cow"), Runner("logged"), Runner("staged")]

    def fail() -> None:
        raise RuntimeError("the second")

    for made in open_groups:
        made.step.begin()
    open_groups[1].manager.cancel = fail
    context = RunnerContext(groups=[ServedGroup(0, (), made.manager) for made in open_groups])
    with pytest.raises(RuntimeError, match="the second"):
        context.cancel()
    assert [made.manager.is_open for made in open_groups] == [False, True, False]


# -- memory, and the line at start-up ----------------------------------------------------------------------------------


def test_a_runner_that_gives_its_caches_back_keeps_no_view_of_them():
    """The target's layers may be in hand longer."""
    made, layers = Runner(), [SimpleNamespace()]
    set_served_groups(made, [ServedGroup(0, layers, made.manager)])
    made.nwor.counts, manager = made.manager.counters.published, weakref.ref(made.manager)
    assert make_releasing(lambda runner: "released")(made) == "released"
    del made.manager, made.step
    gc.collect()
    assert manager() is None and layers[0].nwor is None


def test_what_is_held_beside_the_cache_is_counted_once():
    """Rows, slots, counts and the workspace that groups share; no view twice, and not the cache."""
    manager = Runner().manager
    manager.attention = SimpleNamespace(partials=torch.empty(1000, dtype=torch.float32), some=manager.rows[:1])
    held = manager.rows, manager.slots, manager.staging_rows, manager.page_slots, manager.attention.partials
    counts = 2 * 6 * 8 + 2 * 4 * len(manager.slots)
    group = ServedGroup(0, (), manager)
    assert held_bytes([group, group]) == sum(tensor.nbytes for tensor in held) + counts


def test_what_serves_and_why_not_is_said_for_each_engine_of_a_process(caplog, monkeypatch):
    """By one rank of a machine, also where the engine before said the same; by each that serves nothing, a warning."""
    caplog.set_level("INFO", "vllm.nwor")
    logging, nothing = Runner("logged").nwor, RunnerContext(reason="of nothing")
    logging.reason = "of a log"
    for first in (True, True, False):
        monkeypatch.setattr(parallel_state, "is_local_first_rank", lambda first=first: first)
        for context in (logging, nothing):
            _log("stage", context)
    said = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert [level for level, _ in said] == [*2 * ["INFO", "WARNING"], "WARNING"]
    assert "3 layers" in said[0][1] and "of a log" in said[0][1] and "of nothing" in said[1][1]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("asked_for", "available", "planned", "left"),
    [(None, 900, 300, 600), (None, 900, 0, 900), (500, 500, 300, 500), (None, 300, 300, None)],
    ids=["planned", "nothing is held", "a user's own number stands", "no room"],
)
def test_what_a_mode_holds_is_taken_from_what_vllm_plans_with(asked_for, available, planned, left, on_gpu, monkeypatch):
    """What vLLM advises for the size of the cache, on a GPU, counts it too."""
    monkeypatch.setattr(worker, "planned_bytes", lambda runner, mode: planned)
    made = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=asked_for), model_runner=None)
    if on_gpu:
        made.total_consumed, made.available_kv_cache_memory_bytes = 100, available
    determine = worker._make_available(lambda self: available, "stage")
    if left is None:
        with pytest.raises(RuntimeError, match="max_num_seqs"):
            determine(made)
        return
    assert determine(made) == left
    if on_gpu:
        assert (made.total_consumed, made.available_kv_cache_memory_bytes) == (100 + available - left, left)
