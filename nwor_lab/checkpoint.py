# SPDX-License-Identifier: Apache-2.0
"""What can be found wrong with a model's folder before anything is loaded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def is_folder(model: str) -> bool:
    """Whether `model` is a folder, not a name on the hub."""
    return model.startswith((".", "/")) or Path(model).is_dir()


def check_checkpoint(folder: Path, weights: bool = True) -> dict[str, Any]:
    """Return the config of the model in `folder`, once its files are known to be readable.

    weights: look for them too: each ``*.safetensors`` that there is to be must be there, and as long as it says.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; give a model's folder or its name on the hub")
    texts = ("config.json", "tokenizer.json", "model.safetensors.index.json")
    read = {name: _read_json(folder / name) for name in texts if (folder / name).is_file()}
    names = set(read.get(texts[2], {}).get("weight_map", {}).values()) or {p.name for p in folder.glob("*.safetensors")}
    if weights and not names and not list(folder.glob("*.bin")):
        raise ValueError(f"{folder} holds no weights (*.safetensors)")
    for name in sorted(names) if weights else ():
        try:
            with safe_open(folder / name, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / name} is missing or damaged: {error}") from error
    return read["config.json"]


def check_ranks(config: dict[str, Any], tp: int, model: str) -> None:
    """Raise `ValueError` unless the heads of the model with this config divide over `tp` ranks, as vLLM asks."""
    heads = config.get("num_attention_heads") or tp
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        fit = [n for n in range(1, heads + 1) if not (heads % n or (kv_heads % n and n % kv_heads))]
        raise ValueError(
            f"tp={tp}: {heads} heads and {kv_heads} KV heads of {model} do not divide over {tp} ranks; "
            f"choose one of {', '.join(map(str, fit))}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
