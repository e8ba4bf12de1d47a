# SPDX-License-Identifier: Apache-2.0
"""The pytest fixture `audited_engine`, which holds a test's engines to the audit.

A `conftest.py` takes it in by `from nwor_lab.pytest_plugin import audited_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nwor_lab.engines.engine import Engine, EngineSpec


@pytest.fixture
def audited_engine() -> Iterator[Callable[[EngineSpec, str], Engine]]:
    """Start engines under the whole-cache audit: ``audited_engine(spec, mode)`` is an `nwor_lab.engines.engine.Engine`.

    When the test is over every engine is closed, and the test fails unless each of their ranks was audited and is
    clean: no byte changed outside the kept rows or between steps, and those rows hold what vLLM's own writer makes.
    Mode ``off`` may leave rejected bytes behind, as vanilla does.
    """
    from nwor.settings import Settings
    from nwor_lab.engines.engine import Engine

    started: list[tuple[str, Engine]] = []

    def start(spec: EngineSpec, mode: str = "stage") -> Engine:
        engine = Engine(spec, Settings(mode=mode, audit=True, debug_sync=mode != "off", eagle_bias=True))
        started.append((mode, engine))
        return engine

    try:
        yield start
        reports = [(mode, engine.report()) for mode, engine in started]
    finally:
        for _, engine in started:
            engine.close()
    for mode, ranks in reports:
        require_clean(mode, ranks)


def require_clean(mode: str, ranks: list[dict[str, Any]]) -> None:
    """Fail unless every rank of an engine was audited and is clean, under mode ``off`` but for rejected rows."""
    from nwor_lab.audit.auditor import AuditReport

    for rank in ranks:
        found = AuditReport(**rank["audit"])
        if not found.steps:
            pytest.fail(f"rank {rank['rank']} under {mode} ran no audited step: generate something")
        if not (replace(found, dirty_layer_steps=0) if mode == "off" else found).clean:
            pytest.fail(f"rank {rank['rank']} under {mode} left the cache dirty: {found}; {rank['dirty_examples']}")
