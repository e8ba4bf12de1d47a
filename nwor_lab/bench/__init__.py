# SPDX-License-Identifier: Apache-2.0
"""What is run on engines: benches, parity, acceptance, whole steps."""
