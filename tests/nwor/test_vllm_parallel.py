# SPDX-License-Identifier: Apache-2.0
"""Workers that vLLM starts or splits in other ways, on the CPU: Ray's actors, micro-batches."""

import functools
import importlib.util
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nwor.settings import Settings
from nwor_lab.engines.child import status
from nwor_lab.engines.spec import EngineSpec
from tests.engines import NOTES, PROMPTS, Engines, Outcome, in_child
from tests.nwor.on_cpu import spec_of
from tests.nwor.specs import With
from tests.nwor.test_vllm_drafts import counts, settings_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def assert_clean(rank: dict[str, Any], mode: str) -> None:
    """A rank that serves the mode, has decided windows, and left every byte as it must be."""
    assert (rank["mode"], rank["serving"]) == (mode, mode), rank["reason"]
    counters, audit = rank["counters"], rank["audit"]
    assert counters["committed_tokens"] > 0 < counters["rejected_tokens"]
    assert counters["fallbacks"] == counters["cancelled"] == 0
    assert audit["layer_steps"] > 20
    assert audit["dirty_layer_steps"] == audit["wrong_rows"] == audit["unwritten_rows"] == audit["stray_slots"] == 0


# -- Ray's actors ------------------------------------------------------------------------------------------------------


def serve_on_ray(spec: EngineSpec, settings: Settings) -> Outcome:
    """Two actors of a cluster that was up before the settings were made: only vLLM can bring them there."""
    import ray

    from nwor_lab.engines.child import Served

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=200 << 20)  # two that vLLM may count
    os.environ.update({**spec.environ(), **settings.environ(), "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    served = Served(spec)
    try:
        generation = served.generate(PROMPTS[:6], 24)
        actors = ray.util.list_named_actors()
        return Outcome([generation], served.on_every_rank(status), metrics=served.metrics(), notes=actors)
    finally:
        served.engine.engine_core.shutdown()
        ray.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install nwor[ray]")
def test_the_mode_reaches_every_worker_of_rays_executor(vanilla, model, monkeypatch):
    """TP=2 on one machine. vLLM refuses Ray on a CPU for want of a resource's name, which `ray_on_cpu` gives it."""
    places = [str(Path(__file__).parent / "ray_on_cpu"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    spec = With(**vars(spec_of(model, tp=2)), arguments={"distributed_executor_backend": "ray"})
    outcome = in_child(serve_on_ray, spec, settings_of("stage"))
    assert len(outcome.notes) == 2, "each rank is an actor"
    assert outcome.tokens == [tokens[:24] for tokens in vanilla().tokens[:6]]
    assert [rank["rank"] for rank in outcome.ranks] == [0, 1]
    for rank in outcome.ranks:
        assert_clean(rank, "stage")
    assert outcome.ranks[0]["counters"] == outcome.ranks[1]["counters"]
    assert outcome.metrics["nwor_committed_tokens"] == outcome.ranks[0]["counters"]["committed_tokens"]
    assert outcome.metrics["nwor_scheduler_mismatches"] == 0


# -- micro-batches -----------------------------------------------------------------------------------------------------


def in_two(spec: EngineSpec) -> With:
    """vLLM is to split batches in two; the transport between experts is named and not used."""
    return With(**vars(spec), arguments={"ubatch_size": 2, "all2all_backend": "deepep_low_latency"})


def splits_every_batch(patch: Any) -> None:
    """The V1 runner splits each batch of several requests, and runs one half after the other.

    vLLM itself splits mixtures of experts alone, where data-parallel ranks agree to, on two streams of a GPU.
    """
    from vllm.forward_context import create_forward_context, get_forward_context, override_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_ubatch_wrapper import _cat_ubatch_outputs

    allow, forward = GPUModelRunner._allow_microbatching, GPUModelRunner._model_forward
    decide = GPUModelRunner._determine_batch_execution_and_padding

    @functools.wraps(allow)
    def _allow_microbatching(self: Any, num_reqs: int, num_scheduled_tokens: Any) -> bool:
        self.is_split = num_reqs > 1 and allow(self, num_reqs, num_scheduled_tokens)
        return self.is_split

    @functools.wraps(decide)
    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode, descriptor, _, *others = decide(self, *args, **kwargs)
        return mode, descriptor, vars(self).pop("is_split", False), *others  # asked for in real steps alone

    @functools.wraps(forward)
    def _model_forward(self: Any, input_ids: Any, positions: Any, **kwargs: Any) -> Any:
        whole = get_forward_context()
        if whole.ubatch_slices is None:
            return forward(self, input_ids=input_ids, positions=positions, **kwargs)
        outputs = []
        for number, part in enumerate(whole.ubatch_slices):
            context = create_forward_context(
                whole.attn_metadata[number], self.vllm_config, slot_mapping=whole.slot_mapping[number]
            )
            rows = part.token_slice
            with override_forward_context(context):
                outputs.append(forward(self, input_ids=input_ids[rows], positions=positions[rows], **kwargs))
        first, second = (part.request_slice for part in whole.ubatch_slices)
        NOTES.append("a query" if first.stop > second.start else "between queries")
        return _cat_ubatch_outputs(outputs)

    patch.setattr(GPUModelRunner, "_allow_microbatching", _allow_microbatching)
    patch.setattr(GPUModelRunner, "_determine_batch_execution_and_padding", _determine_batch_execution_and_padding)
    patch.setattr(GPUModelRunner, "_model_forward", _model_forward)


def test_a_batch_in_two_halves(model):
    """The split falls into windows, too: their slots are logged and restored whole, whichever half writes them."""
    with closing(Engines()) as engines:  # a process that has split nothing before
        plain, outcome = (
            engines.run(in_two(spec_of(model)), settings, splits_every_batch)
            for settings in (Settings(audit=True), settings_of("stage"))
        )
    assert plain.audit["dirty_slots"] > 0, "without a mode rejected rows stay"
    assert outcome.notes.count("a query") > 5, "the split falls into a window"
    windows, staged, committed = counts(outcome, plain)
    assert windows > 10 and 0 < committed < staged
    [rank] = outcome.ranks
    assert rank["ways"] == ["logged"] and "micro-batches" in rank["reason"]
