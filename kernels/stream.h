// SPDX-License-Identifier: Apache-2.0
// From a checked call to the device that its tensors are on.
#pragma once
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace nwor {

// The current CUDA stream of a device. The symbol exists in CUDA builds of torch only, so it is looked up when first
// used: a build with CUDA operators then still loads beside a CPU-only torch.
inline void* current_cuda_stream(int32_t device_index) {
  using GetStream = int32_t (*)(int32_t, void**);
  static const auto get_stream = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<GetStream>(torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  STD_TORCH_CHECK(get_stream, "this torch has no CUDA (libtorch_cuda.so is not loaded); install a CUDA build of torch");
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device_index, &stream) == 0, "torch gave no current stream for CUDA device ", device_index);
  return stream;
}

}  // namespace nwor

#ifdef NWOR_CUDA
#define NWOR_RUN_CUDA(op, args, tensor)                                                            \
  do {                                                                                             \
    const torch::stable::accelerator::DeviceGuard guard((tensor).get_device_index());              \
    ::nwor::cuda::op(args, ::nwor::current_cuda_stream((tensor).get_device_index()));              \
  } while (0)
#else
#define NWOR_RUN_CUDA(op, args, tensor)                                                            \
  STD_TORCH_CHECK(false, #op " was built for the CPU alone; rebuild with nvcc on the PATH (make kernels)")
#endif

// Runs the loop or the kernel behind an operator where `tensor` is.
#define NWOR_RUN(op, args, tensor)                \
  do {                                            \
    if ((tensor).is_cpu()) ::nwor::cpu::op(args); \
    else NWOR_RUN_CUDA(op, args, tensor);         \
  } while (0)
