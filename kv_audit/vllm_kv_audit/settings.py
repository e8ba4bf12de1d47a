# SPDX-License-Identifier: Apache-2.0
"""What the user asked for, by two environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

AUDIT, PERTURB = "VLLM_KV_AUDIT", "VLLM_KV_AUDIT_PERTURB"
KINDS = ("bytes", "token", "rejected", "unwritten")
"""What can be wrong with a slot: other bytes than were written; another token's row; a rejected draft's row; none."""


@dataclass(frozen=True)
class Settings:
    """samples: slots that are checked of each request in each step, 0 for all of them.

    perturb: the probability by which a step gets a fault of each kind, for trying the auditor.
    """

    samples: int
    perturb: Mapping[str, float]

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings | None:
        """None where no audit is asked for.

        Raises:
            ValueError: a value is none of those described, or faults are asked for without an audit.
        """
        asked, faults = environ.get(AUDIT, ""), environ.get(PERTURB, "")
        if not asked:
            if faults:
                raise ValueError(f"{PERTURB}={faults!r} puts faults into the cache that nobody looks for: set {AUDIT}")
            return None
        word, _, number = asked.partition("=")
        if asked == "full":
            samples = 0
        elif word == "sample" and number.isdecimal() and 2 <= int(number) <= 1024:
            samples = int(number)
        else:
            raise ValueError(f"{AUDIT}={asked!r} must be full, or sample=N with N from 2 to 1024")
        return cls(samples, dict(_probability(part) for part in faults.split(",") if part))


def _probability(part: str) -> tuple[str, float]:
    kind, _, number = part.partition("=")
    try:
        probability = float(number)
    except ValueError:
        probability = -1.0
    if kind not in KINDS or not 0 <= probability <= 1:
        raise ValueError(f"{PERTURB}: {part!r} must be KIND=P, a kind of {', '.join(KINDS)} and P from 0 to 1")
    return kind, probability
