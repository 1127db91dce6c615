// The floating types by arithmetic instead of by bits, and values to try kernels on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvd::test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (isa <= best_isa()) isas.push_back(isa);
  }
  return isas;
}

// ---- Reference of the number formats, by arithmetic instead of by bits ----

struct Format {
  int mantissa_bits;
  int bias;

  double largest() const { return std::ldexp(2 - std::ldexp(1, -mantissa_bits), bias); }

  // Rounds to nearest even; nearbyint does so unless told otherwise.
  double round(double x) const {
    if (!std::isfinite(x) || x == 0) return x;
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    const double unit = std::ldexp(1.0, exponent - mantissa_bits);
    const double rounded = std::nearbyint(x / unit) * unit;
    if (std::fabs(rounded) > largest()) return std::copysign(kInfinity, x);
    return std::copysign(rounded, x);
  }

  double decode(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == 2 * bias + 1) return mantissa != 0 ? kNan : sign * kInfinity;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }

  // Of a value that the format has.
  uint16_t encode(double x) const {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    const int special = (2 * bias + 1) << mantissa_bits;
    if (std::isnan(x)) return static_cast<uint16_t>(special | (1 << (mantissa_bits - 1)));
    if (std::isinf(x)) return static_cast<uint16_t>(sign | special);
    if (std::fabs(x) < std::ldexp(1, 1 - bias)) {
      return static_cast<uint16_t>(sign + std::ldexp(std::fabs(x), bias - 1 + mantissa_bits));
    }
    const int exponent = std::ilogb(x);
    const double mantissa = std::ldexp(std::fabs(x), mantissa_bits - exponent);
    return static_cast<uint16_t>(sign + ((exponent + bias - 1) << mantissa_bits) + mantissa);
  }
};

constexpr Format kHalf{10, 15};
constexpr Format kBfloat{7, 127};
constexpr Format kSingle{23, 127};

inline double rounded(DType dtype, double x) {
  switch (dtype) {
    case DType::f16:
      return kHalf.round(x);
    case DType::bf16:
      return kBfloat.round(x);
    case DType::f32:
      return kSingle.round(x);
    default:
      return x;
  }
}

inline double read_element(DType dtype, const char* from) {
  if (dtype == DType::f64) {
    double x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  if (dtype == DType::f32) {
    float x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return dtype == DType::f16 ? kHalf.decode(bits) : kBfloat.decode(bits);
}

inline void write_element(DType dtype, char* to, double value) {
  const double x = rounded(dtype, value);
  if (dtype == DType::f64) {
    std::memcpy(to, &x, sizeof(x));
  } else if (dtype == DType::f32) {
    const float single = static_cast<float>(x);
    std::memcpy(to, &single, sizeof(single));
  } else {
    const uint16_t bits = dtype == DType::f16 ? kHalf.encode(x) : kBfloat.encode(x);
    std::memcpy(to, &bits, sizeof(bits));
  }
}

inline bool same(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// ---- Data ----

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}

  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  int below(int limit) { return static_cast<int>(bits() % static_cast<uint64_t>(limit)); }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

inline double smallest(DType dtype) {
  if (dtype == DType::f64) return 0x1p-1074;
  return dtype == DType::f32 ? 0x1p-149 : dtype == DType::f16 ? 0x1p-24 : 0x1p-133;
}

inline double largest(DType dtype) {
  if (dtype == DType::f64) return std::numeric_limits<double>::max();
  return (dtype == DType::f32 ? kSingle : dtype == DType::f16 ? kHalf : kBfloat).largest();
}

// Mostly ordinary values; every now and then (not, if `tame`) one of the awkward ones.
inline double draw(DType dtype, Random* random, bool tame) {
  const double sign = random->below(2) == 0 ? 1 : -1;
  if (!tame && random->below(8) == 0) {
    switch (random->below(7)) {
      case 0:
        return sign * 0.0;
      case 1:
        return sign * smallest(dtype) * random->below(40);
      case 2:
        return sign * largest(dtype) * (random->below(2) == 0 ? 1 : 0.5);
      case 3:
        return random->below(4) == 0 ? sign * kInfinity : sign * 1;
      case 4:
        return random->below(4) == 0 ? kNan : sign * 1;
      case 5:
        return sign * std::ldexp(1, -random->below(25));  // halfway, once added to another
      default:
        return sign * std::ldexp(1 + random->unit(), random->below(30) - 25);
    }
  }
  return sign * (0.01 + random->unit());
}

}  // namespace hvd::test
