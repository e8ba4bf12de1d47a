# SPDX-License-Identifier: Apache-2.0
"""What of a function's source makes it another one, and that it is read alike from a process and from a file."""

import ast
import functools
from pathlib import Path

import pytest

from nwor.vllm import releases

FUNCTION = """
def step(self, tokens: int, scale: int = 1, *more, key=None, **rest) -> int:
    "Of a step."
    # A comment.
    count: int
    total: int = tokens * scale
    for _ in range(2):
        'Text that does nothing.'
        total += f(tokens, [1, 2])
    return total
"""
LAYOUT = """
def step(
    self, tokens, scale=1,
    *more, key=None, **rest,
):
    total = (tokens
             * scale)
    for _ in range(2):
        total += f(
            tokens, [1,
2])
    return total
"""


def of_text(text: str) -> releases.Function:
    return releases.of_node(ast.parse(text).body[-1])


def test_layout_words_and_annotations_are_no_change():
    assert of_text(FUNCTION) == of_text(LAYOUT)
    assert of_text(FUNCTION).parameters == "self tokens scale more key rest"


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("scale: int = 1", "scale: int = 2"),
        ("key=None", "key=0"),
        ("key=None", "key"),
        ("tokens * scale", "tokens + scale"),
        ("total: int = tokens", "total: int = token"),
        ("f(tokens, [1, 2])", "f(tokens, [2, 1])"),
        ("f(tokens, [1, 2])", "f(tokens, (1, 2))"),
        ("f(tokens, [1, 2])", "f(tokens, x=[1, 2])"),
        ("return total", "return"),
        ("return total", "return None"),
        ("    return total", "        return total"),
        ("\ndef step", "\n@cached\ndef step"),
    ],
)
def test_what_a_function_does_is_a_change(text, other):
    assert text in FUNCTION
    assert of_text(FUNCTION).body != of_text(FUNCTION.replace(text, other)).body


# fmt: off
class Odd:
    """Methods whose end is easily missed."""

    @functools.lru_cache  # noqa: B019
    def decorated(
        self,
        text="""
(""",
    ) -> str:
        """Text
at the margin.
        """
# A comment at the margin.
        return text + """
end"""

    def last(self): return 1
# fmt: on


def test_a_functions_lines_are_found_below_what_wraps_it():
    """`of_object` reads lines and `of_node` a whole file: the two must see the same function."""
    [odd] = [node for node in ast.parse(Path(__file__).read_text()).body if getattr(node, "name", "") == "Odd"]
    for node in odd.body[1:]:
        function = vars(Odd)[node.name]
        assert releases.of_object(function) == releases.of_node(node) and releases.of_object(function).body
