#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace hvd {

enum class ReduceOp : uint8_t { sum, min, max };

// What a reduction can tell about its result at no extra pass over memory. Calls accumulate into
// it: start from a fresh one and hand the same one to the calls for all pieces of a tensor.
// Both are taken from the rounded values that were stored.
struct ByProducts {
  double sum_of_squares = 0;
  bool finite = true;  // false once a NaN or an infinity was stored
};

struct ReduceArguments {
  void* out;
  void* second_out;            // null, or a second place for the same result
  const void* const* sources;  // source_count pointers; one whose pre is 0 is not read
  const double* pre;           // source_count factors
  int source_count;
  double post;
  size_t count;             // elements
  ByProducts* by_products;  // null when nobody asks; only floating types fill it
};

// sum: out[i] = round(post * sum over r, in order, of pre[r] * sources[r][i]). Accumulates in
// float for float, half and bfloat16 (in double with accumulate_f64, and always for double), and
// rounds once, to nearest even, when it stores. Integer sums wrap; a sum of bools is "or"; both
// ignore pre, apart from 0 = leave out, and post. min and max ignore the two likewise and hand a
// NaN on. When all sources are left out the result is zero.
// `out` and `second_out` may be the very same memory as any of the sources, but may not overlap
// one partially. Pointers need the alignment of a byte only.
// The result and the by-products are the same, bit for bit, on every Isa (which NaN a NaN is,
// apart).
using ReduceKernel = void (*)(const ReduceArguments&);

enum class Isa { portable, avx2, avx512 };

const char* name_of(Isa isa);

// The best form that this machine runs. HVD_ISA=portable|avx2|avx512 in the environment lowers it.
Isa best_isa();

ReduceKernel find_reduce_kernel(DType dtype, ReduceOp op, bool accumulate_f64 = false);

// The form for one Isa, which has to be no better than what the machine runs.
ReduceKernel find_reduce_kernel(DType dtype, ReduceOp op, bool accumulate_f64, Isa isa);

}  // namespace hvd
