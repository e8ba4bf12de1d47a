// SPDX-License-Identifier: Apache-2.0
// The operators, in vLLM's own namespace: schema, checks, and the loop (CPU) or kernel (CUDA) behind each.
// kernels/ops.h lists the loops and kernels, nwor/ops.py documents each operator.
#include <torch/csrc/stable/library.h>

#include "checks_all_layers.h"
#include "checks_one_layer.h"
#include "stream.h"

namespace nwor {
namespace {

void stage_kv_cache(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, const Tensor& staging_key,
                    const Tensor& staging_value, const Tensor& staging_slots, const Tensor& staging_metadata,
                    const std::string& kv_cache_dtype, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const StageArgs args = check_stage(key, value, slot_mapping, staging_key, staging_value, staging_slots,
                                     staging_metadata, kv_cache_dtype, k_scale, v_scale);
  NWOR_RUN(stage_kv_cache, args, key);
}

void commit_staged_kv_cache(const Tensor& staging_key, const Tensor& staging_value, const Tensor& staging_slots,
                            const Tensor& staging_metadata, const Tensor& key_cache, const Tensor& value_cache,
                            const Tensor& accepted_len) {
  const CommitStagedArgs args = check_commit_staged(staging_key, staging_value, staging_slots, staging_metadata,
                                                    key_cache, value_cache, accepted_len);
  NWOR_RUN(commit_staged_kv_cache, args, key_cache);
}

void commit_draft_layer(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                        const Tensor& slot_mapping, const Tensor& accepted_mask, const std::string& kv_cache_dtype,
                        const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const CommitDraftArgs args = check_commit_draft(key, value, key_cache, value_cache, slot_mapping, accepted_mask,
                                                  kv_cache_dtype, k_scale, v_scale);
  NWOR_RUN(commit_draft_layer, args, key);
}

void log_cache_slots(const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
                     const Tensor& log_key, const Tensor& log_value) {
  const SlotLogArgs args = check_slot_log(log_key, log_value, slot_mapping, nullptr, key_cache, value_cache);
  NWOR_RUN(log_cache_slots, args, key_cache);
}

void restore_rejected_drafts(const Tensor& log_key, const Tensor& log_value, const Tensor& slot_mapping,
                             const Tensor& accepted_mask, const Tensor& key_cache, const Tensor& value_cache) {
  const SlotLogArgs args = check_slot_log(log_key, log_value, slot_mapping, &accepted_mask, key_cache, value_cache);
  NWOR_RUN(restore_rejected_drafts, args, key_cache);
}

void log_all_layers(const Tensor& pool, const Tensor& layer_offsets, const std::vector<int64_t>& cache_strides,
                    const Tensor& slots, const OptionalTensor& packing, const Tensor& rows,
                    const OptionalTensor& logged) {
  const AllLayersArgs args = check_all_layers(pool, layer_offsets, cache_strides, slots, packing, rows, logged, true);
  NWOR_RUN(log_all_layers, args, pool);
}

void restore_all_layers(const Tensor& pool, const Tensor& layer_offsets, const std::vector<int64_t>& cache_strides,
                        const Tensor& slots, const OptionalTensor& packing, const Tensor& rows,
                        const Tensor& num_drafts, const Tensor& num_rejected, const Tensor& kept,
                        const Tensor& counts, const OptionalTensor& logged, const OptionalTensor& published) {
  AllLayersArgs args = check_all_layers(pool, layer_offsets, cache_strides, slots, packing, rows, logged, false);
  check_decisions(args.window, rows, num_drafts, num_rejected, kept);
  check_published(args.window, rows, counts, published);
  NWOR_RUN(restore_all_layers, args, pool);
}

void commit_all_layers(const Tensor& pool, const Tensor& layer_offsets, const std::vector<int64_t>& cache_strides,
                       const Tensor& slots, const OptionalTensor& packing, const Tensor& rows,
                       const Tensor& num_drafts, const Tensor& num_rejected, const Tensor& kept,
                       const Tensor& counts, const OptionalTensor& published) {
  AllLayersArgs args = check_all_layers(pool, layer_offsets, cache_strides, slots, packing, rows, std::nullopt, false);
  check_decisions(args.window, rows, num_drafts, num_rejected, kept);
  check_published(args.window, rows, counts, published);
  NWOR_RUN(commit_all_layers, args, pool);
}

void open_window(const Tensor& query_start_loc, const Tensor& cu_num_logits, const Tensor& slot_mapping,
                 const Tensor& slots, const Tensor& num_drafts, const OptionalTensor& staging_rows,
                 const OptionalTensor& page_slots, const Tensor& counts) {
  const OpenArgs args = check_open_window(query_start_loc, cu_num_logits, slot_mapping, slots, num_drafts,
                                          staging_rows, page_slots, counts);
  NWOR_RUN(open_window, args, slots);
}

}  // namespace
}  // namespace nwor

// Found in the library's bytes: what it was built from.
extern "C" __attribute__((used, visibility("default"))) const char nwor_sources[] = "nwor sources " NWOR_SOURCES;

// A fragment: vLLM defines the library `_C_cache_ops` itself, and may do so before or after this one is loaded.
STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, m) {
  // One layer a call.
  m.def("stage_kv_cache(Tensor key, Tensor value, Tensor slot_mapping, Tensor(a!) staging_key, "
        "Tensor(b!) staging_value, Tensor(c!) staging_slots, Tensor(d!) staging_metadata, str kv_cache_dtype='auto', "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def("commit_staged_kv_cache(Tensor staging_key, Tensor staging_value, Tensor staging_slots, "
        "Tensor staging_metadata, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor accepted_len) -> ()");
  m.def("commit_draft_layer(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, Tensor accepted_mask, str kv_cache_dtype='auto', Tensor? k_scale=None, "
        "Tensor? v_scale=None) -> ()");
  m.def("log_cache_slots(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor(a!) log_key, "
        "Tensor(b!) log_value) -> ()");
  m.def("restore_rejected_drafts(Tensor log_key, Tensor log_value, Tensor slot_mapping, Tensor accepted_mask, "
        "Tensor(a!) key_cache, Tensor(b!) value_cache) -> ()");
  // A step's window, and all layers in one call.
  m.def("open_window(Tensor query_start_loc, Tensor cu_num_logits, Tensor slot_mapping, Tensor(a!) slots, "
        "Tensor(b!) num_drafts, Tensor(c!)? staging_rows, Tensor(d!)? page_slots, Tensor(e!) counts) -> ()");
  m.def("log_all_layers(Tensor pool, Tensor layer_offsets, int[] cache_strides, Tensor slots, Tensor? packing, "
        "Tensor(a!) rows, Tensor? logged=None) -> ()");
  m.def("restore_all_layers(Tensor(a!) pool, Tensor layer_offsets, int[] cache_strides, Tensor slots, "
        "Tensor? packing, Tensor rows, Tensor num_drafts, Tensor num_rejected, Tensor(b!) kept, Tensor(c!) counts, "
        "Tensor(d!)? logged=None, Tensor(e!)? published=None) -> ()");
  m.def("commit_all_layers(Tensor(a!) pool, Tensor layer_offsets, int[] cache_strides, Tensor slots, "
        "Tensor? packing, Tensor rows, Tensor num_drafts, Tensor num_rejected, Tensor(b!) kept, "
        "Tensor(c!) counts, Tensor(d!)? published=None) -> ()");
}

#define NWOR_REGISTER_OPERATORS(m)                                              \
  m.impl("stage_kv_cache", TORCH_BOX(&nwor::stage_kv_cache));                   \
  m.impl("commit_staged_kv_cache", TORCH_BOX(&nwor::commit_staged_kv_cache));   \
  m.impl("commit_draft_layer", TORCH_BOX(&nwor::commit_draft_layer));           \
  m.impl("log_cache_slots", TORCH_BOX(&nwor::log_cache_slots));                 \
  m.impl("restore_rejected_drafts", TORCH_BOX(&nwor::restore_rejected_drafts)); \
  m.impl("open_window", TORCH_BOX(&nwor::open_window));                         \
  m.impl("log_all_layers", TORCH_BOX(&nwor::log_all_layers));                   \
  m.impl("restore_all_layers", TORCH_BOX(&nwor::restore_all_layers));           \
  m.impl("commit_all_layers", TORCH_BOX(&nwor::commit_all_layers))

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, m) { NWOR_REGISTER_OPERATORS(m); }
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, m) { NWOR_REGISTER_OPERATORS(m); }
