# SPDX-License-Identifier: Apache-2.0
"""The reference model: NWOR's parts in plain PyTorch on the CPU, to be read and to be compared with.

cache      pages, one layer's context, one step's batch
staging    `StagingBuffer`, where a window waits
policies   four ways to write draft tokens: `off`, `blind`, `cow`, `stage`
decoder    a speculative decoder that runs a real pair through any of them
compare    the four policies side by side, as tables and a figure
chunks     how draft rows are laid out for attention in chunks; `compare_chunks` checks and draws it
tour       one layer, one request, two blocks
"""
