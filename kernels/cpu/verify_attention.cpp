// SPDX-License-Identifier: Apache-2.0
// Attention of verify windows on the CPU: pages through the block table, up to each window's first row; drafts from
// staging, or without one from the pages too.
//
// Pages and staging hold elements of one packing, so one gather reads both. Softmax and sums are fp32 whatever the
// cache holds, each (request, KV head) is one task, and the order of positions is the order of the sequence.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A paged cache [num_blocks, H, N, 2 * D] whose (block, head) chunk holds N * 2 * D elements in some packing.
template <class C>
struct Pages {
  const C* data;
  int64_t num_blocks, block_stride, head_stride;
  const C* chunk(int64_t block, int64_t head) const { return data + block * block_stride + head * head_stride; }
};

struct Problem {
  // The first position that any row of a window sees: what lies before may be another request's by now.
  int64_t oldest(int64_t prefix) const {
    return sliding_window > 0 ? std::max<int64_t>(0, prefix - sliding_window + 1) : 0;
  }

  const int32_t *query_start_loc, *seq_lens, *block_table, *window_start, *packing;
  int64_t num_requests, table_width, num_heads, num_kv_heads, block_size, head_size;
  int64_t query_stride, query_head_stride, output_stride, output_head_stride;
  float scale, softcap, k_scale, v_scale;
  int64_t sliding_window;
  const float *alibi_slopes, *sinks;  // one a query head, or null
};

template <class C>
void gather(const C* chunk, const int32_t* slot, int64_t head_size, float k_scale, float v_scale, float* key,
            float* value) {
  for (int64_t e = 0; e < head_size; ++e) key[e] = static_cast<float>(chunk[slot[e]]) * k_scale;
  for (int64_t e = 0; e < head_size; ++e) value[e] = static_cast<float>(chunk[slot[head_size + e]]) * v_scale;
}

float dot(const float* a, const float* b, int64_t count) {
  float sums[8] = {};
  for (int64_t i = 0; i < count; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class Q, class C>
void attend(const Problem& p, const Q* query, const Pages<C>& pages, const Pages<C>& staging, Q* output,
            int64_t request, int64_t kv_head) {
  const int64_t first_row = p.query_start_loc[request];
  const int64_t rows = p.query_start_loc[request + 1] - first_row;
  const int64_t length = p.seq_lens[request], prefix = length - rows;
  const int64_t written = staging.data ? prefix + 1 : length;
  const int64_t d = p.head_size, slot_elements = 2 * d;
  std::vector<float> keys(length * d), values(length * d), scores(length), vector(d), sum(d);
  for (int64_t position = p.oldest(prefix); position < length; ++position) {
    const bool in_pages = position < written;
    const int64_t slot = in_pages ? position : p.window_start[request] + position - written;
    const int64_t page = slot / p.block_size;
    const C* chunk = in_pages ? pages.chunk(p.block_table[request * p.table_width + page], kv_head)
                              : staging.chunk(page, kv_head);
    gather(chunk, p.packing + slot % p.block_size * slot_elements, d, p.k_scale, p.v_scale, &keys[position * d],
           &values[position * d]);
  }
  const int64_t group = p.num_heads / p.num_kv_heads;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t last = prefix + row;
    const int64_t first = p.sliding_window > 0 ? std::max<int64_t>(0, last - p.sliding_window + 1) : 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const Q* q = query + (first_row + row) * p.query_stride + head * p.query_head_stride;
      for (int64_t e = 0; e < d; ++e) vector[e] = static_cast<float>(q[e]) * p.scale;
      const float slope = p.alibi_slopes ? p.alibi_slopes[head] : 0.0f;
      float largest = p.sinks ? p.sinks[head] : -std::numeric_limits<float>::infinity();
      for (int64_t position = first; position <= last; ++position) {
        float score = dot(vector.data(), &keys[position * d], d);
        if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
        scores[position] = score + slope * static_cast<float>(position - last);
        largest = std::max(largest, scores[position]);
      }
      float total = p.sinks ? std::exp(p.sinks[head] - largest) : 0.0f;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t position = first; position <= last; ++position) {
        const float weight = std::exp(scores[position] - largest);
        total += weight;
        for (int64_t e = 0; e < d; ++e) sum[e] += weight * values[position * d + e];
      }
      Q* out = output + (first_row + row) * p.output_stride + head * p.output_head_stride;
      for (int64_t e = 0; e < d; ++e) out[e] = static_cast<Q>(sum[e] / total);
    }
  }
}

template <class Q, class C>
void run(const Problem& p, const Tensor& query, const Tensor& kv_cache, const std::optional<Tensor>& staging,
         const Tensor& output) {
  auto pages_of = [](const Tensor& cache) {
    return Pages<C>{static_cast<const C*>(cache.data_ptr()), cache.size(0), cache.stride(0), cache.stride(1)};
  };
  const Pages<C> pages = pages_of(kv_cache), staged = staging ? pages_of(*staging) : Pages<C>{};
  const Q* q = static_cast<const Q*>(query.data_ptr());
  Q* out = static_cast<Q*>(output.data_ptr());
  torch::stable::parallel_for(0, p.num_requests * p.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t request = task / p.num_kv_heads;
      if (p.window_start[request] >= 0) attend(p, q, pages, staged, out, request, task % p.num_kv_heads);
    }
  });
}

template <class C>
void run_query(const Problem& p, const Tensor& query, const Tensor& kv_cache, const std::optional<Tensor>& staging,
               const Tensor& output) {
  switch (query.scalar_type()) {
    case ScalarType::Float: return run<float, C>(p, query, kv_cache, staging, output);
    case ScalarType::Half: return run<c10::Half, C>(p, query, kv_cache, staging, output);
    default: return run<c10::BFloat16, C>(p, query, kv_cache, staging, output);
  }
}

void check_index(const Tensor& tensor, const char* name, int64_t least) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous(), name, " must be contiguous int32");
  STD_TORCH_CHECK(tensor.numel() >= least, name, " has ", tensor.numel(), " elements, needs ", least);
}

void verify_attention(const Tensor& query, const Tensor& kv_cache, const std::optional<Tensor>& staging,
                      Tensor& output, const Tensor& query_start_loc, const Tensor& seq_lens,
                      const Tensor& block_table, const Tensor& window_start, const Tensor& packing, double scale,
                      double softcap, int64_t sliding_window, const std::optional<Tensor>& alibi_slopes,
                      const std::optional<Tensor>& sinks, std::string kv_cache_dtype, double k_scale, double v_scale) {
  STD_TORCH_CHECK(query.dim() == 3 && output.dim() == 3, "query and output must be [num_tokens, num_heads, head_size]");
  STD_TORCH_CHECK(kv_cache.dim() == 4 && (!staging || staging->dim() == 4),
                  "kv_cache and staging must be [blocks, H, N, 2 * D]");
  const int64_t heads = query.size(1), d = query.size(2), kv_heads = kv_cache.size(1), n = kv_cache.size(2);
  const int64_t requests = window_start.numel();
  STD_TORCH_CHECK(output.size(0) == query.size(0) && output.size(1) == heads && output.size(2) == d &&
                      output.scalar_type() == query.scalar_type(),
                  "output must have the shape and dtype of query");
  STD_TORCH_CHECK(query.stride(2) == 1 && output.stride(2) == 1, "head vectors must be dense");
  STD_TORCH_CHECK(kv_cache.size(3) == 2 * d, "kv_cache rows hold ", kv_cache.size(3), " elements, needs 2 * ", d);
  STD_TORCH_CHECK(d % 8 == 0, "head size ", d, " is no multiple of 8");
  STD_TORCH_CHECK(!staging || (staging->size(1) == kv_heads && staging->size(2) == n && staging->size(3) == 2 * d &&
                               staging->scalar_type() == kv_cache.scalar_type()),
                  "staging must have the heads, block size, row and dtype of kv_cache");
  const auto dense = [d](const Tensor& cache) { return cache.stride(3) == 1 && cache.stride(2) == 2 * d; };
  STD_TORCH_CHECK(dense(kv_cache) && (!staging || dense(*staging)),
                  "kv_cache and staging must hold each block and head as one dense [N, 2 * D] chunk");
  STD_TORCH_CHECK(heads % kv_heads == 0, heads, " query heads do not divide among ", kv_heads, " KV heads");
  check_index(query_start_loc, "query_start_loc", requests + 1);
  check_index(seq_lens, "seq_lens", requests);
  check_index(window_start, "window_start", requests);
  check_index(packing, "packing", n * 2 * d);
  STD_TORCH_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
                      block_table.stride(1) == 1 && block_table.size(0) >= requests,
                  "block_table must be int32 [num_reqs, max_blocks] with dense rows");
  const bool fp8 = kv_cache.scalar_type() == ScalarType::Byte;
  STD_TORCH_CHECK(fp8 || kv_cache.scalar_type() == query.scalar_type(), "kv_cache must be uint8 (fp8) or query's dtype");
  STD_TORCH_CHECK(query.scalar_type() == ScalarType::Float || query.scalar_type() == ScalarType::Half ||
                      query.scalar_type() == ScalarType::BFloat16,
                  "query must be float32, float16 or bfloat16");

  const auto per_head = [heads](const std::optional<Tensor>& tensor, const char* name) -> const float* {
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous() && tensor->dim() == 1 &&
                        tensor->size(0) == heads,
                    name, " must be contiguous float32 [", heads, "], one a query head");
    return static_cast<const float*>(tensor->data_ptr());
  };
  const auto int32 = [](const Tensor& tensor) { return static_cast<const int32_t*>(tensor.data_ptr()); };
  const Problem p{int32(query_start_loc), int32(seq_lens), int32(block_table), int32(window_start), int32(packing),
                  requests, block_table.stride(0), heads, kv_heads, n, d,
                  query.stride(0), query.stride(1), output.stride(0), output.stride(1),
                  static_cast<float>(scale), static_cast<float>(softcap),
                  fp8 ? static_cast<float>(k_scale) : 1.0f, fp8 ? static_cast<float>(v_scale) : 1.0f, sliding_window,
                  per_head(alibi_slopes, "alibi_slopes"), per_head(sinks, "sinks")};
  for (int64_t e = 0; e < n * 2 * d; ++e)
    STD_TORCH_CHECK(p.packing[e] >= 0 && p.packing[e] < n * 2 * d, "packing: place ", p.packing[e], " is not in a chunk");
  for (int64_t r = 0; r < requests; ++r) {
    if (p.window_start[r] < 0) continue;
    const int64_t rows = p.query_start_loc[r + 1] - p.query_start_loc[r], prefix = p.seq_lens[r] - rows;
    STD_TORCH_CHECK(p.query_start_loc[r] >= 0 && rows > 0 && prefix >= 0 && p.query_start_loc[r + 1] <= query.size(0),
                    "request ", r,
                    ": its rows do not fit its length or the batch");
    STD_TORCH_CHECK(!staging || p.window_start[r] + rows - 1 <= staging->size(0) * n, "request ", r,
                    ": its window leaves staging");
    const int64_t last = staging ? prefix : p.seq_lens[r] - 1;
    STD_TORCH_CHECK(last / n < block_table.size(1), "request ", r, ": block_table is too short");
    for (int64_t page = p.oldest(prefix) / n; page * n <= last; ++page) {
      const int64_t block = p.block_table[r * p.table_width + page];
      STD_TORCH_CHECK(block >= 0 && block < kv_cache.size(0), "request ", r, ": block ", block, " is not in the cache");
    }
  }

  if (!fp8) {
    switch (query.scalar_type()) {
      case ScalarType::Float: return run<float, float>(p, query, kv_cache, staging, output);
      case ScalarType::Half: return run<c10::Half, c10::Half>(p, query, kv_cache, staging, output);
      default: return run<c10::BFloat16, c10::BFloat16>(p, query, kv_cache, staging, output);
    }
  }
  if (kv_cache_dtype == "fp8_e5m2") return run_query<c10::Float8_e5m2>(p, query, kv_cache, staging, output);
  STD_TORCH_CHECK(kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3", "kv_cache_dtype ", kv_cache_dtype,
                  " is none of fp8, fp8_e4m3, fp8_e5m2");
  run_query<c10::Float8_e4m3fn>(p, query, kv_cache, staging, output);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, m) {
  m.def(
      "verify_attention(Tensor query, Tensor kv_cache, Tensor? staging, Tensor(a!) output, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor block_table, Tensor window_start, Tensor packing, *, float scale, float softcap=0, "
      "int sliding_window=0, Tensor? alibi_slopes=None, Tensor? sinks=None, str kv_cache_dtype='auto', "
      "float k_scale=1, float v_scale=1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, m) { m.impl("verify_attention", TORCH_BOX(&verify_attention)); }
