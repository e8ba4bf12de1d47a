// SPDX-License-Identifier: Apache-2.0
// One layer at a time, one loop an operator. kernels/cuda/per_layer.cu follows function for function.
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "../ops.h"
#include "../quant.h"

namespace nwor::cpu {
namespace {

void check_slots(const int64_t* slots, int64_t count, const Cache& cache, const char* name) {
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(slots[i] < 0 || cache.holds(slots[i]), name, "[", i, "] is ", slots[i], " but the cache ends at slot ",
                    cache.num_blocks * cache.block_size - 1, "; pass this layer's own slot mapping");
}

template <class T, CacheDtype format>
void quantise(const char* source, float scale, int head_size, char* destination) {
  const T* values = reinterpret_cast<const T*>(source);
  for (int d = 0; d < head_size; ++d)
    destination[d] = static_cast<char>(to_fp8<format>(static_cast<float>(values[d]), scale));
}

// One head's vector, from key or value to the bytes that the cache holds.
void write_vector(const Vectors& v, const char* source, float scale, char* destination) {
  if (v.cache_dtype == CacheDtype::kSame) {
    std::memcpy(destination, source, v.vector_bytes);
    return;
  }
  with_element(v.element, [&](auto element) {
    using T = decltype(element);
    v.cache_dtype == CacheDtype::kE4M3 ? quantise<T, CacheDtype::kE4M3>(source, scale, v.head_size, destination)
                                       : quantise<T, CacheDtype::kE5M2>(source, scale, v.head_size, destination);
  });
}

}  // namespace

void stage_kv_cache(const StageArgs& a) {
  const Vectors& v = a.tokens;
  int32_t &staged_count = a.metadata[0], &error_flag = a.metadata[1];
  STD_TORCH_CHECK(staged_count >= 0 && staged_count <= a.capacity, "staging_metadata says that ", staged_count,
                  " rows are staged but staging_key holds ", a.capacity, "; zero it when a window begins");
  const int64_t rows = std::count_if(a.slot_mapping, a.slot_mapping + v.num_tokens, [](int64_t s) { return s >= 0; });
  if (error_flag || staged_count + rows > a.capacity) {
    error_flag = 1;
    return;
  }
  for (int64_t t = 0; t < v.num_tokens; ++t) {
    if (a.slot_mapping[t] < 0) continue;
    for (int h = 0; h < v.num_heads; ++h) {
      write_vector(v, v.key.at(t, h), v.k_scale.at(t, h), a.staging_key.at(staged_count, h));
      write_vector(v, v.value.at(t, h), v.v_scale.at(t, h), a.staging_value.at(staged_count, h));
    }
    a.staging_slots[staged_count] = a.slot_mapping[t];
    ++staged_count;
  }
}

void commit_staged_kv_cache(const CommitStagedArgs& a) {
  const int32_t staged_count = a.metadata[0], error_flag = a.metadata[1];
  if (error_flag) return;
  const int64_t accepted = a.accepted_len_is_64bit ? *static_cast<const int64_t*>(a.accepted_len)
                                                   : *static_cast<const int32_t*>(a.accepted_len);
  STD_TORCH_CHECK(accepted >= 0 && accepted <= staged_count && staged_count <= a.capacity, "accepted_len is ", accepted,
                  " but ", staged_count, " rows are staged (room for ", a.capacity,
                  "); stage this layer before its commit");
  check_slots(a.staging_slots, accepted, a.key_cache, "staging_slots");
  for (int64_t row = 0; row < accepted; ++row) {
    const int64_t slot = a.staging_slots[row];
    if (slot < 0) continue;
    for (int h = 0; h < a.num_heads; ++h) {
      std::memcpy(a.key_cache.at(slot, h), a.staging_key.at(row, h), a.vector_bytes);
      std::memcpy(a.value_cache.at(slot, h), a.staging_value.at(row, h), a.vector_bytes);
    }
  }
}

void commit_draft_layer(const CommitDraftArgs& a) {
  const Vectors& v = a.tokens;
  check_slots(a.slot_mapping, v.num_tokens, a.key_cache, "slot_mapping");
  for (int64_t t = 0; t < v.num_tokens; ++t) {
    const int64_t slot = a.slot_mapping[t];
    if (slot < 0 || !a.accepted_mask[t]) continue;
    for (int h = 0; h < v.num_heads; ++h) {
      write_vector(v, v.key.at(t, h), v.k_scale.at(t, h), a.key_cache.at(slot, h));
      write_vector(v, v.value.at(t, h), v.v_scale.at(t, h), a.value_cache.at(slot, h));
    }
  }
}

void log_cache_slots(const SlotLogArgs& a) {
  check_slots(a.slot_mapping, a.num_tokens, a.key_cache, "slot_mapping");
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t slot = a.slot_mapping[t];
    if (slot < 0) continue;
    for (int h = 0; h < a.num_heads; ++h) {
      std::memcpy(a.log_key.at(t, h), a.key_cache.at(slot, h), a.vector_bytes);
      std::memcpy(a.log_value.at(t, h), a.value_cache.at(slot, h), a.vector_bytes);
    }
  }
}

void restore_rejected_drafts(const SlotLogArgs& a) {
  check_slots(a.slot_mapping, a.num_tokens, a.key_cache, "slot_mapping");
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t slot = a.slot_mapping[t];
    if (slot < 0 || a.accepted_mask[t]) continue;
    for (int h = 0; h < a.num_heads; ++h) {
      std::memcpy(a.key_cache.at(slot, h), a.log_key.at(t, h), a.vector_bytes);
      std::memcpy(a.value_cache.at(slot, h), a.log_value.at(t, h), a.vector_bytes);
    }
  }
}

}  // namespace nwor::cpu
