# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's V2 runner, over its methods' own arguments: the runner itself needs a GPU (`test_gpu.py`)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_kv_audit import hooks, runner_v2
from vllm_kv_audit.auditor import Auditor
from vllm_kv_audit.settings import Settings

from tests.audit.windows import BLOCK, BLOCKS, small_pages

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]


class Runner:
    """What the hooks take of a runner: rows by request, and tables; and its pages, which it writes to.

    It gives every request the blocks it is told to, so that a second one may find the first one's.
    """

    def __init__(self) -> None:
        self.pages = small_pages()
        self.kv_auditor = Auditor(Settings(0, {}), [self.pages], 4, 60, BLOCKS, adopts=False, rank=0)
        self.req_states = SimpleNamespace(req_id_to_index={})
        self.blocks = {"a": [1, 2, 3], "b": [4, 5, 6]}
        self.computed: dict[str, int] = {}
        self.new: list = []

    def add(self, name: str, tokens: list[int], computed: int = 0) -> None:
        """A request joins, of which so many tokens were found in the prefix cache."""
        self.req_states.req_id_to_index[name] = 3 - len(self.req_states.req_id_to_index)
        self.computed[name] = computed
        self.new.append(SimpleNamespace(req_id=name, prefill_token_ids=tokens))

    def step(
        self, fed: dict[str, list[int]], sampled: dict[str, list[int]], rejected: dict[str, int] | None = None
    ) -> list:
        """Run a step of the requests in `fed`, token ids each; findings as (kind, request, position)."""
        output = SimpleNamespace(scheduled_new_reqs=self.new, new_block_ids_to_zero=None, kv_cache_block_copies=None)
        runner_v2._add_requests(lambda *_: None, self, output)
        runner_v2._update_requests(lambda *_: None, self, output)
        self.new = []
        rejected = rejected or {}
        rows = [self.req_states.req_id_to_index[name] for name in fed]
        lengths = [len(ids) for ids in fed.values()]
        slots = [
            self.blocks[name][position // BLOCK] * BLOCK + position % BLOCK
            for name, ids in fed.items()
            for position in range(self.computed[name], self.computed[name] + len(ids))
        ]
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        batch = SimpleNamespace(
            idx_mapping=torch.tensor(rows),
            idx_mapping_np=np.array(rows),
            query_start_loc=starts,
            seq_lens=torch.tensor([self.computed[name] + len(ids) for name, ids in fed.items()], dtype=torch.int32),
            input_ids=torch.tensor(np.concatenate(list(fed.values())), dtype=torch.int32),
            num_reqs=len(fed),
            num_tokens=sum(lengths),
            num_computed_tokens_np=np.array([self.computed[name] for name in fed]),
        )
        tables = [torch.tensor([self.blocks[name] for name in fed], dtype=torch.int32)]
        mapping = torch.tensor(slots)[None]
        runner_v2._prepare_attn(lambda *_: (tables, mapping), self, batch)
        places = self.pages.offsets[:, None, None] + self.pages.addresses(mapping[0])
        self.pages.units[places] = torch.randint(-100, 100, places.shape).int()
        width = max(1, *map(len, sampled.values()))
        ids = torch.tensor([sampled[name] + [7] * (width - len(sampled[name])) for name in fed])  # the rest is anything
        counts = torch.tensor([len(sampled[name]) for name in fed], dtype=torch.int32)
        lost = torch.tensor([rejected.get(name, 0) for name in fed], dtype=torch.int32)
        runner_v2._postprocess_sampled(lambda *_: None, self, batch.idx_mapping, ids, counts, lost, starts)
        for name, ids in fed.items():
            self.computed[name] += len(ids) - rejected.get(name, 0)
        found = self.kv_auditor.look().found
        return [(finding.kind, finding.request, finding.position) for finding in found]


def test_the_hooks_fit_the_installed_runner():
    runner_v2.install()
    try:
        assert {"GPUModelRunner.prepare_attn", "GPUModelRunner.postprocess_sampled"} <= set(hooks.wrapped())
    finally:
        hooks.undo_all()


@pytest.fixture
def runner() -> Runner:
    """A request in its third step: a prompt in two chunks, and a window of which one draft was accepted."""
    runner = Runner()
    runner.add("a", PROMPT)
    assert runner.step({"a": PROMPT[:6]}, {"a": []}) == []
    assert runner.step({"a": PROMPT[6:]}, {"a": [11]}) == []
    assert runner.step({"a": [11, 12, 99, 98]}, {"a": [12, 13]}, {"a": 2}) == []
    return runner


def test_chunks_drafts_and_prefix_hits_are_clean(runner):
    runner.blocks["b"] = [1, 5, 6]
    runner.add("b", PROMPT[:8] + [40, 41], computed=8)
    fed = {"a": [13, 50], "b": [40, 41]}
    assert runner.step(fed, {"a": [14], "b": [60]}, {"a": 1}) == []
    assert runner.step({"b": [60], "a": [14]}, {"b": [61], "a": [15]}) == []
    assert runner.kv_auditor.look().counts["checked"] == 6 + 10 + (12 + 8) + (10 + 13)


def test_a_hit_that_is_written_in_the_very_step_is_clean(runner):
    """vLLM hands out a block while it schedules the step that fills it: the row is not there before the forward."""
    assert runner.step({"a": [13, 14]}, {"a": [14, 15]}) == []
    assert runner.step({"a": [15]}, {"a": [16]}) == []
    runner.blocks["b"] = [1, 2, 6]
    runner.add("b", [*PROMPT, 11, 12, 13, 14, 15, 16, 70], computed=16)
    assert runner.step({"a": [16], "b": [70]}, {"a": [17], "b": [71]}) == []


def test_a_prefix_hit_of_other_tokens_is_found_in_the_first_step(runner):
    runner.blocks["b"] = [1, 5, 6]
    runner.add("b", [5, 9, 2, 7, 7, 1, 3, 9, 40], computed=8)
    assert runner.step({"b": [40]}, {"b": [60]}) == [("token", "b", 7)]


def test_a_rejected_draft_that_counts_as_computed_is_found(runner):
    runner.computed["a"] += 1
    assert runner.step({"a": [14]}, {"a": [15]}) == [("rejected", "a", 12)]
