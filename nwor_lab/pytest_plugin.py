# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin, loaded with the package: the fixture `audited_engine`, which holds a test's engines to the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nwor_lab.engines.engine import Engine, EngineSpec


@pytest.fixture
def audited_engine() -> Iterator[Callable[[EngineSpec, str], Engine]]:
    """Start engines under the whole-cache audit: ``audited_engine(spec, mode)`` is an `nwor_lab.engines.engine.Engine`.

    When the test is over every engine is closed, and the test fails unless each of their ranks was audited and left no
    byte changed outside the kept rows. Mode ``off`` must have been audited alone: vanilla leaves rejected bytes behind.
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
    """Fail unless every rank of an engine was audited and, but for mode ``off``, is clean."""
    from nwor_lab.audit.auditor import AuditReport

    for rank in ranks:
        found = AuditReport(**rank["audit"])
        if not found.steps:
            pytest.fail(f"rank {rank['rank']} under {mode} ran no audited step: generate something")
        if mode != "off" and not found.clean:
            pytest.fail(f"rank {rank['rank']} under {mode} left the cache dirty: {found}; {rank['dirty_examples']}")
