# SPDX-License-Identifier: Apache-2.0
"""Requests that read what another writes in the same step: what the scheduler says of them, on stand-ins."""

from types import SimpleNamespace

import pytest

from nwor.vllm.batch import finds_rows_of_this_step, make_schedule, reads_rows_of_this_step


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
    "a part of a prompt, of one row, fills it": (
        ({"a": 40}, A | {"b": ([7, 5],)}), ({"b": 16}, {}, {"a": 15}, {"a": 1, "b": 1}), True
    ),
    "the part of a prompt ends before it": (
        ({"a": 40}, A | {"b": ([7, 5],)}), ({"b": 16}, {}, {"a": 16}, {"a": 3, "b": 1}), False
    ),
    "it comes back": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({}, {"b": 32}, {"a": 31}, ROWS), True),
    "the other is not in this step": (({"a": 32}, A | {"b": ([7, 8, 5],)}), ({"b": 32}, {}, {}, {"b": 4}), False),
    "the second of two joiners": (
        ({"a": 32}, A | {"b": ([3, 4],), "c": ([7, 8],)}), ({"b": 16, "c": 31}, {}, {"a": 31}, ROWS | {"c": 4}), True
    ),
    "one joiner fills what another has found": (
        ({"b": 32, "c": 36}, {"b": ([7, 8],), "c": ([7, 8, 9],)}), ({"b": 31, "c": 32}, {}, {}, {"b": 1, "c": 4}), True
    ),
    "in the group of larger blocks, which 48 tokens do not fill": (
        ({"a": 48}, {"a": ([1, 2, 3], [11, 12]), "b": ([4, 5, 6], [11, 12])}, (16, 32)),
        ({"b": 32}, {}, {"a": 47}, ROWS), False,
    ),
    "in the group of smaller blocks": (
        ({"a": 48}, {"a": ([1, 2, 3], [11, 12]), "b": ([1, 2, 3], [13, 14])}, (16, 32)),
        ({"b": 48}, {}, {"a": 47}, ROWS), True,
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


def test_only_blocks_of_requests_that_fill_one_are_listed():
    """A request may have thousands of blocks, of which vLLM makes a list at each call."""
    running = {f"r{n}": 100 for n in range(20)}  # of 101 known tokens: none ends a block of 16
    made = Scheduler(dict.fromkeys(running, 101), {name: ([*range(7)],) for name in running} | {"b": ([40, 41],)})
    output = scheduled({"b": 16}, {}, running, dict.fromkeys([*running, "b"], 4))
    assert not finds_rows_of_this_step(made, output) and set(made.asked) == {"b"}


READS = {
    "decodes alone": (({}, {}, {"a": 40}, {"a": 4}), {None: False, True: False}),
    "one that comes back": (({}, {"b": 32}, {"a": 40}, {"a": 4, "b": 1}), {None: True, True: True, False: False}),
    "one without a cached prefix": (({"b": 0}, {}, {"a": 40}, {"a": 4, "b": 3}), {None: False}),
    "one of two has a cached prefix": (({"b": 0, "c": 16}, {}, {}, {"b": 5, "c": 2}), {None: True, False: False}),
}


@pytest.mark.parametrize("case", READS)
def test_what_the_scheduler_says_of_readers_counts(case):
    """Of one that says nothing, as another's subclass may, every joiner with computed tokens may read."""
    arguments, reads = READS[case]
    for said, expected in reads.items():
        output = scheduled(*arguments)
        if said is not None:
            output.nwor_reads_rows = said
        assert reads_rows_of_this_step(SimpleNamespace(attention="a workspace"), output) is expected
        assert not reads_rows_of_this_step(SimpleNamespace(attention=None), output), "nothing is stored by our kernel"
        assert not reads_rows_of_this_step(None, output)
