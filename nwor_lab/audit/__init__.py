# SPDX-License-Identifier: Apache-2.0
"""Whole-cache audit: which bytes of the KV cache each step changed."""
