# SPDX-License-Identifier: Apache-2.0
"""What the lessons share: a guess before a figure, and an exercise that says at once whether it is right.

Both leave a batch run alone: nobody guesses there, and an exercise that nobody has solved says "not yet".
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from IPython.display import display

NOT_YET, RIGHT = "not yet", "right"


class Guess:
    """A question with a few answers to click on, before the cell that shows which of them holds.

    answer: the one that was chosen, None before.
    """

    def __init__(self, question: str, answers: Sequence[str]) -> None:
        import ipywidgets

        self.answers = list(answers)
        self.widget = ipywidgets.RadioButtons(options=self.answers, value=None, layout={"width": "max-content"})
        display(ipywidgets.VBox([ipywidgets.HTML(f"<b>Your guess.</b> {question}"), self.widget]))

    @property
    def answer(self) -> str | None:
        return self.widget.value

    def compare(self, found: str, why: str = "") -> None:
        """Say what was found beside what was guessed.

        Raises:
            ValueError: `found` is none of the answers.
        """
        if found not in self.answers:
            raise ValueError(f"{found!r} is none of the answers: {', '.join(self.answers)}")
        before = "" if self.answer is None else "As you guessed. " if self.answer == found else f"Not {self.answer}. "
        _say(f"{before}Found: {found}. {why}")


def check(attempt: Callable, solution: Callable, cases: Iterable[Sequence[Any]]) -> bool:
    """Hold a reader's function against one that is right, and print where they part first.

    Each case is a call's arguments. What counts is what a call returns and what it leaves in its arguments: each gets
    copies of its own. An attempt that raises `NotImplementedError`, or returns None where a value is asked for, has not
    been made yet.

    Returns:
        Whether the attempt is right in all cases.
    """
    cases = list(cases)
    for case in cases:
        own, given = copy.deepcopy(case), copy.deepcopy(case)
        wanted = solution(*own)
        try:
            found = attempt(*given)
        except NotImplementedError:
            print(NOT_YET)
            return False
        except Exception as error:  # noqa: BLE001  (a reader's code fails in ways of its own)
            _say(f"{NOT_YET}: {type(error).__name__}: {error}, called with {_arguments(case)}")
            return False
        if found is None and wanted is not None:
            print(NOT_YET)
            return False
        names = ("what it returns", *(f"argument {place}" for place in range(1, len(case) + 1)))
        for name, left, right in zip(names, (found, *given), (wanted, *own), strict=True):
            if not _same(left, right):
                _say(f"{NOT_YET}: called with {_arguments(case)},")
                _say(f"  {name} is {_shown(left)},")
                _say(f"  wanted  {_shown(right)}")
                return False
    print(f"{RIGHT}, in {len(cases)} cases")
    return True


def _say(text: str) -> None:
    """Print, broken between words: a page breaks a long line anywhere."""
    print(textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False))


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    if isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right)) if isinstance(left, (list, tuple)) else False
    try:
        left, right = torch.as_tensor(left), torch.as_tensor(right)
    except (TypeError, ValueError, RuntimeError):  # a name, or anything else that is no number
        return bool(left == right)
    return left.shape == right.shape and torch.allclose(left.double(), right.double(), equal_nan=True)


def _arguments(case: Sequence[Any]) -> str:
    return ", ".join(map(_shown, case))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{_arguments(value)}]"
    return repr(value)
