# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in real vLLM on the CPU: requests of one batch with different ones, drafts by n-gram."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nwor.settings import Settings
from nwor_lab import pair, paths
from tests.nwor.specs import With
from tests.nwor.test_vllm_drafts import counts, settings_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RANK = 8


def write_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the shipped target's queries, keys and values, large enough to change its texts."""
    config = json.loads((paths.PAIR_TARGET / "config.json").read_text())
    size, hidden = config["head_dim"], config["hidden_size"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    draw, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, number in heads.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{base}.lora_A.weight"] = torch.randn(RANK, hidden, generator=draw) / hidden**0.5
            weights[f"{base}.lora_B.weight"] = 0.3 * torch.randn(number * size, RANK, generator=draw)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    described["target_modules"] = [f"{name}_proj" for name in heads]
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def with_adapters(folders: list[str], patch: pytest.MonkeyPatch) -> None:
    """Requests take turns: one without an adapter, then one with each."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    adapters = [None, *(LoRARequest(folder, number, folder) for number, folder in enumerate(folders, 1))]
    add = LLMEngine.add_request

    def add_request(self: Any, name: str, *given: Any, **named: Any) -> Any:
        return add(self, name, *given, lora_request=adapters[int(name.split("-")[1]) % len(adapters)], **named)

    patch.setattr(LLMEngine, "add_request", add_request)


def test_requests_with_different_adapters_have_vanillas_tokens_and_a_clean_cache(engines, tmp_path):
    folders = [write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    asked = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": RANK}
    spec = With(str(paths.PAIR_TARGET), method="ngram", k=4, dtype="float32", batch=6, num_blocks=72, arguments=asked)
    texts = pair.load_tokenizer().encode_batch(pair.load_prompts(count=2))
    prompts = [text.ids[:20] * 2 for text in texts for _ in range(3)]
    call = {"prompts": prompts, "max_tokens": 24, "fault": partial(with_adapters, folders)}
    plain = engines.run(spec, Settings(), **call)
    assert len(set(map(tuple, plain.tokens))) >= 4, "the adapters change nothing"
    windows, staged, committed = counts(engines.run(spec, settings_of("stage"), **call), plain)
    assert windows > 10 and 0 < committed < staged
