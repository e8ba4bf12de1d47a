# SPDX-License-Identifier: Apache-2.0
"""The model of bytes, launches and time."""
