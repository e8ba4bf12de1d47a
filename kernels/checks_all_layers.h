// SPDX-License-Identifier: Apache-2.0
// The tensors of the operators of a whole step, to their argument structs.
#pragma once
#include "checks.h"

namespace nwor {

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
  check_length(counts, "counts", kCounts, "counts [kept, rejected, windows, drafts, fallbacks, 0]");
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

inline void check_decisions(Window& w, const Tensor& rows, const Tensor& num_drafts, const Tensor& num_rejected,
                            const Tensor& kept) {
  w.num_drafts = check_vector<int32_t>(num_drafts, "num_drafts", ScalarType::Int, rows, "rows");
  check_length(num_drafts, "num_drafts", w.num_requests, "requests of slots");
  w.num_rejected = check_vector<int32_t>(num_rejected, "num_rejected", ScalarType::Int, rows, "rows");
  check_length(num_rejected, "num_rejected", w.num_requests, "requests of slots");
  w.kept = check_vector<int32_t>(kept, "kept", ScalarType::Int, rows, "rows");
  check_length(kept, "kept", w.num_requests, "requests of slots");
}

inline void check_published(Window& w, const Tensor& rows, const Tensor& counts, const OptionalTensor& published) {
  w.counts = w.all_counts = check_counts(counts, rows, "rows");
  w.num_published = kCounts;
  if (!published) return;
  STD_TORCH_CHECK(published->is_cpu(), "published must be on the host, in pinned memory where pool is on a GPU");
  check_dim(*published, "published", 1, "[counts and requests]");
  check_dtype(*published, "published", ScalarType::Long);
  STD_TORCH_CHECK(published->is_contiguous(), "published must be contiguous");
  check_at_least(*published, "published", kCounts + w.num_requests, "counts and requests of slots");
  w.published = static_cast<int64_t*>(published->data_ptr());
}

// What a window is opened into.
inline OpenArgs check_targets(const Tensor& slots, const Tensor& num_drafts, const OptionalTensor& staging_rows,
                              const OptionalTensor& page_slots) {
  OpenArgs a{};
  a.slots = check_slots(slots, num_drafts, "num_drafts");
  a.max_requests = static_cast<int>(slots.size(0));
  a.width = static_cast<int>(slots.size(1));
  a.num_drafts = check_vector<int32_t>(num_drafts, "num_drafts", ScalarType::Int, slots, "slots");
  check_length(num_drafts, "num_drafts", a.max_requests, "requests of slots");
  STD_TORCH_CHECK(staging_rows.has_value() == page_slots.has_value(),
                  "staging_rows and page_slots go together: pass both (stage) or neither (cow)");
  if (staging_rows) {
    a.staging_rows = check_vector<int64_t>(*staging_rows, "staging_rows", ScalarType::Long, slots, "slots");
    a.page_slots = check_vector<int64_t>(*page_slots, "page_slots", ScalarType::Long, slots, "slots");
    a.max_tokens = staging_rows->size(0);
    check_length(*page_slots, "page_slots", a.max_tokens, "rows of staging_rows");
  }
  return a;
}

inline OpenArgs check_open_window(const Tensor& query_start_loc, const Tensor& cu_num_logits, const Tensor& slot_mapping,
                                  const Tensor& slots, const Tensor& num_drafts, const OptionalTensor& staging_rows,
                                  const OptionalTensor& page_slots, const Tensor& counts) {
  OpenArgs a = check_targets(slots, num_drafts, staging_rows, page_slots);
  a.slot_mapping = check_vector<const int64_t>(slot_mapping, "slot_mapping", ScalarType::Long, slots, "slots");
  a.num_tokens = slot_mapping.size(0);
  a.cu_num_logits = check_vector<const int32_t>(cu_num_logits, "cu_num_logits", ScalarType::Int, slots, "slots");
  STD_TORCH_CHECK(1 <= cu_num_logits.size(0) && cu_num_logits.size(0) - 1 <= a.max_requests,
                  "cu_num_logits must have one entry more than requests, of which slots holds ", a.max_requests, ", got ",
                  cu_num_logits.size(0), " entries");
  a.num_requests = static_cast<int>(cu_num_logits.size(0) - 1);
  a.query_start_loc = check_vector<const int32_t>(query_start_loc, "query_start_loc", ScalarType::Int, slots, "slots");
  check_at_least(query_start_loc, "query_start_loc", a.num_requests + 1, "entries of cu_num_logits");
  if (staging_rows) {
    check_at_least(*staging_rows, "staging_rows", a.num_tokens, "tokens of slot_mapping");
    for (const int64_t* written : {a.staging_rows, a.page_slots})
      STD_TORCH_CHECK(written + a.max_tokens <= a.slot_mapping || a.slot_mapping + a.num_tokens <= written,
                      "staging_rows and page_slots must not share memory with slot_mapping, which is read meanwhile");
  }
  a.counts = check_counts(counts, slots, "slots");
  return a;
}

}  // namespace nwor
