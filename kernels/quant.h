// SPDX-License-Identifier: Apache-2.0
// fp32 to fp8, byte for byte as vLLM's own cache writer of the same device makes it. The two writers differ:
//
//              scaled value           rounding         NaN                     -0.0
//   CPU        value * (1 / scale)    towards zero     largest finite, +       0x00
//   CUDA       value / scale          nearest even     0x7f                    0x80
//
// Both saturate to the largest finite value (448 for e4m3, 57344 for e5m2). CPU: `cpu_attn_reshape_and_cache`,
// CUDA: `reshape_and_cache_flash` (`__nv_cvt_float_to_fp8` with __NV_SATFINITE).
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>

#include "layout.h"

#ifdef __CUDACC__
#include <cuda_fp8.h>
#else
#include <bit>
#endif

namespace nwor {

#ifdef __CUDACC__

template <CacheDtype format>
__device__ inline uint8_t to_fp8(float value, float scale) {
  return __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, format == CacheDtype::kE4M3 ? __NV_E4M3 : __NV_E5M2);
}

#else

template <CacheDtype format>
inline uint8_t to_fp8(float value, float scale) {
  constexpr float largest = format == CacheDtype::kE4M3 ? 448.0f : 57344.0f;
  // min first: of (largest, NaN) it returns largest.
  const float scaled = std::max(-largest, std::min(largest, value * (1.0f / scale)));
  const uint8_t sign = scaled < 0.0f ? 0x80 : 0;
  const float magnitude = sign ? -scaled : scaled;
  if constexpr (format == CacheDtype::kE4M3) {
    // Exponent bias 127 to 7 by a power of two; e4m3's subnormals are then fp32 subnormals.
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(magnitude * 0x1p-120f) >> 20);
  } else {
    if (magnitude < 0x1p-14f) return sign | static_cast<uint8_t>(magnitude * 0x1p16f);  // subnormal: steps of 2^-16
    return sign | static_cast<uint8_t>((std::bit_cast<uint32_t>(magnitude) >> 21) - ((127 - 15) << 2));
  }
}

#endif

// Calls f with a value of the C++ type of `element`.
template <class F>
NWOR_HD inline void with_element(Element element, F&& f) {
  switch (element) {
    case Element::kFloat: return f(float{});
    case Element::kHalf: return f(c10::Half{});
    case Element::kBFloat16: return f(c10::BFloat16{});
  }
}

}  // namespace nwor
