# SPDX-License-Identifier: Apache-2.0
"""The sampled auditor in real vLLM on the CPU."""

from dataclasses import replace
from functools import partial

import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.machine import on_cpu, why_no_fp8_cache
from tests.audit.matrix import MATRIX, audited, generate, pair, problems, reports, shared_prompts, without_drafts
from tests.engines import PROMPTS
from tests.nwor.drafters import HasALayer, custom
from tests.nwor.specs import With, with_connector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not on_cpu(), reason="test_gpu.py runs these on a GPU"),
]


def run(engines, spec, script, fault=None):
    """What the script makes of an engine under the auditor."""
    [found] = engines.run(spec, Settings(), fault, calls=[{"script": script}]).scripts
    return found


@pytest.mark.parametrize("name", MATRIX)
def test_clean_runs_are_clean_and_planted_faults_are_found(engines, name, tmp_path):
    if name == "fp8" and why_no_fp8_cache():
        pytest.skip(why_no_fp8_cache())
    assert problems(engines, MATRIX[name], MATRIX[name].spec(tmp_path)) == []


def cut_session(served):
    """A session's first answer is cut inside a window of drafts; the next turn's prompt goes on from there.

    vLLM 0.32 leaves `num_computed_tokens` past the cut: the first tokens of the next turn count as computed, and their
    slots hold rows of drafts that were accepted and then cut off.

    Returns:
        Positions of the next turn's that count as computed; what was found.
    """
    import copy

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from nwor_lab import pair as shipped

    engine, name, ends = served.engine, None, []
    texts = served.encode(shipped.load_prompts()[:2])
    for chunk, tokens in ((texts[0][:40], 3), (texts[1][:24], 8)):
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        request = engine.input_processor.process_inputs(
            name or "s", {"prompt_token_ids": chunk}, params, supported_tasks=engine.get_supported_tasks(),
            resumable=True,
        )  # fmt: skip
        if name:
            request.external_req_id = "s"
        else:
            engine.input_processor.assign_request_id(request)
            name = request.request_id
        engine.output_processor.add_request(copy.deepcopy(request), None, None, 0)
        engine.engine_core.add_request(request)
        got = 0
        while got < tokens:
            got += sum(len(output.outputs[0].token_ids) for output in engine.step())
        known = engine.engine_core.engine_core.scheduler.requests[name]
        ends.append((known.num_tokens, known.num_computed_tokens))
    engine.abort_request(["s"])
    return list(range(*ends[0])), *reports(served)


def test_a_cut_session_attends_to_other_tokens_rows(engines):
    """vLLM's own fault, which it has without any plugin: every position past the cut is named."""
    spec = replace(pair(None, "draft_model", k=6, batch=4, block_size=32), draft=str(paths.PAIR_TARGET))
    past, report = run(engines, audited(spec), cut_session)
    assert past and [finding["position"] for finding in report["findings"]] == past
    assert {finding["kind"] for finding in report["findings"]} == {"token"}


def asked_again(served):
    shared_prompts(served)
    served.engine.reset_prefix_cache()  # the rows come back from storage, into other blocks
    shared_prompts(served)
    return reports(served)


def test_rows_that_a_connector_brings_are_taken_over(engines, tmp_path):
    spec = pair(None, "ngram", prefix_caching=True, block_size=32)
    spec = with_connector(spec, "ExampleConnector", {"shared_storage_path": str(tmp_path)})
    [report] = run(engines, audited(spec), asked_again)
    assert report["counts"]["adopted"] > 0 and report["findings"] == []


def embedded(served):
    """Prompts of embeddings find their blocks in the prefix cache, in rows of the batch that held tokens before."""
    import torch
    from vllm import SamplingParams

    engine, cached = served.engine, 0
    shape = 70, engine.vllm_config.model_config.get_hidden_size()
    embeddings = {"prompt_embeds": torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 20}
    for turn in range(4):
        tokens = {"prompt_token_ids": PROMPTS[turn]}
        for number, prompt in enumerate((tokens, embeddings) if turn % 2 else (embeddings, tokens)):
            engine.add_request(f"{turn}-{number}", prompt, SamplingParams(temperature=0.0, max_tokens=20))
        while engine.has_unfinished_requests():
            cached += sum(output.num_cached_tokens for output in engine.step() if output.finished)
    return cached, *reports(served)


def test_prompts_of_embeddings_raise_no_alarm(engines):
    spec = With(
        **vars(pair(None, "ngram", prefix_caching=True, block_size=32)), arguments={"enable_prompt_embeds": True}
    )
    cached, report = run(engines, audited(spec), embedded)
    assert cached > 0 and report["counts"]["checked"] > 1000 and report["findings"] == []


def generated(served):
    generate(served)
    return reports(served)


def test_a_drafters_own_layer_is_left_alone(engines):
    spec = custom(pair(None), HasALayer)
    [report] = run(engines, audited(spec), generated)
    assert report["counts"]["checked"] > 1000 and report["findings"] == []


def counted(served):
    generate(served)
    metrics = [metric for metric in served.llm.get_metrics() if "audit" in metric.name]
    return reports(served), {(metric.name, metric.labels.get("kind")): metric.value for metric in metrics}


def test_counters_reach_prometheus_and_the_verdict_is_one_line(engines):
    import vllm_kv_audit

    spec = audited(pair(None), VLLM_KV_AUDIT_PERTURB="bytes=0.2,unwritten=0.1")
    ranks, metrics = run(engines, spec, counted)
    counts = ranks[0]["counts"]
    assert metrics["vllm:kv_audit_slots_checked", None] == counts["checked"] > 1000
    for kind in ("bytes", "unwritten"):
        assert metrics["vllm:kv_audit_findings", kind] == counts[kind] == ranks[0]["planted"][kind] > 0
    total = counts["bytes"] + counts["unwritten"]
    said = vllm_kv_audit.verdict(ranks)
    assert f"{total} findings ({counts['bytes']} bytes, {counts['unwritten']} unwritten)" in said


def hooks_found(served):
    from vllm_kv_audit import hooks

    worker = served.engine.engine_core.engine_core.model_executor.driver_worker.worker
    return hooks.wrapped(), hasattr(worker.model_runner, "kv_auditor")


def test_without_the_variable_nothing_is_patched(engines):
    assert run(engines, without_drafts(None), hooks_found) == ([], False)


@pytest.mark.parametrize("name", ["mark", "_hash"])
def test_an_auditor_that_does_not_see_refuses_to_start(engines, name):
    with pytest.raises(RuntimeError, match="self-check"):
        run(engines, audited(pair(None)), generate, partial(blind, name))


def blind(name, patch) -> None:
    """Rows are not marked, or every slot has the same hash."""
    from vllm_kv_audit.cpu import OnCpu

    does = {"mark": lambda *args: None, "_hash": lambda self, units, places: 0 * places[:, 0]}
    patch.setattr(OnCpu, name, does[name])
