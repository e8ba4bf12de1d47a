# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the traffic of a mode, by itself and beside vanilla's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nwor_lab.audit.auditor import FAULTS
from nwor_lab.bench.parity import OUTLIER_FACTOR, compare, tolerance
from nwor_lab.engines.child import Generation
from nwor_lab.engines.traffic import Answer, Event, ScriptResult

SAME = {"windows": "drafts", "staged_tokens": "draft_tokens", "committed_tokens": "accepted_tokens"}
"""Counts of a mode and vLLM's own, which are to be the same."""


@dataclass
class Verdict:
    """Counts of what was served, faults by kind, and the first of these in words."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        self.counts.update(other.counts)
        self.faults.update(other.faults)
        self.examples = (self.examples + other.examples)[:8]

    def blame(self, kind: str, number: float, example: str) -> None:
        """Note `number` faults of a kind, if there are any."""
        if number:
            self.faults[kind] += int(number)
            self.examples.append(f"{kind}: {example}")

    @property
    def untried(self) -> list[str]:
        """What did not become of any draft, in words: what it would have asked of the mode is not known."""
        drafts, accepted = self.counts["drafts"], self.counts["accepted"]
        occurred = {"no draft was accepted": accepted, "no draft was rejected": drafts - accepted}
        return [words for words, number in occurred.items() if not number]

    def table(self) -> dict[str, int]:
        """What was counted, and the faults by kind, in the order of a table."""
        return {**self.counts, "dirty layer-steps": self.faults["dirty_layer_steps"], "faults": self.faults.total()}


def judge(events: Sequence[Event], vanilla: ScriptResult, traffic: ScriptResult, mode: str, dtype: str) -> Verdict:
    """The verdict on the traffic of one script under `mode`.

    Greedy requests must have vanilla's tokens, but for near ties under a mode other than ``cow``; of sampled ones only
    the number of answers is checked.
    """
    verdict = Verdict()
    metrics = traffic.metrics
    asked = {event.name: event for event in events if event.prompt is not None}
    aborted = {event.name for event in events if event.prompt is None}
    verdict.counts["scripts"] += 1
    verdict.counts["tokens"] += sum(len(answer.tokens) for made in traffic.answers.values() for answer in made)
    verdict.counts["requests"] += len(asked)
    verdict.counts["aborted"] += sum(None in _ends(traffic, name) for name in aborted & asked.keys())
    verdict.counts["preempted"] += metrics.get("num_preemptions", 0)
    verdict.counts["drafts"] += metrics["spec_decode_num_draft_tokens"]
    verdict.counts["accepted"] += metrics["spec_decode_num_accepted_tokens"]
    verdict.counts["cached tokens"] += traffic.cached
    for rank in traffic.ranks:
        audit = rank["audit"]
        verdict.counts["layer-steps"] += audit["layer_steps"]
        verdict.blame("unaudited", not audit["steps"], f"rank {rank['rank']} audited no step")
        example = "; ".join(rank["dirty_examples"]) or f"rank {rank['rank']}"
        for name in FAULTS:
            verdict.blame(name, audit[name], example)
    for name, served in (("vanilla", vanilla), (mode, traffic)):
        for rank in served.ranks:
            if sampled := rank.get("sampled"):
                first = f"{name}, rank {rank['rank']}: {sampled['findings'][:1]}"
                verdict.blame("sampled audit", len(sampled["findings"]), first)
                verdict.blame("unaudited", not sampled["steps"], f"{name}: the sampled auditor saw no step")
    for name in ("fallbacks", "scheduler_mismatches"):
        verdict.blame(name, metrics[f"nwor_{name}"], "see the engine's log")
    for ours, theirs in SAME.items():
        counted = metrics[f"nwor_{ours}"], metrics[f"spec_decode_num_{theirs}"]
        verdict.blame("counts", counted[0] != counted[1], f"{counted[0]} {ours}, {counted[1]} {theirs} by vLLM")
    for name, event in asked.items():
        ends = _ends(traffic, name)
        if name not in aborted:
            lost = None in ends or len(ends) != event.sampling.get("n", 1)
            verdict.blame("lost", lost, f"{name} ended by {ends}")
        if event.sampling["temperature"] == 0:
            _compare(verdict, event, vanilla, traffic, mode, OUTLIER_FACTOR * tolerance(dtype), name in aborted)
    return verdict


def _ends(traffic: ScriptResult, name: str) -> list[str | None]:
    return [answer.finish_reason for answer in traffic.answers.get(name, [])]


def _compare(
    verdict: Verdict, event: Event, vanilla: ScriptResult, traffic: ScriptResult, mode: str, bound: float, aborted: bool
) -> None:
    """Compare one greedy request, which has one answer or, aborted, may have none."""
    name = event.name
    theirs, ours = ((made.answers.get(name) or [Answer([], [], None)])[0] for made in (vanilla, traffic))
    same_prompt = traffic.prompts[name] == vanilla.prompts[name]
    if same_prompt and theirs.tokens == ours.tokens:
        return
    if mode == "cow":
        verdict.blame("tokens", 1, f"{name}: {ours.tokens} for {theirs.tokens}")
    elif same_prompt:  # else what it follows has parted, and is compared itself
        length = min(len(theirs.tokens), len(ours.tokens)) if aborted else None
        # Under a grammar the target's best tokens, whose log-probabilities are known, may all be forbidden.
        drafted = "structured_outputs" in event.sampling
        parity = compare(_cut(theirs, length), _cut(ours, length), drafted=drafted)
        tie = max(parity.largest_gap, parity.largest_shift) <= bound
        verdict.counts["near ties"] += tie
        verdict.blame("tokens", not tie, f"{name}: {parity}, allowed {bound} nats")


def _cut(answer: Answer, length: int | None) -> Generation:
    """The answer, or its first tokens, as a generation of one request."""
    return Generation(
        [answer.tokens[:length]], [""], [], {}, [], [answer.top_logprobs[:length]] * bool(answer.top_logprobs)
    )
