# SPDX-License-Identifier: Apache-2.0
"""The sampled auditor in real vLLM on the CPU."""

import os

import pytest

from nwor_lab import paths
from nwor_lab.machine import on_cpu, why_no_fp8_cache
from tests.audit import matrix
from tests.audit.engines import Engines, environment, generate
from tests.audit.matrix import MATRIX, pair

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not on_cpu(), reason="test_gpu.py runs these on a GPU"),
]


@pytest.fixture(scope="module")
def engines():
    engines = Engines()
    yield engines
    engines.close()


@pytest.mark.parametrize("name", MATRIX)
def test_clean_runs_are_clean_and_planted_faults_are_found(engines, name, tmp_path):
    if name == "fp8" and why_no_fp8_cache():
        pytest.skip(why_no_fp8_cache())
    assert matrix.run(engines, name, tmp_path) == []


def cut_session(llm):
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

    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    texts, name, ends = [list(tokenizer.encode(text)) for text in shipped.load_prompts()[:2]], None, []
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
    [report] = llm.collective_rpc("kv_audit_report")
    return list(range(*ends[0])), report


def test_a_cut_session_attends_to_other_tokens_rows(engines):
    """vLLM's own fault, which it has without any plugin: every position past the cut is named."""
    target = str(paths.PAIR_TARGET)
    spec = pair(None, "draft_model", k=6, batch=4, block_size=32)
    arguments = spec.llm_arguments()
    arguments["speculative_config"]["model"] = target
    past, report = engines.run(arguments, {**spec.environ(), **environment()}, cut_session)
    assert past and [finding["position"] for finding in report["findings"]] == past
    assert {finding["kind"] for finding in report["findings"]} == {"token"}


def asked_again(llm):
    from tests.audit.matrix import shared_prompts

    shared_prompts(llm)
    llm.reset_prefix_cache()  # the rows come back from storage, into other blocks
    shared_prompts(llm)
    return llm.collective_rpc("kv_audit_report")


def test_rows_that_a_connector_brings_are_taken_over(engines, tmp_path):
    spec = pair(None, "ngram", prefix_caching=True, block_size=32)
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    arguments = {**spec.llm_arguments(), "kv_transfer_config": config}
    [report] = engines.run(arguments, {**spec.environ(), **environment()}, asked_again)
    assert report["counts"]["adopted"] > 0 and report["findings"] == []


def counted(llm):
    reports = generate(llm)
    return reports, {
        (metric.name, metric.labels.get("kind")): metric.value for metric in llm.get_metrics() if "audit" in metric.name
    }


def test_counters_reach_prometheus_and_the_verdict_is_one_line(engines):
    import vllm_kv_audit

    spec = pair(None)
    variables = environment(perturb="bytes=0.2,unwritten=0.1")
    reports, metrics = engines.run(spec.llm_arguments(), {**spec.environ(), **variables}, counted)
    counts = reports[0]["counts"]
    assert metrics["vllm:kv_audit_slots_checked", None] == counts["checked"] > 1000
    for kind in ("bytes", "unwritten"):
        assert metrics["vllm:kv_audit_findings", kind] == counts[kind] == reports[0]["planted"][kind] > 0
    total = counts["bytes"] + counts["unwritten"]
    assert f"{total} findings ({counts['bytes']} bytes, {counts['unwritten']} unwritten)" in vllm_kv_audit.verdict(
        reports
    )


def hooks_found(llm):
    from vllm_kv_audit import hooks

    return hooks.wrapped(), hasattr(llm.llm_engine.model_executor.driver_worker.worker.model_runner, "kv_auditor")


def test_without_the_variable_nothing_is_patched(engines):
    spec = pair(None, "none")
    arguments = spec.llm_arguments()
    del arguments["speculative_config"]
    assert engines.run(arguments, {**spec.environ(), **environment("")}, hooks_found) == ([], False)


@pytest.mark.parametrize("fault", ["mark", "bytes"])
def test_an_auditor_that_does_not_see_refuses_to_start(engines, fault):
    spec = pair(None)
    environ = {**spec.environ(), **environment(), "TEST_FAULT": fault}
    with pytest.raises(RuntimeError, match="self-check"):
        engines.run(spec.llm_arguments(), environ, generate, blind)


def blind(patch) -> None:
    """Rows are not marked, or every slot has the same hash."""
    from vllm_kv_audit.cpu import OnCpu

    if os.environ["TEST_FAULT"] == "mark":
        patch.setattr(OnCpu, "mark", lambda *args: None)
    else:
        patch.setattr(OnCpu, "_hash", lambda self, units, places: 0 * places[:, 0])
