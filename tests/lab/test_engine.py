# SPDX-License-Identifier: Apache-2.0
"""An engine's configuration: what of it reaches vLLM, and what is refused before one starts."""

import pytest

from nwor_lab import paths
from nwor_lab.engines.engine import EngineSpec

PAIR = (str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"runner": "v3"}, ValueError, "runner must be v1, v2 or empty"),
        ({"cudagraph_mode": "FULL"}, ValueError, "leave out enforce_eager"),
        ({"cudagraph_capture_sizes": (9, 18)}, ValueError, "leave out enforce_eager"),
        ({"draft": "./nowhere"}, FileNotFoundError, "give a model's folder or its name on the hub"),
    ],
)
def test_a_spec_that_cannot_be_served_is_refused(fields, error, says):
    with pytest.raises(error, match=says):
        EngineSpec(**{"model": PAIR[0], "draft": PAIR[1]} | fields)


def test_what_is_left_empty_is_vllms_own_choice():
    assert not {"compilation_config", "attention_backend", "block_size"} & EngineSpec(*PAIR).llm_arguments().keys()
    graphs = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (9, 576)}
    given = EngineSpec(*PAIR, enforce_eager=False, **graphs).llm_arguments()["compilation_config"]
    assert given == {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [9, 576]}
