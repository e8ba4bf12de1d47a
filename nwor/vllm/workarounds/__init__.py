# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM that a user may ask for, whatever the mode."""
