# SPDX-License-Identifier: Apache-2.0
"""What `nwor measure --record` keeps of a reproduction run, of notebooks on GPUs and of a soak."""

import json

import pandas as pd
import pytest

from nwor_lab import measure, results


def test_a_whole_reproduction_run_is_recorded_without_what_is_of_one_machine(tmp_path, monkeypatch, capsys):
    recorded = tmp_path / "recorded"
    run = results.Run(tmp_path / "run", "01_x", {"k": 1, "run_dir": "somewhere"})
    run.claim("a", 1, 1, True)
    monkeypatch.setattr(measure, "TABLES", ("steps",))
    with pytest.raises(ValueError, match="run is not whole: 01_x; go on with"):
        measure.record_run(run.directory, recorded)
    run.finish()
    run.table("steps", [{"metric": "step_ms", "value": 600.0, "unit": "ms"}], mode="off", model="")
    results.write_table(run.directory / "claims.parquet", results.claims(run.directory))
    results.write_text(run.directory / "figures" / "reference_policies.png", "a picture")
    measure.record_run(run.directory, recorded)
    names = {"steps.parquet", "claims.parquet", "reference_policies.png", "manifest.json"}
    assert {path.name for path in recorded.iterdir()} == names
    made = results.read_manifest(recorded)["notebooks"]["01_x"]["provenance"]
    assert made["parameters"] == {"k": 1} and not {"command", "platform"} & set(made)
    assert measure.main(["--record", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"nwor measure: no folder {tmp_path / 'nothing'}\n"


@pytest.mark.parametrize("clean", [True, False])
def test_notebooks_on_gpus_are_recorded_beside_the_whole_run(tmp_path, clean):
    recorded = tmp_path / "recorded"
    run = results.Run(tmp_path / "run", "02_kernel_correctness", {"seed": 3, "run_dir": "somewhere"})
    run.claim("of this machine", 0, 0, True)
    run.claim("of a table", 1, 1, True, origin="recorded")
    run.expect("at the defaults", 2, 2, True)
    rows = [{"device": device, "metric": "calls", "value": 1.0, "unit": "calls"} for device in ("cpu", "cuda")]
    run.table("kernels", rows, mode="", model="")
    run.finish()
    manifest = results.read_manifest(run.directory)
    git = {"commit": "abc", "clean": clean, "changed": [] if clean else ["M a"]}
    manifest["notebooks"]["02_kernel_correctness"]["provenance"] |= {"gpu": ["an H200"], "git": git}
    results.write_json(run.directory / "manifest.json", manifest)
    if not clean:
        with pytest.raises(ValueError, match="02_kernel_correctness of .*run is not recorded: files differ"):
            measure.record_run(run.directory, recorded)
        assert not recorded.exists()
        return
    measure.record_run(run.directory, recorded)
    names = {"gpu_claims.parquet", "gpu_claims.json", "kernel_check.parquet"}
    assert {path.name for path in recorded.iterdir()} == names
    claims = results.read_table("gpu_claims", recorded).to_dict("records")
    common = {"notebook": "02_kernel_correctness", "predicted": "0", "measured": "0", "holds": True}
    assert claims == [{**common, "claim": "of this machine"}]
    assert results.read_table("kernel_check", recorded)["device"].tolist() == ["cuda"]
    about = json.loads((recorded / "gpu_claims.json").read_text())["02_kernel_correctness"]
    assert about["parameters"] == {"seed": 3} and about["git"] == {"commit": "abc", "clean": True}
    results.write_table(recorded / "gpu_claims.parquet", pd.DataFrame([{"notebook": "04_tp2_end_to_end"}]))
    with pytest.raises(ValueError, match="lacks what is recorded already: 04_tp2_end_to_end; run that on GPUs too"):
        measure.record_run(run.directory, recorded)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("gpu", "name"), [(["an H200"], "gpu_soak"), ("unavailable: no nvidia-smi", "soak")])
def test_a_soak_is_recorded_from_a_clean_commit_alone(tmp_path, clean, gpu, name):
    run, recorded = tmp_path / "soak-1", tmp_path / "recorded"
    results.write_table(run / "soak.parquet", results.tidy([{"metric": "layer-steps", "value": 9.0, "unit": "count"}]))
    about = dict.fromkeys(("time", "parameters", "versions", "python", "cpu", "command"), "x")
    git = {"commit": "abc", "clean": clean, "changed": [] if clean else ["M a"]}
    results.write_json(run / "soak.json", {"provenance": {**about, "git": git, "gpu": gpu}})
    if not clean:
        with pytest.raises(ValueError, match="soak-1 is not recorded: files differ from the commit .M a.: commit them"):
            measure.record_soak(run, recorded)
        assert not recorded.exists()
        return
    measure.record_soak(run, recorded)
    assert results.read_table(name, recorded)["value"].tolist() == [9.0]
    made = json.loads((recorded / f"{name}.json").read_text())
    assert made["git"] == {"commit": "abc", "clean": True} and "command" not in made
