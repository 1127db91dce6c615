// The few vector primitives that the kernels are made of, in the width for which the including
// source file is compiled. Everything is in an unnamed namespace, and nothing of the standard
// library is called: an inline function that the linker merges across source files could end up
// in its AVX-512 form on a machine without it.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvd {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

#define HVD_INLINE inline __attribute__((always_inline))
#define HVD_NOINLINE __attribute__((noinline))

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef double HalfDoubles __attribute__((vector_size(kVectorBytes)));
typedef uint64_t LongWords __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

// As many doubles as there are floats in one vector.
struct Doubles {
  HalfDoubles low, high;
};

HVD_INLINE Doubles operator+(Doubles a, Doubles b) { return {a.low + b.low, a.high + b.high}; }
HVD_INLINE Doubles operator*(Doubles a, Doubles b) { return {a.low * b.low, a.high * b.high}; }

template <class Vector>
HVD_INLINE Vector load(const char* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class Vector>
HVD_INLINE void store(char* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof(vector));
}

HVD_INLINE Floats spread(float value) { return value - Floats{}; }
HVD_INLINE Doubles spread(double value) { return {value - HalfDoubles{}, value - HalfDoubles{}}; }
HVD_INLINE Words spread(uint32_t value) { return value - Words{}; }

HVD_INLINE Words select(Words mask, Words yes, Words no) { return (yes & mask) | (no & ~mask); }

// Both below 2^31, so that the signed comparison will do, which SSE2 has.
HVD_INLINE Words less(Words a, Words b) { return (Words)((Ints)a < (Ints)b); }

// x where it is smaller (larger) than best, or a NaN; a NaN in best stays, as nothing compares
// smaller.
HVD_INLINE Floats smaller(Floats best, Floats x) {
  return (Floats)select((Words)(x < best) | (Words)(x != x), (Words)x, (Words)best);
}
HVD_INLINE Floats larger(Floats best, Floats x) {
  return (Floats)select((Words)(x > best) | (Words)(x != x), (Words)x, (Words)best);
}
HVD_INLINE HalfDoubles select(LongWords mask, HalfDoubles yes, HalfDoubles no) {
  return (HalfDoubles)(((LongWords)yes & mask) | ((LongWords)no & ~mask));
}
HVD_INLINE HalfDoubles smaller(HalfDoubles best, HalfDoubles x) {
  return select((LongWords)(x < best) | (LongWords)(x != x), x, best);
}
HVD_INLINE HalfDoubles larger(HalfDoubles best, HalfDoubles x) {
  return select((LongWords)(x > best) | (LongWords)(x != x), x, best);
}
HVD_INLINE Doubles smaller(Doubles best, Doubles x) {
  return {smaller(best.low, x.low), smaller(best.high, x.high)};
}
HVD_INLINE Doubles larger(Doubles best, Doubles x) {
  return {larger(best.low, x.low), larger(best.high, x.high)};
}

#if defined(__AVX512F__)

HVD_INLINE Doubles widen(Floats x) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
          _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}
HVD_INLINE Floats narrow(Doubles x) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.low)), _mm512_cvtpd_ps(x.high),
                            1);
}
HVD_INLINE Words widen(Shorts x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
HVD_INLINE Shorts narrow(Words x) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)x); }
HVD_INLINE Floats from_half(Shorts x) { return _mm512_cvtph_ps((__m256i)x); }
HVD_INLINE Shorts to_half(Floats x) {
  return (Shorts)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__AVX2__)

HVD_INLINE Doubles widen(Floats x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
HVD_INLINE Floats narrow(Doubles x) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(x.low)),
                              _mm256_cvtpd_ps(x.high), 1);
}
HVD_INLINE Words widen(Shorts x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }
HVD_INLINE Shorts narrow(Words x) {
  return (Shorts)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                                  _mm256_extracti128_si256((__m256i)x, 1));
}
HVD_INLINE Floats from_half(Shorts x) { return _mm256_cvtph_ps((__m128i)x); }
HVD_INLINE Shorts to_half(Floats x) {
  return (Shorts)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#else

#if defined(__SSE2__)

// The generic form below is right, but slow with GCC on x86.
HVD_INLINE Doubles widen(Floats x) { return {_mm_cvtps_pd(x), _mm_cvtps_pd(_mm_movehl_ps(x, x))}; }
HVD_INLINE Floats narrow(Doubles x) {
  return _mm_movelh_ps(_mm_cvtpd_ps(x.low), _mm_cvtpd_ps(x.high));
}
HVD_INLINE Words widen(Shorts x) {
  return (Words)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)&x), _mm_setzero_si128());
}
HVD_INLINE Shorts narrow(Words x) {
  // The saturating instruction is for signed numbers: hand it the same bits as one.
  const __m128i extended = (__m128i)((Ints)(x << 16) >> 16);
  Shorts result;
  _mm_storel_epi64((__m128i*)&result, _mm_packs_epi32(extended, extended));
  return result;
}

#else

typedef float HalfFloats __attribute__((vector_size(8)));

// Not element by element: GCC 12 would take a narrowing that is widened again for no change.
HVD_INLINE Doubles widen(Floats x) {
  HalfFloats halves[2];
  __builtin_memcpy(halves, &x, sizeof(x));
  return {__builtin_convertvector(halves[0], HalfDoubles),
          __builtin_convertvector(halves[1], HalfDoubles)};
}
HVD_INLINE Floats narrow(Doubles x) {
  const HalfFloats halves[2] = {__builtin_convertvector(x.low, HalfFloats),
                                __builtin_convertvector(x.high, HalfFloats)};
  Floats result;
  __builtin_memcpy(&result, halves, sizeof(result));
  return result;
}
HVD_INLINE Words widen(Shorts x) { return __builtin_convertvector(x, Words); }
HVD_INLINE Shorts narrow(Words x) { return __builtin_convertvector(x, Shorts); }

#endif

// The two conversions do, bit by bit, what the F16C instructions do, whatever the thread has set
// for subnormal numbers.
HVD_INLINE Floats from_half(Shorts half) {
  const Words bits = widen(half);
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Words infinity = spread(0x7c00u << 13);
  // A subnormal one is put below an implicit one, which the subtraction takes away again.
  const Words one = spread(113u << 23);
  const Words subnormal = (Words)((Floats)(magnitude + one) - (Floats)one);
  const Words quiet_nan = less(infinity, magnitude) & 0x00400000u;
  const Words special = ~less(magnitude, infinity) & (112u << 23);
  const Words normal = (magnitude + (112u << 23) + special) | quiet_nan;
  const Words result = select(less(magnitude, spread(1u << 23)), subnormal, normal);
  return (Floats)(result | ((bits & 0x8000u) << 16));
}
HVD_INLINE Shorts to_half(Floats x) {
  const Words bits = (Words)x;
  const Words magnitude = bits & 0x7fffffffu;
  // Adding 0.5 shifts the bits to their place, and the addition rounds them.
  const Floats half = spread(0.5f);
  const Words subnormal = (Words)((Floats)magnitude + half) - (Words)half;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const Words special = select(less(spread(0x7f800000u), magnitude), nan, spread(0x7c00u));
  const Words result =
      select(less(magnitude, spread(0x47800000u)),
             select(less(magnitude, spread(0x38800000u)), subnormal, normal), special);
  return narrow(result | ((bits >> 16) & 0x8000u));
}

#endif

// Rounds to odd: what lies between two floats becomes the one with an odd last bit. Rounding that
// again, to a type with at least two bits less, gives the same as rounding x itself once.
HVD_INLINE Floats narrow_to_odd(Doubles x) {
  const Floats nearest = narrow(x);
  const Doubles back = widen(nearest);
  Doubles inexact, beyond;
  const auto sign_less = [](HalfDoubles v) {
    return (HalfDoubles)((LongWords)v & 0x7fffffffffffffffull);
  };
  // Masks as the doubles 0 and 1, so that they narrow exactly.
  const HalfDoubles one = 1.0 - HalfDoubles{};
  const HalfDoubles zero{};
  inexact.low = select((LongWords)(back.low != x.low), one, zero);
  inexact.high = select((LongWords)(back.high != x.high), one, zero);
  beyond.low = select((LongWords)(sign_less(back.low) > sign_less(x.low)), one, zero);
  beyond.high = select((LongWords)(sign_less(back.high) > sign_less(x.high)), one, zero);
  const Words off = (Words)(narrow(inexact) != Floats{}) & 1u;
  const Words back_one = (Words)(narrow(beyond) != Floats{}) & 1u;
  return (Floats)(((Words)nearest - back_one) | off);
}

HVD_INLINE Floats from_bfloat(Shorts x) { return (Floats)(widen(x) << 16); }
HVD_INLINE Words nearest_bfloat(Words bits) { return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; }
HVD_INLINE Shorts to_bfloat(Floats x) {
  const Words bits = (Words)x;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  return narrow(select((Words)(x != x), quiet_nan, nearest_bfloat(bits)));
}
// The same, but what would be rounded up to infinity becomes the largest finite value.
HVD_INLINE Shorts to_finite_bfloat(Floats x) {
  const Words bits = (Words)x;
  const Words finite = less(bits & 0x7fffffffu, spread(0x7f800000u));
  const Words rounded = nearest_bfloat(bits);
  const Words beyond = ~less(rounded & 0x7fffu, spread(0x7f80u)) & finite & 1u;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  return narrow(select((Words)(x != x), quiet_nan, rounded - beyond));
}

}  // namespace
}  // namespace hvd
