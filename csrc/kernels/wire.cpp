#include "kernels/wire.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/kernel_table.h"

namespace hvd {
namespace {

// Scaled up no further than this: a factor that is divided by it is a normal number still.
constexpr int kMostExponentF32 = 100;
constexpr int kMostExponentF64 = 900;

// The values of a block are brought below two to the power of this. f16 ends at 2^16, of which one
// half is for rounding up. In bf16 it is far from both ends, and far enough from 0 for the
// reciprocal of the scale, which has to be a double.
int top_exponent(DType wire) { return wire == DType::f16 ? 15 : 64; }

// That power of two in the wire's bits, without a sign.
uint16_t top_bits(DType wire) {
  return static_cast<uint16_t>(wire == DType::f16 ? (15 + 15) << 10 : (64 + 127) << 7);
}

// The exponent of the first power of two that the type does not have.
int end_exponent(DType type) { return type == DType::f32 ? 128 : 1024; }

}  // namespace

bool has_wire_form(DType type) { return type == DType::f32 || type == DType::f64; }

bool needs_scale(DType wire, DType type) { return !(wire == DType::bf16 && type == DType::f32); }

double largest_magnitude(const void* values, DType type, size_t count, Isa isa) {
  return kernel_table(isa).largest[static_cast<size_t>(type)](values, count);
}

double wire_scale(DType wire, DType type, double largest) {
  if (largest == 0 || !needs_scale(wire, type)) return 1;
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest < 2^exponent
  const int most = type == DType::f32 ? kMostExponentF32 : kMostExponentF64;
  return std::ldexp(1.0, std::min(top_exponent(wire) - exponent, most));
}

void to_wire(void* wire, DType wire_type, const void* values, DType type, size_t count,
             double scale, Isa isa) {
  const KernelTable& table = kernel_table(isa);
  const ConvertKernel kernel =
      needs_scale(wire_type, type)
          ? table.convert[static_cast<size_t>(type)][static_cast<size_t>(wire_type)]
          : table.to_finite_bf16;
  kernel(wire, values, count, scale);
  if (!needs_scale(wire_type, type) ||
      scale != std::ldexp(1.0, top_exponent(wire_type) - end_exponent(type))) {
    return;
  }
  // Among values of the last power of two of the type: none may have been rounded up to the next.
  auto* bits = static_cast<uint16_t*>(wire);
  const uint16_t top = top_bits(wire_type);
  for (size_t i = 0; i < count; ++i) {
    if ((bits[i] & 0x7fff) == top) --bits[i];
  }
}

ReduceKernel find_wire_kernel(DType wire, DType type, bool accumulate_f64, Isa isa) {
  const int form = type == DType::f64 ? 2 : accumulate_f64 ? 1 : 0;
  return kernel_table(isa).sum_of_wire[wire == DType::bf16 ? 1 : 0][form];
}

}  // namespace hvd
