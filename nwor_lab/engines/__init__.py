# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in child processes, as notebooks and tests start them."""
