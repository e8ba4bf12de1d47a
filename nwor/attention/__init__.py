# SPDX-License-Identifier: Apache-2.0
"""`stage`'s attention over paged prefixes and a window held beside them, on NVIDIA GPUs."""
