# SPDX-License-Identifier: Apache-2.0
"""Light stand-ins for vLLM's model runner and attention layers, as far as `nwor.vllm.support` looks at them."""

from types import SimpleNamespace

import torch
from torch import nn
from vllm.config import KVTransferConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv

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
    groups = groups_of([*names, "draft"])
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=4, enable_adaptive_verification=False),
            kv_transfer_config=None,
            parallel_config=parallel,
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(**dict.fromkeys(FUSED, False)),
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
                use_inductor_graph_partition=False,
                splitting_ops=["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"],
            ),
            model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
            cache_config=SimpleNamespace(block_size=16, skip_page_size_padded=None, mamba_cache_mode="none"),
        ),
        device=torch.device("cpu"),
        kv_cache_config=groups,
        compilation_config=SimpleNamespace(static_forward_context={}),
        drafter=SimpleNamespace(_draft_attn_layer_names={"draft"}),
    )
    runner.get_model = lambda: SimpleNamespace(modules=runner.compilation_config.static_forward_context.values)
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = runner
        for part in owners:
            owner = getattr(owner, part)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return runner


def gpu_layer(implementation: str = "FlashAttentionImpl", layer_class: type[Attention] = Attention, **changes):
    """One of vLLM's attention layers, as far as the hooks look at it, without an engine to make it in."""
    of_impl = {
        "attn_type": "decoder",
        "head_size": 128,
        "kv_cache_dtype": "auto",
        "alibi_slopes": None,
        "sinks": None,
        "sliding_window": (-1, -1),
        "num_queries_per_kv": 4,
        "vllm_flash_attn_version": 3,
    }
    of_layer = {
        "attn_backend": type(implementation.replace("Impl", "Backend"), (), {}),
        "head_size_v": changes.get("head_size", 128),
        "kv_cache_torch_dtype": torch.bfloat16,
        "kv_cache_update_bypass": False,
        "kv_sharing_target_layer_name": None,
        "layer_sliding_window": None,
        "use_mm_prefix": False,
        "use_sparse": False,
    }
    values = of_impl | of_layer | {"scale_of": 1} | changes
    layer = object.__new__(layer_class)
    nn.Module.__init__(layer)
    layer.impl = type(implementation, (), {})()
    vars(layer.impl).update({name: value for name, value in values.items() if name not in {*of_layer, "scale_of"}})
    layer._k_scale = layer._v_scale = torch.ones(values["scale_of"])
    layer.num_kv_heads, layer.head_size, layer.dtype = 2, values["head_size"], torch.bfloat16
    layer.attn_type, layer.kv_cache_dtype = values["attn_type"], values["kv_cache_dtype"]
    layer.sliding_window = values.pop("layer_sliding_window")
    vars(layer)["nwor_given_rows"] = True
    for name in of_layer.keys() & values.keys():
        setattr(layer, name, values[name])
    return layer


def groups_of(*names: list[str], **recurrent: list[str]) -> SimpleNamespace:
    """Cache groups of layers with these names; recurrent: those that hold states, by the name of their spec's class."""
    specs = [*((None, group) for group in names), *((type(kind, (), {})(), group) for kind, group in recurrent.items())]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=x, layer_names=y) for x, y in specs])


# A runner whose layer "reader" reads the cache of "a".
SHARING = {
    "kv_cache_config": groups_of(["a", "b", "reader"], ["draft"]),
    "compilation_config__static_forward_context": {"reader": gpu_layer(kv_sharing_target_layer_name="a")},
}
# One with a recurrent layer beside its attention.
RECURRENT = {
    "kv_cache_config": groups_of(["a", "b", "draft"], MambaSpec=["state"]),
    "compilation_config__static_forward_context": {"state": object.__new__(ShortConv)},
}


def connector(name: str, *children: dict, path: str | None = None) -> KVTransferConfig:
    """The configuration of a KV connector, of several behind one where there are `children`."""
    options = {"connectors": [*children]} if children else {}
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=options, kv_connector_module_path=path
    )
