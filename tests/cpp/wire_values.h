// Values that travel in 16 bits, and arithmetic that says what becomes of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "number_formats.h"

namespace hvd::test {

struct Pair {
  DType wire;
  DType type;
};
inline const Pair kPairs[] = {{DType::f16, DType::f32},
                              {DType::bf16, DType::f32},
                              {DType::f16, DType::f64},
                              {DType::bf16, DType::f64}};

// What a value becomes on the wire: rounded, but never to infinity.
inline double on_wire(DType wire, double x) {
  const double nearest = rounded(wire, x);
  if (std::isfinite(x) && std::isinf(nearest)) return std::copysign(largest(wire), x);
  return nearest;
}

// How far a value may come out from what it was, in a block with the largest magnitude `most`.
inline double bound(const Pair& pair, double x, double most) {
  const double relative = std::ldexp(std::fabs(x), pair.wire == DType::f16 ? -11 : -8);
  if (pair.wire == DType::f16) {
    const double floor = pair.type == DType::f32 ? 0x1p-125 : 0x1p-920;
    return relative + std::max(std::ldexp(most, -39), floor);
  }
  return relative +
         (pair.type == DType::f32 ? 0x1p-134 : std::max(std::ldexp(most, -197), 0x1p-1030));
}

inline double largest_of(const std::vector<double>& values) {
  double most = 0;
  for (const double x : values) {
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  }
  return most;
}

inline std::vector<char> packed(DType type, const std::vector<double>& values,
                                size_t misalignment) {
  std::vector<char> memory(misalignment + values.size() * size_of(type) + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    write_element(type, memory.data() + misalignment + i * size_of(type), values[i]);
  }
  return memory;
}

inline std::vector<double> some_values(DType type, size_t count, Random* random) {
  // Now and then a block of tiny or of huge values, or of nothing but zeros.
  const int kind = random->below(6);
  const double factor = kind == 0   ? std::ldexp(1, -140)
                        : kind == 1 ? std::ldexp(1, 120)
                        : kind == 2 ? 0
                                    : 1;
  std::vector<double> values(count);
  for (double& x : values) x = rounded(type, draw(type, random, kind == 5) * factor);
  return values;
}

// The sum of what is on the wire, step by step as the kernels take it.
template <class Scalar>
double sum_of(const std::vector<double>& values, const std::vector<double>& factors, double post) {
  volatile Scalar sum = 0;
  bool started = false;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (factors[rank] == 0) continue;
    volatile Scalar product =
        static_cast<Scalar>(values[rank]) * static_cast<Scalar>(factors[rank]);
    sum = started ? Scalar{sum} + Scalar{product} : Scalar{product};
    started = true;
  }
  volatile Scalar result = Scalar{sum} * static_cast<Scalar>(post);
  return started ? static_cast<double>(Scalar{result}) : 0;
}

}  // namespace hvd::test
