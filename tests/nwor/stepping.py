# SPDX-License-Identifier: Apache-2.0
"""Light stand-ins for both of vLLM's model runners in a step; no engine is started."""

from types import SimpleNamespace

import torch

from nwor.vllm import runner_v1
from nwor.vllm.context import RunnerContext, ServedGroup, make_cancelling
from tests.nwor.paged import Batch
from tests.nwor.steps import Step

DRAFTS = (0, 3, 2)
MIXED, DECODES = (5, 4, 3), (1, 4, 3)


def queries_of(way: str) -> tuple[int, ...]:
    """The rows of a step that takes this way (`tests.nwor.steps.WAYS`): a prefill beside windows, or windows alone."""
    return DECODES if way == "staged" else MIXED


class Stepping:
    """A stand-in for the V1 runner whose forward writes three layers, and whose sampler accepts as given."""

    def __init__(self, way: str = "staged", max_requests: int = 4) -> None:
        self.step = Step("HND", way, "cpu", Batch(queries_of(way), DRAFTS), max_requests=max_requests, max_drafts=3)
        self.batch, self.manager, self.device = self.step.batch, self.step.manager, torch.device("cpu")
        batch = self.batch
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([*batch.query_start_loc, 99, 99], dtype=torch.int32))
        table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=batch.slot_mapping))
        self.input_batch = SimpleNamespace(num_reqs=3, req_ids=["p", "q", "r"], block_table=[table])
        drafts = torch.tensor(DRAFTS, dtype=torch.int32)
        self.nwor = RunnerContext(
            groups=[ServedGroup(0, (), self.manager)],
            copies_counts=True,
            metadata=SimpleNamespace(
                num_draft_tokens=list(DRAFTS),
                cu_num_sampled_tokens=(drafts + 1).cumsum(0, dtype=torch.int32),
                cu_num_draft_tokens=drafts.cumsum(0, dtype=torch.int32),
            ),
            requests=["p", "q", "r"],
            windows_alone=way == "staged",
        )

    def forward(self, fail: bool = False) -> None:
        for layer in range(3):
            if fail and layer == 2:
                raise MemoryError("in the third layer")
            self.step.forward_layer(layer)

    def run(self, sampled: list[list[int]] | None, **options) -> SimpleNamespace:
        """One step through the hooks; `sampled` None: the sampler raises."""
        make_cancelling(runner_v1._make_forward(Stepping.forward))(self, **options)
        self.way_during = None if self.manager.way is None else self.manager.way.name

        def sample(self, logits, metadata):
            if sampled is None:
                raise MemoryError("in the sampler")
            return SimpleNamespace(sampled_token_ids=torch.tensor(sampled))

        return make_cancelling(runner_v1._make_sample(sample))(self, None, self.nwor.metadata)


class SteppingV2:
    """A stand-in for the V2 runner as far as its slots: a padded batch of the three requests above."""

    def __init__(self, way: str = "staged") -> None:
        self.step = Step("HND", way, "cpu", Batch(queries_of(way), DRAFTS), max_requests=4, max_drafts=3)
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
