# SPDX-License-Identifier: Apache-2.0
"""vLLM's features under the modes, on the shipped pair: an engine for each mode serves all of `scripts.SCRIPTS`."""

import re
from functools import cache

import pytest

from nwor.settings import Settings
from tests.engines import Outcome
from tests.nwor import scripts
from tests.nwor.on_cpu import ROUNDING
from tests.nwor.scripts import REGEX, SCRIPTS, Answer, Found

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
FAULTS = ("dirty_layer_steps", "dirty_slots", "unwritten_rows", "wrong_rows", "stray_slots")


@pytest.fixture(scope="module")
def serve(engines):
    @cache
    def run(mode: str) -> Outcome:
        settings = Settings(mode=mode, audit=True, debug_sync=mode != "off")
        return engines.run(scripts.spec(), settings, scripts.same_ids, calls=[{"script": script} for script in SCRIPTS])

    return run


@pytest.fixture(scope="module")
def vanilla(serve) -> dict[str, Found]:
    return {script.__name__: found for script, found in zip(SCRIPTS, serve("off").scripts, strict=True)}


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_feature_gives_what_it_gives_in_vanilla(serve, vanilla, mode, script):
    outcome, theirs = serve(mode), vanilla[script.__name__]
    ours, audit = outcome.scripts[SCRIPTS.index(script)], outcome.audits[SCRIPTS.index(script)]["audit"]
    [rank] = outcome.ranks
    assert rank["serving"] == mode and rank["counters"]["fallbacks"] == 0, rank["reason"]
    assert audit["steps"] > 10 and not any(audit[fault] for fault in FAULTS)
    for their, our in zip(theirs.answers, ours.answers, strict=True):
        assert _without_logprobs(our) == _without_logprobs(their)
        pairs = zip(our.logprobs, their.logprobs, strict=True)
        assert all(_close(*pair, 0.0 if mode == "cow" else ROUNDING) for pair in pairs)
    assert ours.preemptions == theirs.preemptions


def _without_logprobs(answer: Answer) -> dict[str, object]:
    return {name: value for name, value in vars(answer).items() if name != "logprobs"}


def _close(ours: dict[int, float], theirs: dict[int, float], tolerance: float) -> bool:
    """The last of the best may be another where two are nearly as likely."""
    both = [(ours[token], theirs[token]) for token in ours.keys() & theirs.keys()]
    return len(both) >= len(theirs) - 1 and all(our == their or abs(our - their) <= tolerance for our, their in both)


def test_vanilla_fails_every_audit(serve):
    assert all(found["audit"]["dirty_layer_steps"] > 0 for found in serve("off").audits)


def test_the_scripts_do_what_they_are_for(vanilla):
    """Each feature shows in vanilla's answers: else equal ones would say nothing."""
    *_, last = kept = [len(answer.tokens) for answer in vanilla["lengths"].answers]
    assert kept == 2 * list(range(1, last + 1)) and last > 2 * scripts.K

    urgent = vanilla["priorities"]
    assert urgent.preemptions > 0 and urgent.answers[3].place > max(answer.place for answer in urgent.answers[4:])

    bound = vanilla["grammars"]
    assert bound.preemptions > 0
    assert all(re.fullmatch(REGEX.replace("12,60", "80,110"), answer.text) for answer in bound.answers[1:4:2])

    again = vanilla["resets_and_pauses"]
    assert again.preemptions == 2 * len(again.answers)

    shared = vanilla["aborts_beside_a_stem"].answers
    aborted = [answer for answer in shared if answer.place < 0]
    assert len(aborted) == 3 and all(0 < len(answer.tokens) < 48 for answer in aborted)
    assert all(answer.cached > 0 for answer in shared[1:])
