# SPDX-License-Identifier: Apache-2.0
"""Patch of the attention backends for mode ``stage``: note which layers are ever called without keys and values.

Why: some models write the cache themselves, with rope and write in one kernel, or read a layer's cache once more; then
nothing passes through the hook of the cache write that could be staged.
How: on a GPU vLLM always runs the whole model once before it makes the cache; on a CPU it may not, so one row is run.
What is noted there is asked before a mode is chosen, that is, before a graph is captured and before any request.
When it can go: when such a model says so.
"""

from collections.abc import Callable, Collection
from typing import Any

from nwor.vllm.patch import wrap

_NOTE = "nwor_given_rows"  # of a layer: whether each call so far had keys and values


def watch(implementation: type) -> None:
    """Note of each layer of this implementation whether its calls had keys and values."""
    wrap(implementation, "forward", _make_forward)


def _make_forward(original: Callable) -> Callable:
    def forward(self: Any, layer: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if key is None or _NOTE not in vars(layer):
            vars(layer)[_NOTE] = key is not None
        return original(self, layer, query, key, *args, **kwargs)

    return forward


def some_layer_does(runner: Any, layers: Collection[Any]) -> bool:
    """Whether the model calls one of these layers without keys and values; on a CPU it is run if it has not been."""
    if any(getattr(layer, "kv_cache_update_bypass", False) for layer in layers):  # vLLM's own mark, from 0.33 on
        return True
    if runner.device.type == "cpu" and any(_NOTE not in vars(layer) for layer in layers):
        runner._dummy_run(1)
    return not all(vars(layer).get(_NOTE, True) for layer in layers)
