# SPDX-License-Identifier: Apache-2.0
"""Engines for tests of the soak: one that only pretends, and real ones with a fault injected in each mode's child."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.engines.traffic import Answer, Event, Traffic

AUDIT = {"steps": 3, "layer_steps": 6, "dirty_layer_steps": 0, "dirty_slots": 0, "kept_rows": 9, "unwritten_rows": 0}


class FakeEngine:
    """Answers at once with four tokens; under mode stage a text parts where both names of `culprits` are asked for.

    started: the modes of all engines so far. served: (mode, seed) of all scripts. dies: the engine ends instead.
    dirty: how many slots stage's audit finds dirty then, its tokens being vanilla's. windows: of each script, by what
    became of their drafts, where a mode is named other than what all have. seconds: a script takes. drafts: the
    drafters of all engines so far.
    """

    started: ClassVar[list[str]]
    served: ClassVar[list[tuple[str, int]]]
    culprits: ClassVar[set[str]]
    dies: ClassVar[bool]
    dirty: ClassVar[int]
    windows: ClassVar[dict[str, Counter[str]]]
    seconds: ClassVar[float]
    drafts: ClassVar[list[str]]

    def __init__(self, spec: EngineSpec, settings: Any, core: int = 0, log: object = None) -> None:
        self.mode = settings.mode
        self.started.append(self.mode)
        self.drafts.append(spec.draft or spec.method)

    @classmethod
    def forget(cls) -> None:
        cls.started, cls.served, cls.culprits, cls.dies, cls.dirty = [], [], set(), False, 0
        cls.windows, cls.seconds, cls.drafts = {}, 0.0, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> None:
        pass

    def report(self) -> list[dict[str, Any]]:
        return [{"rank": 0, "mode": self.mode, "serving": self.mode}]

    def traffic(self, events: Sequence[Event], seed: int) -> Traffic:
        self.served.append((self.mode, seed))
        time.sleep(self.seconds)
        asked = {event.name: event for event in events if event.prompt is not None}
        broken = self.mode == "stage" and bool(self.culprits) and self.culprits <= asked.keys()
        if broken and self.dies:
            raise EngineError("the stage engine failed at traffic: it died")
        parted = broken and not self.dirty
        answers = {
            name: [Answer([1, 2, 3, 4 + parted], [], "length") for _ in range(event.sampling.get("n", 1))]
            for name, event in asked.items()
        }
        audit = AUDIT | {"dirty_slots": self.dirty * broken, "dirty_by_step": [0]}
        rank = {"rank": 0, "audit": audit, "dirty_examples": ["step 1, layer 0, slot 7"] if broken else []}
        ours = dict.fromkeys(("windows", "staged_tokens", "committed_tokens"), 5)
        ours |= dict.fromkeys(("fallbacks", "scheduler_mismatches"), 0)
        theirs = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 5)
        metrics = {f"nwor_{name}": value for name, value in ours.items()}
        metrics |= {f"spec_decode_num_{name}": value for name, value in theirs.items()}
        windows = self.windows.get(self.mode, Counter({"some accepted": 5}))
        prompts = {name: event.prompt or [] for name, event in asked.items()}
        return Traffic(answers, prompts, 0, windows, [rank], metrics)


def serve_without_restore(spec: EngineSpec, environ: dict[str, str], *rest: Any) -> None:
    """`child.serve` of an engine whose mode cow does not restore."""
    import pytest

    from nwor_lab.engines.child import serve
    from tests.nwor import faults

    faults.no_restore(pytest.MonkeyPatch())
    serve(spec, environ, *rest)
