// SPDX-License-Identifier: Apache-2.0
// What each operator gets once its tensors are checked. kernels/cpu and kernels/cuda define the same functions.
#pragma once
#include "layout.h"

namespace nwor {

struct StageArgs {
  Vectors tokens;
  const int64_t* slot_mapping;
  Rows staging_key, staging_value;
  int64_t* staging_slots;
  int32_t* metadata;  // [staged_count, error_flag]
  int64_t capacity;
};

struct CommitStagedArgs {
  Rows staging_key, staging_value;
  const int64_t* staging_slots;
  const int32_t* metadata;
  int64_t capacity;
  Cache key_cache, value_cache;
  const void* accepted_len;  // one int32 or int64
  bool accepted_len_is_64bit;
  int num_heads, vector_bytes;
};

struct CommitDraftArgs {
  Vectors tokens;
  const int64_t* slot_mapping;
  const bool* accepted_mask;
  Cache key_cache, value_cache;
};

// Both directions of the copy-on-write pair; the log is the destination of one and the source of the other.
struct SlotLogArgs {
  Rows log_key, log_value;
  Cache key_cache, value_cache;
  const int64_t* slot_mapping;
  const bool* accepted_mask;  // null when logging
  int64_t num_tokens;
  int num_heads, vector_bytes;
};

struct AllLayersArgs {
  Pool pool;
  MiniCache rows;
  Packing packing;
  Window window;  // when logging without num_rejected, kept and counts
};

// Which rows of a batch a window is to hold: the drafts; with staging_rows those of verify queries alone.
struct OpenArgs {
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* cu_num_logits;    // [num_requests + 1]
  const int64_t* slot_mapping;     // [num_tokens]
  int64_t* slots;                  // [max_requests, width]
  int32_t* num_drafts;             // [max_requests]
  int64_t* staging_rows;           // [max_tokens] or null
  int64_t* page_slots;             // [max_tokens] or null
  int64_t* counts;                 // [2] windows, [3] drafts, [4] fallbacks
  int64_t num_tokens, max_tokens;
  int num_requests, max_requests, width;
};

// The rows [first, first + drafts) of the batch.
struct Hold {
  int64_t first, drafts;
  bool falls_back;
};

NWOR_HD inline Hold hold_of(const OpenArgs& a, int request) {
  const int64_t begin = a.query_start_loc[request], end = a.query_start_loc[request + 1];
  const int64_t logits = int64_t{a.cu_num_logits[request + 1]} - a.cu_num_logits[request], rows = end - begin;
  const bool sane = 0 <= begin && begin <= end && end <= a.num_tokens;
  if (!sane || logits <= 1) return {end, 0, false};
  const int64_t drafts = logits - 1;
  if (drafts > a.width || drafts > rows || (a.staging_rows && logits != rows)) return {end, 0, true};
  return {end - drafts, drafts, false};
}

namespace cpu {
void stage_kv_cache(const StageArgs& args);
void commit_staged_kv_cache(const CommitStagedArgs& args);
void commit_draft_layer(const CommitDraftArgs& args);
void log_cache_slots(const SlotLogArgs& args);
void restore_rejected_drafts(const SlotLogArgs& args);
void log_all_layers(const AllLayersArgs& args);
void restore_all_layers(const AllLayersArgs& args);
void commit_all_layers(const AllLayersArgs& args);
void open_window(const OpenArgs& args);
}  // namespace cpu

// `stream` is a cudaStream_t of the current device. Each call only enqueues kernels: no allocation, no synchronisation.
namespace cuda {
void stage_kv_cache(const StageArgs& args, void* stream);
void commit_staged_kv_cache(const CommitStagedArgs& args, void* stream);
void commit_draft_layer(const CommitDraftArgs& args, void* stream);
void log_cache_slots(const SlotLogArgs& args, void* stream);
void restore_rejected_drafts(const SlotLogArgs& args, void* stream);
void log_all_layers(const AllLayersArgs& args, void* stream);
void restore_all_layers(const AllLayersArgs& args, void* stream);
void commit_all_layers(const AllLayersArgs& args, void* stream);
void open_window(const OpenArgs& args, void* stream);
}  // namespace cuda

}  // namespace nwor
