# SPDX-License-Identifier: Apache-2.0
"""What lessons share: a guess that is compared, an exercise that is checked at once and stops no batch run."""

import pytest
import torch

from nwor_lab.run import lessons

CASES = [(torch.zeros(3), 1), (torch.ones(3), 2)]


def fill(pages, slot):
    pages[slot] = 7
    return pages.sum()


def unsolved(pages, slot):
    raise NotImplementedError


def forgets_to_return(pages, slot):
    pages[slot] = 7


def beside(pages, slot):
    pages[0] = pages[slot] = 7
    return pages.sum() - (pages[0] if slot else 0)


@pytest.mark.parametrize(
    ("attempt", "right", "says"),
    [
        (lambda pages, slot: fill(pages, slot), True, "2 cases"),
        (unsolved, False, "not yet\n"),
        (forgets_to_return, False, "not yet\n"),
        (beside, False, "argument 1"),
        (lambda pages, slot: fill(pages, slot) + 1, False, "returns"),
        (lambda pages, slot: pages.nothing, False, "AttributeError"),
        (lambda pages, slot: fill(pages, slot).expand(2), False, "returns"),
    ],
)
def test_an_exercise_says_at_once_whether_it_is_right(attempt, right, says, capsys):
    assert lessons.check(attempt, fill, CASES) is right
    out = capsys.readouterr().out
    assert says in out and out.startswith(lessons.RIGHT if right else lessons.NOT_YET)


def test_an_answer_may_be_a_name():
    cases = [(["a", "b"], 0), (["a", "b"], 1)]
    assert lessons.check(lambda names, at: names[at], lambda names, at: names[at], cases)
    assert not lessons.check(lambda names, at: "a", lambda names, at: names[at], cases)
    assert not lessons.check(lambda names, at: at, lambda names, at: names[at], cases)


def test_what_works_in_place_and_returns_nothing_is_checked(capsys):
    assert lessons.check(forgets_to_return, forgets_to_return, CASES)
    assert not lessons.check(lambda pages, slot: None, forgets_to_return, CASES)
    assert "argument 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chosen", "says"), [(None, "Found: b. because"), ("b", "As you guessed"), ("a", "Not a.")], ids=str
)
def test_a_guess_is_compared_with_what_was_found(chosen, says, capsys):
    guess = lessons.Guess("Which?", ["a", "b"])
    assert guess.answer is None, "nothing is chosen for the reader"
    guess.widget.value = chosen
    capsys.readouterr()
    guess.compare("b", "because")
    assert capsys.readouterr().out.startswith(says)
    with pytest.raises(ValueError, match="none"):
        guess.compare("c")
