# SPDX-License-Identifier: Apache-2.0
"""The laboratory around `nwor`: what the notebooks, the command line and the tests call."""
