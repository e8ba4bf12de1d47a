// SPDX-License-Identifier: Apache-2.0
// Twin of kernels/cpu/open_window.cpp in one launch, a thread for each row of the window and of the batch.
#include <algorithm>

#include "../ops.h"
#include "launch.h"

namespace nwor::cuda {
namespace {

constexpr int kThreads = 256;

// The slot of one row of the window.
__device__ int64_t slot_of(const OpenArgs& a, int request, int column) {
  if (request >= a.num_requests) return -1;
  const Hold hold = hold_of(a, request);
  return column < hold.drafts ? max(a.slot_mapping[hold.first + column], int64_t{-1}) : -1;
}

// The request whose query `token` is in: the last one that starts no later.
__device__ int request_of(const OpenArgs& a, int64_t token) {
  int low = -1, high = a.num_requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (a.query_start_loc[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

// Where one row of the batch is written: staging or the pages.
__device__ void route(const OpenArgs& a, int64_t token) {
  int64_t staging_row = -1, page_slot = -1;
  if (token < a.num_tokens && token < a.query_start_loc[a.num_requests]) {
    page_slot = a.slot_mapping[token];
    const int request = request_of(a, token);
    const Hold hold = request < 0 ? Hold{} : hold_of(a, request);
    const int64_t draft = token - hold.first;
    if (0 <= draft && draft < hold.drafts) {
      staging_row = int64_t{request} * a.width + draft;
      page_slot = -1;
    }
  }
  a.staging_rows[token] = staging_row;
  a.page_slots[token] = page_slot;
}

// The drafts of each request, and of all of them.
__device__ void count(const OpenArgs& a) {
  int windows = 0, drafts = 0, fallbacks = 0;
  for (int request = threadIdx.x; request < a.max_requests; request += kThreads) {
    const Hold hold = request < a.num_requests ? hold_of(a, request) : Hold{};
    a.num_drafts[request] = static_cast<int32_t>(hold.drafts);
    windows += hold.drafts > 0;
    drafts += static_cast<int>(hold.drafts);
    fallbacks += hold.falls_back;
  }
  for (int lane = 16; lane; lane /= 2) {
    windows += __shfl_xor_sync(~0u, windows, lane);
    drafts += __shfl_xor_sync(~0u, drafts, lane);
    fallbacks += __shfl_xor_sync(~0u, fallbacks, lane);
  }
  const int lane = threadIdx.x % 32, found = lane == 0 ? windows : lane == 1 ? drafts : fallbacks;
  if (lane < 3 && found) atomicAdd(reinterpret_cast<unsigned long long*>(a.counts + 2 + lane), found);
}

__global__ void __launch_bounds__(kThreads) open_window_kernel(const OpenArgs a, const Divisor width) {
  if (blockIdx.x == 0) return count(a);
  const int64_t index = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
  if (index < int64_t{a.max_requests} * a.width) {
    const int request = width.of(static_cast<uint32_t>(index));
    a.slots[index] = slot_of(a, request, static_cast<int>(index) - request * a.width);
  }
  if (index < a.max_tokens) route(a, index);
}

}  // namespace

void open_window(const OpenArgs& a, void* stream) {
  const int64_t threads = std::max(int64_t{a.max_requests} * a.width, a.max_tokens);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads + 1);
  open_window_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, Divisor(std::max(a.width, 1)));
  check_launch("open_window");
}

}  // namespace nwor::cuda
