// The kernels of the CUDA data plane: one source for every device and every type. NVRTC compiles it
// for the device at hand, and the tests compile it for the host (tests/fakes/cuda_shim.h) and run
// it against the CPU kernels. Nothing newer than sm_70 is used, and no CUDA header.
//
// Results do not depend on the number of blocks, on the device, or on where memory lies: ranks get
// equal bits from equal buckets, so they clip alike. For that every number has one order in which
// it is summed; products and sums are fused only where it is written (the options switch the rest
// off); nothing is summed atomically.
//
// Every kernel is a sequence of steps in which each thread works for itself, with __syncthreads()
// between them. The loop over threads makes one turn on a device. On the host a block may have any
// number of threads; with one, it runs as an ordinary function.

#include "gpu/kernel_arguments.h"
#include "gpu/kernel_formats.h"

// Room for four blocks on a multiprocessor of any architecture: 64 registers. NVRTC chooses to use
// more for some of the kernels otherwise.
#if !defined(HVD_KERNEL)
#define HVD_KERNEL(name, Arguments)                                        \
  extern "C" __global__ void __launch_bounds__(hvd::gpu::kBlockThreads, 4) \
      name(const Arguments arguments)
#endif

#define HVD_FOR_EACH_THREAD(thread) \
  for (unsigned thread = threadIdx.x; thread < kBlockThreads; thread += blockDim.x)

namespace hvd::gpu {

// What both sides of a conversion are computed in: double when one of them is.
template <bool kWide>
struct NumberFor {
  using Type = float;
};
template <>
struct NumberFor<true> {
  using Type = double;
};
template <class From, class To>
using CommonNumber = typename NumberFor<From::kSize == 8 || To::kSize == 8>::Type;

template <class Number>
__device__ inline void scale_unit(Number (&x)[kUnit], Number factor, unsigned count) {
#pragma unroll
  for (unsigned i = 0; i < kUnit; ++i) x[i] = i < count ? x[i] * factor : Number(0);
}

// Elements of the unit among `count` ones.
__device__ inline unsigned in_unit(unsigned unit, unsigned count) {
  const unsigned first = unit * kUnit;
  if (first >= count) return 0;
  return count - first < kUnit ? count - first : kUnit;
}

// Units of 16-bit elements are short, so that two are fetched at a time; but doubles fill the
// registers anyway.
template <class Format, class Number>
constexpr unsigned kUnitsAtOnce = Format::kSize == 2 && sizeof(Number) == 4 ? 2 : 1;

// ---- Sums over a block
// ---------------------------------------------------------------------------

// Adds up kWidth neighbours, in a fixed order; each first of kWidth holds the result. kWidth is a
// power of 2. All threads of the block have to call it, after they have set their elements.
template <unsigned kWidth>
__device__ inline void add_neighbours(double* sums, unsigned* flags) {
  __syncthreads();
  for (unsigned width = kWidth / 2; width > 0; width /= 2) {
    HVD_FOR_EACH_THREAD(thread) {
      if (thread % kWidth < width) {
        sums[thread] += sums[thread + width];
        flags[thread] |= flags[thread + width];
      }
    }
    __syncthreads();
  }
}

// The squares of a unit, added to *sum, and whether all of it is finite.
//
// Doubles are squared as doubles. Of the narrower types the squares of one unit are summed in
// float, where that is as good: when the largest lies between 2^-50 and 2^60, no sum overflows and
// what underflows is too small to count, so that the error is below kUnit * 2^-24 of the sum. The
// rest is summed in double. Many devices have few units for doubles: this needs them once per unit
// instead of once per element.
__device__ inline void add_squares(const float (&x)[kUnit], double* sum, unsigned* not_finite) {
  unsigned largest = 0;
#pragma unroll
  for (unsigned i = 0; i < kUnit; ++i) {
    const unsigned magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  constexpr unsigned kLow = (127u - 50u) << 23;
  constexpr unsigned kHigh = (127u + 60u) << 23;
  if (largest - kLow <= kHigh - kLow) {
    float squares = 0;
#pragma unroll
    for (unsigned i = 0; i < kUnit; ++i) squares = __fmaf_rn(x[i], x[i], squares);
    *sum += static_cast<double>(squares);
  } else if (largest != 0) {
    for (unsigned i = 0; i < kUnit; ++i) {
      const double value = static_cast<double>(x[i]);
      *sum = __fma_rn(value, value, *sum);
    }
    if (largest >= kInfinityBits) *not_finite = 1;
  }
}
__device__ inline void add_squares(const double (&x)[kUnit], double* sum, unsigned* not_finite) {
#pragma unroll
  for (unsigned i = 0; i < kUnit; ++i) {
    const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(x[i]));
    if ((bits & 0x7ff0000000000000ull) == 0x7ff0000000000000ull) *not_finite = 1;
    *sum = __fma_rn(x[i], x[i], *sum);
  }
}

// ---- pack
// ----------------------------------------------------------------------------------------

template <class Format>
__device__ inline void write_element(char* bucket, unsigned long long place, double value) {
  Raw<Format::kSize> raw;
  double x[kUnit] = {value};
  encode<Format>(x, raw);
  write_unit<Format::kSize>(bucket + place * Format::kSize, raw, 1, false);
}

template <class Format>
__device__ inline double read_element(const char* bucket, unsigned long long place) {
  Raw<Format::kSize> raw = read_unit<Format::kSize>(bucket + place * Format::kSize, 1, false);
  typename Format::Number x[kUnit];
  Format::decode(raw, x);
  return x[0];
}

template <class Format>
__device__ inline void write_trailer(const PackArguments& arguments) {
  const Trailer& trailer = arguments.trailer;
  char* bucket = static_cast<char*>(arguments.bucket);
  const unsigned weights = trailer.rank_count * Format::kDigits;
  HVD_FOR_EACH_THREAD(thread) {
    for (unsigned i = thread; i < weights; i += kBlockThreads) {
      double value = 0;
      // Not by a subscript: parameters of a kernel have addresses only as copies on a stack.
#pragma unroll
      for (unsigned digit = 0; digit < Format::kDigits; ++digit) {
        if (i == trailer.rank * Format::kDigits + digit) value = arguments.weight[digit];
      }
      write_element<Format>(bucket, trailer.place + i, value);
    }
    for (unsigned i = thread; i < trailer.segment_count; i += kBlockThreads) {
      const Segment segment = arguments.segments[i];
      const bool used = segment.memory != nullptr && segment.factor != 0;
      write_element<Format>(bucket, trailer.place + weights + i, used ? 1.0 : 0.0);
    }
    for (unsigned i = thread; i < trailer.padding; i += kBlockThreads) {
      write_element<Format>(bucket, trailer.place + weights + trailer.segment_count + i, 0.0);
    }
  }
}

// bucket = round(factor * segment), in the type of the bucket.
template <class From, class To>
__device__ inline void pack(const PackArguments& arguments) {
  using Number = CommonNumber<From, To>;
  constexpr unsigned kAtOnce = kUnitsAtOnce<From, Number>;
  const double common = arguments.factor != nullptr ? *arguments.factor : 1.0;
  for (unsigned index = blockIdx.x; index < arguments.chunk_count; index += gridDim.x) {
    const Chunk chunk = arguments.chunks[index];
    const Segment segment = arguments.segments[chunk.segment];
    const double wide_factor = common * segment.factor;
    const Number factor = static_cast<Number>(wide_factor);
    const unsigned read = segment.memory == nullptr || wide_factor == 0 ? 0 : chunk.count;
    const unsigned written = chunk.count + chunk.padding;
    const char* from = static_cast<const char*>(segment.memory) + chunk.offset * From::kSize;
    char* to = static_cast<char*>(arguments.bucket) + chunk.place * To::kSize;
    const bool whole_reads = is_aligned(from);
    const bool whole_writes = is_aligned(to);
    const unsigned units = (written + kUnit - 1) / kUnit;
    HVD_FOR_EACH_THREAD(thread) {
      for (unsigned first = thread; first < units; first += kAtOnce * kBlockThreads) {
        Raw<From::kSize> values[kAtOnce];
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          values[i] = read_unit<From::kSize>(from + unit * (kUnit * From::kSize),
                                             in_unit(unit, read), whole_reads);
        }
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          Number x[kUnit];
          decode<From>(values[i], x);
          scale_unit(x, factor, in_unit(unit, read));
          Raw<To::kSize> rounded;
          encode<To>(x, rounded);
          write_unit<To::kSize>(to + unit * (kUnit * To::kSize), rounded, in_unit(unit, written),
                                whole_writes);
        }
      }
    }
  }
  if (arguments.trailer.rank_count != 0 && blockIdx.x == gridDim.x - 1) {
    write_trailer<To>(arguments);
  }
}

// ---- trailer
// -------------------------------------------------------------------------------------

// A weight is an integer of 24 bits, sent as three digits, times a power of 2; or itself.
template <class Format>
__device__ inline double read_weight(const char* bucket, unsigned long long place) {
  const double first = read_element<Format>(bucket, place);
  if constexpr (Format::kDigits == 1) return first;
  double mantissa = 0;
  for (unsigned i = 1; i < Format::kDigits; ++i) {
    mantissa = mantissa * 256 + read_element<Format>(bucket, place + i);
  }
  const long long power = (1023 + static_cast<long long>(first)) << 52;
  return mantissa * __longlong_as_double(power);
}

// One block: what the trailer says, and the factor that follows from it.
template <class Format>
__device__ inline void read_trailer(const TrailerArguments& arguments) {
  __shared__ double sums[kBlockThreads];
  __shared__ unsigned flags[kBlockThreads];
  const Trailer& trailer = arguments.trailer;
  const char* bucket = static_cast<const char*>(arguments.bucket);
  const unsigned long long counts =
      trailer.place + static_cast<unsigned long long>(trailer.rank_count) * Format::kDigits;
  HVD_FOR_EACH_THREAD(thread) {
    double sum = 0;
    for (unsigned rank = thread; rank < trailer.rank_count; rank += kBlockThreads) {
      sum += read_weight<Format>(bucket, trailer.place + rank * Format::kDigits);
    }
    sums[thread] = sum;
    flags[thread] = 0;
    if (arguments.used != nullptr) {
      for (unsigned i = thread; i < trailer.segment_count; i += kBlockThreads) {
        arguments.used[i] = static_cast<float>(read_element<Format>(bucket, counts + i));
      }
    }
  }
  add_neighbours<kBlockThreads>(sums, flags);
  if (threadIdx.x == 0) {
    const double total = sums[0];
    const double scale = arguments.scale != nullptr ? static_cast<double>(*arguments.scale) : 1.0;
    *arguments.factor = arguments.post / ((total != 0 ? total : 1.0) * scale);
    if (arguments.total_weight != nullptr) *arguments.total_weight = total;
  }
}

// ---- post
// ----------------------------------------------------------------------------------------

// segment = round(factor * bucket), in the type of the segment; and what the result is like, also
// of segments that have no memory here: all ranks have to come to the same sums.
template <class To, class From>
__device__ inline void post(const PostArguments& arguments) {
  using Number = CommonNumber<From, To>;
  constexpr unsigned kAtOnce = kUnitsAtOnce<From, Number>;
  __shared__ double sums[kBlockThreads];
  __shared__ unsigned flags[kBlockThreads];
  const double common = arguments.factor != nullptr ? *arguments.factor : 1.0;
  const Number factor = static_cast<Number>(common * arguments.post);
  for (unsigned index = blockIdx.x; index < arguments.chunk_count; index += gridDim.x) {
    const Chunk chunk = arguments.chunks[index];
    char* memory = static_cast<char*>(arguments.segments[chunk.segment].memory);
    const char* from = static_cast<const char*>(arguments.bucket) + chunk.place * From::kSize;
    char* to = memory + chunk.offset * To::kSize;
    const bool whole_reads = is_aligned(from);
    const bool whole_writes = is_aligned(to);
    const unsigned units = (chunk.count + kUnit - 1) / kUnit;
    HVD_FOR_EACH_THREAD(thread) {
      double sum = 0;
      unsigned not_finite = 0;
      for (unsigned first = thread; first < units; first += kAtOnce * kBlockThreads) {
        Raw<From::kSize> values[kAtOnce];
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          values[i] = read_unit<From::kSize>(from + unit * (kUnit * From::kSize),
                                             in_unit(unit, chunk.count), whole_reads);
        }
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          const unsigned count = in_unit(unit, chunk.count);
          Number x[kUnit];
          decode<From>(values[i], x);
          scale_unit(x, factor, count);
          Raw<To::kSize> rounded;
          encode<To>(x, rounded);
          if (memory != nullptr) {
            write_unit<To::kSize>(to + unit * (kUnit * To::kSize), rounded, count, whole_writes);
          }
          if (arguments.partials != nullptr) {
            typename To::Number stored[kUnit];
            To::decode(rounded, stored);
            add_squares(stored, &sum, &not_finite);
          }
        }
      }
      sums[thread] = sum;
      flags[thread] = not_finite;
    }
    if (arguments.partials != nullptr) {
      add_neighbours<kBlockThreads>(sums, flags);
      if (threadIdx.x == 0) arguments.partials[index] = {sums[0], flags[0], 0};
    }
  }
}

// ---- rescale
// -------------------------------------------------------------------------------------

// segment = round(coefficient * segment), unless that is 1 or more.
template <class Format>
__device__ inline void rescale(const RescaleArguments& arguments) {
  using Number = typename Format::Number;
  constexpr unsigned kAtOnce = kUnitsAtOnce<Format, Number>;
  const double coefficient = *arguments.coefficient;
  if (coefficient >= 1) return;
  const Number factor = static_cast<Number>(coefficient);
  for (unsigned index = blockIdx.x; index < arguments.chunk_count; index += gridDim.x) {
    const Chunk chunk = arguments.chunks[index];
    char* memory = static_cast<char*>(arguments.segments[chunk.segment].memory);
    if (memory == nullptr) continue;
    memory += chunk.offset * Format::kSize;
    const bool whole = is_aligned(memory);
    const unsigned units = (chunk.count + kUnit - 1) / kUnit;
    HVD_FOR_EACH_THREAD(thread) {
      for (unsigned first = thread; first < units; first += kAtOnce * kBlockThreads) {
        Raw<Format::kSize> values[kAtOnce];
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          values[i] = read_unit<Format::kSize>(memory + unit * (kUnit * Format::kSize),
                                               in_unit(unit, chunk.count), whole);
        }
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          const unsigned unit = first + i * kBlockThreads;
          const unsigned count = in_unit(unit, chunk.count);
          Number x[kUnit];
          Format::decode(values[i], x);
          scale_unit(x, factor, count);
          Format::encode(x, values[i]);
          write_unit<Format::kSize>(memory + unit * (kUnit * Format::kSize), values[i], count,
                                    whole);
        }
      }
    }
  }
}

// ---- combine and norm
// ----------------------------------------------------------------------------

// What the chunks of each segment add up to.
__device__ inline void combine(const CombineArguments& arguments) {
  __shared__ double sums[kBlockThreads];
  __shared__ unsigned flags[kBlockThreads];
  constexpr unsigned kSegments = kBlockThreads / kSegmentThreads;
  for (unsigned base = blockIdx.x * kSegments; base < arguments.segment_count;
       base += gridDim.x * kSegments) {
    HVD_FOR_EACH_THREAD(thread) {
      const unsigned segment = base + thread / kSegmentThreads;
      double sum = 0;
      unsigned not_finite = 0;
      if (segment < arguments.segment_count) {
        const unsigned end = arguments.first_chunks[segment + 1];
        for (unsigned chunk = arguments.first_chunks[segment] + thread % kSegmentThreads;
             chunk < end; chunk += kSegmentThreads) {
          sum += arguments.partials[chunk].sum_of_squares;
          not_finite |= arguments.partials[chunk].not_finite;
        }
      }
      sums[thread] = sum;
      flags[thread] = not_finite;
    }
    add_neighbours<kSegmentThreads>(sums, flags);
    HVD_FOR_EACH_THREAD(thread) {
      const unsigned segment = base + thread / kSegmentThreads;
      if (thread % kSegmentThreads == 0 && segment < arguments.segment_count) {
        const float used = arguments.used != nullptr ? arguments.used[segment] : 1.0f;
        arguments.results[segment] = {sums[thread], flags[thread] == 0 ? 1u : 0u, used};
      }
    }
    __syncthreads();
  }
}

// One block: the norm over several segments, and what clipping by it takes.
__device__ inline void norm(const NormArguments& arguments) {
  __shared__ double sums[kBlockThreads];
  __shared__ unsigned flags[kBlockThreads];
  HVD_FOR_EACH_THREAD(thread) {
    double sum = 0;
    unsigned not_finite = 0;
    for (unsigned i = thread; i < arguments.count; i += kBlockThreads) {
      const SegmentResult& result =
          arguments.results[arguments.members != nullptr ? arguments.members[i] : i];
      sum += result.sum_of_squares;
      not_finite |= result.finite == 0 ? 1u : 0u;
    }
    sums[thread] = sum;
    flags[thread] = not_finite;
  }
  add_neighbours<kBlockThreads>(sums, flags);
  if (threadIdx.x == 0) {
    const double root = sqrt(sums[0]);
    const double coefficient = arguments.max_norm / (root + 1e-6);
    arguments.norm->sum_of_squares = sums[0];
    arguments.norm->coefficient = coefficient >= 1 ? 1.0 : coefficient;
    arguments.norm->norm = static_cast<float>(root);
    arguments.norm->found_inf = flags[0] != 0 ? 1.0f : 0.0f;
  }
}

}  // namespace hvd::gpu

// ---- Entry points
// --------------------------------------------------------------------------------

// hvd_pack_<segment>_<bucket> and hvd_post_<segment>_<bucket>.
#define HVD_BOTH_WAYS(segment, Segment, bucket, Bucket)                \
  HVD_KERNEL(hvd_pack_##segment##_##bucket, hvd::gpu::PackArguments) { \
    hvd::gpu::pack<hvd::gpu::Segment, hvd::gpu::Bucket>(arguments);    \
  }                                                                    \
  HVD_KERNEL(hvd_post_##segment##_##bucket, hvd::gpu::PostArguments) { \
    hvd::gpu::post<hvd::gpu::Segment, hvd::gpu::Bucket>(arguments);    \
  }

#define HVD_ONE_TYPE(type, Type)                               \
  HVD_BOTH_WAYS(type, Type, f32, Float32)                      \
  HVD_BOTH_WAYS(type, Type, f64, Float64)                      \
  HVD_BOTH_WAYS(type, Type, f16, Float16)                      \
  HVD_BOTH_WAYS(type, Type, bf16, BFloat16)                    \
  HVD_KERNEL(hvd_trailer_##type, hvd::gpu::TrailerArguments) { \
    hvd::gpu::read_trailer<hvd::gpu::Type>(arguments);         \
  }                                                            \
  HVD_KERNEL(hvd_rescale_##type, hvd::gpu::RescaleArguments) { \
    hvd::gpu::rescale<hvd::gpu::Type>(arguments);              \
  }

HVD_ONE_TYPE(f32, Float32)
HVD_ONE_TYPE(f64, Float64)
HVD_ONE_TYPE(f16, Float16)
HVD_ONE_TYPE(bf16, BFloat16)

HVD_KERNEL(hvd_combine, hvd::gpu::CombineArguments) { hvd::gpu::combine(arguments); }
HVD_KERNEL(hvd_norm, hvd::gpu::NormArguments) { hvd::gpu::norm(arguments); }
