# SPDX-License-Identifier: Apache-2.0
"""The combinations in which the sampled auditor has to find each kind of fault, and raise no false alarm.

One engine a combination: all that runs in it is clean, then faults are planted. Tests run the table on a CPU and under
``-m gpu``; `main` runs it anywhere, and prints a line a combination:

    python -m tests.audit.matrix [NAME ...]
"""

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nwor_lab import machine, paths
from nwor_lab.engines.spec import EngineSpec
from tests import checkpoints, hybrids
from tests.audit.engines import KINDS, PROMPTS, Engines, clean_then_planted, environment, generate

SHARED = [[(11 * j) % 250 + 3 for j in range(70)] + [i + 3, 5, i + 9] for i in range(10)]


@dataclass(frozen=True)
class Combination:
    """spec: of the engine, without drafts where it has no method. environ, arguments: more of both.

    audit: as ``VLLM_KV_AUDIT``. mode: as ``VLLM_NWOR_MODE``. run: what the engine does, twice.
    """

    spec: Callable[[Path], EngineSpec]
    run: Callable[[Any], Any] = generate
    audit: str = "sample=16"
    mode: str = "off"
    arguments: dict[str, Any] = field(default_factory=dict)

    def start(self, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Arguments and environment; models that are not shipped are written to `path`."""
        spec = self.spec(path)
        arguments = {**spec.llm_arguments(), **self.arguments}
        if spec.method == "none":
            del arguments["speculative_config"]
        return arguments, {**spec.environ(), **environment(self.audit, mode=self.mode)}


def pair(path: Path, method: str = "eagle", **more: Any) -> EngineSpec:
    draft = str(paths.PAIR_EAGLE) if method == "eagle" else ""
    sizes = {"num_blocks": 64, "dtype": "float32"} if machine.on_cpu() else {"num_blocks": 128}
    return EngineSpec(str(paths.PAIR_TARGET), draft, method=method, **{**sizes, "kv_cache_memory": 512, **more})


def hybrid(path: Path) -> EngineSpec:
    model = hybrids.hybrid_pair(path)
    sizes = {"dtype": "float32", "block_size": 32, "num_blocks": 96, "kv_cache_memory": 512}
    return EngineSpec(str(model / "target"), str(model / "eagle"), max_num_batched_tokens=96, **sizes)


def latent(path: Path) -> EngineSpec:
    backend = "CPU_MLA" if machine.on_cpu() else ""
    model = checkpoints.random_deepseek(path)
    sizes = {"num_blocks": 128, "max_num_batched_tokens": 512, "attention_backend": backend, "kv_cache_memory": 512}
    return EngineSpec(str(model), method="mtp", k=3, batch=4, dtype="bfloat16", **sizes)


def shared_prompts(llm: Any) -> None:
    """Prompts that begin alike, asked for twice."""
    for _ in range(2):
        generate(llm, SHARED)


def sleep_between(llm: Any) -> None:
    generate(llm)
    llm.sleep(level=1)
    llm.wake_up()
    generate(llm)


def aborted_and_asked_again(llm: Any) -> None:
    """Requests are aborted mid-run, and others take their ids."""
    from vllm import SamplingParams

    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[::-1]):
        for name, prompt in enumerate(prompts):
            engine.add_request(str(name), {"prompt_token_ids": prompt}, params)
        for _ in range(12):
            engine.step()
        engine.abort_request(list(map(str, range(0, len(prompts), 2))))
    while engine.has_unfinished_requests():
        engine.step()


def preempted(llm: Any) -> None:
    generate(llm, max_tokens=150)


several = functools.partial(generate, n=3, temperature=1.0, max_tokens=30)

MATRIX = {
    "no speculation": Combination(lambda path: pair(path, "none")),
    "eagle": Combination(pair),
    "eagle, all slots": Combination(pair, audit="full"),
    "ngram": Combination(lambda path: pair(path, "ngram")),
    "prefix hits": Combination(lambda path: pair(path, "ngram", prefix_caching=True), shared_prompts),
    "preemption": Combination(lambda path: pair(path, num_blocks=9 if machine.on_cpu() else 50), preempted),
    "several answers": Combination(lambda path: pair(path, "none", prefix_caching=True), several),
    "chunked prefill": Combination(lambda path: pair(path, max_num_batched_tokens=48, prefix_caching=True)),
    "sleep": Combination(
        lambda path: pair(path, prefix_caching=True),
        sleep_between,
        arguments={} if machine.on_cpu() else {"enable_sleep_mode": True},
    ),
    "reused ids": Combination(lambda path: pair(path, prefix_caching=True), aborted_and_asked_again),
    "cache groups": Combination(hybrid),
    "mla": Combination(latent),
    "fp8": Combination(lambda path: pair(path, kv_cache_dtype="fp8", dtype="bfloat16")),
    "two ranks": Combination(lambda path: pair(path, tp=2)),
    "stage": Combination(pair, mode="stage"),
    "cow": Combination(pair, mode="cow"),
    "direct": Combination(pair, mode="direct"),
}


def problems(clean: list[dict], planted: list[dict]) -> list[str]:
    """What is wrong with two ranks' reports of a combination, a line each."""
    found = []
    for rank in clean:
        if rank["counts"]["checked"] < 1000 or rank["findings"]:
            found.append(f"unperturbed: {rank['counts']}, {rank['findings'][:3]}")
    for rank in planted:
        for kind in KINDS:
            if not 0 < rank["planted"][kind] <= rank["counts"][kind]:
                found.append(f"{kind}: {rank['counts'][kind]} found of {rank['planted'][kind]} planted")
    return found


def run(engines: Engines, name: str, path: Path) -> list[str]:
    """The problems of a combination."""
    combination = MATRIX[name]
    script = functools.partial(clean_then_planted, run=combination.run)
    return problems(*engines.run(*combination.start(path), script))


def main(names: list[str]) -> int:
    engines, bad = Engines(), 0
    for name in names or MATRIX:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = run(engines, name, Path(folder))
            except RuntimeError as error:
                found = [str(error)]
        bad += bool(found)
        print(f"{name}: {'; '.join(found) or 'clean, and each kind found'}", flush=True)
    engines.close()
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
