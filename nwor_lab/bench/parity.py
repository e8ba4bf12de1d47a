# SPDX-License-Identifier: Apache-2.0
"""Whether an engine gives the baseline's tokens, and where they differ how nearly it was a tie."""

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import pandas as pd

from nwor_lab.engines.engine import Generation

PARITY_TOLERANCE_NATS = {
    "float32": 7e-4,
    "bfloat16": 0.035,
    "fp8": 0.18,
    "fp8, random weights": 0.095,
    "fp8, random weights, GPU": 0.061,
}
"""Nats of `Parity.shift` up to which a mode is at parity, by what rounds most: the model's dtype, or an fp8 cache.

Under random weights all tokens are nearly as likely: both rounding and faults shift them less. Each is the geometric
middle of the most that rounding gave and the least that a fault did, in `data/recorded/parity_margin.parquet`, measured
by `nwor_lab.bench.parity_margin`; one in a single head or layer counts where rounding does not drown it. On a GPU
with an fp8 cache and random weights the two lie close: 0.057 and 0.066.
"""
OUTLIER_FACTOR = 5
"""How many tolerances a gap or the shift of one token may have: of many, the largest lies that far out."""


def tolerance(dtype: str, kv_cache_dtype: str = "auto", random_weights: bool = False, on_gpu: bool = False) -> float:
    """The tolerance of a model and a cache of these dtypes, by vLLM's names; float16 has bfloat16's."""
    if kv_cache_dtype.startswith("fp8"):
        return PARITY_TOLERANCE_NATS[
            "fp8" + ", random weights" * random_weights + ", GPU" * (random_weights and on_gpu)
        ]
    return PARITY_TOLERANCE_NATS["float32" if dtype == "float32" else "bfloat16"]


@dataclass(frozen=True)
class Parity:
    """How one mode's greedy tokens and log-probabilities compare with the baseline's, request for request.

    equal, requests: requests with the same tokens, and all requests.
    largest_gap: over the first differing token of each other request, the largest gap in nats between the baseline's
        log-probability of its own token and of the one chosen instead; infinite where that is not among its best.
    largest_shift: over all places up to that one, the largest difference in nats between the log-probabilities that
        both give to the baseline's best token; infinite where it is not among the other's best.
    places: those same places but for each answer's first, whose token comes from prefill, where no mode attends.
    sum_p4: the sum over `places` of the fourth power of each place's shift. That is the root of the mean square
        of the shifts of the baseline's best tokens, weighted by their probabilities.
    """

    equal: int = 0
    requests: int = 0
    largest_gap: float = 0.0
    largest_shift: float = 0.0
    places: int = 0
    sum_p4: float = 0.0

    @property
    def shift(self) -> float:
        """The fourth root of the mean fourth power of all places' shifts, in nats; 0 without any.

        Rounding shifts all places alike, and a fault some of them much more: a mean of squares lets those drown, and
        the largest of all grows with the number of places.
        """
        return (self.sum_p4 / max(1, self.places)) ** 0.25

    def within(self, tolerance: float) -> bool:
        """Whether what differs is rounding: `shift` is at most `tolerance` nats, and no single token's far beyond."""
        return self.shift <= tolerance and max(self.largest_gap, self.largest_shift) <= OUTLIER_FACTOR * tolerance

    def __add__(self, other: "Parity") -> "Parity":
        """Of both comparisons together."""
        both = zip(astuple(self), astuple(other), strict=True)
        return Parity(*(how(pair) for (_, _, how), pair in zip(METRICS, both, strict=True)))

    def rows(self) -> list[dict[str, Any]]:
        """It as tidy rows."""
        values = zip(METRICS, astuple(self), strict=True)
        return [{"metric": metric, "value": value, "unit": unit} for (metric, unit, _), value in values]


METRICS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("equal_requests", "requests", sum),
    ("requests", "requests", sum),
    ("largest_gap", "nats", max),
    ("largest_shift", "nats", max),
    ("places", "tokens", sum),
    ("fourth_powers", "nats^4", sum),
)
"""Of each field of a `Parity`: its metric and unit in tables, and what is made of several."""


def of_rows(rows: pd.DataFrame) -> Parity:
    """What all of `Parity.rows` among these say together."""
    values = {metric: found.tolist() for metric, found in rows.groupby("metric")["value"]}
    kinds = map(type, astuple(Parity()))
    return Parity(*(kind(how(values.get(metric, [0]))) for kind, (metric, _, how) in zip(kinds, METRICS, strict=True)))


def compare(baseline: Generation, other: Generation, drafted: bool = False) -> Parity:
    """Compare tokens; `baseline` must carry `top_logprobs` for gaps of differing tokens to be known.

    drafted: tokens may be the drafter's, whatever the target says (synthetic acceptance): a differing one that is not
        among the baseline's best has no gap. What the target says is compared all the same, up to that token.
    """
    equal, gaps, largest = 0, [0.0], [0.0]
    shifts: list[float] = []
    for index, (ours, theirs) in enumerate(zip(baseline.tokens, other.tokens, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if baseline.top_logprobs and other.top_logprobs:
            both = zip(baseline.top_logprobs[index], other.top_logprobs[index], strict=False)
            found = [_shifts(*pair) for pair in itertools.islice(both, None if place is None else place + 1)]
            largest += [of_best for of_best, _ in found]
            shifts += [of_place for _, of_place in found[1:]]
        if ours == theirs:
            equal += 1
            continue
        best = baseline.top_logprobs[index][place] if place is not None and baseline.top_logprobs else {}
        if place is not None and theirs[place] in best and ours[place] in best:
            gaps.append(best[ours[place]] - best[theirs[place]])
        elif not drafted:
            gaps.append(math.inf)
    return Parity(
        equal, len(baseline.tokens), max(gaps), max(largest), len(shifts), math.fsum(shift**4 for shift in shifts)
    )


def _shifts(best: dict[int, float], beside: dict[int, float]) -> tuple[float, float]:
    """Of one place: by how much the baseline's best token shifts, and all of its best that the other has too."""
    if any(map(math.isnan, (*best.values(), *beside.values()))):  # `max` would pass over it
        return math.inf, math.inf
    first = max(best, key=best.__getitem__)
    if first not in beside:
        return math.inf, math.inf
    weights = {token: math.exp(logprob - best[first]) for token, logprob in best.items() if token in beside}
    # Tokens that structured output rules out have -inf in both, and no weight.
    squares = sum(weight * (best[token] - beside[token]) ** 2 for token, weight in weights.items() if weight)
    return abs(best[first] - beside[first]), math.sqrt(squares / sum(weights.values()))
