// SPDX-License-Identifier: Apache-2.0
// The operators of a step without their arguments: what stays the same from step to step is checked and kept once, and
// a call brings pointers. Through torch's dispatcher a call of ten tensors takes longer than what it launches.
#include <cstring>
#include <string>

#include <torch/csrc/stable/library.h>

#include "checks_all_layers.h"
#include "stream.h"

namespace nwor {
namespace {

struct Step {
  AllLayersArgs rows;
  OpenArgs open;
  int32_t device;  // -1: the CPU
};

// What `bind_step` left in a tensor, which Python keeps beside the tensors that it points to.
Step step_of(const void* bound) {
  Step step;
  std::memcpy(&step, bound, sizeof step);
  return step;
}

void bind_step(const Tensor& pool, const Tensor& layer_offsets, const std::vector<int64_t>& cache_strides,
               const Tensor& slots, const OptionalTensor& packing, const Tensor& rows, const Tensor& num_drafts,
               const Tensor& kept, const OptionalTensor& staging_rows, const OptionalTensor& page_slots,
               const OptionalTensor& logged, const Tensor& counts, const Tensor& bound) {
  Step step{};
  step.rows = check_all_layers(pool, layer_offsets, cache_strides, slots, packing, rows, logged, true);
  check_dim(counts, "counts", 2, "[ways, 6]");
  check_dtype(counts, "counts", ScalarType::Long);
  check_same_device(counts, "counts", rows, "rows");
  STD_TORCH_CHECK(counts.size(1) == kCounts && counts.is_contiguous(), "counts must be contiguous [ways, 6]");
  check_decisions(step.rows.window, rows, num_drafts, num_drafts, kept);
  step.rows.window.all_counts = static_cast<int64_t*>(counts.data_ptr());
  step.rows.window.num_published = static_cast<int>(counts.numel());
  step.open = check_targets(slots, num_drafts, staging_rows, page_slots);
  step.device = pool.is_cpu() ? -1 : pool.get_device_index();
  STD_TORCH_CHECK(bound.is_cpu() && bound.scalar_type() == ScalarType::Byte && bound.is_contiguous() &&
                      bound.numel() >= static_cast<int64_t>(sizeof step),
                  "bound must be uint8 on the CPU, of at least ", sizeof step, " bytes");
  std::memcpy(bound.data_ptr(), &step, sizeof step);
}

// Runs the loop or the kernel of a bound step; nullptr, or what went wrong.
template <class Run>
const char* run(Run&& what) {
  thread_local std::string message;
  try {
    what();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
}  // namespace nwor

#ifdef NWOR_CUDA
#define NWOR_RUN_STEP(op, args, device)                                 \
  do {                                                                  \
    if ((device) < 0) {                                                 \
      ::nwor::cpu::op(args);                                            \
    } else {                                                            \
      const torch::stable::accelerator::DeviceGuard guard(device);      \
      ::nwor::cuda::op(args, ::nwor::current_cuda_stream(device));      \
    }                                                                   \
  } while (0)
#else
#define NWOR_RUN_STEP(op, args, device) ::nwor::cpu::op(args)
#endif

#define NWOR_EXPORT extern "C" __attribute__((used, visibility("default")))

// open_window, and with `logs` log_all_layers behind it.
NWOR_EXPORT const char* nwor_open(const void* bound, const void* query_start_loc, const void* cu_num_logits,
                                  const void* slot_mapping, int64_t num_tokens, int64_t num_requests, void* counts,
                                  bool stages, bool logs) {
  return nwor::run([&] {
    nwor::Step step = nwor::step_of(bound);
    nwor::OpenArgs& open = step.open;
    open.query_start_loc = static_cast<const int32_t*>(query_start_loc);
    open.cu_num_logits = static_cast<const int32_t*>(cu_num_logits);
    open.slot_mapping = static_cast<const int64_t*>(slot_mapping);
    open.num_tokens = num_tokens;
    open.num_requests = static_cast<int>(num_requests);
    open.counts = static_cast<int64_t*>(counts);
    if (!stages) {
      open.staging_rows = open.page_slots = nullptr;
      open.max_tokens = 0;
    }
    NWOR_RUN_STEP(open_window, open, step.device);
    if (!logs) return;
    step.rows.window.num_requests = open.num_requests;
    step.rows.window.num_rows = num_requests * step.rows.window.width;
    NWOR_RUN_STEP(log_all_layers, step.rows, step.device);
  });
}

// commit_all_layers, or with `restores` restore_all_layers.
NWOR_EXPORT const char* nwor_close(const void* bound, const void* num_rejected, int64_t num_requests, void* counts,
                                   void* published, bool restores) {
  return nwor::run([&] {
    nwor::Step step = nwor::step_of(bound);
    nwor::Window& window = step.rows.window;
    window.num_rejected = static_cast<const int32_t*>(num_rejected);
    window.num_requests = static_cast<int>(num_requests);
    window.num_rows = num_requests * window.width;
    window.counts = static_cast<int64_t*>(counts);
    window.published = static_cast<int64_t*>(published);  // with the counts of all ways
    if (restores) NWOR_RUN_STEP(restore_all_layers, step.rows, step.device);
    else NWOR_RUN_STEP(commit_all_layers, step.rows, step.device);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, m) {
  m.def("bind_step(Tensor pool, Tensor layer_offsets, int[] cache_strides, Tensor slots, Tensor? packing, Tensor rows, "
        "Tensor num_drafts, Tensor kept, Tensor? staging_rows, Tensor? page_slots, Tensor? logged, Tensor counts, "
        "Tensor(a!) bound) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, m) { m.impl("bind_step", TORCH_BOX(&nwor::bind_step)); }
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, m) { m.impl("bind_step", TORCH_BOX(&nwor::bind_step)); }
