# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from nwor_lab.pair.llama import EagleHead, LlamaConfig, LlamaTarget, apply_rope, causal_attention

SHAPE = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=5000.0,
)


@pytest.fixture
def tokens():
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))


def hugging_face(tie: bool, seed: int = 0):
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = HFConfig(**{**SHAPE.to_dict(), "tie_word_embeddings": tie, "initializer_range": 0.1})
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("tie", [False, True])
def test_logits_and_hidden_states_equal_hugging_face(tie, tokens, tmp_path):
    model = hugging_face(tie)
    model.save_pretrained(tmp_path)
    target = LlamaTarget.from_pretrained(tmp_path)
    assert target.config.rope_theta == 5000.0 and target.config.tie_word_embeddings is tie
    positions = torch.arange(tokens.shape[-1])
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True)
        hidden = target(tokens, positions)
        torch.testing.assert_close(hidden, theirs.hidden_states[-1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target.logits(hidden), theirs.logits, rtol=1e-5, atol=1e-5)


def test_batched_forward_equals_one_sequence_at_a_time(tokens):
    torch.manual_seed(1)
    target = LlamaTarget(SHAPE)
    positions = torch.arange(tokens.shape[-1])
    with torch.no_grad():
        together = target(tokens, positions)
        for row, alone in zip(together, tokens, strict=True):
            torch.testing.assert_close(row, target(alone, positions), rtol=1e-5, atol=1e-5)


def test_rope_depends_on_distance_alone_and_keeps_length():
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    dots = []
    for shift in (0, 7, 100):
        rotated = [apply_rope(x, torch.tensor([p + shift]), 10000.0) for x, p in ((query, 5), (key, 2))]
        assert torch.allclose(rotated[0].norm(), query.norm())
        dots.append((rotated[0] * rotated[1]).sum())
    assert torch.allclose(dots[0], dots[1], atol=1e-4) and torch.allclose(dots[0], dots[2], atol=1e-4)
    assert not torch.allclose(dots[0], (query * key).sum(), atol=1e-4)


def test_causal_attention_is_softmax_over_the_past():
    query, key, value = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    out = causal_attention(0, query, key, value)
    for t in range(6):
        for h in range(4):
            weights = F.softmax(key[: t + 1, h // 2] @ query[t, h] / 8**0.5, dim=0)
            torch.testing.assert_close(out[t, h], weights @ value[: t + 1, h // 2], rtol=1e-5, atol=1e-6)


def test_attend_is_told_each_layer_and_the_head_follows_the_target(tokens):
    target = LlamaTarget(SHAPE)
    head = EagleHead(LlamaConfig(**{**vars(SHAPE), "num_hidden_layers": 1}), target)
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return causal_attention(layer, query, key, value)

    positions = torch.arange(8)
    hidden = target(tokens[0, :8], positions, attend)
    head(tokens[0, 1:9], positions, hidden, attend)
    assert [s[0] for s in seen] == [0, 1, 2, 3]
    assert all(s[1:] == ((8, 4, 16), (8, 2, 16), (8, 2, 16)) for s in seen)


def eagle_checkpoint(path, target, bias):
    config = LlamaConfig(**{**vars(SHAPE), "num_hidden_layers": 1})
    head = EagleHead(config, target, bias=bias)
    save_file({n: p.detach().clone() for n, p in head.own_parameters().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return head


@pytest.mark.parametrize("bias", [False, True])
def test_head_round_trip_with_and_without_bias(bias, tokens, tmp_path):
    torch.manual_seed(2)
    target = LlamaTarget(SHAPE)
    head = eagle_checkpoint(tmp_path, target, bias)
    again = EagleHead.from_pretrained(tmp_path, target)
    assert (again.fc.bias is not None) is bias
    assert again.embed_tokens is target.model.embed_tokens and again.lm_head is target.lm_head
    assert "layers.0.input_layernorm.weight" not in again.own_parameters()
    positions, hidden = torch.arange(40), torch.randn(2, 40, 48)
    with torch.no_grad():
        assert torch.equal(head(tokens, positions, hidden), again(tokens, positions, hidden))


def test_head_is_the_formula_of_the_paper(tokens):
    torch.manual_seed(3)
    target = LlamaTarget(SHAPE)
    head = EagleHead(LlamaConfig(**{**vars(SHAPE), "num_hidden_layers": 1}), target)
    positions, hidden = torch.arange(40), torch.randn(40, 48)
    embedded = target.model.embed_tokens(tokens[0])
    x = F.linear(torch.cat((embedded, hidden), -1), head.fc.weight)
    layer = head.layers[0]
    x = x + layer.self_attn(3, x, positions, causal_attention)
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    assert torch.equal(head(tokens[0], positions, hidden), x)


def test_wrong_checkpoints_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LlamaTarget.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE.to_dict()))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        LlamaTarget.from_pretrained(tmp_path)
    target = LlamaTarget(SHAPE)
    eagle_checkpoint(tmp_path, target, False)
    save_file({"fc.weight": torch.zeros(48, 96)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="q_proj"):
        EagleHead.from_pretrained(tmp_path, target)
    with pytest.raises(ValueError, match="llama3"):
        LlamaConfig.from_dict({**SHAPE.to_dict(), "rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(ValueError, match="bias"):
        LlamaConfig.from_dict({**SHAPE.to_dict(), "attention_bias": True})
    with pytest.raises(ValueError, match="KV heads"):
        LlamaConfig(**{**vars(SHAPE), "num_key_value_heads": 3})
