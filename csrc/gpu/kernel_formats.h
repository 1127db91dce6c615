// The number formats of the CUDA kernels: units of kUnit elements as they lie in memory, and as
// numbers. Rounding is to nearest even throughout, NaN stays NaN (which one is left open),
// subnormal numbers are kept: the values are those of csrc/kernels, bit for bit.
#pragma once

#include "gpu/kernel_arguments.h"

namespace hvd::gpu {

constexpr unsigned kInfinityBits = 0x7f800000u;

// ---- 16 bits
// -------------------------------------------------------------------------------------

// The processor's own conversions where it has them. What the host runs is below.
#if defined(__CUDA_ARCH__)

__device__ inline float half_to_float(unsigned bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(bits)));
  return x;
}

__device__ inline unsigned float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#else

__device__ inline float half_to_float(unsigned bits) {
  const unsigned sign = (bits & 0x8000u) << 16;
  const unsigned magnitude = (bits & 0x7fffu) << 13;
  if (magnitude < (1u << 23)) {  // zero and subnormal numbers: units of 2^-24
    const float x = static_cast<float>(bits & 0x7fffu) * 0x1p-24f;
    return __uint_as_float(__float_as_uint(x) | sign);
  }
  if (magnitude >= (0x7c00u << 13)) {
    const unsigned quiet = magnitude > (0x7c00u << 13) ? 0x00400000u : 0;
    return __uint_as_float(sign | (magnitude + (224u << 23)) | quiet);
  }
  return __uint_as_float(sign | (magnitude + (112u << 23)));
}

__device__ inline unsigned float_to_half(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned sign = (bits >> 16) & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfinityBits) return sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // from 65536 on
  if (magnitude < 0x38800000u) {                        // below 2^-14: a subnormal number
    // Adding 0.5 shifts the bits to their place, and the addition rounds them.
    const float shifted = __uint_as_float(magnitude) + 0.5f;
    return sign | (__float_as_uint(shifted) - 0x3f000000u);
  }
  return sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

#endif

__device__ inline unsigned pack_halves(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return float_to_half(low) | (float_to_half(high) << 16);
#endif
}

__device__ inline unsigned float_to_bfloat(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > kInfinityBits) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ inline unsigned pack_bfloats(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return float_to_bfloat(low) | (float_to_bfloat(high) << 16);
#endif
}

// Rounds to odd: what lies between two floats becomes the one with an odd last bit. Rounding that
// again, to a type with at least two bits less, gives the same as rounding x itself once.
__device__ inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const bool beyond = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  return __uint_as_float((__float_as_uint(nearest) - (beyond ? 1u : 0u)) | 1u);
}

// ---- Units
// ---------------------------------------------------------------------------------------

// A unit of elements of kSize bytes, as it lies in memory.
template <unsigned kSize>
struct Raw {
  static constexpr unsigned kParts = kUnit * kSize / 16;
  uint4 parts[kParts];
};

template <unsigned kSize>
struct ElementOf;
template <>
struct ElementOf<2> {
  using Type = unsigned short;
};
template <>
struct ElementOf<4> {
  using Type = unsigned;
};
template <>
struct ElementOf<8> {
  using Type = unsigned long long;
};

__device__ inline unsigned& word_of(uint4* parts, unsigned index) {
  uint4& part = parts[index / 4];
  switch (index % 4) {
    case 0:
      return part.x;
    case 1:
      return part.y;
    case 2:
      return part.z;
    default:
      return part.w;
  }
}

template <unsigned kSize>
__device__ inline unsigned& word(Raw<kSize>& raw, unsigned index) {
  return word_of(raw.parts, index);
}

__device__ inline bool is_aligned(const void* memory) {
  return (reinterpret_cast<unsigned long long>(memory) & 15u) == 0;
}

// Reads `count` elements, zero for the rest. `whole` tells that 16 bytes can be read at a time.
template <unsigned kSize>
__device__ inline Raw<kSize> read_unit(const char* from, unsigned count, bool whole) {
  using Element = typename ElementOf<kSize>::Type;
  Raw<kSize> raw;
  if (whole && count == kUnit) {
#pragma unroll
    for (unsigned part = 0; part < Raw<kSize>::kParts; ++part) {
      raw.parts[part] = reinterpret_cast<const uint4*>(from)[part];
    }
    return raw;
  }
  const Element* elements = reinterpret_cast<const Element*>(from);
#pragma unroll
  for (unsigned i = 0; i < kUnit; ++i) {
    const Element element = i < count ? elements[i] : 0;
    if constexpr (kSize == 2) {
      unsigned& both = word(raw, i / 2);
      both = i % 2 == 0 ? element : both | (static_cast<unsigned>(element) << 16);
    } else if constexpr (kSize == 4) {
      word(raw, i) = element;
    } else {
      word(raw, 2 * i) = static_cast<unsigned>(element);
      word(raw, 2 * i + 1) = static_cast<unsigned>(element >> 32);
    }
  }
  return raw;
}

// Writes the first `count` elements.
template <unsigned kSize>
__device__ inline void write_unit(char* to, Raw<kSize>& raw, unsigned count, bool whole) {
  using Element = typename ElementOf<kSize>::Type;
  if (whole && count == kUnit) {
#pragma unroll
    for (unsigned part = 0; part < Raw<kSize>::kParts; ++part) {
      reinterpret_cast<uint4*>(to)[part] = raw.parts[part];
    }
    return;
  }
  Element* elements = reinterpret_cast<Element*>(to);
#pragma unroll
  for (unsigned i = 0; i < kUnit; ++i) {
    if (i >= count) break;
    if constexpr (kSize == 2) {
      elements[i] = static_cast<Element>(word(raw, i / 2) >> (16 * (i % 2)));
    } else if constexpr (kSize == 4) {
      elements[i] = word(raw, i);
    } else {
      elements[i] = static_cast<Element>(word(raw, 2 * i)) |
                    (static_cast<Element>(word(raw, 2 * i + 1)) << 32);
    }
  }
}

// ---- Formats
// -------------------------------------------------------------------------------------

// Number: what a format is computed in when nothing wider takes part.

struct Float32 {
  static constexpr unsigned kSize = 4;
  static constexpr unsigned kDigits = 1;  // elements in which a weight travels
  using Number = float;
  static __device__ inline void decode(Raw<4>& raw, float (&x)[kUnit]) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) x[i] = __uint_as_float(word(raw, i));
  }
  static __device__ inline void encode(const float (&x)[kUnit], Raw<4>& raw) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) word(raw, i) = __float_as_uint(x[i]);
  }
  static __device__ inline float narrow(double x) { return static_cast<float>(x); }
};

struct Float16 {
  static constexpr unsigned kSize = 2;
  static constexpr unsigned kDigits = kWeightDigits;
  using Number = float;
  static __device__ inline void decode(Raw<2>& raw, float (&x)[kUnit]) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) {
      x[i] = half_to_float((word(raw, i / 2) >> (16 * (i % 2))) & 0xffffu);
    }
  }
  static __device__ inline void encode(const float (&x)[kUnit], Raw<2>& raw) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; i += 2) word(raw, i / 2) = pack_halves(x[i], x[i + 1]);
  }
  static __device__ inline float narrow(double x) { return round_to_odd(x); }
};

struct BFloat16 {
  static constexpr unsigned kSize = 2;
  static constexpr unsigned kDigits = kWeightDigits;
  using Number = float;
  static __device__ inline void decode(Raw<2>& raw, float (&x)[kUnit]) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; i += 2) {
      x[i] = __uint_as_float(word(raw, i / 2) << 16);
      x[i + 1] = __uint_as_float(word(raw, i / 2) & 0xffff0000u);
    }
  }
  static __device__ inline void encode(const float (&x)[kUnit], Raw<2>& raw) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; i += 2) word(raw, i / 2) = pack_bfloats(x[i], x[i + 1]);
  }
  static __device__ inline float narrow(double x) { return round_to_odd(x); }
};

struct Float64 {
  static constexpr unsigned kSize = 8;
  static constexpr unsigned kDigits = 1;
  using Number = double;
  static __device__ inline void decode(Raw<8>& raw, double (&x)[kUnit]) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) {
      const unsigned long long bits =
          word(raw, 2 * i) | (static_cast<unsigned long long>(word(raw, 2 * i + 1)) << 32);
      x[i] = __longlong_as_double(static_cast<long long>(bits));
    }
  }
  static __device__ inline void encode(const double (&x)[kUnit], Raw<8>& raw) {
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) {
      const auto bits = static_cast<unsigned long long>(__double_as_longlong(x[i]));
      word(raw, 2 * i) = static_cast<unsigned>(bits);
      word(raw, 2 * i + 1) = static_cast<unsigned>(bits >> 32);
    }
  }
};

// Number is the format's own, or double where something else in the computation is double.
template <class Format, class Number>
__device__ inline void decode(Raw<Format::kSize>& raw, Number (&x)[kUnit]) {
  if constexpr (sizeof(Number) == sizeof(typename Format::Number)) {
    Format::decode(raw, x);
  } else {
    float narrow[kUnit];
    Format::decode(raw, narrow);
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) x[i] = narrow[i];
  }
}

// Rounds once.
template <class Format, class Number>
__device__ inline void encode(const Number (&x)[kUnit], Raw<Format::kSize>& raw) {
  if constexpr (sizeof(Number) == sizeof(typename Format::Number)) {
    Format::encode(x, raw);
  } else {
    float narrow[kUnit];
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) narrow[i] = Format::narrow(x[i]);
    Format::encode(narrow, raw);
  }
}

}  // namespace hvd::gpu
