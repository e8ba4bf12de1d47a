// SPDX-License-Identifier: Apache-2.0
// The tensors of the operators of one layer, to their argument structs.
#pragma once
#include "checks.h"

namespace nwor {

inline Element check_element(const Tensor& key) {
  switch (key.scalar_type()) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "key must be float32, float16 or bfloat16, got ",
                      torch::headeronly::toString(key.scalar_type()));
  }
}

inline CacheDtype check_kv_cache_dtype(const std::string& kv_cache_dtype) {
  if (kv_cache_dtype == "auto") return CacheDtype::kSame;
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return CacheDtype::kE4M3;
  if (kv_cache_dtype == "fp8_e5m2") return CacheDtype::kE5M2;
  STD_TORCH_CHECK(false, "kv_cache_dtype must be 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2', got '", kv_cache_dtype, "'");
}

// The dtype that holds `cache_dtype` bytes of `key`: its own, or uint8.
inline void check_holds(const Tensor& t, const char* name, const Tensor& key, CacheDtype cache_dtype) {
  if (cache_dtype == CacheDtype::kSame) {
    STD_TORCH_CHECK(t.scalar_type() == key.scalar_type(), name, " must have the dtype of key under kv_cache_dtype 'auto', ",
                    torch::headeronly::toString(key.scalar_type()), ", got ", torch::headeronly::toString(t.scalar_type()));
  } else {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte, name,
                    " must be uint8 under an fp8 kv_cache_dtype (use .view(torch.uint8)), got ",
                    torch::headeronly::toString(t.scalar_type()));
  }
}

inline Scale check_scale(const OptionalTensor& scale, const char* name, const Tensor& key, int64_t num_tokens) {
  if (!scale) return {nullptr, 0, 0};
  check_dtype(*scale, name, ScalarType::Float);
  check_same_device(*scale, name, key, "key");
  const float* data = static_cast<const float*>(scale->data_ptr());
  if (scale->numel() == 1) return {data, 0, 0};
  const char* advice = " must hold one number, or be [tokens, 1] or [1, num_heads] (state it with unsqueeze), got ";
  STD_TORCH_CHECK(scale->dim() == 2, name, advice, shape_of(*scale));
  if (scale->size(1) == 1) {
    check_at_least(*scale, name, num_tokens, "tokens of slot_mapping");
    return {data, scale->stride(0), 0};
  }
  STD_TORCH_CHECK(scale->size(0) == 1 && scale->size(1) == key.size(1), name, advice, shape_of(*scale), " with ",
                  key.size(1), " heads");
  return {data, 0, scale->stride(1)};
}

// Values beside their keys.
inline void check_alike(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  check_same_shape(t, name, other, other_name);
  check_dtype(t, name, other.scalar_type());
  check_same_device(t, name, other, other_name);
}

inline Vectors check_vectors(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
                             const std::string& kv_cache_dtype, const OptionalTensor& k_scale,
                             const OptionalTensor& v_scale) {
  Vectors v;
  v.element = check_element(key);
  v.cache_dtype = check_kv_cache_dtype(kv_cache_dtype);
  v.key = check_rows(key, "key", false);
  v.value = check_rows(value, "value", false);
  check_alike(value, "value", key, "key");
  check_dim(slot_mapping, "slot_mapping", 1, "[tokens]");
  v.num_tokens = slot_mapping.size(0);
  check_at_least(key, "key", v.num_tokens, "tokens of slot_mapping");
  v.k_scale = check_scale(k_scale, "k_scale", key, v.num_tokens);
  v.v_scale = check_scale(v_scale, "v_scale", key, v.num_tokens);
  STD_TORCH_CHECK(key.size(1) > 0 && key.size(2) > 0, "key must have at least one head and one element, got ", shape_of(key));
  v.num_heads = static_cast<int>(key.size(1));
  v.head_size = static_cast<int>(key.size(2));
  v.vector_bytes = v.head_size * (v.cache_dtype == CacheDtype::kSame ? static_cast<int>(key.element_size()) : 1);
  return v;
}

// A key cache and its value cache, and rows that hold the same bytes.
inline void check_cache_pair(const Tensor& key_cache, const Tensor& value_cache, const Tensor& rows, const char* rows_name) {
  check_same_shape(value_cache, "value_cache", key_cache, "key_cache");
  check_dtype(value_cache, "value_cache", key_cache.scalar_type());
  check_same_device(key_cache, "key_cache", rows, rows_name);
  check_same_device(value_cache, "value_cache", rows, rows_name);
  check_same_vectors(key_cache, "key_cache", rows, rows_name);
}

inline const bool* check_accepted_mask(const Tensor& mask, int64_t num_tokens, const Tensor& like, const char* like_name) {
  const bool* data = check_vector<bool>(mask, "accepted_mask", ScalarType::Bool, like, like_name);
  check_length(mask, "accepted_mask", num_tokens, "tokens of slot_mapping");
  return data;
}

inline StageArgs check_stage(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
                             const Tensor& staging_key, const Tensor& staging_value, const Tensor& staging_slots,
                             const Tensor& staging_metadata, const std::string& kv_cache_dtype,
                             const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  StageArgs a;
  a.tokens = check_vectors(key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale);
  a.slot_mapping = check_vector<int64_t>(slot_mapping, "slot_mapping", ScalarType::Long, key, "key");
  a.staging_key = check_rows(staging_key, "staging_key", true);
  a.staging_value = check_rows(staging_value, "staging_value", true);
  check_holds(staging_key, "staging_key", key, a.tokens.cache_dtype);
  check_holds(staging_value, "staging_value", key, a.tokens.cache_dtype);
  check_same_device(staging_key, "staging_key", key, "key");
  check_same_device(staging_value, "staging_value", key, "key");
  check_same_vectors(staging_key, "staging_key", key, "key");
  check_same_shape(staging_value, "staging_value", staging_key, "staging_key");
  a.capacity = staging_key.size(0);
  a.staging_slots = check_vector<int64_t>(staging_slots, "staging_slots", ScalarType::Long, key, "key");
  check_length(staging_slots, "staging_slots", a.capacity, "rows of staging_key");
  a.metadata = check_vector<int32_t>(staging_metadata, "staging_metadata", ScalarType::Int, key, "key");
  check_length(staging_metadata, "staging_metadata", 2, "counters [staged_count, error_flag]");
  return a;
}

inline CommitStagedArgs check_commit_staged(const Tensor& staging_key, const Tensor& staging_value,
                                            const Tensor& staging_slots, const Tensor& staging_metadata,
                                            const Tensor& key_cache, const Tensor& value_cache,
                                            const Tensor& accepted_len) {
  CommitStagedArgs a;
  a.staging_key = check_rows(staging_key, "staging_key", false);
  a.staging_value = check_rows(staging_value, "staging_value", false);
  check_alike(staging_value, "staging_value", staging_key, "staging_key");
  a.capacity = staging_key.size(0);
  a.staging_slots = check_vector<int64_t>(staging_slots, "staging_slots", ScalarType::Long, staging_key, "staging_key");
  check_length(staging_slots, "staging_slots", a.capacity, "rows of staging_key");
  a.metadata = check_vector<int32_t>(staging_metadata, "staging_metadata", ScalarType::Int, staging_key, "staging_key");
  check_length(staging_metadata, "staging_metadata", 2, "counters [staged_count, error_flag]");
  a.key_cache = check_cache(key_cache, "key_cache", true);
  a.value_cache = check_cache(value_cache, "value_cache", true);
  check_cache_pair(key_cache, value_cache, staging_key, "staging_key");
  check_dtype(key_cache, "key_cache", staging_key.scalar_type());
  check_same_device(accepted_len, "accepted_len", staging_key, "staging_key");
  STD_TORCH_CHECK(accepted_len.numel() == 1 && (accepted_len.scalar_type() == ScalarType::Int ||
                                                accepted_len.scalar_type() == ScalarType::Long),
                  "accepted_len must be one int32 or int64 on the device, got ", shape_of(accepted_len), " ",
                  torch::headeronly::toString(accepted_len.scalar_type()));
  a.accepted_len = accepted_len.data_ptr();
  a.accepted_len_is_64bit = accepted_len.scalar_type() == ScalarType::Long;
  a.num_heads = static_cast<int>(staging_key.size(1));
  a.vector_bytes = static_cast<int>(staging_key.size(2) * staging_key.element_size());
  return a;
}

inline CommitDraftArgs check_commit_draft(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                          const Tensor& value_cache, const Tensor& slot_mapping,
                                          const Tensor& accepted_mask, const std::string& kv_cache_dtype,
                                          const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  CommitDraftArgs a;
  a.tokens = check_vectors(key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale);
  a.slot_mapping = check_vector<int64_t>(slot_mapping, "slot_mapping", ScalarType::Long, key, "key");
  a.accepted_mask = check_accepted_mask(accepted_mask, a.tokens.num_tokens, key, "key");
  a.key_cache = check_cache(key_cache, "key_cache", true);
  a.value_cache = check_cache(value_cache, "value_cache", true);
  check_cache_pair(key_cache, value_cache, key, "key");
  check_holds(key_cache, "key_cache", key, a.tokens.cache_dtype);
  return a;
}

inline SlotLogArgs check_slot_log(const Tensor& log_key, const Tensor& log_value, const Tensor& slot_mapping,
                                  const Tensor* accepted_mask, const Tensor& key_cache, const Tensor& value_cache) {
  const bool logging = accepted_mask == nullptr;
  SlotLogArgs a;
  a.log_key = check_rows(log_key, "log_key", logging);
  a.log_value = check_rows(log_value, "log_value", logging);
  check_alike(log_value, "log_value", log_key, "log_key");
  a.key_cache = check_cache(key_cache, "key_cache", !logging);
  a.value_cache = check_cache(value_cache, "value_cache", !logging);
  check_cache_pair(key_cache, value_cache, log_key, "log_key");
  STD_TORCH_CHECK(key_cache.scalar_type() == log_key.scalar_type(),
                  "log_key must have the dtype of key_cache (the log holds raw bytes, never values), got ",
                  torch::headeronly::toString(log_key.scalar_type()), " for ",
                  torch::headeronly::toString(key_cache.scalar_type()));
  a.slot_mapping = check_vector<int64_t>(slot_mapping, "slot_mapping", ScalarType::Long, log_key, "log_key");
  a.num_tokens = slot_mapping.size(0);
  check_at_least(log_key, "log_key", a.num_tokens, "tokens of slot_mapping");
  a.accepted_mask = logging ? nullptr : check_accepted_mask(*accepted_mask, a.num_tokens, log_key, "log_key");
  a.num_heads = static_cast<int>(log_key.size(1));
  a.vector_bytes = static_cast<int>(log_key.size(2) * log_key.element_size());
  return a;
}

}  // namespace nwor
