#pragma once

#include <string>
#include <vector>

#include "gpu/kernel_cache.h"
#include "gpu/nvrtc_api.h"

namespace hvd {

// What NVRTC is asked to make.
struct KernelTarget {
  std::string name;  // "sm_90", or "compute_90" for PTX
  bool cubin = true;
};

// Machine code for the device itself where NVRTC knows it; otherwise, for a device that came out
// after it, PTX for the newest older one, which the driver compiles. `architecture` is 90 for a
// device of compute capability 9.0. Throws Error if NVRTC knows only newer ones: CUDA 13 has no
// more code for sm_70.
KernelTarget choose_target(int architecture, const NvrtcApi& nvrtc);

struct CompiledKernels {
  std::string image;   // for cuModuleLoadData
  std::string target;  // "sm_90"
  bool from_cache = false;
  std::string log;            // what the compiler had to say; empty from the cache
  std::string cache_problem;  // why the image could not be kept; empty if it was
};

// Options for NVRTC.
std::vector<std::string> kernel_options(const KernelTarget& target);

// The kernels for a device of this architecture, from the cache or from the compiler, which takes
// seconds. Throws Error with the compiler's log.
CompiledKernels compile_kernels(const NvrtcApi& nvrtc, int architecture, const KernelCache& cache);

}  // namespace hvd
