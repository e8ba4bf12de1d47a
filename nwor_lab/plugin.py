# SPDX-License-Identifier: Apache-2.0
"""The lab's own vLLM plugin: one key for compiled graphs; the auditor and random weights, where a variable asks."""

from __future__ import annotations

import os

from nwor_lab.audit import AUDIT


def register() -> None:
    """Entry point of group ``vllm.general_plugins``; called again, it does nothing.

    Raises:
        ValueError: ``VLLM_NWOR_AUDIT`` is neither 0 nor 1.
        RuntimeError: this vLLM is not the release the hooks were written for.
    """
    from nwor_lab.engines import random_weights, shared_graphs

    audit = os.environ.get(AUDIT, "0")
    if audit not in ("0", "1"):
        raise ValueError(f"{AUDIT}={audit!r} must be 0 or 1")
    shared_graphs.install()
    if os.environ.get(random_weights.ASKED) == "1":
        random_weights.install()
    if audit == "1":
        from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

        from nwor_lab.audit import hooks

        # First, whatever the order of plugins: the audit's hooks lie around those of the modes.
        for name, other in load_plugins_by_group(DEFAULT_PLUGINS_GROUP).items():
            if name != "nwor_lab":
                other()
        hooks.install()
