# SPDX-License-Identifier: Apache-2.0
"""Operators and attention timed by themselves, profiled and tuned."""
