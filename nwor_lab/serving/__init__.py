# SPDX-License-Identifier: Apache-2.0
"""Serving, as people have it: prefill beside decodes, by vLLM's own server and vLLM's own client (`nwor serving`)."""
