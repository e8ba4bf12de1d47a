# SPDX-License-Identifier: Apache-2.0
"""An old name of `results.measure_or_load_recorded`, for notebooks that still use it."""

from nwor_lab.results import measure_or_load_recorded as obtain

__all__ = ["obtain"]
