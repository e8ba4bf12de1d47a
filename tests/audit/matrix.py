# SPDX-License-Identifier: Apache-2.0
"""The combinations in which the sampled auditor has to find each kind of fault, and raise no false alarm.

One engine a combination: all that runs in it is clean, then faults are planted. Tests run the table on a CPU and under
``-m gpu``.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor.settings import Settings
from nwor_lab import machine, paths
from nwor_lab.engines.child import Served
from nwor_lab.engines.spec import EngineSpec
from tests import checkpoints, hybrids
from tests.engines import PROMPTS, Engines
from tests.nwor.specs import With

KINDS = ("bytes", "token", "rejected", "unwritten")
SHARED = [[(11 * j) % 250 + 3 for j in range(70)] + [i + 3, 5, i + 9] for i in range(10)]


def generate(served: Served) -> None:
    served.generate(PROMPTS, 40)


@dataclass(frozen=True)
class Combination:
    """spec: of the engine. run: what it does, twice. audit: as ``VLLM_KV_AUDIT``. mode: as ``VLLM_NWOR_MODE``."""

    spec: Callable[[Path], EngineSpec]
    run: Callable[[Served], Any] = generate
    audit: str = "sample=16"
    mode: str = "off"


def audited(spec: EngineSpec, audit: str = "sample=16", **variables: str) -> With:
    """The engine under the sampled auditor."""
    arguments = {"arguments": {}, **vars(spec), "variables": {"VLLM_KV_AUDIT": audit, **variables}}
    return With(**arguments)


def pair(path: Path, method: str = "eagle", **more: Any) -> EngineSpec:
    draft = str(paths.PAIR_EAGLE) if method == "eagle" else ""
    sizes = {"num_blocks": 64, "dtype": "float32"} if machine.on_cpu() else {"num_blocks": 128}
    return EngineSpec(str(paths.PAIR_TARGET), draft, method=method, **{**sizes, "kv_cache_memory": 512, **more})


def without_drafts(path: Path, **more: Any) -> With:
    return With(**vars(pair(path, "ngram", **more)), arguments={"speculative_config": None})


def sleeping(path: Path) -> With:
    arguments = {} if machine.on_cpu() else {"enable_sleep_mode": True}
    return With(**vars(pair(path, prefix_caching=True)), arguments=arguments)


def hybrid(path: Path) -> EngineSpec:
    model = hybrids.hybrid_pair(path)
    sizes = {"dtype": "float32", "block_size": 32, "num_blocks": 96, "kv_cache_memory": 512}
    return EngineSpec(str(model / "target"), str(model / "eagle"), max_num_batched_tokens=96, **sizes)


def latent(path: Path) -> EngineSpec:
    model = checkpoints.random_deepseek(path)
    sizes = {"num_blocks": 128, "max_num_batched_tokens": 512, "kv_cache_memory": 512}
    return EngineSpec(str(model), method="mtp", k=3, batch=4, dtype="bfloat16", **sizes)


def shared_prompts(served: Served) -> None:
    """Prompts that begin alike, asked for twice."""
    for _ in range(2):
        served.generate(SHARED, 40)


def aborted_and_asked_again(served: Served) -> None:
    """Requests are aborted mid-run, and others take their ids; the engine sleeps, and serves once more."""
    for prompts in (PROMPTS, PROMPTS[::-1]):
        served.calls = 0
        names = served.add_requests(prompts, 60)
        for _ in range(12):
            served.engine.step()
        served.engine.abort_request(names[::2])
    while served.engine.has_unfinished_requests():
        served.engine.step()
    served.llm.sleep(level=1)
    served.llm.wake_up()
    generate(served)


def some(served: Served) -> None:
    """Half of them on a CPU, where latent rows take long."""
    served.generate(PROMPTS[: 6 if machine.on_cpu() else None], 40)


def preempted(served: Served) -> None:
    served.generate(PROMPTS, 150)


def several(served: Served) -> None:
    served.generate(PROMPTS, 30, temperature=1.0, sampling=[{"n": 3}])


MATRIX = {
    "no speculation": Combination(without_drafts),
    "eagle": Combination(pair),
    "eagle, all slots": Combination(pair, audit="full"),
    "ngram": Combination(lambda path: pair(path, "ngram")),
    "prefix hits": Combination(lambda path: pair(path, "ngram", prefix_caching=True), shared_prompts),
    "preemption": Combination(lambda path: pair(path, num_blocks=9 if machine.on_cpu() else 50), preempted),
    "several answers": Combination(lambda path: without_drafts(path, prefix_caching=True), several),
    "reused ids and sleep": Combination(sleeping, aborted_and_asked_again),
    "cache groups": Combination(hybrid),
    "mla": Combination(latent, some),
    "fp8": Combination(lambda path: pair(path, kv_cache_dtype="fp8", dtype="bfloat16")),
    "two ranks": Combination(lambda path: pair(path, tp=2)),
    "stage": Combination(pair, mode="stage"),
    "cow": Combination(pair, mode="cow"),
}


def clean_then_planted(run: Callable[[Served], Any], served: Served) -> tuple[list[dict], list[dict]]:
    """Every rank's report of a run, and then of the same with faults of each kind planted."""
    run(served)
    clean = reports(served)
    served.on_every_rank(plant)
    run(served)
    return clean, reports(served)


def reports(served: Served) -> list[dict[str, Any]]:
    return [rank["sampled"] for rank in served.report()]


def plant(worker: Any) -> None:
    """Let this rank's auditor plant faults from here on."""
    from vllm_kv_audit.perturb import Perturb

    worker.model_runner.kv_auditor.perturb = Perturb(worker.model_runner.kv_auditor, dict.fromkeys(KINDS, 0.2))


def problems(engines: Engines, combination: Combination, spec: EngineSpec) -> list[str]:
    """What is wrong with the ranks' reports of a combination, a line each."""
    script, found = functools.partial(clean_then_planted, combination.run), []
    settings = Settings(mode=combination.mode)
    [(clean, planted)] = engines.run(audited(spec, combination.audit), settings, calls=[{"script": script}]).scripts
    for rank in clean:
        if rank["counts"]["checked"] < 1000 or rank["findings"]:
            found.append(f"unperturbed: {rank['counts']}, {rank['findings'][:3]}")
    for rank in planted:
        for kind in KINDS:
            if not 0 < rank["planted"][kind] <= rank["counts"][kind]:
                found.append(f"{kind}: {rank['counts'][kind]} found of {rank['planted'][kind]} planted")
    return found
