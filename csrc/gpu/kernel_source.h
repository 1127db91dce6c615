#pragma once

#include <vector>

#include "gpu/nvrtc_api.h"

namespace hvd {

// The CUDA C++ source of the kernels: kernels.cu and what it includes, as they were when this
// library was built.
const std::vector<SourceFile>& kernel_source();

}  // namespace hvd
