// Kernels that bring values into 16 bits for their way between ranks; included by body.h, under the
// same rules.
#pragma once

#include "kernels/vector.h"

namespace hvd {
namespace {

// The largest magnitude of the finite values among `count`, 0 where there is none. A first look
// takes all values for finite, which they are but for accidents: one operation less for each.

constexpr uint32_t kInfinityBits = 0x7f800000u;

HVD_INLINE Ints magnitude_bits(const char* from) { return (Ints)(load<Words>(from) & 0x7fffffffu); }

HVD_INLINE uint32_t largest_lane(Ints values) {
  int32_t lanes[kLanes];
  __builtin_memcpy(lanes, &values, sizeof(lanes));
  int32_t best = 0;
  for (int lane = 0; lane < kLanes; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  return static_cast<uint32_t>(best);
}

template <bool kAllFinite>
HVD_NOINLINE uint32_t largest_bits(const char* from, size_t count) {
  constexpr int kStreams = 4;
  Ints largest[kStreams] = {};
  const auto look = [&](const char* at, int stream) {
    Ints magnitude = magnitude_bits(at);
    if constexpr (!kAllFinite) magnitude &= magnitude < static_cast<int32_t>(kInfinityBits);
    largest[stream] = magnitude > largest[stream] ? magnitude : largest[stream];
  };
  size_t index = 0;
  for (; index + kStreams * kLanes <= count; index += kStreams * kLanes) {
    for (int stream = 0; stream < kStreams; ++stream) {
      look(from + (index + stream * kLanes) * 4, stream);
    }
  }
  for (; index < count; index += kLanes) {
    char tail[kVectorBytes] = {};
    const size_t rest = count - index < kLanes ? count - index : kLanes;
    __builtin_memcpy(tail, from + index * 4, rest * 4);
    look(tail, 0);
  }
  uint32_t best = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    const uint32_t of_stream = largest_lane(largest[stream]);
    best = of_stream > best ? of_stream : best;
  }
  return best;
}

double largest_of_floats(const void* src, size_t count) {
  const char* from = static_cast<const char*>(src);
  uint32_t bits = largest_bits<true>(from, count);
  if (bits >= kInfinityBits) bits = largest_bits<false>(from, count);
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

double largest_of_doubles(const void* src, size_t count) {
  const char* from = static_cast<const char*>(src);
  HalfDoubles largest{};
  const auto look = [&](LongWords bits) {
    const HalfDoubles magnitude = (HalfDoubles)(bits & 0x7fffffffffffffffull);
    // False for infinities and NaN; zero for those.
    const LongWords finite = (LongWords)(magnitude <= __DBL_MAX__);
    largest = larger(largest, (HalfDoubles)((LongWords)magnitude & finite));
  };
  constexpr int kWide = kVectorBytes / 8;
  size_t index = 0;
  for (; index + kWide <= count; index += kWide) look(load<LongWords>(from + index * 8));
  if (index < count) {
    char tail[kVectorBytes] = {};
    __builtin_memcpy(tail, from + index * 8, (count - index) * 8);
    look(load<LongWords>(tail));
  }
  double lanes[kWide];
  __builtin_memcpy(lanes, &largest, sizeof(lanes));
  double best = 0;
  for (int lane = 0; lane < kWide; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  return best;
}

// Between float and bfloat16, which have the same range: finite values stay finite.

// From here on up rounding is not all there is to do: what rounds to infinity, infinity, NaN.
constexpr uint32_t kSpecialBits = 0x7f7f8000u;

// Any value.
HVD_NOINLINE void to_finite_bfloats(char* to, const char* from, size_t count) {
  size_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    store(to + index * 2, to_finite_bfloat(load<Floats>(from + index * 4)));
  }
  if (index == count) return;
  char values[kVectorBytes] = {};
  char rounded[kVectorBytes / 2];
  __builtin_memcpy(values, from + index * 4, (count - index) * 4);
  store(rounded, to_finite_bfloat(load<Floats>(values)));
  __builtin_memcpy(to + index * 2, rounded, (count - index) * 2);
}

void to_finite_bfloat_kernel(void* dst, const void* src, size_t count, double) {
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  // One look at all values of a piece, then a loop that is nothing but rounding: as fast as both in
  // one loop where the values are in a cache, and faster where they come from memory.
  constexpr size_t kPiece = 4096;
  for (size_t done = 0; done < count; done += kPiece) {
    const size_t rest = count - done < kPiece ? count - done : kPiece;
    const char* piece = from + done * 4;
    char* rounded = to + done * 2;
    size_t index = 0;
    if (largest_bits<true>(piece, rest) < kSpecialBits) {
      for (; index + 2 * kLanes <= rest; index += 2 * kLanes) {
        for (int v = 0; v < 2; ++v) {
          const size_t place = index + static_cast<size_t>(v * kLanes);
          store(rounded + place * 2, narrow(nearest_bfloat(load<Words>(piece + place * 4))));
        }
      }
    }
    to_finite_bfloats(rounded + index * 2, piece + index * 4, rest - index);
  }
}

}  // namespace
}  // namespace hvd
