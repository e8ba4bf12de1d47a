// SPDX-License-Identifier: Apache-2.0
// Twins of kernels/cpu/all_layers.cpp in one launch each. Each row has thread blocks of its own, which ask for its slot
// and what was decided of it at once and leave before they load a row that is not to move.
//
// With a handful of rows the time goes into waiting for memory, and for instructions that no cache holds: so every
// layer has threads of its own, divisions are multiplications prepared by the host, and nothing is asked for twice.
// With many rows it goes into the bytes, and into starting blocks for rows that stay: so a block takes several layers.
#include <algorithm>

#include "../ops.h"
#include "launch.h"

namespace nwor::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocksEach = 6;      // on a multiprocessor, at least
constexpr int kManyBlocks = 10000;  // enough to keep every multiprocessor busy to the end

// What the host works out once for all threads.
struct Plan {
  int64_t end_slot;  // slots from here on lie beyond the pool
  int64_t length;    // bytes from a row's first head to the end of its last
  int row_bytes;
  bool aligned;      // to 16 bytes, but for the layer offsets, which only the device knows
  Divisor block_size, head_bytes, width;
};

// One row of one layer, in the pool or in the mini-cache; kApart: with `gap` bytes between its heads.
template <bool kApart>
struct Row {
  char* data;
  int64_t gap;
  __device__ char* at(int byte, const Plan& plan) const {
    return data + byte + (kApart ? plan.head_bytes.of(byte) * gap : 0);
  }
};

// A warp takes pieces of 2 KiB, every word of which is at a distance that is known now.
template <bool kApart>
__device__ void copy_row(const Row<kApart>& to, const Row<kApart>& from, const Plan& plan) {
  constexpr int kWord = sizeof(uint4), kStep = 32 * kWord;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int first = warp * kInFlight * kStep + lane * kWord; first < plan.row_bytes; first += blockDim.x * kInFlight * kWord) {
    uint4 held[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (u * kStep < plan.row_bytes - first) held[u] = *reinterpret_cast<const uint4*>(from.at(first + u * kStep, plan));
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (u * kStep < plan.row_bytes - first) *reinterpret_cast<uint4*>(to.at(first + u * kStep, plan)) = held[u];
  }
}

// Byte by byte: no cache of vLLM's is laid out so that it needs this.
template <bool kApart>
__device__ void copy_unaligned_row(const Row<kApart>& to, const Row<kApart>& from, const Plan& plan) {
#pragma unroll 1
  for (int byte = threadIdx.x; byte < plan.row_bytes; byte += blockDim.x) *to.at(byte, plan) = *from.at(byte, plan);
}

// A warp a request: neither layers nor heads nor the launch shape enter the counts. The last block to arrive publishes
// them; whoever waits for a later event of this stream may read them.
__device__ void count_rows(const Window& w, int block, int blocks, int thread) {
  const int lane = thread % 32, warp = block * kWarps + thread / 32, warps = blocks * kWarps;
  for (int request = warp; request < w.num_requests; request += warps) {
    const int32_t drafts = w.num_drafts[request], rejected_drafts = w.num_rejected[request];
    int kept = 0, rejected = 0;
#pragma unroll 1
    for (int first = 0; first < w.width; first += 32) {
      const int column = first + lane;
      const int64_t slot = column < w.width ? w.slots[int64_t{request} * w.width + column] : -1;
      const RowDecision row = w.decide(slot, column, drafts, rejected_drafts);
      kept += __popc(__ballot_sync(~0u, row == RowDecision::kKept));
      rejected += __popc(__ballot_sync(~0u, row == RowDecision::kRejected));
      if (w.logged && slot >= 0) w.logged[w.row_of(0, request, slot)] = row == RowDecision::kRejected ? slot : -1;
    }
    if (lane == 0) w.kept[request] = kept;
    if (lane == 0 && w.published) w.published[w.num_published + request] = w.kept_and_held(kept, drafts);
    const int found = lane == 0 ? kept : rejected;
    if (lane < 2 && found)  // added where the counts lie: nobody waits for the old ones
      atomicAdd(reinterpret_cast<unsigned long long*>(w.counts + lane), found);
  }
  if (!w.published) return;
  __threadfence();
  __syncthreads();
  if (thread != 0) return;
  auto* const counts = reinterpret_cast<unsigned long long*>(w.counts);
  if (atomicAdd(counts + kCounts - 1, 1) != blocks - 1) return;
  counts[kCounts - 1] = 0;
  auto* const all = reinterpret_cast<unsigned long long*>(w.all_counts);
  for (int i = 0; i < w.num_published; ++i) w.published[i] = i % kCounts == kCounts - 1 ? 0 : atomicAdd(all + i, 0);
}

// blockDim: threads of a row, layers at once. gridDim: rows, layers, and when not logging one more to count.
template <bool kLogging, bool kApart>
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    move_rows(const __grid_constant__ AllLayersArgs a, const __grid_constant__ Plan plan, const RowDecision wanted) {
  const Pool& p = a.pool;
  const Window& w = a.window;
  const int row = blockIdx.x, groups = kLogging ? gridDim.y : gridDim.y - 1;
  if (blockIdx.y == groups) {
    const int blocks = min(static_cast<int>(gridDim.x), (w.num_requests + kWarps - 1) / kWarps);
    if (row < blocks) count_rows(w, row, blocks, threadIdx.y * blockDim.x + threadIdx.x);
    return;
  }
  int layer = blockIdx.y * blockDim.y + threadIdx.y;
  if (layer >= p.num_layers) return;
  // One condition on all four loads: a branch on the first would leave the others to wait for it.
  const int request = plan.width.of(row);
  const int64_t slot = w.slots[row];
  const int32_t drafts = kLogging ? 0 : w.num_drafts[request], rejected = kLogging ? 0 : w.num_rejected[request];
  int64_t layer_offset = p.layer_offsets[layer];
  const bool stays = !kLogging && w.keeps(row - request * w.width, drafts, rejected) != (wanted == RowDecision::kKept);
  if ((slot < 0) | (slot >= plan.end_slot) | (layer_offset < 0) | stays) return;
  const int place = static_cast<int>(w.row_of(row, request, slot));
  if (kLogging && w.logged && w.logged[place] == slot) return;
  const int block = plan.block_size.of(slot), row_block = plan.block_size.of(place);
  const int64_t in_pool = block * p.block_stride + (static_cast<int>(slot) - block * p.block_size) * p.token_stride;
  const int64_t in_rows = row_block * a.rows.block_stride + (place - row_block * p.block_size) * a.rows.token_stride;
  while (true) {
    const int64_t offset = layer_offset + in_pool;
    const Row<kApart> page{p.data + offset, p.head_stride - p.bytes};
    const Row<kApart> mini{a.rows.data + layer * a.rows.layer_stride + in_rows, a.rows.head_stride - p.bytes};
    const Row<kApart>&to = kLogging ? mini : page, &from = kLogging ? page : mini;
    if (offset >= 0 && offset + plan.length <= p.size) {
      if (plan.aligned && offset % 16 == 0) copy_row(to, from, plan);
      else copy_unaligned_row(to, from, plan);
    }
    layer += groups * blockDim.y;
    if (layer >= p.num_layers) return;
    layer_offset = p.layer_offsets[layer];
  }
}

// As many threads a row as have their loads under way at once.
template <bool kLogging>
void launch(AllLayersArgs a, RowDecision wanted, void* stream, const char* name) {
  Pool& p = a.pool;
  const MiniCache& rows = a.rows;
  if (a.window.num_rows == 0) return;
  const int64_t end_slot = (p.size / p.block_stride + 1) * p.block_size;
  if (p.head_stride == p.bytes && rows.head_stride == p.bytes) {  // heads lie side by side: one piece
    p.bytes *= p.num_heads;
    p.num_heads = 1;
  }
  const bool apart = p.num_heads > 1;
  const int64_t places = reinterpret_cast<intptr_t>(p.data) | reinterpret_cast<intptr_t>(rows.data) | p.bytes |
                         p.block_stride | p.token_stride | rows.layer_stride | rows.block_stride | rows.token_stride |
                         (apart ? p.head_stride | rows.head_stride : 0);
  const Plan plan{end_slot, (p.num_heads - 1) * p.head_stride + p.bytes, p.num_heads * p.bytes, places % 16 == 0,
                  Divisor(p.block_size), Divisor(p.bytes), Divisor(a.window.width)};
  if (a.window.published) {
    void* seen = nullptr;
    if (cudaHostGetDevicePointer(&seen, a.window.published, 0) != cudaSuccess) {
      cudaGetLastError();
      throw std::runtime_error(std::string(name) + ": published must be in pinned memory, which the GPU can write");
    }
    a.window.published = static_cast<int64_t*>(seen);
  }
  dim3 block(32);
  while (block.x < kThreads && static_cast<int>(block.x * kInFlight * sizeof(uint4)) < plan.row_bytes) block.x *= 2;
  block.y = kThreads / block.x;
  const int64_t groups = (p.num_layers + block.y - 1) / block.y;
  const int64_t layers_each = (groups * a.window.num_rows + kManyBlocks - 1) / kManyBlocks;
  const dim3 grid(a.window.num_rows, (groups + layers_each - 1) / layers_each + (kLogging ? 0 : 1));
  const auto kernel = apart ? move_rows<kLogging, true> : move_rows<kLogging, false>;
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(a, plan, wanted);
  check_launch(name);
}

}  // namespace

void log_all_layers(const AllLayersArgs& a, void* stream) { launch<true>(a, RowDecision::kKept, stream, "log_all_layers"); }

void restore_all_layers(const AllLayersArgs& a, void* stream) {
  launch<false>(a, RowDecision::kRejected, stream, "restore_all_layers");
}

void commit_all_layers(const AllLayersArgs& a, void* stream) {
  launch<false>(a, RowDecision::kKept, stream, "commit_all_layers");
}

}  // namespace nwor::cuda
