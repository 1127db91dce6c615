#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvd {

// x[i] = round(factor * x[i]) in one pass over memory, and what the result is like. With a factor
// of 1 memory is only read. Floating types only: Error(bad_argument) otherwise.
ByProducts rescale(void* memory, DType dtype, size_t count, double factor);

}  // namespace hvd
