# SPDX-License-Identifier: Apache-2.0
"""Where a mode serves and where vLLM's own write does, on light stand-ins; no engine is started."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import kv_transfer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers import attention as layer_classes
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention import attention as layer_module
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.platforms import current_platform
from vllm.v1.attention.backend import subclass_attention_backend

from nwor.vllm import connectors, write_bypass
from nwor.vllm.context import target_groups, target_layers
from nwor.vllm.initialize import what_serves
from tests.nwor.runners import FUSED, RECURRENT, SHARING, connector, gpu_layer, groups_of, make_runner

NOBODY, LOGS, SERVES = None, False, True
"""vLLM's own write whatever the mode; cow serves and stage logs every step; all modes serve."""


@pytest.fixture(autouse=True)
def a_gpu_of_today(monkeypatch):
    """What a layer is asked about beside itself, where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(layer_module, "_largest_kernel_block_within", lambda *arguments: 16)


def assert_serves(runner, layers, does: bool | None, why: str) -> None:
    """What each mode does, and that its reason has this word where it does less than serve."""
    expected = {"stage": does, "direct": does or None, "cow": NOBODY if does is NOBODY else False}
    for mode, found in expected.items():
        served, reason = what_serves(runner, layers, mode)
        said = "" if mode == "cow" and does is LOGS else why
        assert served is found, (mode, reason)
        assert said in reason and bool(reason) == bool(said), (mode, reason)


CONFIG, PARALLEL = "vllm_config__", "vllm_config__parallel_config__"
COMPILATION = "vllm_config__compilation_config__"
GROUPS, GRAPHS = "kv_cache_config", COMPILATION + "cudagraph_mode"
DRAFTS = "vllm_config__speculative_config__num_speculative_tokens"
ON_A_GPU = {"device": torch.device("cuda")}
FLASH, TRITON, FLASHINFER = (
    {"implementation": f"{name}Impl"} for name in ("FlashAttention", "TritonAttention", "FlashInfer")
)
FLASH_BACKEND = type("FlashAttentionBackend", (), {})
ON_CPU = {"implementation": "CPUAttentionBackendImpl", "attn_backend": type("CPUAttentionBackend", (), {})}
CHUNKED = subclass_attention_backend("ChunkedLocalAttention_64_", FLASH_BACKEND, object)
SLOPES, SINKS = {"alibi_slopes": torch.ones(2)}, {"sinks": torch.ones(2)}
MLA = {"layer_class": layer_classes.MLAAttention}
# What a mode does, for which changes of the runner and of one of its two layers, and a word of the reason.
CASES = [
    (SERVES, {}, {}, ""),
    (NOBODY, {CONFIG + "speculative_config": None}, {}, "speculative"),
    (NOBODY, {CONFIG + "speculative_config__enable_adaptive_verification": True}, {}, "adaptive"),
    *((SERVES, {CONFIG + "kv_transfer_config": connector(name)}, {}, "") for name in connectors.AFTER_THE_VERDICT),
    *((NOBODY, {CONFIG + "kv_transfer_config": connector(name)}, {}, name) for name in ("MoRIIOConnector", "Unheard")),
    (NOBODY, {PARALLEL + "pipeline_parallel_size": 2}, {}, "pipeline"),
    (NOBODY, {PARALLEL + "decode_context_parallel_size": 2}, {}, "context parallelism"),
    (NOBODY, {PARALLEL + "prefill_context_parallel_size": 2}, {}, "context parallelism"),
    (LOGS, {PARALLEL + "use_ubatching": True}, {}, "micro-batches"),
    (LOGS, {PARALLEL + "enable_elastic_ep": True}, {}, "elastic"),
    # Layers that are not all of the target's cache, or not alike.
    (LOGS, SHARING, {}, "reader"),
    (LOGS, {}, MLA, "MLA"),
    (NOBODY, {}, MLA | {"use_sparse": True}, "sparse MLA"),
    *((SERVES, {GROUPS: groups_of(*groups)}, {}, "")
      for groups in ((["a"], ["b"]), (["draft"], ["b"], ["a"]), (["a"], ["b", "draft"]))),
    (SERVES, RECURRENT, {}, ""),
    *((NOBODY, RECURRENT | {CONFIG + "cache_config__mamba_cache_mode": m}, {}, "recurrent") for m in ("align", "all")),
    (NOBODY, {GROUPS: groups_of(["draft"])}, {}, "2 of"),
    (NOBODY, {GROUPS: groups_of(["a", "draft"])}, {}, "b among"),
    (NOBODY, {GROUPS: groups_of(["a", "b", "unknown", "draft"])}, {}, "unknown ("),
    (NOBODY, {GROUPS: groups_of(["a", "b"], ["unknown"])}, {}, "unknown ("),
    (NOBODY, {"drafter": SimpleNamespace()}, {}, "draft ("),
    # Masks: look-back by chunks and windows that spare the prompt were taken for plain causal ones.
    *((LOGS, {}, {"layer_class": getattr(layer_classes, name)}, name)
      for name in ("ChunkedLocalAttention", "PrefillPrefixLMAttention", "RSWAAttention")),
    (LOGS, {}, {"attn_backend": CHUNKED}, "ChunkedLocalAttention_64_"),
    (LOGS, {CONFIG + "model_config__rswa_window": 128}, {}, "R-SWA"),
    (LOGS, {CONFIG + "model_config__is_mm_prefix_lm": True}, {}, "multimodal"),
    (LOGS, {}, {"use_mm_prefix": True}, "multimodal"),
    (LOGS, {}, {"attn_type": "encoder_decoder"}, "encoder_decoder"),
    (LOGS, {}, {"head_size_v": 64}, "values of size 64"),
    (LOGS, {}, {"chunk_lookback": 1}, "chunk_lookback"),
    (LOGS, {}, TRITON | {"chunk_lookback": 0}, "chunk_lookback"),
    (LOGS, {}, TRITON | {"use_alibi_sqrt": True}, "use_alibi_sqrt"),
    (SERVES, {}, TRITON | {"chunk_lookback": -1, "use_alibi_sqrt": False, "_set_kv_ptr_range": False}, ""),
    (SERVES, {}, FLASHINFER | {"_multi_ctas_kv_counter_buffer": torch.ones(1)}, ""),
    (SERVES, {}, ON_CPU | {"sliding_window": -1}, ""),
    (SERVES, {}, {"layer_sliding_window": 64, "sliding_window": (63, 0)}, ""),
    (LOGS, {}, {"sliding_window": (63, 0)}, "FullAttentionSpec"),
    (LOGS, {}, {"layer_sliding_window": 64}, "SlidingWindowSpec"),
    (LOGS, {}, {"layer_sliding_window": 64, "sliding_window": (63, 63)}, "SlidingWindowSpec"),
    (LOGS, {}, {"layer_sliding_window": 64, "sliding_window": (31, 0)}, "SlidingWindowSpec"),
    *((SERVES, where, layer, "") for where in ({}, ON_A_GPU)
      for layer in (SLOPES, SINKS, SLOPES | TRITON | {"kv_cache_dtype": "fp8"})),
    (LOGS, ON_A_GPU, SLOPES | FLASHINFER, "ALiBi"),
    (LOGS, ON_A_GPU, SLOPES | SINKS, "ALiBi"),
    # Graphs and passes of the compiler that hold the cache write.
    *((LOGS, ON_A_GPU | {f"{COMPILATION}pass_config__{name}": True}, {}, "fused" if "rope" in name else "quantised")
      for name in FUSED),
    (LOGS, ON_A_GPU | {COMPILATION + "use_inductor_graph_partition": True}, {}, "piecewise"),
    (LOGS, ON_A_GPU | {COMPILATION + "splitting_ops": ["vllm::unified_attention_with_output"]}, {}, "piecewise"),
    (LOGS, {GRAPHS: CUDAGraphMode.FULL}, {}, "cudagraph"),
    *((SERVES, {GRAPHS: mode}, {}, "") for mode in (None, *CUDAGraphMode) if mode is not CUDAGraphMode.FULL),
    # Backends, heads and caches that a kernel knows.
    (SERVES, ON_A_GPU, FLASHINFER, ""),
    (LOGS, ON_A_GPU, {"implementation": "FlexAttentionImpl"}, "FlexAttentionBackend"),
    (LOGS, ON_A_GPU, {"head_size": 80}, "heads of size 80"),
    (LOGS, {}, {"kv_cache_torch_dtype": torch.float16}, "torch.float16"),
    (LOGS, ON_A_GPU, {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
    (LOGS, ON_A_GPU, {"kv_cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head"),
    # Numbers and their scales lie apart there: a row of such a view is bytes of many slots.
    *((NOBODY, where, FLASHINFER | {"kv_cache_dtype": name}, name) for where in ({}, ON_A_GPU)
      for name in ("nvfp4", "nvfp4_4over6", "unheard_of")),
    (LOGS, ON_A_GPU, {"scale_of": 8}, "scale"),
    (LOGS, {}, {"kv_cache_update_bypass": True}, "itself"),  # vLLM 0.33's mark
    # 16 drafts and a token for four query heads of a KV head: more rows than the tensor cores take at a time.
    (SERVES, ON_A_GPU | {DRAFTS: 15}, FLASH, ""),
    *((LOGS, ON_A_GPU | {DRAFTS: 16}, {"vllm_flash_attn_version": version}, "faster") for version in (3, 4)),
    (LOGS, ON_A_GPU | {DRAFTS: 8}, {"num_queries_per_kv": 8}, "faster"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case[-1]}" for number, case in enumerate(CASES)])
def test_where_a_mode_serves_and_why_not(case):
    does, changes, layer, why = case
    layers = {"a": gpu_layer(), "b": gpu_layer(**layer)}
    for one in layers.values():
        one.attn_backend.customize_spec, one.attn_backend.is_mla = lambda spec: spec, lambda: False
    assert_serves(make_runner(**changes), layers, does, why)


@pytest.mark.parametrize(
    ("name", "on_cpu", "why"), [("BATCH_INVARIANT", LOGS, "batch"), ("USE_BREAKABLE_CUDAGRAPH", SERVES, "breakable")]
)
def test_variables_of_vllm(name, on_cpu, why, monkeypatch):
    """Splits of a prefix follow the batch; a write in a graph of pieces takes vLLM's slots in every replay."""
    layers = {"a": gpu_layer(), "b": gpu_layer()}
    monkeypatch.setenv(f"VLLM_{name}", "1")
    assert_serves(make_runner(), layers, on_cpu, why if on_cpu is LOGS else "")
    made = make_runner(**ON_A_GPU)
    assert_serves(made, layers, LOGS, why)


@pytest.mark.parametrize(("capability", "does"), [((8, 6), LOGS), ((8, 9), SERVES)])
def test_fp8_caches_need_a_gpu_that_computes_with_them(capability, does, monkeypatch):
    """Triton compiles no e4m3 for an older one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    layers = {"a": gpu_layer(), "b": gpu_layer(kv_cache_dtype="fp8")}
    assert_serves(make_runner(**ON_A_GPU), layers, does, "8.9" if does is LOGS else "")


def test_no_mode_serves_on_another_platform(monkeypatch):
    """Said at the start, and not by an operator that fails in the first step."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_name", "rocm")
    assert_serves(make_runner(**ON_A_GPU), {"a": gpu_layer(), "b": gpu_layer()}, NOBODY, "rocm")


@pytest.mark.parametrize("key", [None, 1])
def test_a_model_that_writes_its_own_keys_and_values(key):
    """It is known from the run before the cache is made, or, on a CPU, from one row; one call of many is enough."""
    layers, made = {"a": gpu_layer(), "b": gpu_layer()}, make_runner()
    attend = write_bypass._make_forward(lambda *arguments: arguments[3])
    del vars(layers["b"])["nwor_given_rows"]
    made._dummy_run = lambda rows: [attend(None, layers["b"], None, given, None) for given in (1, key, 1)]
    for _ in range(2):
        assert_serves(made, layers, SERVES if key else LOGS, "" if key else "itself")
        made._dummy_run = None  # noted, and not asked again


# -- which layers are the target's -------------------------------------------------------------------------------------


def test_target_layers_are_attention_and_not_the_drafters():
    """ "staged tokens 0 < accepted 6 for layer 32" was the drafter's layer taken for a target's."""
    context = {"model.0": object.__new__(Attention), "mamba": object()}
    context |= {name: object.__new__(Attention) for name in ("model.2", "model.1")}
    target = SimpleNamespace(modules=[*context.values()].copy)
    context["custom"] = object.__new__(Attention)  # of a drafter whose layers vLLM does not know
    made = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context), get_model=lambda: target)
    for drafter, found in (
        ({"drafter": SimpleNamespace(_draft_attn_layer_names={"model.2"})}, ["model.0", "model.1"]),
        ({"drafter": SimpleNamespace()}, ["model.0", "model.2", "model.1"]),  # n-gram: a drafter without layers
        ({"speculator": SimpleNamespace(draft_attn_layer_names={"model.1"})}, ["model.0", "model.2"]),  # V2's name
    ):
        assert list(target_layers(SimpleNamespace(**vars(made), **drafter))) == found


class OfOneModel(Attention):
    """A model's own attention, which may write wherever it likes."""


@pytest.mark.parametrize("other", [layer_classes.CrossAttention, layer_classes.StaticSinkAttention, OfOneModel])
def test_a_group_is_served_whole_or_not_at_all(other):
    """Layers of another class in the target's cache group were neither served nor audited."""
    context = {"a": gpu_layer(), "b": object.__new__(other), "draft": gpu_layer()}
    made = make_runner(compilation_config__static_forward_context=context)
    layers = target_layers(made)
    assert list(layers) == ["a"]
    assert_serves(made, layers, NOBODY, other.__name__)
    del context["b"]
    made.kv_cache_config = groups_of(["a", "draft"])
    assert_serves(made, target_layers(made), SERVES, "")


STATE, OTHER = "state (ShortConv)", "other (object)"


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (groups_of(["a"], ["b", "draft"], MambaSpec=["state"]), ""),
        (groups_of(["a", "b", "draft"], FullAttentionSpec=["state"]), STATE),
        (groups_of(["a", "b", "draft", "state"]), STATE),
        (groups_of(["a", "b", "draft", "other"], MambaSpec=["state"]), OTHER),
        (groups_of(["a", "b", "draft"], MambaSpec=["nowhere"]), "nowhere ("),
        (groups_of(["draft"], MambaSpec=["state"]), "a among"),
    ],
)
def test_recurrent_layers_are_left_alone(groups, why):
    """Where both the layer's class and its group's spec say that it keeps a state; all others are named."""
    layers = {"a": gpu_layer(), "b": gpu_layer()}
    context = layers | {"state": object.__new__(ShortConv), "other": object()}
    made = make_runner(kv_cache_config=groups, compilation_config__static_forward_context=context)
    assert_serves(made, layers, NOBODY if why else SERVES, why)
    found = [layer for group in target_groups(made, layers).values() for layer in group]
    assert context["state"] not in found and context["other"] not in found
    made.kv_cache_config = groups_of(["draft"], MambaSpec=["state"])
    assert_serves(made, {}, NOBODY, "no attention layers")


# -- connectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (connector("OffloadingConnector", path="a.module"), "OffloadingConnector"),
        (connector("MultiConnector", {"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}), ""),
        (connector("MultiConnector", {"kv_connector": "NixlConnector"}, {"kv_connector": "MoRIIOConnector"}), "MoRIIO"),
    ],
)
def test_connectors_that_read_pages_before_the_verdict_are_named(config, why):
    """Even by a known name, where it is another module's class; and among several behind one."""
    found = connectors.why_not_beside(config)
    assert why in found and bool(found) == bool(why)


@pytest.mark.parametrize("engine", [{"use_layerwise": False}, {"use_layerwise": True}, {}])
@pytest.mark.parametrize("among_others", [False, True])
def test_a_layerwise_lmcache_is_known_by_what_was_loaded(engine, among_others, monkeypatch):
    """LMCache reads that from its own file or variables: vLLM's configuration does not tell."""
    config = connector("LMCacheConnectorV1")
    assert connectors.why_not_beside(config) == "", "not loaded yet"
    loaded = type("LMCacheConnectorV1", (), {"_lmcache_engine": SimpleNamespace(**engine)})()
    if among_others:
        children = ({"kv_connector": name} for name in ("ExampleConnector", "LMCacheConnectorV1"))
        config, loaded = (
            connector("MultiConnector", *children),
            SimpleNamespace(_connectors=[SimpleNamespace(), loaded]),
        )
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: loaded)
    serves = engine.get("use_layerwise") is False
    assert ("use_layerwise" in connectors.why_not_beside(config)) is not serves


def test_the_connectors_that_serve_are_vllms():
    """A name that vLLM has given up, or never had, would be a promise that nobody can check."""
    assert {*KVConnectorFactory._registry} >= connectors.AFTER_THE_VERDICT
    not_served = {"MultiConnector", "ExampleHiddenStatesConnector", "HiSparseConnector", "MoRIIOConnector"}
    assert {*KVConnectorFactory._registry} - connectors.AFTER_THE_VERDICT == not_served
