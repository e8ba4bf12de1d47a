# SPDX-License-Identifier: Apache-2.0
"""Where a mode serves and where vLLM's own write does, on light stand-ins; no engine is started."""

from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers import attention as layer_classes
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from nwor.vllm import attention_gpu, connectors, own_write, support
from nwor.vllm.context import target_layers
from nwor.vllm.initialize import what_serves
from nwor_lab import paths
from tests.nwor.runners import FUSED, RECURRENT, SHARING, connector, gpu_layer, groups_of, make_runner


def assert_attends(runner, layers, why: str) -> None:
    """NWOR's attention serves, or does not, for this reason: then every step of stage is logged, and direct is not."""
    assert support.why_unsupported(runner, layers) == ""
    found = support.why_not_attending(runner, layers)
    assert found.startswith(why) and bool(found) == bool(why), found
    assert what_serves(runner, layers, "stage") == (not why, found)
    assert what_serves(runner, layers, "direct") == (None if why else True, found)
    assert what_serves(runner, layers, "cow") == (False, ""), "vLLM's own attention is as good as ever"


@pytest.mark.parametrize(("capability", "serves"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_caches_need_a_gpu_that_computes_with_them(capability, serves, monkeypatch):
    """Triton's fp8e4nv is not compiled for an older one; its 16-bit caches are served."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    number = "{}.{}".format(*capability)
    why = "" if serves else f"an fp8 cache on a GPU of compute capability {number}: the kernel needs 8.9"
    assert attention_gpu.cannot_attend(gpu_layer(kv_cache_dtype="fp8")) == why
    assert attention_gpu.cannot_attend(gpu_layer()) == ""


@pytest.mark.parametrize(
    ("drafts", "backend", "version", "serves"),
    [
        (15, "FlashAttentionImpl", 3, True),
        (16, "FlashAttentionImpl", 3, False),
        (16, "FlashAttentionImpl", 4, False),
        (16, "FlashAttentionImpl", 2, True),
        (16, "TritonAttentionImpl", None, True),
    ],
)
def test_long_windows_are_left_to_a_faster_attention(drafts, backend, version, serves):
    """16 drafts and a token for four query heads of a KV head: 68 rows, more than the tensor cores take at a time."""
    layers = {"a": gpu_layer(backend, vllm_flash_attn_version=version)}
    changes = {"device": torch.device("cuda"), "vllm_config__speculative_config__num_speculative_tokens": drafts}
    made = make_runner(("a",), **changes)
    why = (
        f"windows of 17 rows for 4 query heads of a KV head: of more than 64 in all FlashAttention {version} is faster"
    )
    assert_attends(made, layers, "" if serves else why)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_invariance_is_left_to_vllms_attention(device, monkeypatch):
    """Splits of a prefix are chosen by the batch in ours."""
    made, layers = make_runner(device=torch.device(device)), {"a": gpu_layer(), "b": gpu_layer()}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert_attends(made, layers, "batch invariance (VLLM_BATCH_INVARIANT)")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert_attends(made, layers, "")


@pytest.mark.parametrize(("key", "why"), [(None, "the model writes keys and values itself, or reads"), (1, "")])
def test_a_model_that_writes_its_own_keys_and_values(key, why):
    """It is known from the run before the cache is made, or, on a CPU, from one row; one call of many is enough."""
    layers = {"a": gpu_layer(), "b": gpu_layer()}
    made = make_runner()
    attend = own_write._make_forward(lambda *arguments: arguments[3])
    del vars(layers["b"])["nwor_given_rows"]
    made._dummy_run = lambda rows: [attend(None, layers["b"], None, given, None) for given in (1, key, 1)]
    assert_attends(made, layers, why)
    made._dummy_run = None  # noted, and not asked again
    assert_attends(made, layers, why)


def test_a_layer_that_vllm_marks_as_written_by_its_model():
    """From vLLM 0.33 on; no run is needed to know it."""
    layers, made = {"a": gpu_layer(), "b": gpu_layer()}, make_runner()
    layers["b"].kv_cache_update_bypass = False
    assert_attends(made, layers, "")
    layers["b"].kv_cache_update_bypass = True
    assert_attends(made, layers, "the model writes keys and values itself (kv_cache_update_bypass)")


@pytest.fixture(autouse=True)
def a_gpu_of_today(monkeypatch):
    """What a layer is asked about beside itself, where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_graphs_that_hold_the_cache_write(monkeypatch):
    """A write that is captured takes vLLM's slots in every replay, drafts among them; FULL graphs replay our hook's."""
    compilation = (config := make_runner().vllm_config).compilation_config
    assert attention_gpu.captured_writes(config) == ""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert attention_gpu.captured_writes(config).startswith("breakable CUDA graphs")
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert attention_gpu.captured_writes(config) == ""


PARALLEL = "vllm_config__parallel_config__"
DRAFTS = "vllm_config__speculative_config__num_speculative_tokens"
ON_A_GPU = {"device": torch.device("cuda")}
GROUPS = "kv_cache_config"
GRAPHS = "vllm_config__compilation_config__cudagraph_mode"
# Of each line of the table: changes of the runner, of a layer, and how stage's reason begins; empty where it serves.
MATRIX = {
    "no speculative decoding": [({"vllm_config__speculative_config": None}, {}, "no speculative decoding")],
    "a KV connector that reads pages behind the step or the request (offloading, NIXL, Mooncake and others)": [
        ({"vllm_config__kv_transfer_config": connector(name)}, {}, "") for name in sorted(connectors.AFTER_THE_VERDICT)
    ],
    "a KV connector that reads within the forward pass, or an unknown one": [
        ({"vllm_config__kv_transfer_config": connector(name)}, {}, f"the KV connector {name}")
        for name in ("MoRIIOConnector", "HiSparseConnector")
    ],
    "adaptive verification (DSpark)": [
        ({"vllm_config__speculative_config__enable_adaptive_verification": True}, {}, "adaptive verification")
    ],
    "pipeline parallelism": [({PARALLEL + "pipeline_parallel_size": 2}, {}, "pipeline parallelism")],
    "context parallelism, decode or prefill": [
        ({PARALLEL + f"{kind}_context_parallel_size": 2}, {}, "context parallelism") for kind in ("decode", "prefill")
    ],
    "layers that share another's cache (Gemma 3n)": [
        (SHARING, {}, "layers that read another layer's KV cache, which lacks the rows that stage holds: reader")
    ],
    "DeepSeek's attention (MLA)": [
        ({}, {"layer_class": layer_classes.MLAAttention}, "MLA: stage's attention has no latent kernel")
    ],
    "sparse MLA (DeepSeek-V3.2)": [
        ({}, {"layer_class": layer_classes.MLAAttention, "use_sparse": True}, "sparse MLA: the caches of its indexer")
    ],
    "several cache groups: sliding windows beside full attention (Gemma 3, gpt-oss)": [
        ({GROUPS: groups_of(["a"], ["b"])}, {}, ""),
        ({GROUPS: groups_of(["draft"], ["b"], ["a"])}, {}, ""),
        ({GROUPS: groups_of(["a"], ["b", "draft"])}, {}, ""),
    ],
    "recurrent layers (Qwen3-Next)": [(RECURRENT, {}, "")],
    "recurrent layers beside prefix caching": [
        (RECURRENT | {"vllm_config__cache_config__mamba_cache_mode": states}, {}, "states of recurrent layers in the")
        for states in ("align", "all")
    ],
    "any layer of the target whose class no mode knows": [
        ({GROUPS: groups_of(["draft"])}, {}, "2 of the target's layers lie in no cache group, a among"),
        ({GROUPS: groups_of(["a", "draft"])}, {}, "1 of the target's layers lie in no cache group, b among"),
        ({GROUPS: groups_of(["a", "b", "sparse", "draft"])}, {}, "a hybrid model: 1 of its layers are not served, s"),
        ({GROUPS: groups_of(["a", "b"], ["mamba"])}, {}, "a hybrid model: 1 of its layers are not served, mamba ("),
        ({"drafter": SimpleNamespace()}, {}, "a hybrid model: 1 of its layers are not served, draft (a class of its"),
    ],
    "masks other than causal (chunks, R-SWA, prefixes seen both ways), heads whose values have another size": [
        (
            {},
            {"layer_class": layer_classes.ChunkedLocalAttention},
            "attention of class ChunkedLocalAttention: its mask is",
        ),
        ({}, {"layer_class": layer_classes.PrefillPrefixLMAttention}, "attention of class PrefillPrefixLMAttention"),
        ({}, {"chunk_lookback": 1}, "FlashAttentionImpl.chunk_lookback is 1"),
        ({"vllm_config__model_config__rswa_window": 128}, {}, "a window of 128 that spares the prompt"),
        ({"vllm_config__model_config__is_mm_prefix_lm": True}, {}, "multimodal prefixes"),
        ({}, {"head_size_v": 64}, "values of size 64 beside keys of size 128"),
    ],
    "micro-batches": [({PARALLEL + "use_ubatching": True}, {}, "micro-batches")],
    "elastic expert parallelism": [({PARALLEL + "enable_elastic_ep": True}, {}, "elastic expert parallelism")],
    "fused rope and cache write, quantised attention output (GPU)": [
        (ON_A_GPU | {f"vllm_config__compilation_config__pass_config__{name}": True}, {}, why)
        for name, why in zip(FUSED, [*2 * ["rope and cache write are fused"], "attention with quantised"], strict=True)
    ],
    "piecewise CUDA graphs that hold the cache write: breakable ones, Inductor's partition (GPU)": [
        (
            ON_A_GPU | {f"vllm_config__compilation_config__{name}": value},
            {},
            "piecewise CUDA graphs that hold the cache",
        )
        for name, value in {
            "use_inductor_graph_partition": True,
            "splitting_ops": ["vllm::unified_attention_with_output"],
        }.items()
    ],
    "one CUDA graph for prefills and decodes (`cudagraph_mode=FULL`)": [
        ({GRAPHS: CUDAGraphMode.FULL}, {}, "cudagraph")
    ],
    "any other mode of CUDA graphs": [
        ({GRAPHS: mode}, {}, "") for mode in (None, *CUDAGraphMode) if mode is not CUDAGraphMode.FULL
    ],
    "attention sinks (gpt-oss), ALiBi (Bloom)": [
        (where, layer, "")
        for where in ({}, ON_A_GPU)
        for layer in (
            {"sinks": torch.ones(2)},
            {"alibi_slopes": torch.ones(2)},
            {"alibi_slopes": torch.ones(2), "implementation": "TritonAttentionImpl", "kv_cache_dtype": "fp8"},
        )
    ],
    "ALiBi under FlashInfer, or beside attention sinks (GPU)": [
        (ON_A_GPU, {"alibi_slopes": torch.ones(2), "implementation": "FlashInferImpl"}, "ALiBi under FlashInfer"),
        (ON_A_GPU, {"alibi_slopes": torch.ones(2), "sinks": torch.ones(2)}, "ALiBi and attention sinks at once"),
    ],
    "FlashInfer": [(ON_A_GPU, {"implementation": "FlashInferImpl"}, "")],
    "a cache of another 16-bit type than the model's": [
        ({}, {"kv_cache_torch_dtype": torch.float16}, "a cache of torch.float16 beside a model of torch.bfloat16")
    ],
    "other attention backends": [
        (ON_A_GPU, {"implementation": "FlexAttentionImpl"}, "the attention backend FlexAttentionBackend: stage knows"),
        (
            ON_A_GPU,
            {"implementation": "FlexAttentionImpl", "attn_backend": type("FlashAttentionBackend", (), {})},
            "the attention backend FlexAttentionImpl: stage has a hook in",
        ),
    ],
    "windows of more than 64 rows for the query heads of a KV head beside FlashAttention 3 or later (16 drafts with"
    " four query heads to a KV head, 8 with eight)": [
        (ON_A_GPU | {DRAFTS: 16}, {}, "windows of 17 rows for 4 query heads of a KV head: of more than 64 in all"),
        (ON_A_GPU | {DRAFTS: 8}, {"num_queries_per_kv": 8}, "windows of 9 rows for 8 query heads of a KV head"),
    ],
    "heads of a size other than 64, 96, 128, 256 (GPU)": [(ON_A_GPU, {"head_size": 80}, "heads of size 80")],
    "a cache of fp8 e5m2 or with scales per token or head (GPU)": [
        (ON_A_GPU, {"kv_cache_dtype": "fp8_e5m2"}, "a cache of type fp8_e5m2"),
        (ON_A_GPU, {"kv_cache_dtype": "fp8_per_token_head"}, "a cache of type fp8_per_token_head"),
        (ON_A_GPU, {"scale_of": 8}, "a scale for each head"),
    ],
}
# Seen above and below, in a step, or while a manager is built:
# tests/nwor/test_manager.py, test_vllm_modes.py, test_vllm_parallel.py, test_vllm_drafts.py, test_vllm_gpu.py and
# test_gpu_hooks.py hold these.
ELSEWHERE = {
    "LoRA adapters",
    "LoRA adapters beside EAGLE on a CPU",
    "a platform other than CUDA and CPUs (ROCm, XPU)",
    "a batch or a window larger than the held rows",
    "drafts behind prefill rows, in one query or in one batch",
    "prefix caching, several answers to a prompt (`n` > 1), requests that join as a block is filled",
    "sleep mode (GPU)",
    "a CPU packing that is no permutation",
    "an fp8 cache on a GPU older than compute capability 8.9",
    "`VLLM_BATCH_INVARIANT`",
    "models that write keys and values themselves, or read a layer's once more",
    "an operator that fails the check at start-up",
    "data parallelism",
    "drafts whose number follows the batch (`num_speculative_tokens_per_batch_size`), none in large batches included",
    "Ray's executor",
}


def documented_matrix() -> dict[str, tuple[str, str]]:
    text = (paths.ROOT / "docs" / "modes.md").read_text()
    lines = text[text.index("| beside a mode |") :].partition("\n\n")[0].splitlines()[2:]
    return {
        name: (cow, stage) for name, cow, stage in ([part.strip() for part in line.split("|")[1:4]] for line in lines)
    }


def test_the_documents_say_where_a_mode_serves():
    """Each line of the table in `docs/modes.md` is what the hooks decide, and they say why."""
    said = documented_matrix()
    assert said.keys() == MATRIX.keys() | ELSEWHERE
    for name, cases in MATRIX.items():
        for changes, layer, why in cases:
            made, layers = make_runner(**changes), {"a": gpu_layer(), "b": gpu_layer(**layer)}
            of_cow, of_stage = said[name]
            assert of_cow == ("vLLM's write" if what_serves(made, layers, "cow")[0] is None else "serves"), name
            attends, found = what_serves(made, layers, "stage")
            assert of_stage == {True: "serves", False: "logs every step", None: "vLLM's write"}[attends], (name, found)
            assert found.startswith(why) and bool(found) == bool(why), (name, found)
            if attends is not None:
                assert_attends(made, layers, why)
                continue
            for mode in ("cow", "direct", "stage"):
                assert what_serves(made, layers, mode) == (None, found), "no mode serves, for one reason"


@pytest.mark.parametrize("mode", ["cow", "direct", "stage"])
@pytest.mark.parametrize("name", ["rocm", "xpu"])
def test_no_mode_serves_on_another_platform(name, mode, monkeypatch):
    """Said at the start, and not by an operator that fails in the first step."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_name", name)
    layers = {"a": gpu_layer(), "b": gpu_layer()}
    said = f"{name}: the operators are built for CUDA and for CPUs"
    assert what_serves(make_runner(**ON_A_GPU), layers, mode) == (None, said)


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


class MLAOfOneModel(layer_classes.MLAAttention):
    """The same of DeepSeek's."""


@pytest.mark.parametrize(
    "other", [MLAOfOneModel, layer_classes.CrossAttention, layer_classes.StaticSinkAttention, OfOneModel]
)
@pytest.mark.parametrize("mode", ["cow", "direct", "stage"])
def test_a_group_is_served_whole_or_not_at_all(mode, other):
    """Layers of another class in the target's cache group were neither served nor audited."""
    context = {"a": gpu_layer(), "b": object.__new__(other), "draft": gpu_layer()}
    made = make_runner(compilation_config__static_forward_context=context)
    layers = target_layers(made)
    assert list(layers) == ["a"]
    why = f"a hybrid model: 1 of its layers are not served, b ({other.__name__}) among them"
    assert what_serves(made, layers, mode) == (None, why)
    del context["b"]
    made.kv_cache_config = groups_of(["a", "draft"])
    assert what_serves(made, target_layers(made), mode) == (mode != "cow", "")


def test_mla_layers_are_found_beside_a_drafters():
    """Of the same class, in the same group."""
    context = {name: gpu_layer("FlashMLAImpl", layer_classes.MLAAttention) for name in ("a", "b", "draft")}
    made = make_runner(compilation_config__static_forward_context=context)
    layers = target_layers(made)
    assert list(layers) == ["a", "b"] and what_serves(made, layers, "cow") == (False, "")
