# SPDX-License-Identifier: Apache-2.0
"""An engine that notes what it is asked for, for tests of what an experiment runs and in which order."""

from typing import Any, ClassVar, Self

from nwor_lab.engines.engine import EngineSpec, Generation

ACCEPTED = {1: 40, 2: 25, 3: 10}
"""Windows of a pass that accept that many drafts, beside 25 that accept none; cut at k."""


class FakeEngine:
    """Notes each call in `calls`, beside its mode; a step takes 1 ms.

    For `bad_batch` prompts mode stage gives another token than vanilla.
    """

    calls: ClassVar[list[tuple]] = []
    every: ClassVar[list["FakeEngine"]] = []
    bad_batch: ClassVar[int] = 0
    hooks: ClassVar[list[str]] = []

    def __init__(self, spec: EngineSpec, settings: Any, core: int = 0, log: object = None) -> None:
        self.spec, self.settings, self.mode = spec, settings, settings.mode
        self.every.append(self)
        self.calls.append((self.mode, "start"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append((self.mode, "close"))

    def wait(self) -> None:
        self.calls.append((self.mode, "wait"))

    def capacity(self) -> int:
        return 10**6

    def on_every_rank(self, function: Any) -> None:
        pass

    def report(self) -> list[dict[str, Any]]:
        rank = {"rank": 0, "mode": self.mode, "serving": self.mode, "counters": {}, "audit": {}}
        return [{**rank, "hooks": self.hooks}]

    def metrics(self) -> dict[str, float]:
        return {}

    def kernel_times(self, prompts: list, max_tokens: int) -> tuple[list[dict[str, float]], int]:
        self.calls.append((self.mode, "kernel_times"))
        return [{"nvjet": 8.0 * len(self.calls), "reshape_and_cache": 4.0}], 4

    def generate(self, prompts: list, max_tokens: int, temperature=0.0, seed=0, logprobs=0) -> Generation:
        how = (len(prompts), max_tokens, temperature, seed, logprobs)
        self.calls.append((self.mode, "generate", *how))
        token = 1 + (self.mode == "stage" and len(prompts) == self.bad_batch)
        cut = [min(self.spec.k, n) for n, windows in ACCEPTED.items() for _ in range(windows)]
        at = [sum(n > position for n in cut) for position in range(self.spec.k)]
        counters = {"drafts": 100, "draft_tokens": 100 * self.spec.k, "accepted_tokens": sum(cut)}
        return Generation([[token]] * len(prompts), [""] * len(prompts), [1e-3] * 3, counters, at)
