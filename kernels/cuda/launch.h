// SPDX-License-Identifier: Apache-2.0
// Copies in the widest pieces that both sides' alignment allows, division without dividing, and the launch check.
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

// Division of 0 <= n < 2^31 by a number known on the host, as a multiplication (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t divisor, magic, shift;
  explicit Divisor(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ int of(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

// One vector a head, one every `stride` bytes.
struct Strided {
  char* data;
  int64_t stride;
};

constexpr int kInFlight = 4;  // loads that a thread has under way before its first store

template <class Word>
__device__ void copy_words(Strided to, Strided from, int heads, const Divisor& bytes, int thread, int threads) {
  const int step = threads * static_cast<int>(sizeof(Word)), end = heads * bytes.divisor;
  for (int first = thread * static_cast<int>(sizeof(Word)); first < end; first += kInFlight * step) {
    Word held[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int at = first + u * step, head = bytes.of(at);
      const char* source = from.data + head * from.stride + (at - head * bytes.divisor);
      if (at < end) held[u] = *reinterpret_cast<const Word*>(source);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int at = first + u * step, head = bytes.of(at);
      char* target = to.data + head * to.stride + (at - head * bytes.divisor);
      if (at < end) *reinterpret_cast<Word*>(target) = held[u];
    }
  }
}

// Out of the way of the path that is taken nearly always.
static __device__ __noinline__ void copy_unaligned(Strided to, Strided from, int heads, Divisor bytes, int thread,
                                                   int threads, bool by_four) {
  if (by_four) copy_words<uint32_t>(to, from, heads, bytes, thread, threads);
  else copy_words<uint8_t>(to, from, heads, bytes, thread, threads);
}

// The vectors of all heads, by `threads` threads, in the widest pieces that both sides' alignment allows.
__device__ inline void copy_heads(Strided to, Strided from, int heads, const Divisor& bytes, int thread, int threads) {
  const int64_t strides = heads > 1 ? to.stride | from.stride : 0;
  const auto alignment = static_cast<unsigned>(reinterpret_cast<uintptr_t>(to.data) |
                                               reinterpret_cast<uintptr_t>(from.data) | strides | bytes.divisor);
  if (alignment % 16 == 0) copy_words<uint4>(to, from, heads, bytes, thread, threads);
  else copy_unaligned(to, from, heads, bytes, thread, threads, alignment % 4 == 0);
}

// Threads for `bytes` bytes of one row: whole warps, 16 bytes a thread, 4 pieces in flight each.
inline int threads_for(int64_t bytes) {
  int threads = 32;
  while (threads < 256 && threads * 16 < bytes) threads *= 2;
  return threads;
}

}  // namespace nwor::cuda
