// SPDX-License-Identifier: Apache-2.0
// Copies by one thread block, in the widest pieces that both sides' alignment allows, and the launch check.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nwor::cuda {

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(kernel) + " was not launched: " + cudaGetErrorString(error));
}

// `count` vectors of `bytes` bytes, one every `stride` bytes.
struct Span {
  char* data;
  int64_t stride;
};

template <class Word>
__device__ void copy_words(Span to, Span from, int count, int bytes) {
  constexpr int kInFlight = 4;  // loads under way before the first store
  const int words = bytes / static_cast<int>(sizeof(Word)), total = count * words;
  for (int first = threadIdx.x; first < total; first += kInFlight * blockDim.x) {
    Word held[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * blockDim.x;
      if (i < total) held[u] = reinterpret_cast<const Word*>(from.data + i / words * from.stride)[i % words];
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * blockDim.x;
      if (i < total) reinterpret_cast<Word*>(to.data + i / words * to.stride)[i % words] = held[u];
    }
  }
}

__device__ inline void copy_span(Span to, Span from, int count, int bytes) {
  if (to.stride == bytes && from.stride == bytes) {  // heads lie side by side: one piece
    bytes *= count;
    count = 1;
  }
  const int64_t strides = count > 1 ? to.stride | from.stride : 0;
  const auto alignment = reinterpret_cast<uintptr_t>(to.data) | reinterpret_cast<uintptr_t>(from.data) |
                         static_cast<uintptr_t>(strides) | static_cast<uintptr_t>(bytes);
  if (alignment % 16 == 0) copy_words<uint4>(to, from, count, bytes);
  else if (alignment % 4 == 0) copy_words<uint32_t>(to, from, count, bytes);
  else copy_words<uint8_t>(to, from, count, bytes);
}

// Threads for `bytes` bytes of one row: whole warps, 16 bytes a thread, 4 pieces in flight each.
inline int threads_for(int64_t bytes) {
  int threads = 32;
  while (threads < 256 && threads * 16 < bytes) threads *= 2;
  return threads;
}

}  // namespace nwor::cuda
