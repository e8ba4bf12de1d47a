# SPDX-License-Identifier: Apache-2.0
"""Random traffic on real engines under the whole-cache audit, each mode beside vanilla: `nwor soak`."""
