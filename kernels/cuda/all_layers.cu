// SPDX-License-Identifier: Apache-2.0
// Twins of kernels/cpu/all_layers.cpp in one launch each: thread block (m, l) moves row m of layer l, all its heads.
// A block whose row is not its own to move leaves before it loads any of it. Slots beyond the pool are skipped.
#include "../ops.h"
#include "launch.h"

namespace nwor::cuda {
namespace {

__device__ bool inside(const Pool& p, int64_t layer, int64_t slot) {
  if (slot / p.block_size > p.size / p.block_stride) return false;  // before a product that could overflow
  const int64_t first = p.offset(layer, slot, 0);
  return first >= 0 && p.offset(layer, slot, p.num_heads - 1) + p.bytes <= p.size;
}

__device__ void copy_row(const AllLayersArgs& a, int64_t layer, int64_t m, bool into_pool) {
  const int64_t slot = a.verdict.slots[m];
  if (!inside(a.pool, layer, slot)) return;
  const Span in_pool{a.pool.data + a.pool.offset(layer, slot, 0), a.pool.head_stride};
  const Span in_rows{a.rows.data + a.rows.offset(layer, m, 0), a.rows.head_stride};
  copy_span(into_pool ? in_pool : in_rows, into_pool ? in_rows : in_pool, a.pool.num_heads, a.pool.bytes);
}

// Block (0, 0) alone counts every row once, so that neither layers nor heads nor the launch shape enter the counts.
__device__ void count_rows(const Verdict& v) {
  int64_t kept = 0, rejected = 0;
  for (int64_t first = 0; first < v.num_rows; first += blockDim.x) {
    const int64_t m = first + threadIdx.x;
    const Fate fate = m < v.num_rows ? v.of(m) : Fate::kSkipped;
    kept += __syncthreads_count(fate == Fate::kKept);
    rejected += __syncthreads_count(fate == Fate::kRejected);
  }
  if (threadIdx.x == 0) {
    v.counts[0] += kept;
    v.counts[1] += rejected;
  }
}

__global__ void log_rows(const AllLayersArgs a) {
  if (a.verdict.slots[blockIdx.x] >= 0) copy_row(a, blockIdx.y, blockIdx.x, false);
}

__global__ void write_back_rows(const AllLayersArgs a, Fate wanted) {
  if (a.verdict.of(blockIdx.x) == wanted) copy_row(a, blockIdx.y, blockIdx.x, true);
  if (blockIdx.x == 0 && blockIdx.y == 0) count_rows(a.verdict);
}

dim3 grid_of(const AllLayersArgs& a) { return dim3(a.verdict.num_rows, a.pool.num_layers); }

int threads_of(const AllLayersArgs& a) { return threads_for(int64_t{a.pool.num_heads} * a.pool.bytes); }

void write_back(const AllLayersArgs& a, Fate wanted, void* stream, const char* name) {
  if (a.verdict.num_rows == 0) return;
  write_back_rows<<<grid_of(a), threads_of(a), 0, static_cast<cudaStream_t>(stream)>>>(a, wanted);
  check_launch(name);
}

}  // namespace

void log_all_layers(const AllLayersArgs& a, void* stream) {
  if (a.verdict.num_rows == 0) return;
  log_rows<<<grid_of(a), threads_of(a), 0, static_cast<cudaStream_t>(stream)>>>(a);
  check_launch("log_all_layers");
}

void restore_all_layers(const AllLayersArgs& a, void* stream) {
  write_back(a, Fate::kRejected, stream, "restore_all_layers");
}

void commit_all_layers(const AllLayersArgs& a, void* stream) { write_back(a, Fate::kKept, stream, "commit_all_layers"); }

}  // namespace nwor::cuda
