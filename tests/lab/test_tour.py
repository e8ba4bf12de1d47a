# SPDX-License-Identifier: Apache-2.0
"""The small window of lesson 00, and what `make demo` says of two engines."""

from nwor_lab import demo
from nwor_lab.engines.engine import EngineError, Generation
from nwor_lab.reference.tour import TinyWindow


def test_positions_become_slots_by_the_block_table() -> None:
    assert [row["slot"] for row in TinyWindow(k=4).slot_mapping()] == [11, 0, 1, 2, 3]


def audited(changed: list[bool], dirty: int) -> demo.Audited:
    history = [
        {"slots": [64, 65, 66], "num_rejected": 0, "changed": [True] * 3},
        {"slots": [67, 68, 69], "num_rejected": 2, "changed": changed},
    ]
    audit = {"steps": 2, "layer_steps": 10, "dirty_slots": dirty, "unwritten_rows": 0, "kept_rows": 20}
    counters = {"drafts": 1, "draft_tokens": 2, "accepted_tokens": 0}
    return demo.Audited(Generation([[1, 2]], [""], [], counters, []), {"audit": audit, "history": history})


def test_the_verdict_and_the_pages_follow_the_audit() -> None:
    runs = {"off": audited([True] * 3, 10), "stage": audited([True, False, False], 0)}
    said = demo.verdict(runs)
    assert "rejected 2 of 2 drafts, in each of 5 layers" in said[0] == said[2].replace("stage", "vanilla")
    assert said[1].endswith("  10 rejected rows are left in the KV cache; 20 of 20 rows to be kept were written.")
    assert said[3].lstrip().startswith("No rejected rows are left")
    assert said[4] == "1 of 1 texts are equal, token for token."
    pages = demo.pages(runs)
    states = {mode: rows["state"].tolist()[:7] for mode, rows in pages.groupby("mode")}
    assert states["off"] == ["context"] * 3 + ["kept", "rejected", "rejected", "empty"]
    assert states["stage"] == ["context"] * 3 + ["kept", "empty", "empty", "empty"]
    assert set(pages["block"]) == {2}
    by_step = demo.pages_by_step(runs)
    assert by_step.groupby(["mode", "step"]).size().to_dict() == {(m, n): 32 for m in runs for n in range(2)}


def test_an_engine_that_fails_is_one_line(capsys, monkeypatch) -> None:
    def fail(*given: object) -> None:
        raise EngineError("the stage engine failed at start")

    monkeypatch.setattr(demo, "side_by_side", fail)
    assert demo.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: the stage engine") and error.count("\n") == 1
