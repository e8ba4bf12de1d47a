# SPDX-License-Identifier: Apache-2.0
"""NWOR, No-Write-On-Reject: keep draft keys and values out of a paged KV cache until the verifier accepts them."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of group ``vllm.general_plugins``: called in every process before vLLM builds anything.

    Imports stay inside, so that finding this plugin can never fail: vLLM logs and skips a plugin whose import
    raises, but it lets an exception from this call through, and a run that asked for a mode must stop with it.
    """
    from nwor.vllm import register

    register()
