# SPDX-License-Identifier: Apache-2.0
"""Engines for tests of the soak: one that only pretends, and real ones with a fault injected in each mode's child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import Any, ClassVar

from nwor_lab.audit.auditor import AuditReport
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.engines.traffic import Answer, Event, ScriptResult
from tests.lab import fake_engine


class FakeEngine(fake_engine.FakeEngine):
    """Answers at once with four tokens; mode stage has a fault in each script with a request that is aborted.

    started: the modes of all engines so far. served: each mode's scripts. fault: none, "tokens", "died" or
    "dirty_layer_steps". lasts: scripts that have it. accepted: drafts of each script, of 5.
    """

    started: ClassVar[list[str]]
    served: ClassVar[list[tuple[str, Sequence[Event]]]]
    fault: ClassVar[str]
    lasts: ClassVar[float]
    accepted: ClassVar[int]

    def __init__(self, spec: EngineSpec, settings: Any, core: int = 0, log: object = None) -> None:
        super().__init__(spec, settings)
        self.started.append(self.mode)

    @classmethod
    def forget(cls) -> None:
        cls.started, cls.served, cls.fault = [], [], ""
        cls.lasts, cls.accepted = inf, 3

    def traffic(self, events: Sequence[Event], seed: int) -> ScriptResult:
        self.served.append((self.mode, events))
        asked = {event.name: event for event in events if event.prompt is not None}
        fault = self.fault if self.mode == "stage" and len(asked) < len(events) and self.lasts > 0 else ""
        type(self).lasts -= bool(fault)
        if fault == "died":
            raise EngineError("the stage engine failed at traffic: it died")
        last = 5 if fault == "tokens" else 4
        answers = {
            name: [Answer([1, 2, 3, last], [], "length") for _ in range(event.sampling.get("n", 1))]
            for name, event in asked.items()
        }
        audit = asdict(AuditReport(3, 6, dirty_layer_steps=2 * (fault == "dirty_layer_steps"), kept_rows=9))
        rank = {"rank": 0, "audit": audit, "dirty_examples": ["step 1, layer 0, slot 7"] if fault else []}
        ours = {"windows": 2, "staged_tokens": 5, "committed_tokens": self.accepted}
        ours |= dict.fromkeys(("fallbacks", "scheduler_mismatches"), 0)
        theirs = {"drafts": 2, "draft_tokens": 5, "accepted_tokens": self.accepted}
        metrics = {f"nwor_{name}": value for name, value in ours.items()}
        metrics |= {f"spec_decode_num_{name}": value for name, value in theirs.items()}
        prompts = {name: event.prompt or [] for name, event in asked.items()}
        return ScriptResult(answers, prompts, 0, [rank], metrics)


def serve_without_restore(spec: EngineSpec, environ: dict[str, str], *rest: Any) -> None:
    """`child.serve` of an engine whose mode cow does not restore."""
    import pytest

    from nwor_lab.engines.child import serve
    from tests.nwor import faults

    faults.no_restore(pytest.MonkeyPatch())
    serve(spec, environ, *rest)
