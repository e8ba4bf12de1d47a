# SPDX-License-Identifier: Apache-2.0
"""Whether an engine gives the baseline's tokens, and where they differ how nearly it was a tie."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nwor_lab.engines.engine import Generation


def near_tie(dtype: str) -> float:
    """Nats below which two log-probabilities of a model of that dtype (vLLM's name) differ by rounding alone.

    In float32 sums in another order move them by 1e-5 at most; in bfloat16 `stage` was seen to move them by 0.07.
    """
    return 1e-3 if dtype == "float32" else 0.25


@dataclass(frozen=True)
class Parity:
    """How one mode's greedy tokens compare with the baseline's, request for request.

    equal, requests: requests with the same tokens, and all requests.
    largest_gap: over the first differing token of each other request, the largest gap in nats between the baseline's
        log-probability of its own token and of the one chosen instead; infinite where that is not among its best.
    largest_shift: over all places up to that one, the largest difference in nats between the log-probabilities that
        both give to the baseline's best token; infinite where it is not among the other's best.
    """

    equal: int = 0
    requests: int = 0
    largest_gap: float = 0.0
    largest_shift: float = 0.0

    def within(self, bound: float) -> bool:
        """Whether every difference is a near tie: no gap and no shift of more than `bound` nats."""
        return max(self.largest_gap, self.largest_shift) <= bound

    def __add__(self, other: "Parity") -> "Parity":
        """Of both comparisons together."""
        return Parity(
            self.equal + other.equal,
            self.requests + other.requests,
            max(self.largest_gap, other.largest_gap),
            max(self.largest_shift, other.largest_shift),
        )

    def rows(self) -> list[dict[str, Any]]:
        """It as tidy rows."""
        return [
            {"metric": "equal_requests", "value": self.equal, "unit": "requests"},
            {"metric": "requests", "value": self.requests, "unit": "requests"},
            {"metric": "largest_gap", "value": self.largest_gap, "unit": "nats"},
            {"metric": "largest_shift", "value": self.largest_shift, "unit": "nats"},
        ]


def of_rows(rows: pd.DataFrame) -> Parity:
    """What all of `Parity.rows` among these say together."""
    values = rows.groupby("metric")["value"]
    total, most = values.sum(), values.max()
    counts = (int(total.get(name, 0)) for name in ("equal_requests", "requests"))
    return Parity(*counts, *(float(most.get(name, 0.0)) for name in ("largest_gap", "largest_shift")))


def compare(baseline: Generation, other: Generation, drafted: bool = False) -> Parity:
    """Compare tokens; `baseline` must carry `top_logprobs` for gaps of differing tokens to be known.

    drafted: tokens may be the drafter's, whatever the target says (synthetic acceptance): a differing one that is not
        among the baseline's best has no gap. What the target says is compared all the same, up to that token.
    """
    equal, gaps, shifts = 0, [0.0], [0.0]
    for index, (ours, theirs) in enumerate(zip(baseline.tokens, other.tokens, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if baseline.top_logprobs and other.top_logprobs:
            both = zip(baseline.top_logprobs[index], other.top_logprobs[index], strict=False)
            for best, beside in itertools.islice(both, None if place is None else place + 1):
                shifts.append(_shift(best, beside))
        if ours == theirs:
            equal += 1
            continue
        best = baseline.top_logprobs[index][place] if place is not None and baseline.top_logprobs else {}
        if place is not None and theirs[place] in best and ours[place] in best:
            gaps.append(best[ours[place]] - best[theirs[place]])
        elif not drafted:
            gaps.append(math.inf)
    return Parity(equal, len(baseline.tokens), max(gaps), max(shifts))


def _shift(best: dict[int, float], beside: dict[int, float]) -> float:
    if any(map(math.isnan, (*best.values(), *beside.values()))):  # `max` would pass over it
        return math.inf
    first = max(best, key=best.__getitem__)
    return abs(best[first] - beside.get(first, math.inf))
