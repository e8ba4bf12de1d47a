// SPDX-License-Identifier: Apache-2.0
// Tensors to argument structs. Each wrong input ends in a RuntimeError that names the tensor and says what to do,
// before anything is read or written. Nothing here looks at the contents of a tensor.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "ops.h"

namespace nwor {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline std::string shape_of(const Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t d = 0; d < t.dim(); ++d) out << (d ? ", " : "") << t.size(d);
  out << "]";
  return out.str();
}

inline void check_dim(const Tensor& t, const char* name, int64_t dim, const char* shape) {
  STD_TORCH_CHECK(t.dim() == dim, name, " must have shape ", shape, ", got ", shape_of(t));
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", torch::headeronly::toString(dtype), ", got ",
                  torch::headeronly::toString(t.scalar_type()), "; convert it once, outside the step");
}

inline void check_same_device(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  STD_TORCH_CHECK(t.is_cuda() == other.is_cuda() && t.is_cpu() == other.is_cpu() &&
                      t.get_device_index() == other.get_device_index(),
                  name, " must be on the device of ", other_name, "; move it there before the step");
}

inline void check_same_shape(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  bool same = t.dim() == other.dim();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == other.size(d);
  STD_TORCH_CHECK(same, name, " must have the shape of ", other_name, ", ", shape_of(other), ", got ", shape_of(t));
}

inline void check_last_dim_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.size(-1) <= 1 || t.stride(-1) == 1, name, " must be contiguous in its last dimension, got stride ",
                  t.stride(-1));
}

// A destination whose elements overlap (an expanded tensor) has no one value to hold.
inline void check_not_expanded(const Tensor& t, const char* name) {
  for (int64_t d = 0; d < t.dim(); ++d)
    STD_TORCH_CHECK(t.size(d) <= 1 || t.stride(d) > 0, name, " is written to and must not be expanded (dimension ", d,
                    " has stride ", t.stride(d), ")");
}

// A 1-D tensor without gaps, e.g. a slice of a persistent buffer: read through its own pointer, never copied.
template <class T>
T* check_vector(const Tensor& t, const char* name, ScalarType dtype, const Tensor& like, const char* like_name) {
  check_dim(t, name, 1, "[n]");
  check_dtype(t, name, dtype);
  check_same_device(t, name, like, like_name);
  STD_TORCH_CHECK(t.size(0) <= 1 || t.stride(0) == 1, name, " must be contiguous, got stride ", t.stride(0));
  return static_cast<T*>(t.data_ptr());
}

inline void check_length(const Tensor& t, const char* name, int64_t length, const char* of) {
  STD_TORCH_CHECK(t.size(0) == length, name, " must have one entry for each of the ", length, " ", of, ", got ",
                  t.size(0));
}

inline Rows check_rows(const Tensor& t, const char* name, bool written) {
  check_dim(t, name, 3, "[tokens, num_heads, head_size]");
  check_last_dim_contiguous(t, name);
  if (written) check_not_expanded(t, name);
  const int64_t bytes = static_cast<int64_t>(t.element_size());
  return {static_cast<char*>(t.data_ptr()), t.stride(0) * bytes, t.stride(1) * bytes};
}

inline Cache check_cache(const Tensor& t, const char* name, bool written) {
  check_dim(t, name, 4, "[num_blocks, block_size, num_heads, head_size] (HND and others by stride: use a transposed view)");
  check_last_dim_contiguous(t, name);
  if (written) check_not_expanded(t, name);
  const int64_t bytes = static_cast<int64_t>(t.element_size());
  return {static_cast<char*>(t.data_ptr()),
          t.stride(0) * bytes, t.stride(1) * bytes, t.stride(2) * bytes,
          t.size(0), t.size(1)};
}

// Heads and head size of rows [T, H, D] against those of a cache [.., H, D] or of other rows.
inline void check_same_vectors(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  STD_TORCH_CHECK(t.size(-2) == other.size(-2) && t.size(-1) == other.size(-1), name, " must have the ",
                  other.size(-2), " heads of size ", other.size(-1), " of ", other_name, ", got ", shape_of(t));
}

inline void check_at_least(const Tensor& t, const char* name, int64_t rows, const char* of) {
  STD_TORCH_CHECK(t.size(0) >= rows, name, " must have a row for each of the ", rows, " ", of, ", got ", t.size(0));
}

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

inline Vectors check_vectors(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
                             const std::string& kv_cache_dtype, const OptionalTensor& k_scale,
                             const OptionalTensor& v_scale) {
  Vectors v;
  v.element = check_element(key);
  v.cache_dtype = check_kv_cache_dtype(kv_cache_dtype);
  v.key = check_rows(key, "key", false);
  v.value = check_rows(value, "value", false);
  check_dtype(value, "value", key.scalar_type());
  check_same_device(value, "value", key, "key");
  check_same_shape(value, "value", key, "key");
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
  check_same_shape(staging_value, "staging_value", staging_key, "staging_key");
  check_dtype(staging_value, "staging_value", staging_key.scalar_type());
  check_same_device(staging_value, "staging_value", staging_key, "staging_key");
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
  check_same_shape(log_value, "log_value", log_key, "log_key");
  check_dtype(log_value, "log_value", log_key.scalar_type());
  check_same_device(log_value, "log_value", log_key, "log_key");
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

inline int64_t* check_slots(const Tensor& slots, const Tensor& like, const char* like_name) {
  check_dim(slots, "slots", 2, "[requests, rows of a window]");
  check_dtype(slots, "slots", ScalarType::Long);
  check_same_device(slots, "slots", like, like_name);
  STD_TORCH_CHECK(slots.is_contiguous(), "slots must be contiguous (cut it by requests, not by columns)");
  STD_TORCH_CHECK(slots.numel() < int64_t{1} << 31, "slots must list fewer than 2^31 rows, got ", shape_of(slots));
  return static_cast<int64_t*>(slots.data_ptr());
}

inline int64_t* check_counts(const Tensor& counts, const Tensor& like, const char* like_name) {
  int64_t* data = check_vector<int64_t>(counts, "counts", ScalarType::Long, like, like_name);
  check_length(counts, "counts", 5, "counts [kept, rejected, windows, drafts, fallbacks]");
  return data;
}

inline int64_t* check_logged(const Tensor& logged, const Tensor& slots, const Tensor& rows) {
  check_dim(logged, "logged", 2, "[requests, entries]");
  check_dtype(logged, "logged", ScalarType::Long);
  check_same_device(logged, "logged", rows, "rows");
  STD_TORCH_CHECK(logged.is_contiguous(), "logged must be contiguous");
  const int64_t requests = logged.size(0), entries = logged.size(1);
  STD_TORCH_CHECK(requests >= slots.size(0), "logged has ", requests, " requests but slots has ", slots.size(0));
  STD_TORCH_CHECK(entries >= slots.size(1) && (entries & (entries - 1)) == 0 && rows.size(3) % entries == 0,
                  "logged must have a power of two of columns, at least those of slots (", slots.size(1),
                  "), that divides the block size (", rows.size(3), "), got ", entries);
  return static_cast<int64_t*>(logged.data_ptr());
}

inline AllLayersArgs check_all_layers(const Tensor& pool, const Tensor& layer_offsets,
                                      const std::vector<int64_t>& cache_strides, const Tensor& slots,
                                      const OptionalTensor& packing, const Tensor& rows, const OptionalTensor& logged,
                                      bool logging) {
  AllLayersArgs a{};
  a.pool.data = check_vector<char>(pool, "pool", ScalarType::Byte, rows, "rows");
  a.pool.size = pool.size(0);
  a.pool.layer_offsets = check_vector<int64_t>(layer_offsets, "layer_offsets", ScalarType::Long, rows, "rows");
  check_dim(rows, "rows", 5, "[layers, blocks, num_heads, block_size, slot bytes]");
  check_dtype(rows, "rows", ScalarType::Byte);
  check_last_dim_contiguous(rows, "rows");
  if (logging) check_not_expanded(rows, "rows");
  for (int64_t d : {0, 2, 3, 4})
    STD_TORCH_CHECK(rows.size(d) > 0, "rows must have at least one layer, head, slot a block and byte, got ", shape_of(rows));
  check_length(layer_offsets, "layer_offsets", rows.size(0), "layers of rows");
  STD_TORCH_CHECK(cache_strides.size() == 3, "cache_strides must be (block, head, token) in bytes, got ",
                  cache_strides.size(), " numbers");
  for (int64_t stride : cache_strides)
    STD_TORCH_CHECK(stride > 0, "cache_strides must be positive byte strides (block, head, token), got ", stride);
  a.pool.block_stride = cache_strides[0];
  a.pool.head_stride = cache_strides[1];
  a.pool.token_stride = cache_strides[2];
  a.pool.num_layers = static_cast<int>(rows.size(0));
  a.pool.num_heads = static_cast<int>(rows.size(2));
  a.pool.block_size = static_cast<int>(rows.size(3));
  a.pool.bytes = static_cast<int>(rows.size(4));
  a.rows = {static_cast<char*>(rows.data_ptr()), rows.stride(0), rows.stride(1), rows.stride(2), rows.stride(3),
            a.pool.block_size};
  a.window.slots = check_slots(slots, rows, "rows");
  STD_TORCH_CHECK(slots.size(1) > 0, "slots must have at least one column, got ", shape_of(slots));
  a.window.num_requests = static_cast<int>(slots.size(0));
  a.window.width = static_cast<int>(slots.size(1));
  a.window.num_rows = slots.numel();
  int64_t needed = a.window.num_rows;
  if (logged) {
    a.window.logged = check_logged(*logged, slots, rows);
    a.window.entries = static_cast<int>(logged->size(1));
    needed = slots.size(0) * logged->size(1);
  }
  STD_TORCH_CHECK(needed <= rows.size(1) * rows.size(3), "rows holds ", rows.size(1) * rows.size(3),
                  " slots a layer but ", logged ? "logged" : "slots", " lists ", needed, "; make rows larger");
  STD_TORCH_CHECK(rows.is_cpu() || a.pool.size / a.pool.block_stride < (int64_t{1} << 31) / a.pool.block_size - 1,
                  "pool must hold fewer than 2^31 slots a layer on CUDA, got ", a.pool.size, " bytes in blocks of ",
                  a.pool.block_size, " slots every ", a.pool.block_stride, " bytes");
  if (packing) {
    STD_TORCH_CHECK(rows.is_cpu(), "packing describes vLLM's CPU caches; pass None for a cache on the GPU");
    check_dim(*packing, "packing", 2, "[block_size, elements of a slot]");
    check_dtype(*packing, "packing", ScalarType::Int);
    check_same_device(*packing, "packing", rows, "rows");
    STD_TORCH_CHECK(packing->is_contiguous(), "packing must be contiguous");
    check_length(*packing, "packing", a.pool.block_size, "slots of a block");
    const int64_t elements = packing->size(1);
    const int64_t element_size = elements > 0 ? a.pool.bytes / elements : 0;
    STD_TORCH_CHECK(elements > 0 && element_size * elements == a.pool.bytes &&
                        (element_size == 1 || element_size == 2 || element_size == 4),
                    "packing must list the elements of a slot of ", a.pool.bytes,
                    " bytes, each of 1, 2 or 4 bytes, got ", elements, " elements");
    STD_TORCH_CHECK(a.rows.token_stride == a.pool.bytes || a.pool.block_size == 1,
                    "with a packing each (block, head) chunk of rows must be contiguous, got token stride ",
                    a.rows.token_stride, " for slots of ", a.pool.bytes, " bytes");
    a.packing = {static_cast<const int32_t*>(packing->data_ptr()), static_cast<int>(elements),
                 static_cast<int>(element_size)};
  }
  return a;
}

inline void check_verdict(AllLayersArgs& a, const Tensor& rows, const Tensor& num_rejected, const Tensor& kept,
                          const Tensor& counts) {
  Window& w = a.window;
  w.num_rejected = check_vector<int32_t>(num_rejected, "num_rejected", ScalarType::Int, rows, "rows");
  check_length(num_rejected, "num_rejected", w.num_requests, "requests of slots");
  w.kept = check_vector<int32_t>(kept, "kept", ScalarType::Int, rows, "rows");
  check_length(kept, "kept", w.num_requests, "requests of slots");
  w.counts = check_counts(counts, rows, "rows");
}

inline OpenArgs check_open_window(const Tensor& query_start_loc, const Tensor& cu_num_logits, const Tensor& slot_mapping,
                                  const Tensor& slots, const OptionalTensor& staging_rows,
                                  const OptionalTensor& page_slots, const Tensor& counts) {
  OpenArgs a{};
  a.slots = check_slots(slots, slot_mapping, "slot_mapping");
  a.max_requests = static_cast<int>(slots.size(0));
  a.width = static_cast<int>(slots.size(1));
  const auto check = [&](const Tensor& t, const char* name, ScalarType dtype) {
    return check_vector<void>(t, name, dtype, slots, "slots");
  };
  a.slot_mapping = static_cast<const int64_t*>(check(slot_mapping, "slot_mapping", ScalarType::Long));
  a.num_tokens = slot_mapping.size(0);
  a.cu_num_logits = static_cast<const int32_t*>(check(cu_num_logits, "cu_num_logits", ScalarType::Int));
  STD_TORCH_CHECK(1 <= cu_num_logits.size(0) && cu_num_logits.size(0) - 1 <= a.max_requests,
                  "cu_num_logits must have one entry more than requests, of which slots holds ", a.max_requests, ", got ",
                  cu_num_logits.size(0), " entries");
  a.num_requests = static_cast<int>(cu_num_logits.size(0) - 1);
  a.query_start_loc = static_cast<const int32_t*>(check(query_start_loc, "query_start_loc", ScalarType::Int));
  check_at_least(query_start_loc, "query_start_loc", a.num_requests + 1, "entries of cu_num_logits");
  STD_TORCH_CHECK(staging_rows.has_value() == page_slots.has_value(),
                  "staging_rows and page_slots go together: pass both (stage) or neither (cow)");
  if (staging_rows) {
    a.staging_rows = static_cast<int64_t*>(check(*staging_rows, "staging_rows", ScalarType::Long));
    a.page_slots = static_cast<int64_t*>(check(*page_slots, "page_slots", ScalarType::Long));
    a.max_tokens = staging_rows->size(0);
    check_at_least(*staging_rows, "staging_rows", a.num_tokens, "tokens of slot_mapping");
    check_length(*page_slots, "page_slots", a.max_tokens, "rows of staging_rows");
    for (const int64_t* written : {a.staging_rows, a.page_slots})
      STD_TORCH_CHECK(written + a.max_tokens <= a.slot_mapping || a.slot_mapping + a.num_tokens <= written,
                      "staging_rows and page_slots must not share memory with slot_mapping, which is read meanwhile");
  }
  a.counts = check_counts(counts, slots, "slots");
  return a;
}

}  // namespace nwor
