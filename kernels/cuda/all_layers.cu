// SPDX-License-Identifier: Apache-2.0
// Twins of kernels/cpu/all_layers.cpp in one launch each. A thread block takes a few rows of a few layers: each warp
// asks for the verdict on all of its rows at once, and leaves before it loads any row that is not to move.
//
// With a handful of rows the time goes into waiting for memory, and for instructions that no cache holds: so loads are
// asked for together, divisions are multiplications prepared by the host, and the counting has a block of its own.
#include "../ops.h"
#include "launch.h"

namespace nwor::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;     // on a multiprocessor, at least
constexpr int kMostRows = 8;       // of a block
constexpr int kManyBlocks = 4096;  // enough to keep every multiprocessor busy to the end

// What the launch is cut into: `threads` threads a row of a layer, `rows` rows and `layers` layers a block.
struct Cut {
  int threads, layers, rows;
  int64_t end_slot;  // slots from here on lie beyond the pool
  Divisor block_size, head_bytes, width;
};

// Spare blocks count every row once, a warp a request, so that neither layers nor heads nor the launch shape enter.
__device__ void count_rows(const Window& w) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * (kThreads / 32);
  int kept = 0, rejected = 0;
  for (int request = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; request < w.num_requests; request += warps) {
    const int before = kept;
    for (int first = 0; first < w.width; first += 32) {
      const int column = first + lane;
      const int64_t slot = column < w.width ? w.slots[int64_t{request} * w.width + column] : -1;
      const Fate fate = w.of(slot, column, w.num_rejected[request]);
      kept += __popc(__ballot_sync(~0u, fate == Fate::kKept));
      rejected += __popc(__ballot_sync(~0u, fate == Fate::kRejected));
    }
    if (lane == 0) w.kept[request] = kept - before;
  }
  const int found = lane ? rejected : kept;
  if (lane < 2 && found)  // added where the counts lie: nobody waits for the old ones
    atomicAdd(reinterpret_cast<unsigned long long*>(w.counts + lane), found);
}

template <bool kLogging>
__global__ void __launch_bounds__(kThreads, kBlocksEach) move_rows(const AllLayersArgs a, const Cut cut, Fate wanted) {
  const Pool& p = a.pool;
  if (!kLogging && blockIdx.y == 0) {
    count_rows(a.window);
    return;
  }
  const int group = kLogging ? blockIdx.y : blockIdx.y - 1;
  const int layer = group * cut.layers + threadIdx.x / cut.threads, thread = threadIdx.x % cut.threads;
  if (layer >= p.num_layers) return;
  const int64_t layer_offset = p.layer_offsets[layer];
  const int lane = threadIdx.x % 32, row = blockIdx.x * cut.rows + lane;
  const bool has_row = lane < cut.rows && row < a.window.num_rows;
  const int64_t slot = has_row ? a.window.slots[row] : -1;
  bool moves = slot >= 0 && slot < cut.end_slot;
  if constexpr (!kLogging) {
    const int request = cut.width.of(row);
    const int32_t rejected = has_row ? a.window.num_rejected[request] : 0;
    moves &= a.window.of(slot, row - request * a.window.width, rejected) == wanted;
  }
  unsigned left = __ballot_sync(~0u, moves);

  const int block = cut.block_size.of(slot), block_of_row = cut.block_size.of(row);
  const int64_t in_pool = layer_offset + block * p.block_stride +
                          (static_cast<int>(slot) - block * p.block_size) * p.token_stride;
  const int64_t in_rows = layer * a.rows.layer_stride + block_of_row * a.rows.block_stride +
                          (row - block_of_row * p.block_size) * a.rows.token_stride;
  const int64_t length = (p.num_heads - 1) * p.head_stride + p.bytes;
  for (; left; left &= left - 1) {
    const int64_t offset = __shfl_sync(~0u, in_pool, __ffs(left) - 1);
    char* mini = a.rows.data + __shfl_sync(~0u, in_rows, __ffs(left) - 1);
    if (offset < 0 || offset + length > p.size) continue;
    const Strided pool_row{p.data + offset, p.head_stride}, mini_row{mini, a.rows.head_stride};
    copy_heads(kLogging ? mini_row : pool_row, kLogging ? pool_row : mini_row, p.num_heads, cut.head_bytes, thread,
               cut.threads);
  }
}

// As many threads a row as have their loads under way at once; one row a block as long as that gives few blocks.
template <bool kLogging>
void launch(AllLayersArgs a, Fate wanted, void* stream, const char* name) {
  Pool& p = a.pool;
  if (a.window.num_rows == 0) return;
  const int64_t end_slot = (p.size / p.block_stride + 1) * p.block_size;
  if (p.head_stride == p.bytes && a.rows.head_stride == p.bytes) {  // heads lie side by side: one piece
    p.bytes *= p.num_heads;
    p.num_heads = 1;
  }
  Cut cut{32, 1, 1, end_slot, Divisor(p.block_size), Divisor(p.bytes), Divisor(a.window.width)};
  while (cut.threads < kThreads && cut.threads * kInFlight * 16 < p.num_heads * p.bytes) cut.threads *= 2;
  cut.layers = kThreads / cut.threads;
  const int groups = (p.num_layers + cut.layers - 1) / cut.layers;
  while (cut.rows < kMostRows && a.window.num_rows / cut.rows * groups > kManyBlocks) cut.rows *= 2;
  const dim3 grid((a.window.num_rows + cut.rows - 1) / cut.rows, groups + (kLogging ? 0 : 1));
  move_rows<kLogging><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, cut, wanted);
  check_launch(name);
}

}  // namespace

void log_all_layers(const AllLayersArgs& a, void* stream) { launch<true>(a, Fate::kKept, stream, "log_all_layers"); }

void restore_all_layers(const AllLayersArgs& a, void* stream) {
  launch<false>(a, Fate::kRejected, stream, "restore_all_layers");
}

void commit_all_layers(const AllLayersArgs& a, void* stream) {
  launch<false>(a, Fate::kKept, stream, "commit_all_layers");
}

}  // namespace nwor::cuda
