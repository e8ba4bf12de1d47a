// SPDX-License-Identifier: Apache-2.0
// Where a vector lies. Every address is a byte address made from strides; nothing is read off a shape.
// Plain structs without torch, so that the CPU loops and the CUDA kernels share them.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define NWOR_HD __host__ __device__
#else
#define NWOR_HD
#endif

namespace nwor {

enum class Element : int { kFloat, kHalf, kBFloat16 };    // dtype of key and value
enum class CacheDtype : int { kSame, kE4M3, kE5M2 };      // how the cache holds them

// Rows [T, num_heads, head_size]: key, value, staging, log.
struct Rows {
  char* data;
  int64_t token_stride, head_stride;
  NWOR_HD char* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// One layer's keys or values [num_blocks, block_size, num_heads, head_size]: NHD, HND and views differ in strides only.
struct Cache {
  char* data;
  int64_t block_stride, token_stride, head_stride;
  int64_t num_blocks, block_size;
  NWOR_HD bool holds(int64_t slot) const { return slot >= 0 && slot < num_blocks * block_size; }
  NWOR_HD char* at(int64_t slot, int64_t head) const {
    return data + slot / block_size * block_stride + slot % block_size * token_stride + head * head_stride;
  }
};

// fp32 scales: none (1.0), one for all, one a token or one a head; a broadcast dimension has stride 0.
struct Scale {
  const float* data;
  int64_t token_stride, head_stride;
  NWOR_HD float at(int64_t token, int64_t head) const {
    return data ? data[token * token_stride + head * head_stride] : 1.0f;
  }
};

// What one token brings: the vectors, and how the cache stores them.
struct Vectors {
  Rows key, value;
  Scale k_scale, v_scale;
  Element element;
  CacheDtype cache_dtype;
  int num_heads, head_size;
  int64_t num_tokens;
  int vector_bytes;  // of one head's vector in the cache
};

// All layers at once. A slot of one layer and head is `bytes` bytes: its key, then its value.
struct Pool {
  char* data;
  int64_t size;
  const int64_t* layer_offsets;  // [num_layers]
  int64_t block_stride, head_stride, token_stride;
  int num_layers, num_heads, block_size, bytes;
  NWOR_HD int64_t offset(int64_t layer, int64_t slot, int64_t head) const {
    return layer_offsets[layer] + slot / block_size * block_stride + head * head_stride + slot % block_size * token_stride;
  }
};

// The mini-cache [L, B, H, block_size, bytes] whose row m stands beside slot `slots[m]` of the pool.
struct MiniCache {
  char* data;
  int64_t layer_stride, block_stride, head_stride, token_stride;
  int block_size;
  NWOR_HD int64_t offset(int64_t layer, int64_t row, int64_t head) const {
    return layer * layer_stride + row / block_size * block_stride + head * head_stride + row % block_size * token_stride;
  }
};

// vLLM's CPU caches scatter the elements of a slot over its (block, head) chunk: element e of in-block offset n is
// element index[n * num_elements + e] of the chunk. No index: the bytes of a slot lie in a row.
struct Packing {
  const int32_t* index;
  int num_elements, element_size;
};

constexpr int kCounts = 6;

// What becomes of a held row, decided on the device from what vLLM's sampler left there.
enum class RowDecision : int { kSkipped, kKept, kRejected };

// The drafts of a step: column d is draft d of its request, and row request * width + d of the mini-cache; or, where
// this is a log that outlives the step, row request * entries + slot % entries.
struct Window {
  const int64_t* slots;         // [num_requests, width], negative: no row
  const int32_t* num_drafts;    // [num_requests]
  const int32_t* num_rejected;  // [num_requests]
  int32_t* kept;                // [num_requests]
  int64_t* counts;              // [0] kept and [1] rejected rows; [5] 0 between launches
  int64_t* published;           // null, or [num_published + num_requests] on the host, which a GPU writes too
  int64_t* all_counts;          // [num_published], those of other windows among them
  int num_published;
  int64_t* logged;              // [num_requests, entries], the slot whose bytes a row holds as the pages do, or null
  int64_t num_rows;
  int num_requests, width, entries;  // entries: a power of two
  NWOR_HD int64_t row_of(int64_t row, int request, int64_t slot) const {
    return logged ? int64_t{request} * entries + (slot & (entries - 1)) : row;
  }
  // Two int32 in memory, kept first, on any machine that CUDA or vLLM's CPU build runs on: little-endian.
  NWOR_HD static int64_t kept_and_held(int32_t kept, int32_t held) {
    return static_cast<int64_t>(static_cast<uint32_t>(kept) | static_cast<uint64_t>(static_cast<uint32_t>(held)) << 32);
  }
  // vLLM keeps the rows [0, query_len - num_rejected) of a query, of which the drafts are the last.
  NWOR_HD static bool keeps(int draft, int32_t drafts, int32_t rejected) { return draft < drafts - rejected; }
  NWOR_HD static RowDecision decide(int64_t slot, int draft, int32_t drafts, int32_t rejected) {
    if (slot < 0) return RowDecision::kSkipped;
    return keeps(draft, drafts, rejected) ? RowDecision::kKept : RowDecision::kRejected;
  }
};

}  // namespace nwor
