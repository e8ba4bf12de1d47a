# SPDX-License-Identifier: Apache-2.0
"""The shipped pair, a small target and its EAGLE head: prompts and tokenizer here, the models in `nwor_lab.pair.model`.

`data/pair/train.py` is the recipe that made it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nwor_lab.paths import PAIR_TARGET, PROMPTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_prompts(path: str | Path = PROMPTS, count: int | None = None) -> list[str]:
    """The first `count` prompts of a `{"id": ..., "prompt": ...}` JSON-lines file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no such object, or the file holds fewer prompts, or none is asked for.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}; give a JSON-lines file with a `prompt` in each line")
    lines, prompts = path.read_text(encoding="utf-8").splitlines(), list[str]()
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'line {number} of {path} is no JSON object with a "prompt": {line[:60]}') from error
    if count is not None and not 1 <= count <= len(prompts):
        raise ValueError(f"{count} prompts asked for: ask for 1 to the {len(prompts)} of {path}, or give another file")
    return prompts[:count]


def load_tokenizer(model: str | Path = PAIR_TARGET) -> Tokenizer:
    """The `tokenizer.json` in the checkpoint folder `model`."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give the folder of a checkpoint with its tokenizer")
    return Tokenizer.from_file(str(file))
