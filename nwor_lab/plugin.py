# SPDX-License-Identifier: Apache-2.0
"""The lab's own vLLM plugin: the audit and random weights, each only where its variable asks for it."""

import os


def register() -> None:
    """Entry point of group ``vllm.general_plugins``; called again, it does nothing.

    Raises:
        ValueError: a ``VLLM_NWOR_*`` variable is misspelt or has an impossible value.
        IncompatibleVLLM: this vLLM is not the release the hooks were written for.
    """
    from nwor.settings import Settings
    from nwor_lab.engines import random_weights

    audit = Settings.from_env().audit
    if os.environ.get(random_weights.ASKED) == "1":
        random_weights.install()
    if audit:
        import nwor
        from nwor.vllm import patch
        from nwor_lab.audit import hooks

        patch.check_version()
        nwor.register()  # first, whatever the order of plugins: the audit's hooks lie around the modes'
        hooks.install()
