# SPDX-License-Identifier: Apache-2.0
"""The reference model: NWOR's parts in plain PyTorch on the CPU, to be read and to be compared with.

ledger     bytes and launches, counted as they happen
cache      pages, one layer's context, one step's batch
staging    `StagingBuffer`, where a window waits
policies   four ways to write draft tokens, and `KVCacheInterceptor`, which two of them share
decoder    a speculative decoder that runs a real pair through any of them
chunks     long drafts that are looked up in the text, and their verification in chunks
tour       one layer, one request, two blocks

It needs torch and nothing else of this package; `nwor_lab.bench.reference` runs it side by side.
"""
