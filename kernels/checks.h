// SPDX-License-Identifier: Apache-2.0
// What every operator asks of a tensor. Wrong input raises RuntimeError, naming the tensor and what to do, before
// anything is read or written. Nothing here looks at the contents of a tensor.
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

}  // namespace nwor
