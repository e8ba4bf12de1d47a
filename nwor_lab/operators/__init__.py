# SPDX-License-Identifier: Apache-2.0
"""The operators' definition in plain PyTorch, their inputs, and the comparison of both."""
