// SPDX-License-Identifier: Apache-2.0
// All layers in one call. kernels/cuda/all_layers.cu follows function for function.
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../ops.h"

namespace nwor::cpu {
namespace {

// Blocks that a layer has room for: up to the next layer where layers lie one behind the other, up to the end of the
// pool where each block holds all layers.
int64_t count_blocks(const Pool& p, bool packed) {
  const int64_t in_block = (p.num_heads - 1) * p.head_stride +
                           (packed ? int64_t{p.block_size} * p.bytes : (p.block_size - 1) * p.token_stride + p.bytes);
  int64_t blocks = INT64_MAX;
  for (int l = 0; l < p.num_layers; ++l) {
    STD_TORCH_CHECK(p.layer_offsets[l] >= 0 && p.layer_offsets[l] + in_block <= p.size, "layer_offsets[", l, "] is ",
                    p.layer_offsets[l], ", which leaves no room for a block in a pool of ", p.size, " bytes");
    int64_t end = p.size;
    for (int other = 0; other < p.num_layers; ++other) {
      const int64_t gap = p.layer_offsets[other] - p.layer_offsets[l];
      if (gap >= p.block_stride) end = std::min(end, p.layer_offsets[other]);
    }
    blocks = std::min(blocks, (end - p.layer_offsets[l] - in_block) / p.block_stride + 1);
  }
  return blocks;
}

int64_t row_in_log(const AllLayersArgs& a, int64_t m) {
  return a.window.row_of(m, static_cast<int>(m / a.window.width), a.window.slots[m]);
}

void check_slots(const AllLayersArgs& a) {
  const int64_t num_slots = count_blocks(a.pool, a.packing.index) * a.pool.block_size;
  for (int64_t m = 0; m < a.window.num_rows; ++m)
    STD_TORCH_CHECK(a.window.slots[m] < num_slots, "slots[", m / a.window.width, ", ", m % a.window.width, "] is ",
                    a.window.slots[m], " but the layers end at slot ", num_slots - 1, "; take the slots from this cache's block table");
  for (int64_t m = 0; a.window.logged && m < a.window.num_rows; ++m)
    for (int64_t other = m - m % a.window.width; other < m; ++other)
      STD_TORCH_CHECK(a.window.slots[m] < 0 || a.window.slots[other] < 0 || row_in_log(a, m) != row_in_log(a, other),
                      "slots ", a.window.slots[other], " and ", a.window.slots[m], " of request ", m / a.window.width,
                      " share one of ", a.window.entries, " rows of the log; the slots must be of consecutive positions");
  const int64_t chunk = int64_t{a.pool.block_size} * a.packing.num_elements;
  for (int64_t i = 0; i < chunk; ++i)
    STD_TORCH_CHECK(a.packing.index[i] >= 0 && a.packing.index[i] < chunk, "packing[", i / a.packing.num_elements, ", ",
                    i % a.packing.num_elements, "] is ", a.packing.index[i], " but a chunk has ", chunk, " elements");
}

template <class T>
void copy_elements(const char* source, const int32_t* from, char* destination, const int32_t* to, int count) {
  for (int e = 0; e < count; ++e)
    std::memcpy(destination + to[e] * int64_t{sizeof(T)}, source + from[e] * int64_t{sizeof(T)}, sizeof(T));
}

// A held row of one layer and head, out of the pool or into it.
void copy_row(const AllLayersArgs& a, int layer, int64_t held, int head, bool into_pool) {
  const int64_t slot = a.window.slots[held], m = row_in_log(a, held);
  const int block_size = a.pool.block_size;
  if (!a.packing.index) {
    char* in_pool = a.pool.data + a.pool.offset(layer, slot, head);
    char* in_rows = a.rows.data + a.rows.offset(layer, m, head);
    std::memcpy(into_pool ? in_pool : in_rows, into_pool ? in_rows : in_pool, a.pool.bytes);
    return;
  }
  const int elements = a.packing.num_elements;
  char* pool_chunk = a.pool.data + a.pool.offset(layer, slot - slot % block_size, head);
  char* rows_chunk = a.rows.data + a.rows.offset(layer, m - m % block_size, head);
  const int32_t* pool_index = a.packing.index + slot % block_size * elements;
  const int32_t* rows_index = a.packing.index + m % block_size * elements;
  const char* source = into_pool ? rows_chunk : pool_chunk;
  char* destination = into_pool ? pool_chunk : rows_chunk;
  const int32_t* from = into_pool ? rows_index : pool_index;
  const int32_t* to = into_pool ? pool_index : rows_index;
  switch (a.packing.element_size) {
    case 1: return copy_elements<uint8_t>(source, from, destination, to, elements);
    case 2: return copy_elements<uint16_t>(source, from, destination, to, elements);
    case 4: return copy_elements<uint32_t>(source, from, destination, to, elements);
  }
}

void copy_row_of_all_layers(const AllLayersArgs& a, int64_t m, bool into_pool) {
  for (int layer = 0; layer < a.pool.num_layers; ++layer)
    for (int head = 0; head < a.pool.num_heads; ++head) copy_row(a, layer, m, head, into_pool);
}

void write_back(const AllLayersArgs& a, RowDecision wanted) {
  const Window& w = a.window;
  check_slots(a);
  for (int request = 0; request < w.num_requests; ++request) {
    w.kept[request] = 0;
    for (int column = 0; column < w.width; ++column) {
      const int64_t m = int64_t{request} * w.width + column;
      const RowDecision row = w.decide(w.slots[m], column, w.num_drafts[request], w.num_rejected[request]);
      if (row == RowDecision::kSkipped) continue;
      w.counts[row == RowDecision::kKept ? 0 : 1] += 1;
      w.kept[request] += row == RowDecision::kKept;
      if (row == wanted) copy_row_of_all_layers(a, m, true);
      if (w.logged) w.logged[row_in_log(a, m)] = row == RowDecision::kRejected ? w.slots[m] : -1;
    }
    if (w.published) w.published[w.num_published + request] = w.kept_and_held(w.kept[request], w.num_drafts[request]);
  }
  if (w.published) std::copy_n(w.all_counts, w.num_published, w.published);
}

}  // namespace

void log_all_layers(const AllLayersArgs& a) {
  check_slots(a);
  for (int64_t m = 0; m < a.window.num_rows; ++m)
    if (a.window.slots[m] >= 0 && !(a.window.logged && a.window.logged[row_in_log(a, m)] == a.window.slots[m]))
      copy_row_of_all_layers(a, m, false);
}

void restore_all_layers(const AllLayersArgs& a) { write_back(a, RowDecision::kRejected); }

void commit_all_layers(const AllLayersArgs& a) { write_back(a, RowDecision::kKept); }

}  // namespace nwor::cpu
