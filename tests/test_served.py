# SPDX-License-Identifier: Apache-2.0
"""Where a mode serves and where vLLM's own write does (R17, R19, R22), on light stand-ins; no engine is started."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.platforms import current_platform

from nwor import paths
from nwor.vllm import gpu, runner

FUSED = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "fuse_attn_quant")


def make_runner(names: tuple[str, ...] = ("a", "b"), **changes) -> SimpleNamespace:
    """A V1 runner as far as `unsupported` looks at it; a change of a dotted name goes inside."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
        enable_elastic_ep=False,
    )
    groups = [SimpleNamespace(layer_names=[*names, "draft"])]
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(),
            kv_transfer_config=None,
            parallel_config=parallel,
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**dict.fromkeys(FUSED, False))),
        ),
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = runner
        for part in owners:
            owner = getattr(owner, part)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return runner


def test_cow_needs_neither_attention_nor_a_whole_batch():
    made = make_runner(device=torch.device("cuda"), vllm_config__parallel_config__use_ubatching=True)
    assert runner.unsupported(made, {"a": None, "b": None}, "cow") == ""


def groups_of(*names: list[str]) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=group) for group in names])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kv_cache_config": groups_of(["draft"], ["a", "b"])}, ""),
        ({"vllm_config__speculative_config": None}, "no speculative decoding"),
        ({"vllm_config__kv_transfer_config": SimpleNamespace()}, "a KV connector reads the pages before the commit"),
        ({"vllm_config__parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"vllm_config__parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"vllm_config__parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"vllm_config__parallel_config__use_ubatching": True}, "micro-batches"),
        ({"vllm_config__parallel_config__enable_elastic_ep": True}, "elastic expert parallelism"),
        ({"kv_cache_config": groups_of(["a"], ["b", "draft"])}, "a hybrid model: its target layers lie in 2 cache"),
        ({"kv_cache_config": groups_of(["a", "draft"])}, "a hybrid model"),
        ({"kv_cache_config": groups_of(["draft"])}, "a hybrid model: its target layers lie in 0 cache"),
    ],
)
def test_unsupported(changes, why):
    """R19: each configuration that no mode serves is named, and vLLM's own write serves it."""
    found = runner.unsupported(make_runner(**changes), {"a": gpu_layer(), "b": gpu_layer()}, "stage")
    assert found.startswith(why) and bool(found) == bool(why)


def test_layers_that_share_a_cache():
    layers = {
        "a": SimpleNamespace(kv_sharing_target_layer_name=None),
        "b": SimpleNamespace(kv_sharing_target_layer_name="a"),
    }
    for mode in ("cow", "stage"):
        assert runner.unsupported(make_runner(), layers, mode) == "layers that share another layer's KV cache"


def gpu_layer(implementation: str = "FlashAttentionImpl", **changes) -> SimpleNamespace:
    """An attention layer as far as `gpu.cannot_attend` looks at it."""
    values = {
        "attn_type": "decoder",
        "head_size": 128,
        "kv_cache_dtype": "auto",
        "alibi_slopes": None,
        "sinks": None,
        "scale_of": 1,
    } | changes
    impl = type(implementation, (), values)()
    scale, dtype = torch.ones(values["scale_of"]), values.pop("kv_cache_torch_dtype", torch.bfloat16)
    return SimpleNamespace(impl=impl, _k_scale=scale, _v_scale=scale, dtype=torch.bfloat16, kv_cache_torch_dtype=dtype)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (gpu_layer(), ""),
        (gpu_layer("TritonAttentionImpl", kv_cache_dtype="fp8"), ""),
        (gpu_layer("FlashInferImpl"), ""),
        (gpu_layer("FlexAttentionImpl"), "the attention backend FlexAttentionImpl: stage has a hook in"),
        (gpu_layer("FlashAttentionMLAImpl"), "the attention backend FlashAttentionMLAImpl"),
        (gpu_layer(attn_type="encoder_only"), "attention of type encoder_only"),
        (gpu_layer(head_size=80), "heads of size 80"),
        (gpu_layer(kv_cache_dtype="int8_per_token_head"), "a cache of type int8_per_token_head"),
        (gpu_layer(alibi_slopes=torch.ones(2)), "ALiBi"),
        (gpu_layer(sinks=torch.ones(2)), "attention sinks"),
        (gpu_layer(scale_of=8), "a scale for each head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_stage_cannot_attend_to_on_a_gpu(layer, why):
    """R19: named before the first step, and vLLM's own write serves them."""
    found = gpu.cannot_attend(layer)
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.parametrize("name", FUSED)
def test_fused_passes_keep_rows_from_the_hook(name):
    config = make_runner().vllm_config
    assert gpu.fused_passes(config) == ""
    setattr(config.compilation_config.pass_config, name, True)
    assert gpu.fused_passes(config)


PARALLEL = "vllm_config__parallel_config__"
ON_A_GPU = {"device": torch.device("cuda")}
MATRIX = {
    "no speculative decoding": [({"vllm_config__speculative_config": None}, {})],
    "a KV connector or offload": [({"vllm_config__kv_transfer_config": SimpleNamespace()}, {})],
    "pipeline parallelism": [({PARALLEL + "pipeline_parallel_size": 2}, {})],
    "context parallelism, decode or prefill": [
        ({PARALLEL + f"{kind}_context_parallel_size": 2}, {}) for kind in ("decode", "prefill")
    ],
    "layers that share another's cache": [({}, {"kv_sharing_target_layer_name": "a"})],
    "hybrid models, MLA": [
        ({"kv_cache_config": groups_of(["a"], ["b"])}, {}),
        ({"kv_cache_config": groups_of([])}, {}),
    ],
    "micro-batches": [({PARALLEL + "use_ubatching": True}, {})],
    "elastic expert parallelism": [({PARALLEL + "enable_elastic_ep": True}, {})],
    "fused rope and cache write, quantised attention output (GPU)": [
        (ON_A_GPU | {f"vllm_config__compilation_config__pass_config__{name}": True}, {}) for name in FUSED
    ],
    "ALiBi, sinks": [(ON_A_GPU, {"alibi_slopes": torch.ones(2)}), (ON_A_GPU, {"sinks": torch.ones(2)})],
    "FlashInfer": [(ON_A_GPU, {"implementation": "FlashInferImpl"})],
    "a cache of another 16-bit type than the model's": [({}, {"kv_cache_torch_dtype": torch.float16})],
    "other attention backends": [
        (ON_A_GPU, {"implementation": name}) for name in ("FlexAttentionImpl", "RocmAttentionImpl")
    ],
    "heads of a size other than 64, 96, 128, 256 (GPU)": [(ON_A_GPU, {"head_size": 80})],
    "a cache of fp8 e5m2 or with scales per token or head (GPU)": [
        (ON_A_GPU, {"kv_cache_dtype": "fp8_e5m2"}),
        (ON_A_GPU, {"kv_cache_dtype": "fp8_per_token_head"}),
        (ON_A_GPU, {"scale_of": 8}),
    ],
}
# Seen below, in a step, or while a manager is built:
# tests/test_manager.py, test_vllm_modes.py and test_gpu_hooks.py hold these.
ELSEWHERE = {
    "ROCm (AITER's unified attention has a hook; the operators are not built for it)",
    "steps in which little or nothing is to be won, by the tuning (GPU)",
    "a batch or a window larger than the held rows",
    "drafts behind prefill rows of one query",
    "a CPU packing that is no permutation",
}


def readme_matrix() -> dict[str, tuple[str, str]]:
    text = (paths.ROOT / "README.md").read_text()
    lines = text[text.index("| beside a mode |") :].partition("\n\n")[0].splitlines()[2:]
    return {
        name: (cow, stage) for name, cow, stage in ([part.strip() for part in line.split("|")[1:4]] for line in lines)
    }


def test_the_readme_tells_where_a_mode_serves():
    """R19: each line of its table is what the hooks decide."""
    said = readme_matrix()
    assert said.keys() == MATRIX.keys() | ELSEWHERE
    for name, cases in MATRIX.items():
        for changes, layer in cases:
            layers = {
                "a": gpu_layer(),
                "b": gpu_layer(**{k: v for k, v in layer.items() if not k.startswith("kv_sharing")}),
            }
            layers["b"].kv_sharing_target_layer_name = layer.get("kv_sharing_target_layer_name")
            for mode, words in zip(("cow", "stage"), said[name], strict=True):
                found = runner.unsupported(make_runner(**changes), layers, mode)
                assert (found == "") == (words == "serves"), (name, mode, found)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_no_mode_serves_on_rocm(mode, monkeypatch):
    """R19: told at the start, and not by an operator that fails in the first step."""
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    layers = {"a": gpu_layer("RocmAiterUnifiedAttentionImpl"), "b": gpu_layer()}
    assert runner.unsupported(make_runner(**ON_A_GPU), layers, mode) == "ROCm: the operators are not built for it"


def test_batches_that_stand_aside_are_told(monkeypatch):
    """N1: by one warning and by the rank's status, which carry the notice."""
    made = make_runner(device=torch.device("cuda"))
    config = made.vllm_config
    config.scheduler_config = SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=64)
    config.speculative_config.num_speculative_tokens = 3
    config.compilation_config.cudagraph_mode = None
    config.model_config = SimpleNamespace(max_model_len=8192)
    monkeypatch.setattr(gpu, "workspace", lambda manager, layer: None)
    slower = {8: 4120, 9: 4120, 12: 1048}
    monkeypatch.setattr(gpu, "slower", lambda manager, layer, longest: slower if longest == 8192 else {})
    layers = [SimpleNamespace(kv_cache=torch.zeros(4, 2, 16, 64))]
    by_batch = {8: 0, 9: 0, 12: 0}
    for by_context, aside, where in ((True, slower, "from contexts of 1048 on"), (False, by_batch, "at every context")):
        manager, notice = runner.build_manager(made, "stage", layers, by_context)
        assert manager is not None and manager.aside == aside and not manager.emulate
        assert f"3 batch sizes from 8 to 12 requests stand aside {where}: " in notice
    config.model_config.max_model_len = 4096
    for mode in ("stage", "cow"):
        manager, notice = runner.build_manager(made, mode, layers, by_context=True)
        assert manager is not None and (manager.aside, notice) == ({}, "")


def test_target_layers_are_attention_and_not_the_drafters():
    """R3, R22: "staged tokens 0 < accepted 6 for layer 32" was the drafter's layer taken for a target's."""
    from vllm.model_executor.layers.attention import Attention

    layers = {name: object.__new__(Attention) for name in ("model.0", "model.1", "model.2")}
    context = {
        "model.0": layers["model.0"],
        "mamba": object(),
        "model.2": layers["model.2"],
        "model.1": layers["model.1"],
    }
    made = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        drafter=SimpleNamespace(_draft_attn_layer_names={"model.2"}),
    )
    assert list(runner.target_layers(made)) == ["model.0", "model.1"]
    made.drafter = SimpleNamespace()  # n-gram: a drafter without layers
    assert list(runner.target_layers(made)) == ["model.0", "model.2", "model.1"]
    del made.drafter
    assert len(runner.target_layers(made)) == 3
    made.speculator = SimpleNamespace(draft_attn_layer_names={"model.1"})  # V2's name for it
    assert list(runner.target_layers(made)) == ["model.0", "model.2"]
