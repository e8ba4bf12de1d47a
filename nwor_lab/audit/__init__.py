# SPDX-License-Identifier: Apache-2.0
"""Whole-cache audit: which bytes of the KV cache each step changed."""

AUDIT = "VLLM_NWOR_AUDIT"  # 1: the lab's plugin audits every step
