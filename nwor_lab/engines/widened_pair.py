# SPDX-License-Identifier: Apache-2.0
"""The shipped pair written at a larger shape, with the same function: real text and acceptance at another model's cost.

The residual stream is padded with zeros, and RMS norms are scaled for it: of d numbers among D the mean square is d / D
of what it was. A head of 64 lies in a head of 128 so that rotary frequencies agree (dimension i becomes 2 i, and its
partner 64 + 2 i), with queries scaled by sqrt(128 / 64). All other heads, intermediate rows and layers are random, and
what they compute is multiplied by zeros before it is added. The vocabulary stays the pair's.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nwor_lab.command_line import check_names
from nwor_lab.engines.shapes import SHAPES, SIZES
from nwor_lab.paths import PAIR_EAGLE, PAIR_TARGET
from nwor_lab.run.results import write_json

PAIR_AT = "pair@"
"""Before the name of a shape, where a command takes a model."""
DTYPES = {
    "auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16,
    "float32": torch.float32, "float": torch.float32,
}  # fmt: skip
"""By vLLM's names; auto is the pair's own."""
WRITERS = 8


def write_widened(shape: str, folder: Path, dtype: str = "auto") -> tuple[Path, Path]:
    """Write target and EAGLE head at a shape, and return their folders; what is whole there already stays.

    Args:
        shape: one of `shapes.SHAPES`, alone or after ``pair@``; any that is as large as the pair in each size.
        folder: for both, which needs two bytes (float32: four) for each weight.
        dtype: of the weights, one of `DTYPES`. In float32 logits are the pair's to the last places; bfloat16 rounds
            scaled weights.

    Raises:
        ValueError: there is no such shape or dtype, or the pair does not fit into the shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    name = shape.removeprefix(PAIR_AT)
    check_names("shape", (name,), SHAPES)
    sizes, written = SHAPES[name], []
    for source in (PAIR_TARGET, PAIR_EAGLE):
        config = json.loads((source / "config.json").read_text())
        wide = {**config, **sizes, "vocab_size": config["vocab_size"]}
        if source == PAIR_EAGLE:
            wide["num_hidden_layers"] = config["num_hidden_layers"]
        wide["rms_norm_eps"] = config["rms_norm_eps"] * config["hidden_size"] / wide["hidden_size"]
        wide["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        _check_fits(config, wide, name)
        written.append(_write(source, config, wide, folder / source.name, DTYPES[dtype]))
    return written[0], written[1]


def _check_fits(config: Mapping[str, Any], wide: Mapping[str, Any], name: str) -> None:
    small = [size for size in SIZES if size != "num_key_value_heads" and wide[size] < config[size]]
    places = _places(SimpleNamespace(**config), SimpleNamespace(**wide))
    if wide["head_dim"] % config["head_dim"] or max(kv for kv, _ in places) >= wide["num_key_value_heads"]:
        small.append("heads or their size")
    if small:
        raise ValueError(f"the pair does not fit into the shape {name}, which is too small in {', '.join(small)}")


def _places(narrow: SimpleNamespace, wide: SimpleNamespace) -> list[tuple[int, int]]:
    """Of each query head of the pair its KV head and its own place in the larger model; KV heads repeat as needed."""
    group = narrow.num_attention_heads // narrow.num_key_value_heads
    wider_group = wide.num_attention_heads // wide.num_key_value_heads
    repeats = -(-group // wider_group)
    found = []
    for head in range(narrow.num_attention_heads):
        kv_head = head // group * repeats + head % group // wider_group
        found.append((kv_head, kv_head * wider_group + head % group % wider_group))
    return found


def _write(source: Path, config: Mapping[str, Any], wide: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> Path:
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    narrow, wider = SimpleNamespace(**config), SimpleNamespace(**wide)
    base = _noise_of_a_layer(wider, dtype)
    stem = "model.layers." if source == PAIR_TARGET else "layers."

    def save(layer: int) -> dict[str, str]:
        """Write a layer's tensors, or after the last layer all others, and return the file of each."""
        if layer == wider.num_hidden_layers:
            others = {name: tensor for name, tensor in weights.items() if not name.startswith(stem)}
            made = _widen_others(others, narrow, wider, dtype)
        else:
            prefix = f"{stem}{layer}."
            own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
            tensors = _widen_layer(own, base, narrow, wider, dtype) if own else base
            made = {prefix + name: x for name, x in tensors.items() if not own or name in own}
        file = f"model-{layer:05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / file, {"format": "pt"})
        return dict.fromkeys(made, file)

    with ThreadPoolExecutor(WRITERS) as pool:
        parts = pool.map(save, range(wider.num_hidden_layers + 1))
        places = {name: file for part in parts for name, file in part.items()}
    total = sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    write_json(folder / "config.json", dict(wide))  # last: a folder with one is whole
    return folder


def _noise_of_a_layer(wide: SimpleNamespace, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer that computes all that one does, and adds zeros."""
    hidden, intermediate = wide.hidden_size, wide.intermediate_size
    queries, keys = wide.num_attention_heads * wide.head_dim, wide.num_key_value_heads * wide.head_dim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    random = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    random |= {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}
    made = {
        f"{name}.weight": torch.randn(rows, hidden, generator=draw, device=device, dtype=dtype).mul_(0.02).cpu()
        for name, rows in random.items()
    }
    made["self_attn.o_proj.weight"] = torch.zeros(hidden, queries, dtype=dtype)
    made["mlp.down_proj.weight"] = torch.zeros(hidden, intermediate, dtype=dtype)
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        made[norm] = torch.ones(hidden, dtype=dtype)
    return made


def _widen_layer(
    own: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    narrow: SimpleNamespace,
    wide: SimpleNamespace,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """A layer of the pair among the random weights of `base`."""
    d, size, wider = narrow.hidden_size, narrow.head_dim, wide.head_dim
    made = {name: tensor.clone() for name, tensor in base.items()}
    half = torch.arange(size // 2) * (wider // size)
    rotary, values = torch.cat([half, wider // 2 + half]), torch.arange(size)
    group = narrow.num_attention_heads // narrow.num_key_value_heads

    def put(name: str, head: int, dims: Tensor, rows: Tensor) -> None:
        """A head's rows, and zeros in what is left of it."""
        block = made[name][head * wider : (head + 1) * wider]
        block.zero_()
        block[dims, :d] = rows.to(dtype)

    for head, (kv_head, place) in enumerate(_places(narrow, wide)):
        rows, kv_rows = (slice(x * size, (x + 1) * size) for x in (head, head // group))
        put("self_attn.q_proj.weight", place, rotary, own["self_attn.q_proj.weight"][rows] * math.sqrt(wider / size))
        put("self_attn.k_proj.weight", kv_head, rotary, own["self_attn.k_proj.weight"][kv_rows])
        put("self_attn.v_proj.weight", kv_head, values, own["self_attn.v_proj.weight"][kv_rows])
        made["self_attn.o_proj.weight"][:d, place * wider + values] = own["self_attn.o_proj.weight"][:, rows].to(dtype)
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        made[name][: narrow.intermediate_size].zero_()
        made[name][: narrow.intermediate_size, :d] = own[name].to(dtype)
    made["mlp.down_proj.weight"][:d, : narrow.intermediate_size] = own["mlp.down_proj.weight"].to(dtype)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        if name in own:
            made[name] = _widen_norm(own[name], wide.hidden_size, dtype)
    return made


def _widen_norm(weight: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(weight * math.sqrt(len(weight) / hidden), (0, hidden - len(weight))).to(dtype)


def _widen_others(
    weights: Mapping[str, Tensor], narrow: SimpleNamespace, wide: SimpleNamespace, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Embedding, final norm, `lm_head` and an EAGLE head's `fc`."""
    d, more, made = narrow.hidden_size, wide.hidden_size - narrow.hidden_size, dict[str, Tensor]()
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            made[name] = _widen_norm(weight, wide.hidden_size, dtype)
        elif name == "fc.weight":  # of a token's embedding and the target's feature, side by side
            halves = [torch.nn.functional.pad(half, (0, more, 0, more)) for half in weight.split(d, dim=1)]
            made[name] = torch.cat(halves, dim=1).to(dtype)
        else:
            made[name] = torch.nn.functional.pad(weight, (0, more)).to(dtype)
    return made
