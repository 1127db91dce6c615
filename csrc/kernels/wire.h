#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvd {

// Gradients on their way between ranks in 16 bits ("wire"): f16 or bf16 for values of f32 or f64.
//
// Values travel in blocks. What lies in a block is the value times a power of two, its scale, so
// that the largest finite value of the block fits, and small ones are not lost: relative to the
// block's largest value M, a value x comes out as x (1 + d) + a with
//   f16    |d| <= 2^-11, |a| <= 2^-39 M (2^-125 for f32, 2^-925 for f64, where that is more)
//   bf16   |d| <= 2^-8,  |a| <= 2^-134 for f32, 2^-197 M for f64 (2^-1030, where that is more)
// Infinities and NaNs come out as such, and nothing else does: what would be rounded up beyond the
// range of the type is rounded down, which is within the bound. f32 in bf16 needs no scale, because
// the range is the same.

bool has_wire_form(DType type);  // f32 and f64
bool needs_scale(DType wire, DType type);

// The largest magnitude of the finite values among `count`, 0 where there is none.
double largest_magnitude(const void* values, DType type, size_t count, Isa isa = best_isa());

// The scale of a block with this largest magnitude. Its reciprocal is exact as well, also as float.
double wire_scale(DType wire, DType type, double largest);

// wire[i] = round(scale * values[i]), once, to nearest even, but not to what is beyond the range of
// the type when the scale is undone. `scale` is wire_scale's for these values, or for more of them.
// The two may not overlap.
void to_wire(void* wire, DType wire_type, const void* values, DType type, size_t count,
             double scale, Isa isa = best_isa());

// As find_reduce_kernel's for sums of `type`, but the sources are in `wire`: `pre` has to hold the
// reciprocals of their scales. The outputs may not overlap the sources.
ReduceKernel find_wire_kernel(DType wire, DType type, bool accumulate_f64, Isa isa = best_isa());

}  // namespace hvd
