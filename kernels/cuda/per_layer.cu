// SPDX-License-Identifier: Apache-2.0
// Twins of kernels/cpu/per_layer.cpp: one thread block a token. What the CPU refuses after a look at the data
// (a slot beyond the cache, more rows accepted than staged) is skipped here, since the host must not wait for it.
#include "../ops.h"
#include "../quant.h"
#include "launch.h"

namespace nwor::cuda {
namespace {

__device__ Strided heads_of(const Rows& rows, int64_t token) { return {rows.at(token, 0), rows.head_stride}; }

__device__ Strided heads_of(const Cache& cache, int64_t slot) { return {cache.at(slot, 0), cache.head_stride}; }

__device__ void copy_block(Strided to, Strided from, int heads, const Divisor& bytes) {
  copy_heads(to, from, heads, bytes, threadIdx.x, blockDim.x);
}

template <class T, CacheDtype format>
__device__ void quantise(const Vectors& v, const Rows& source, const Scale& scale, int64_t token, Strided destination) {
  const int total = v.num_heads * v.head_size;
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int head = i / v.head_size, d = i % v.head_size;
    const float value = static_cast<float>(reinterpret_cast<const T*>(source.at(token, head))[d]);
    destination.data[head * destination.stride + d] = static_cast<char>(to_fp8<format>(value, scale.at(token, head)));
  }
}

// One token's vectors of all heads, from key or value to the bytes that the cache holds.
__device__ void write_vectors(const Vectors& v, const Rows& source, const Scale& scale, int64_t token,
                              Strided destination, const Divisor& bytes) {
  if (v.cache_dtype == CacheDtype::kSame) {
    copy_block(destination, heads_of(source, token), v.num_heads, bytes);
    return;
  }
  with_element(v.element, [&](auto element) {
    using T = decltype(element);
    if (v.cache_dtype == CacheDtype::kE4M3) quantise<T, CacheDtype::kE4M3>(v, source, scale, token, destination);
    else quantise<T, CacheDtype::kE5M2>(v, source, scale, token, destination);
  });
}

// Rows of slot_mapping[begin, end) that are no padding. All threads of the block get the sum.
__device__ int count_rows(const int64_t* slot_mapping, int64_t begin, int64_t end) {
  int count = 0;
  for (int64_t first = begin; first < end; first += blockDim.x) {
    const int64_t t = first + threadIdx.x;
    count += __syncthreads_count(t < end && slot_mapping[t] >= 0);
  }
  return count;
}

__device__ bool fits(const StageArgs& a, int rows) {
  const int32_t staged_count = a.metadata[0], error_flag = a.metadata[1];
  return !error_flag && staged_count >= 0 && staged_count + rows <= a.capacity;
}

__global__ void stage_rows(const StageArgs a, const Divisor bytes) {
  const Vectors& v = a.tokens;
  const int64_t t = blockIdx.x;
  if (a.slot_mapping[t] < 0) return;
  const int rank = count_rows(a.slot_mapping, 0, t);
  if (!fits(a, rank + count_rows(a.slot_mapping, t, v.num_tokens))) return;
  const int64_t row = a.metadata[0] + rank;
  write_vectors(v, v.key, v.k_scale, t, heads_of(a.staging_key, row), bytes);
  write_vectors(v, v.value, v.v_scale, t, heads_of(a.staging_value, row), bytes);
  if (threadIdx.x == 0) a.staging_slots[row] = a.slot_mapping[t];
}

// A launch of its own: every block of stage_rows reads the counters first.
__global__ void advance_count(const StageArgs a) {
  const int rows = count_rows(a.slot_mapping, 0, a.tokens.num_tokens);
  if (threadIdx.x != 0) return;
  if (fits(a, rows)) a.metadata[0] += rows;
  else a.metadata[1] = 1;
}

__global__ void commit_staged_rows(const CommitStagedArgs a, const Divisor bytes) {
  const int64_t row = blockIdx.x;
  const int64_t accepted = a.accepted_len_is_64bit ? *static_cast<const int64_t*>(a.accepted_len)
                                                   : *static_cast<const int32_t*>(a.accepted_len);
  const int32_t staged_count = a.metadata[0], error_flag = a.metadata[1];
  if (error_flag || row >= accepted || row >= staged_count) return;
  const int64_t slot = a.staging_slots[row];
  if (!a.key_cache.holds(slot)) return;
  copy_block(heads_of(a.key_cache, slot), heads_of(a.staging_key, row), a.num_heads, bytes);
  copy_block(heads_of(a.value_cache, slot), heads_of(a.staging_value, row), a.num_heads, bytes);
}

__global__ void commit_draft_rows(const CommitDraftArgs a, const Divisor bytes) {
  const Vectors& v = a.tokens;
  const int64_t t = blockIdx.x, slot = a.slot_mapping[t];
  if (!a.accepted_mask[t] || !a.key_cache.holds(slot)) return;
  write_vectors(v, v.key, v.k_scale, t, heads_of(a.key_cache, slot), bytes);
  write_vectors(v, v.value, v.v_scale, t, heads_of(a.value_cache, slot), bytes);
}

__global__ void log_slots(const SlotLogArgs a, const Divisor bytes) {
  const int64_t t = blockIdx.x, slot = a.slot_mapping[t];
  if (!a.key_cache.holds(slot)) return;
  copy_block(heads_of(a.log_key, t), heads_of(a.key_cache, slot), a.num_heads, bytes);
  copy_block(heads_of(a.log_value, t), heads_of(a.value_cache, slot), a.num_heads, bytes);
}

__global__ void restore_slots(const SlotLogArgs a, const Divisor bytes) {
  const int64_t t = blockIdx.x, slot = a.slot_mapping[t];
  if (a.accepted_mask[t] || !a.key_cache.holds(slot)) return;
  copy_block(heads_of(a.key_cache, slot), heads_of(a.log_key, t), a.num_heads, bytes);
  copy_block(heads_of(a.value_cache, slot), heads_of(a.log_value, t), a.num_heads, bytes);
}

int threads_for_vectors(const Vectors& v) {
  const bool same = v.cache_dtype == CacheDtype::kSame;
  return threads_for(int64_t{v.num_heads} * v.head_size * (same ? v.vector_bytes / v.head_size : 4));
}

template <class Args>
void launch(void (*kernel)(Args, Divisor), const Args& a, int64_t blocks, int threads, int vector_bytes, void* stream,
            const char* name) {
  if (blocks == 0) return;
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(a, Divisor(vector_bytes));
  check_launch(name);
}

}  // namespace

void stage_kv_cache(const StageArgs& a, void* stream) {
  const Vectors& v = a.tokens;
  if (v.num_tokens == 0) return;
  launch(stage_rows, a, v.num_tokens, threads_for_vectors(v), v.vector_bytes, stream, "stage_kv_cache");
  advance_count<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(a);
  check_launch("stage_kv_cache");
}

void commit_staged_kv_cache(const CommitStagedArgs& a, void* stream) {
  const int threads = threads_for(int64_t{a.num_heads} * a.vector_bytes);
  launch(commit_staged_rows, a, a.capacity, threads, a.vector_bytes, stream, "commit_staged_kv_cache");
}

void commit_draft_layer(const CommitDraftArgs& a, void* stream) {
  const Vectors& v = a.tokens;
  launch(commit_draft_rows, a, v.num_tokens, threads_for_vectors(v), v.vector_bytes, stream, "commit_draft_layer");
}

void log_cache_slots(const SlotLogArgs& a, void* stream) {
  const int threads = threads_for(int64_t{a.num_heads} * a.vector_bytes);
  launch(log_slots, a, a.num_tokens, threads, a.vector_bytes, stream, "log_cache_slots");
}

void restore_rejected_drafts(const SlotLogArgs& a, void* stream) {
  const int threads = threads_for(int64_t{a.num_heads} * a.vector_bytes);
  launch(restore_slots, a, a.num_tokens, threads, a.vector_bytes, stream, "restore_rejected_drafts");
}

}  // namespace nwor::cuda
