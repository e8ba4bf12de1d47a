# SPDX-License-Identifier: Apache-2.0
"""How options are written and refused, and the line that moves while a command works."""

import io
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from nwor_lab import command_line, progress


@dataclass(frozen=True)
class Group:
    """What a group is for."""

    share: float = 0.5
    """of the whole"""
    caches: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """dtypes"""

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError(f"share is at most 1, got {self.share}")


@dataclass(frozen=True)
class Asked:
    out: Path
    """a folder"""
    ks: tuple[int, ...] = (4,)
    """draft lengths"""
    grid: list[str] = field(default_factory=list)
    """as it is written"""
    group: Group = field(default_factory=Group)


def parse(text: str) -> Asked:
    return command_line.parse(Asked, text.split(), "nwor some", "What it does.")


def test_several_values_are_written_with_commas_or_spaces() -> None:
    assert parse("--out x --ks 1,2,3") == parse("--ks 1 2,3 --out=x") == Asked(Path("x"), (1, 2, 3))
    assert parse("--out x --grid k=1,8 tp=1,2").grid == ["k=1,8", "tp=1,2"]
    assert parse("--out x --caches bf16,fp8 --share 0.25").group == Group(0.25, ("bf16", "fp8"))
    assert command_line.parse(Asked, ["--out", "x", "--ks", ""], "", "").ks == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--out"),
        ("--out x --ks 1,b", "'b'"),
        ("--out x --share much", "'much'"),
        ("--out x --caches fp16", "fp16 is not of bf16, fp8"),
        ("--out x --share 2", "at most 1"),
        ("--out x --share", "--share: a value is missing"),
        ("--out x --kss 1", "--kss"),
        ("--kss 1", "--kss"),  # and not what is missing too
    ],
)
def test_what_is_wrong_is_one_line(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        parse(text)
    assert "\n" not in str(raised.value) and capsys.readouterr() == ("", "")


# -- progress ----------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, is_a_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_a_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_a_line_that_moves_and_a_file_has_lines(terminal: bool, monkeypatch) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stdout", screen)
    with progress.moving():
        progress.say("one")
        print("to stay")
        progress.say("only where it moves", plain=False)
        time.sleep(2.2 * terminal)
    print("the end")
    said = screen.getvalue()
    lines = said.splitlines() if not terminal else said.split("\r")
    if not terminal:
        assert [bool(progress.PLAIN.match(line)) for line in lines] == [True, False, False] and "moves" not in said
        assert "\r" not in said
        return
    seconds = {re.findall(r"\d\.\d s", line)[-1] for line in lines if "only where it moves" in line}
    assert len(seconds) >= 2, "it counts while nothing is said"
    assert "to stay\n" in said and said.endswith("the end\n")
