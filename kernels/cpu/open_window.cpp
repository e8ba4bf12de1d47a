// SPDX-License-Identifier: Apache-2.0
// A step's window from its batch. kernels/cuda/open_window.cu follows function for function.
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "../ops.h"

namespace nwor::cpu {
namespace {

void check_batch(const OpenArgs& a) {
  int32_t before = 0;
  for (int r = 0; r <= a.num_requests; ++r) {
    const int32_t start = a.query_start_loc[r];
    STD_TORCH_CHECK(before <= start && start <= a.num_tokens, "query_start_loc[", r, "] is ", start,
                    " but must ascend from 0 to at most the ", a.num_tokens, " tokens of slot_mapping");
    STD_TORCH_CHECK(r == 0 || a.cu_num_logits[r - 1] <= a.cu_num_logits[r], "cu_num_logits[", r, "] is ",
                    a.cu_num_logits[r], " but must not fall below the entry before it");
    before = start;
  }
}

void hold_rows(const OpenArgs& a, int request, const Hold& hold) {
  a.num_drafts[request] = static_cast<int32_t>(hold.drafts);
  for (int64_t draft = 0; draft < hold.drafts; ++draft) {
    const int64_t token = hold.first + draft, row = int64_t{request} * a.width + draft;
    a.slots[row] = std::max<int64_t>(a.slot_mapping[token], -1);
    if (!a.staging_rows) continue;
    a.staging_rows[token] = row;
    a.page_slots[token] = -1;
  }
}

}  // namespace

void open_window(const OpenArgs& a) {
  check_batch(a);
  std::fill_n(a.slots, int64_t{a.max_requests} * a.width, -1);
  std::fill_n(a.num_drafts, a.max_requests, 0);
  std::fill_n(a.staging_rows, a.max_tokens, -1);
  std::fill_n(a.page_slots, a.max_tokens, -1);
  if (a.page_slots) std::copy_n(a.slot_mapping, a.query_start_loc[a.num_requests], a.page_slots);
  for (int request = 0; request < a.num_requests; ++request) {
    const Hold hold = hold_of(a, request);
    hold_rows(a, request, hold);
    a.counts[2] += hold.drafts > 0;
    a.counts[3] += hold.drafts;
    a.counts[4] += hold.falls_back;
  }
}

}  // namespace nwor::cpu
