# SPDX-License-Identifier: Apache-2.0
"""One engine's configuration, and what can be found wrong with it before an engine starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nwor_lab import paths
from nwor_lab.engines.random_weights import ASKED, FORMAT
from nwor_lab.machine import on_cpu


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """vLLM's engine. What is 0 or none is left to vLLM; names are its own where it has them."""

    model: str = str(paths.PAIR_TARGET)
    """target model, a folder or a name on the hub; pair@SHAPE is the shipped pair written at another shape"""
    draft: str = str(paths.PAIR_EAGLE)
    """draft model, likewise; empty for methods without one (ngram)"""
    tp: int = 1
    """tensor-parallel ranks"""
    method: str = "eagle"
    """vLLM's speculative method"""
    dtype: str = ""
    """of the weights, by vLLM's name; none: the one that this machine has instructions for"""
    kv_cache_dtype: str = "auto"
    """of the cache: auto, fp8, fp8_e4m3 or fp8_e5m2"""
    batch: int = 8
    """requests that run at once, at most"""
    max_num_batched_tokens: int = 256
    """tokens of a step, at most"""
    max_model_len: int = 512
    """tokens of a request, prompt and answer, at most"""
    num_blocks: int = 0
    """cache blocks; 0: as many as vLLM finds room for"""
    block_size: int = 0
    """slots of a cache block"""
    prefix_caching: bool = False
    """reuse the cache of prompts that begin alike"""
    kv_cache_memory: int = 0
    """MiB of cache on each GPU, 0 for what gpu_memory_utilization leaves; given, engines may start side by side"""
    gpu_memory_utilization: float = 0.22
    """share of a GPU for each engine; those of all modes, four by default, are up at once"""
    cpu_threads: int = 1
    """cores of each rank on a CPU, 0 for an equal share of all; small models run best on one"""
    enforce_eager: bool = True
    """run without CUDA graphs"""
    cudagraph_mode: str = ""
    """FULL, PIECEWISE or another of vLLM's; its own choice is FULL_AND_PIECEWISE"""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """tokens of a batch for which graphs are captured; vLLM's own choice ends at 512 on an H200"""
    deterministic: bool = True
    """compile without TorchInductor's own timings, so that engines round alike; a step takes up to 1 % longer"""
    async_scheduling: bool | None = None
    """whether the scheduler runs a step ahead; None is vLLM's own choice"""
    runner: str = ""
    """vLLM's model runner, v1 or v2; its own choice is V2 on a GPU, V1 on a CPU"""
    attention_backend: str = ""
    """FLASH_ATTN, TRITON_ATTN or another of vLLM's"""
    flash_attn_version: int = 0
    """FlashAttention 2, 3 or 4 under FLASH_ATTN, whatever the GPU has"""
    load_format: str = "auto"
    """auto, or nwor_random for random weights of the model's shape"""
    acceptance_length: float = 0.0
    """synthetic mean acceptance length, bonus token included; 0 for the real rejection sampler"""
    plugins: str = ""
    """vLLM plugins that are loaded, by name; empty for all"""
    seed: int = 0
    """of the engine, and of sampled requests"""

    def __post_init__(self) -> None:
        for name in ("tp", "batch", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.runner not in ("", "v1", "v2"):
            raise ValueError(f"runner must be v1, v2 or empty for vLLM's own choice, got {self.runner!r}")
        if self.enforce_eager and (self.cudagraph_mode or self.cudagraph_capture_sizes):
            raise ValueError("graphs are asked for and ruled out: leave out enforce_eager (--no-enforce-eager)")


MOST_DRAFTS = 128
"""Of a window, by vLLM's rejection sampler (`vllm.v1.sample.rejection_sampler.MAX_SPEC_LEN`)."""


@dataclass(frozen=True)
class EngineSpec(EngineOptions):
    """One engine's configuration but for its mode.

    k: drafts a request brings to a step, vLLM's ``num_speculative_tokens``.
    """

    model: str
    draft: str = ""
    k: int = 4
    dtype: str = field(default="bfloat16", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.k <= MOST_DRAFTS:
            raise ValueError(f"k must be at least 1 and at most {MOST_DRAFTS}, got {self.k}")

    def llm_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``; what is empty or 0 here is left to vLLM."""
        speculative: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.k}
        if self.draft:
            speculative["model"] = self.draft
        if self.method == "ngram":
            speculative["prompt_lookup_max"] = 3
        if self.acceptance_length:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = self.acceptance_length
        graphs = {
            "cudagraph_mode": self.cudagraph_mode,
            "cudagraph_capture_sizes": list(self.cudagraph_capture_sizes),
            # Rules choose how much of a row a reduction sums at once. Else a stopwatch does, in each process anew.
            "inductor_compile_config": {"deterministic": True} if self.deterministic and not self.enforce_eager else {},
        }
        chosen = {
            "num_gpu_blocks_override": self.num_blocks,
            "block_size": self.block_size,
            "kv_cache_memory_bytes": self.kv_cache_memory << 20,
            "attention_backend": self.attention_backend,
            "attention_config": self.flash_attn_version and {"flash_attn_version": self.flash_attn_version},
            "compilation_config": {name: value for name, value in graphs.items() if value},
        }
        arguments = {name: value for name, value in chosen.items() if value}
        if self.async_scheduling is not None:
            arguments["async_scheduling"] = self.async_scheduling
        return arguments | {
            "model": self.model,
            "speculative_config": speculative,
            "tensor_parallel_size": self.tp,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.prefix_caching,
            "load_format": self.load_format,
            "skip_tokenizer_init": self.load_format == FORMAT,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "seed": self.seed,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }

    def environ(self, core: int = 0) -> dict[str, str]:
        """Environment of the engine's process.

        Repeatable batches, and on a CPU a small cache and cores of its own for each rank, the first of them `core`
        counted on from the first that this process may use.
        """
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's own, of torch's names, from every process
        }
        if self.load_format == FORMAT:
            env[ASKED] = "1"
        if self.plugins:
            env["VLLM_PLUGINS"] = self.plugins
        if self.runner:
            env["VLLM_USE_V2_MODEL_RUNNER"] = str(int(self.runner == "v2"))
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if on_cpu():
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
            cores = sorted(os.sched_getaffinity(0))
            cores = cores[core % len(cores) :] + cores[: core % len(cores)]
            share = self.cpu_threads or max(1, len(cores) // self.tp)
            env["NUMBA_NUM_THREADS"] = str(share)  # numba, which ngram drafts use, sets OpenMP's threads by it
            parts = [cores[rank * share : (rank + 1) * share] for rank in range(self.tp)]
            if all(len(part) == share for part in parts):
                env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
        return env
