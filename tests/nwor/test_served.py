# SPDX-License-Identifier: Apache-2.0
"""Where a mode serves and where vLLM's own write does, on light stand-ins; no engine is started."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from torch import nn
from vllm.config import ModelConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers import attention as layer_classes
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention import attention as layer_module
from vllm.platforms import current_platform
from vllm.v1.attention.backend import subclass_attention_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nwor.vllm import attention_gpu, masks, own_write, support
from nwor.vllm.context import target_layers
from nwor_lab import paths

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
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(**dict.fromkeys(FUSED, False)),
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
                use_inductor_graph_partition=False,
                splitting_ops=["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"],
            ),
            model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
            cache_config=SimpleNamespace(block_size=16, skip_page_size_padded=None),
        ),
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        compilation_config=SimpleNamespace(static_forward_context={}),
        drafter=SimpleNamespace(_draft_attn_layer_names={"draft"}),
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
    assert support.why_unsupported(made, {"a": None, "b": None}, "cow") == ""


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
        ({"drafter": SimpleNamespace()}, "a hybrid model: 1 of its layers are not served, draft (a class of its own)"),
    ],
)
def test_unsupported(changes, why):
    """Each configuration that no mode serves is named, and vLLM's own write serves it."""
    found = support.why_unsupported(make_runner(**changes), {"a": gpu_layer(), "b": gpu_layer()}, "stage")
    assert found.startswith(why) and bool(found) == bool(why)


def test_layers_that_share_a_cache():
    layers = {"a": gpu_layer(), "b": gpu_layer(kv_sharing_target_layer_name="a")}
    for mode in ("cow", "stage"):
        assert support.why_unsupported(make_runner(), layers, mode) == "layers that share another layer's KV cache"


def gpu_layer(implementation: str = "FlashAttentionImpl", layer_class: type[Attention] = Attention, **changes):
    """One of vLLM's attention layers, as far as the hooks look at it, without an engine to make it in."""
    of_impl = {
        "attn_type": "decoder",
        "head_size": 128,
        "kv_cache_dtype": "auto",
        "alibi_slopes": None,
        "sinks": None,
        "sliding_window": (-1, -1),
    }
    of_layer = {
        "attn_backend": type(implementation.replace("Impl", "Backend"), (), {}),
        "head_size_v": changes.get("head_size", 128),
        "kv_cache_torch_dtype": torch.bfloat16,
        "kv_sharing_target_layer_name": None,
        "layer_sliding_window": None,
        "use_mm_prefix": False,
    }
    values = of_impl | of_layer | {"scale_of": 1} | changes
    layer = object.__new__(layer_class)
    nn.Module.__init__(layer)
    layer.impl = type(implementation, (), {})()
    vars(layer.impl).update({name: value for name, value in values.items() if name not in {*of_layer, "scale_of"}})
    layer._k_scale = layer._v_scale = torch.ones(values["scale_of"])
    layer.num_kv_heads, layer.head_size, layer.dtype = 2, values["head_size"], torch.bfloat16
    layer.attn_type, layer.kv_cache_dtype = values["attn_type"], "auto"
    layer.sliding_window = values.pop("layer_sliding_window")
    vars(layer)["nwor_given_rows"] = True
    for name in of_layer.keys() & values.keys():
        setattr(layer, name, values[name])
    return layer


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (gpu_layer(), ""),
        (gpu_layer("TritonAttentionImpl", kv_cache_dtype="fp8"), ""),
        (gpu_layer("FlashInferImpl"), ""),
        (gpu_layer("FlexAttentionImpl"), "the attention backend FlexAttentionImpl: stage has a hook in"),
        (gpu_layer("FlashAttentionMLAImpl"), "the attention backend FlashAttentionMLAImpl"),
        (gpu_layer(head_size=80), "heads of size 80"),
        (gpu_layer(kv_cache_dtype="int8_per_token_head"), "a cache of type int8_per_token_head"),
        (gpu_layer(alibi_slopes=torch.ones(2)), "ALiBi"),
        (gpu_layer(sinks=torch.ones(2)), "attention sinks"),
        (gpu_layer(scale_of=8), "a scale for each head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_stage_cannot_attend_to_on_a_gpu(layer, why):
    """Named before the first step, and vLLM's own write serves them."""
    found = attention_gpu.cannot_attend(layer)
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.parametrize(("capability", "serves"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_caches_need_a_gpu_that_computes_with_them(capability, serves, monkeypatch):
    """Triton's fp8e4nv is not compiled for an older one; its 16-bit caches are served."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    number = "{}.{}".format(*capability)
    why = "" if serves else f"an fp8 cache on a GPU of compute capability {number}: the kernel needs 8.9"
    assert attention_gpu.cannot_attend(gpu_layer(kv_cache_dtype="fp8")) == why
    assert attention_gpu.cannot_attend(gpu_layer()) == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_invariance_is_cows_alone(device, monkeypatch):
    """Stage's splits of a prefix are chosen by the batch; cow leaves attention to vLLM."""
    made, layers = make_runner(device=torch.device(device)), {"a": gpu_layer(), "b": gpu_layer()}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert support.why_unsupported(made, layers, "stage").startswith("batch invariance (VLLM_BATCH_INVARIANT)")
    assert support.why_unsupported(made, layers, "cow") == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert support.why_unsupported(made, layers, "stage") == ""


@pytest.mark.parametrize(("key", "mode", "serves"), [(None, "stage", False), (1, "stage", True), (None, "cow", True)])
def test_a_model_that_writes_its_own_keys_and_values(key, mode, serves):
    """It is known from the run before the cache is made, or, on a CPU, from one row; one call of many is enough."""
    layers = {"a": gpu_layer(), "b": gpu_layer()}
    made = make_runner()
    attend = own_write._make_forward(lambda *arguments: arguments[3])
    del vars(layers["b"])["nwor_given_rows"]
    made._dummy_run = lambda rows: [attend(None, layers["b"], None, given, None) for given in (1, key, 1)]
    assert (support.why_unsupported(made, layers, mode) == "") == serves
    made._dummy_run = None  # noted, and not asked again
    assert (support.why_unsupported(made, layers, mode) == "") == serves


@pytest.fixture(autouse=True)
def a_gpu_of_today(monkeypatch):
    """What a layer is asked about beside itself, where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize("name", FUSED)
def test_fused_passes_keep_rows_from_the_hook(name):
    config = make_runner().vllm_config
    assert attention_gpu.fused_passes(config) == ""
    setattr(config.compilation_config.pass_config, name, True)
    assert attention_gpu.fused_passes(config)


def test_graphs_that_hold_the_cache_write(monkeypatch):
    """A write that is captured takes vLLM's slots in every replay, drafts among them; FULL graphs replay our hook's."""
    compilation = (config := make_runner().vllm_config).compilation_config
    assert attention_gpu.captured_writes(config) == ""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert attention_gpu.captured_writes(config).startswith("breakable CUDA graphs")
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert attention_gpu.captured_writes(config) == ""


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
    "hybrid models, MLA, any layer of the target whose class no mode knows": [
        ({"kv_cache_config": groups_of(["a"], ["b"])}, {}),
        ({"kv_cache_config": groups_of([])}, {}),
        ({"kv_cache_config": groups_of(["a", "b", "sparse", "draft"])}, {}),
        ({"kv_cache_config": groups_of(["a", "b"], ["mamba"])}, {}),
    ],
    "masks other than causal (chunks, R-SWA, prefixes seen both ways), heads whose values have another size": [
        ({}, {"layer_class": layer_classes.ChunkedLocalAttention}),
        ({}, {"layer_class": layer_classes.PrefillPrefixLMAttention}),
        ({}, {"chunk_lookback": 1}),
        ({"vllm_config__model_config__rswa_window": 128}, {}),
        ({"vllm_config__model_config__is_mm_prefix_lm": True}, {}),
        ({}, {"head_size_v": 64}),
    ],
    "micro-batches": [({PARALLEL + "use_ubatching": True}, {})],
    "elastic expert parallelism": [({PARALLEL + "enable_elastic_ep": True}, {})],
    "fused rope and cache write, quantised attention output (GPU)": [
        (ON_A_GPU | {f"vllm_config__compilation_config__pass_config__{name}": True}, {}) for name in FUSED
    ],
    "piecewise CUDA graphs that hold the cache write: breakable ones, Inductor's partition (GPU)": [
        (ON_A_GPU | {"vllm_config__compilation_config__use_inductor_graph_partition": True}, {}),
        (ON_A_GPU | {"vllm_config__compilation_config__splitting_ops": ["vllm::unified_attention_with_output"]}, {}),
    ],
    "ALiBi, sinks": [
        (device, {name: torch.ones(2)}) for device in ({}, ON_A_GPU) for name in ("alibi_slopes", "sinks")
    ],
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
# Seen above and below, in a step, or while a manager is built:
# tests/nwor/test_manager.py, test_vllm_modes.py, test_vllm_gpu.py and test_gpu_hooks.py hold these.
ELSEWHERE = {
    "ROCm (AITER's unified attention has a hook; the operators are not built for it)",
    "a batch or a window larger than the held rows",
    "drafts behind prefill rows of one query",
    "prefix caching, several answers to a prompt (`n` > 1), requests that join as a block is filled",
    "sleep mode (GPU)",
    "a CPU packing that is no permutation",
    "an fp8 cache on a GPU older than compute capability 8.9",
    "`VLLM_BATCH_INVARIANT`",
    "models that write keys and values themselves, or read a layer's once more",
    "an operator that fails the check at start-up",
}


def documented_matrix() -> dict[str, tuple[str, str]]:
    text = (paths.ROOT / "docs" / "modes.md").read_text()
    lines = text[text.index("| beside a mode |") :].partition("\n\n")[0].splitlines()[2:]
    return {
        name: (cow, stage) for name, cow, stage in ([part.strip() for part in line.split("|")[1:4]] for line in lines)
    }


def test_the_documents_say_where_a_mode_serves():
    """Each line of the table in `docs/modes.md` is what the hooks decide."""
    said = documented_matrix()
    assert said.keys() == MATRIX.keys() | ELSEWHERE
    for name, cases in MATRIX.items():
        for changes, layer in cases:
            layers = {"a": gpu_layer(), "b": gpu_layer(**layer)}
            for mode, words in zip(("cow", "stage"), said[name], strict=True):
                found = support.why_unsupported(make_runner(**changes), layers, mode)
                assert (found == "") == (words == "serves"), (name, mode, found)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_no_mode_serves_on_rocm(mode, monkeypatch):
    """Said at the start, and not by an operator that fails in the first step."""
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    layers = {"a": gpu_layer("RocmAiterUnifiedAttentionImpl"), "b": gpu_layer()}
    assert support.why_unsupported(make_runner(**ON_A_GPU), layers, mode) == "ROCm: the operators are not built for it"


def test_target_layers_are_attention_and_not_the_drafters():
    """ "staged tokens 0 < accepted 6 for layer 32" was the drafter's layer taken for a target's."""
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
    assert list(target_layers(made)) == ["model.0", "model.1"]
    made.drafter = SimpleNamespace()  # n-gram: a drafter without layers
    assert list(target_layers(made)) == ["model.0", "model.2", "model.1"]
    del made.drafter
    assert len(target_layers(made)) == 3
    made.speculator = SimpleNamespace(draft_attn_layer_names={"model.1"})  # V2's name for it
    assert list(target_layers(made)) == ["model.0", "model.2"]


class OfOneModel(Attention):
    """A model's own attention, which may write wherever it likes."""


@pytest.mark.parametrize(
    "other", [layer_classes.MLAAttention, layer_classes.CrossAttention, layer_classes.StaticSinkAttention, OfOneModel]
)
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_group_is_served_whole_or_not_at_all(mode, other):
    """Layers of another class in the target's cache group were neither served nor audited."""
    context = {"a": gpu_layer(), "b": object.__new__(other), "draft": gpu_layer()}
    made = make_runner(compilation_config__static_forward_context=context)
    layers = target_layers(made)
    assert list(layers) == ["a"]
    why = f"a hybrid model: 1 of its layers are not served, b ({other.__name__}) among them"
    assert support.why_unsupported(made, layers, mode) == why
    del context["b"]
    made.kv_cache_config = groups_of(["a", "draft"])
    assert support.why_unsupported(made, target_layers(made), mode) == ""


# -- masks: stage serves what it knows ---------------------------------------------------------------------------------


def chunked(**changes) -> Attention:
    layer = gpu_layer(layer_class=layer_classes.ChunkedLocalAttention, **changes)
    layer.attention_chunk_size = 64
    return layer


def rswa() -> Attention:
    layer = gpu_layer(layer_class=layer_classes.RSWAAttention)
    layer._rswa_window = 64
    return layer


def non_causal() -> Attention:
    return gpu_layer(layer_class=layer_classes.PrefillPrefixLMAttention)


FLASH = type("FlashAttentionBackend", (), {})


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (gpu_layer(), ""),
        (gpu_layer(layer_sliding_window=64, sliding_window=(63, 0)), ""),
        (gpu_layer("CPUAttentionBackendImpl", attn_backend=type("CPUAttentionBackend", (), {}), sliding_window=-1), ""),
        (chunked(), "attention of class ChunkedLocalAttention: its mask is not known to be causal"),
        (rswa(), "attention of class RSWAAttention"),
        (non_causal(), "attention of class PrefillPrefixLMAttention"),
        (
            gpu_layer(attn_backend=subclass_attention_backend("ChunkedLocalAttention_64_", FLASH, object)),
            "the attention backend ChunkedLocalAttention_64_FlashAttentionBackend: stage knows ",
        ),
        (gpu_layer(use_mm_prefix=True), "multimodal prefixes that are attended to in both directions"),
        (gpu_layer(attn_type="encoder_decoder"), "attention of type encoder_decoder"),
        (gpu_layer(head_size_v=64), "values of size 64 beside keys of size 128"),
        (gpu_layer("TritonAttentionImpl", chunk_lookback=-1, use_alibi_sqrt=False), ""),
        (gpu_layer("TritonAttentionImpl", chunk_lookback=0), "TritonAttentionImpl.chunk_lookback is 0, a mask that"),
        (gpu_layer("TritonAttentionImpl", use_alibi_sqrt=True), "TritonAttentionImpl.use_alibi_sqrt is True, a mask"),
        (gpu_layer(rolling=3), "FlashAttentionImpl.rolling, which stage does not know"),
        (gpu_layer(sliding_window=(63, 0)), "a cache of kind FullAttentionSpec("),
        (gpu_layer(layer_sliding_window=64), "a cache of kind SlidingWindowSpec("),
        (gpu_layer(layer_sliding_window=64, sliding_window=(63, 63)), "a cache of kind SlidingWindowSpec("),
        (gpu_layer(layer_sliding_window=64, sliding_window=(31, 0)), "a cache of kind SlidingWindowSpec("),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_masks_that_stage_does_not_know(layer, why, monkeypatch):
    """Look-back by chunks and windows that spare the prompt were taken for plain causal masks."""
    monkeypatch.setattr(layer_module, "_largest_kernel_block_within", lambda *arguments: 16)
    layer.attn_backend.customize_spec = lambda spec: spec
    layer.attn_backend.is_mla = lambda: False
    found = masks.unknown_mask(layer, make_runner().vllm_config)
    assert found.startswith(why) and bool(found) == bool(why)
    with_stage = support.why_unsupported(make_runner(), {"a": gpu_layer(), "b": layer}, "stage")
    assert bool(with_stage) == bool(why)
    assert support.why_unsupported(make_runner(), {"a": gpu_layer(), "b": layer}, "cow") == ""


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("backend", "AttentionImplBase"),
        ("backends/cpu_attn", "CPUAttentionBackendImpl"),
        ("backends/flash_attn", "FlashAttentionImpl"),
        ("backends/triton_attn", "TritonAttentionImpl"),
        ("backends/flashinfer", "FlashInferImpl"),
        ("backends/rocm_attn", "RocmAttentionImpl"),
        ("backends/rocm_aiter_unified_attn", "RocmAiterUnifiedAttentionImpl"),
    ],
)
def test_what_vllms_implementations_carry_is_known(file, name):
    """Else a mode would refuse every model of that backend, by an attribute that this release of vLLM has added."""
    source = (Path(vllm.__file__).parent / "v1" / "attention" / f"{file}.py").read_text()
    [found] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    stored = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert stored and stored <= masks._KNOWN | masks._NEUTRAL.keys()
    backend = name.removesuffix("Impl").removesuffix("Backend") + "Backend"
    assert backend in {*masks.BACKENDS, "AttentionImplBaseBackend", "RocmAttentionBackend"}


def test_the_sources_of_masks_are_vllms():
    """The names that `masks` looks for must be those that vLLM gives: a renamed one would be passed over."""
    assert {"is_mm_prefix_lm", "rswa_window"} <= vars(ModelConfig).keys()
    source = inspect.getsource(Attention.__init__)
    for name in ("use_mm_prefix", "attn_backend", "attn_type", "head_size_v", "sliding_window"):
        assert f"self.{name} = " in source or f"self.{name}: " in source
    assert {"tokens_per_state", "non_causal", "attention_chunk_size", "sliding_window"} <= {
        field.name for field in fields(FullAttentionSpec)
    }
