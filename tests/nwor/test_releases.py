# SPDX-License-Identifier: Apache-2.0
"""What of a function's source makes it another one."""

import ast

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
