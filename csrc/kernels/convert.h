#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvd {

// dst[i] = round(factor * src[i]) between floating types; with equal types and a factor of 1 a
// plain copy of any type. The product is taken in float, or in double when either side is double,
// and rounded once to nearest even; a NaN stays one. dst may be src itself when the element sizes
// are equal; otherwise the two may not overlap. Throws Error(bad_argument) for any other types.
void convert(void* dst, DType to, const void* src, DType from, size_t count, double factor);

// The form for one Isa, which has to be no better than what the machine runs.
void convert(void* dst, DType to, const void* src, DType from, size_t count, double factor,
             Isa isa);

}  // namespace hvd
