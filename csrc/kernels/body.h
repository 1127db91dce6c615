// The kernels themselves. Included once by each of portable.cpp, avx2.cpp and avx512.cpp, which
// are compiled with different flags; see vector.h for what that forbids.
#pragma once

#include "kernels/hash_body.h"
#include "kernels/kernel_table.h"
#include "kernels/vector.h"
#include "kernels/wire_body.h"

namespace hvd {
namespace {

// The step of every loop. The sum of squares has one partial sum per element of a step, so this
// number may not depend on the instruction set.
constexpr int kTile = 32;
constexpr int kTileVectors = kTile / kLanes;

// Vectors of a tile that are worked on together; more would not fit the registers.
template <class Vector>
constexpr int kStrip = sizeof(Vector) > kVectorBytes || kLanes == 16 ? 2 : 4;

// Sources that are read side by side. Beyond this many streams the hardware prefetchers lose
// track, so more sources are read in groups, blockwise.
constexpr int kGroup = 8;
constexpr size_t kBlock = 1024;

// ---- Element types ---------------------------------------------------------------------------

// store() returns the value as it was rounded.

struct Float32 {
  static constexpr size_t kSize = 4;
  static HVD_INLINE Floats read(const char* from) { return load<Floats>(from); }
  static HVD_INLINE Floats write(char* to, Floats x) {
    store(to, x);
    return x;
  }
  static HVD_INLINE Floats round(Doubles x) { return narrow(x); }
};

struct Float16 {
  static constexpr size_t kSize = 2;
  static HVD_INLINE Floats read(const char* from) { return from_half(load<Shorts>(from)); }
  static HVD_INLINE Floats write(char* to, Floats x) {
    const Shorts rounded = to_half(x);
    store(to, rounded);
    return from_half(rounded);
  }
  static HVD_INLINE Floats round(Doubles x) { return narrow_to_odd(x); }
};

struct BFloat16 {
  static constexpr size_t kSize = 2;
  static HVD_INLINE Floats read(const char* from) { return from_bfloat(load<Shorts>(from)); }
  static HVD_INLINE Floats write(char* to, Floats x) {
    const Shorts rounded = to_bfloat(x);
    store(to, rounded);
    return from_bfloat(rounded);
  }
  static HVD_INLINE Floats round(Doubles x) { return narrow_to_odd(x); }
};

struct Float64 {
  static constexpr size_t kSize = 8;
};

// ---- Accumulators ----------------------------------------------------------------------------

struct InFloat {
  using Scalar = float;
  using Vector = Floats;

  template <class Element>
  static HVD_INLINE Floats read(const char* from) {
    return Element::read(from);
  }
  template <class Element>
  static HVD_INLINE Floats write(char* to, Floats x) {
    return Element::write(to, x);
  }
};

struct InDouble {
  using Scalar = double;
  using Vector = Doubles;

  template <class Element>
  static HVD_INLINE Doubles read(const char* from) {
    if constexpr (Element::kSize == 8) {
      return {load<HalfDoubles>(from), load<HalfDoubles>(from + kVectorBytes)};
    } else {
      return widen(Element::read(from));
    }
  }
  template <class Element>
  static HVD_INLINE auto write(char* to, Doubles x) {
    if constexpr (Element::kSize == 8) {
      store(to, x.low);
      store(to + kVectorBytes, x.high);
      return x;
    } else {
      return Element::write(to, Element::round(x));
    }
  }
};

// ---- Operations ------------------------------------------------------------------------------

struct Sum {
  static constexpr bool kIsSum = true;

  template <class Vector>
  static HVD_INLINE Vector start(Vector x, Vector factor) {
    return x * factor;
  }
  template <class Vector>
  static HVD_INLINE Vector add(Vector result, Vector x, Vector factor) {
    return result + x * factor;
  }
  template <class Vector>
  static HVD_INLINE Vector finish(Vector result, Vector post) {
    return result * post;
  }
};

struct Min {
  static constexpr bool kIsSum = false;

  template <class Vector>
  static HVD_INLINE Vector start(Vector x, Vector) {
    return x;
  }
  template <class Vector>
  static HVD_INLINE Vector add(Vector result, Vector x, Vector) {
    return smaller(result, x);
  }
  template <class Vector>
  static HVD_INLINE Vector finish(Vector result, Vector) {
    return result;
  }
};

struct Max : Min {
  template <class Vector>
  static HVD_INLINE Vector add(Vector result, Vector x, Vector) {
    return larger(result, x);
  }
};

// ---- Reduction of floating types -------------------------------------------------------------

HVD_INLINE Doubles square(Doubles x) { return x * x; }
HVD_INLINE Doubles square(Floats x) { return square(widen(x)); }

// Sources that are read side by side, and their factors.
template <class Scalar>
struct Group {
  const char* sources[kGroup];
  Scalar factors[kGroup];
  int count = 0;
};

// Result of one strip of vectors over the sources of the group, from element `index` on; onto
// `before` (accumulators) if there is one. kCount is the number of sources, or 0 if it is known at
// run time only.
template <class Element, class Accumulator, class Op, int kCount>
HVD_INLINE void combine(
    const Group<typename Accumulator::Scalar>& group, size_t index, const char* before,
    typename Accumulator::Vector (&result)[kStrip<typename Accumulator::Vector>]) {
  using Vector = typename Accumulator::Vector;
  constexpr size_t kStride = kLanes * Element::kSize;
  int rank = 0;
  if (before != nullptr) {
    before += index * sizeof(typename Accumulator::Scalar);
    for (int v = 0; v < kStrip<Vector>; ++v) result[v] = load<Vector>(before + v * sizeof(Vector));
  } else {
    const char* from = group.sources[0] + index * Element::kSize;
    const Vector factor = spread(group.factors[0]);
    for (int v = 0; v < kStrip<Vector>; ++v) {
      result[v] = Op::start(Accumulator::template read<Element>(from + v * kStride), factor);
    }
    rank = 1;
  }
  const int count = kCount > 0 ? kCount : group.count;
  for (; rank < count; ++rank) {
    const char* from = group.sources[rank] + index * Element::kSize;
    const Vector factor = spread(group.factors[rank]);
    for (int v = 0; v < kStrip<Vector>; ++v) {
      result[v] =
          Op::add(result[v], Accumulator::template read<Element>(from + v * kStride), factor);
    }
  }
}

// Leaves the result of one tile in accumulators.
template <class Element, class Accumulator, class Op>
HVD_INLINE void accumulate_tile(const Group<typename Accumulator::Scalar>& group, size_t index,
                                const char* before, char* after) {
  using Vector = typename Accumulator::Vector;
  constexpr int kSize = kStrip<Vector>;
  for (int strip = 0; strip < kTileVectors; strip += kSize) {
    Vector result[kSize];
    combine<Element, Accumulator, Op, 0>(group, index + strip * kLanes, before, result);
    for (int v = 0; v < kSize; ++v) store(after + (strip + v) * sizeof(Vector), result[v]);
  }
}

// Stores the rounded result of one tile. Sources are of type Element, the result of type Out.
template <class Element, class Out, class Accumulator, class Op, int kCount, bool kSquares>
HVD_INLINE void finish_tile(const Group<typename Accumulator::Scalar>& group, size_t index,
                            const char* before, typename Accumulator::Vector post, char* out,
                            char* second_out, Doubles (&squares)[kTileVectors]) {
  using Vector = typename Accumulator::Vector;
  constexpr int kSize = kStrip<Vector>;
  constexpr size_t kStride = kLanes * Out::kSize;
#pragma GCC unroll 8
  for (int strip = 0; strip < kTileVectors; strip += kSize) {
    Vector result[kSize];
    combine<Element, Accumulator, Op, kCount>(group, index + strip * kLanes, before, result);
#pragma GCC unroll 8
    for (int v = 0; v < kSize; ++v) {
      result[v] = Op::finish(result[v], post);
      const auto rounded = Accumulator::template write<Out>(out + (strip + v) * kStride, result[v]);
      if constexpr (kSquares) {
        squares[strip + v] = squares[strip + v] + square(rounded);
      }
    }
    if (second_out != nullptr) {
      for (int v = 0; v < kSize; ++v) {
        Accumulator::template write<Out>(second_out + (strip + v) * kStride, result[v]);
      }
    }
  }
}

// A group with the last elements, fewer than a tile, copied to where a whole tile can be read.
template <class Element, class Scalar>
struct Tail {
  Group<Scalar> group;
  char copies[kGroup][kTile * Element::kSize];

  Tail(const Group<Scalar>& whole, size_t index, size_t count) {
    const size_t bytes = count * Element::kSize;
    group.count = whole.count;
    for (int rank = 0; rank < whole.count; ++rank) {
      __builtin_memcpy(copies[rank], whole.sources[rank] + index * Element::kSize, bytes);
      __builtin_memset(copies[rank] + bytes, 0, sizeof(copies[rank]) - bytes);
      group.sources[rank] = copies[rank];
      group.factors[rank] = whole.factors[rank];
    }
  }
};

// Leaves the result of `count` elements in accumulators, rounded up to whole tiles.
template <class Element, class Accumulator, class Op>
HVD_NOINLINE void accumulate(const Group<typename Accumulator::Scalar>& group, size_t count,
                             const char* before, char* after) {
  using Scalar = typename Accumulator::Scalar;
  size_t index = 0;
  for (; index + kTile <= count; index += kTile) {
    accumulate_tile<Element, Accumulator, Op>(group, index, before, after + index * sizeof(Scalar));
  }
  if (index == count) return;
  const Tail<Element, Scalar> tail(group, index, count - index);
  accumulate<Element, Accumulator, Op>(tail.group, kTile,
                                       before ? before + index * sizeof(Scalar) : nullptr,
                                       after + index * sizeof(Scalar));
}

// Combines the last group and stores the rounded result.
template <class Element, class Out, class Accumulator, class Op, int kCount, bool kSquares>
HVD_NOINLINE void finish(const Group<typename Accumulator::Scalar>& sources, size_t count,
                         const char* before, double post, char* out, char* second_out,
                         Doubles* squares_out) {
  using Scalar = typename Accumulator::Scalar;
  const Group<Scalar> group =
      sources;  // A copy cannot be what `out` points to: stays in registers.
  const auto factor = spread(static_cast<Scalar>(post));
  Doubles squares[kTileVectors] = {};
  if constexpr (kSquares) {
    for (int v = 0; v < kTileVectors; ++v) squares[v] = squares_out[v];
  }
  size_t index = 0;
  for (; index + kTile <= count; index += kTile) {
    finish_tile<Element, Out, Accumulator, Op, kCount, kSquares>(
        group, index, before, factor, out + index * Out::kSize,
        second_out ? second_out + index * Out::kSize : nullptr, squares);
  }
  if (index < count) {
    const size_t bytes = (count - index) * Out::kSize;
    const Tail<Element, Scalar> tail(group, index, count - index);
    alignas(kVectorBytes) char tile[kTile * Out::kSize];
    finish<Element, Out, Accumulator, Op, 0, false>(
        tail.group, kTile, before ? before + index * sizeof(Scalar) : nullptr, post, tile, nullptr,
        nullptr);
    // What lies behind the end may have become anything, and counts as nothing.
    __builtin_memset(tile + bytes, 0, sizeof(tile) - bytes);
    __builtin_memcpy(out + index * Out::kSize, tile, bytes);
    if (second_out) __builtin_memcpy(second_out + index * Out::kSize, tile, bytes);
    if constexpr (kSquares) {
      for (int v = 0; v < kTileVectors; ++v) {
        const char* from = tile + v * kLanes * Out::kSize;
        squares[v] = squares[v] + square(Accumulator::template read<Out>(from));
      }
    }
  }
  if constexpr (kSquares) {
    for (int v = 0; v < kTileVectors; ++v) squares_out[v] = squares[v];
  }
}

// Fills the group with the next sources that take part, from *rank on, at byte `offset`.
template <class Scalar>
void next_group(const ReduceArguments& arguments, size_t offset, int* rank, Group<Scalar>* group) {
  group->count = 0;
  for (; *rank < arguments.source_count && group->count < kGroup; ++*rank) {
    if (arguments.pre[*rank] == 0) continue;
    group->sources[group->count] = static_cast<const char*>(arguments.sources[*rank]) + offset;
    group->factors[group->count] = static_cast<Scalar>(arguments.pre[*rank]);
    ++group->count;
  }
}

int count_used(const ReduceArguments& arguments) {
  int used = 0;
  for (int rank = 0; rank < arguments.source_count; ++rank) used += arguments.pre[rank] != 0;
  return used;
}

void store_zero(const ReduceArguments& arguments, size_t size) {
  __builtin_memset(arguments.out, 0, arguments.count * size);
  if (arguments.second_out) __builtin_memset(arguments.second_out, 0, arguments.count * size);
}

bool all_finite(const double* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    double value;
    __builtin_memcpy(&value, values + i, sizeof(value));
    if (!__builtin_isfinite(value)) return false;
  }
  return true;
}

template <class Out>
void report(const Doubles (&squares)[kTileVectors], const ReduceArguments& arguments) {
  double sums[kTile];
  __builtin_memcpy(sums, squares, sizeof(sums));
  for (int width = kTile / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  arguments.by_products->sum_of_squares += sums[0];
  // No finite values of the narrower types have squares that overflow a double, and what is not
  // finite never leaves a sum again: the sum tells it. Squares of doubles overflow, so that there
  // the values have to be looked at; but only then.
  if (__builtin_isfinite(sums[0])) return;
  if (Out::kSize == 8 && all_finite(static_cast<const double*>(arguments.out), arguments.count))
    return;
  arguments.by_products->finite = false;
}

template <class Element, class Out, class Accumulator, class Op, int kCount, bool kSquares>
void reduce_blocks(const ReduceArguments& arguments, size_t block_size, Doubles* squares) {
  using Scalar = typename Accumulator::Scalar;
  const int used = count_used(arguments);
  alignas(kVectorBytes) char accumulators[kBlock * sizeof(Scalar)];
  for (size_t done = 0; done < arguments.count; done += block_size) {
    const size_t left = arguments.count - done;
    const size_t count = left < block_size ? left : block_size;
    const size_t offset = done * Element::kSize;
    const size_t out_offset = done * Out::kSize;
    char* second_out =
        arguments.second_out ? static_cast<char*>(arguments.second_out) + out_offset : nullptr;
    const char* before = nullptr;
    Group<Scalar> group;
    int rank = 0;
    for (int seen = 0; seen < used;) {
      next_group(arguments, offset, &rank, &group);
      seen += group.count;
      if (seen < used) {
        accumulate<Element, Accumulator, Op>(group, count, before, accumulators);
        before = accumulators;
      } else {
        finish<Element, Out, Accumulator, Op, kCount, kSquares>(
            group, count, before, arguments.post, static_cast<char*>(arguments.out) + out_offset,
            second_out, squares);
      }
    }
  }
}

template <class Element, class Accumulator, class Op, class Out = Element>
void reduce_floating(const ReduceArguments& arguments) {
  const int used = count_used(arguments);
  if (used == 0) {
    store_zero(arguments, Out::kSize);
    return;
  }
  // Without accumulators in memory there is no reason for blocks.
  const size_t block_size = used <= kGroup ? arguments.count : kBlock;
  // Two sources are what most reductions have: worth a form of their own where speed matters.
  constexpr int kPair =
      Op::kIsSum && sizeof(typename Accumulator::Scalar) <= Out::kSize * 2 ? 2 : 0;
  if (arguments.by_products == nullptr) {
    const auto reduce = used == 2 ? reduce_blocks<Element, Out, Accumulator, Op, kPair, false>
                                  : reduce_blocks<Element, Out, Accumulator, Op, 0, false>;
    reduce(arguments, block_size, nullptr);
    return;
  }
  const auto reduce = used == 2 ? reduce_blocks<Element, Out, Accumulator, Op, kPair, true>
                                : reduce_blocks<Element, Out, Accumulator, Op, 0, true>;
  Doubles squares[kTileVectors] = {};
  reduce(arguments, block_size, squares);
  report<Out>(squares, arguments);
}

// ---- Integers --------------------------------------------------------------------------------

// Signed types are summed as unsigned ones, which wrap.
template <class Integer>
struct IntegerSum {
  static HVD_INLINE Integer apply(Integer a, Integer b) { return static_cast<Integer>(a + b); }
};
template <class Integer>
struct IntegerMin {
  static HVD_INLINE Integer apply(Integer a, Integer b) { return b < a ? b : a; }
};
template <class Integer>
struct IntegerMax {
  static HVD_INLINE Integer apply(Integer a, Integer b) { return b > a ? b : a; }
};

template <class Integer, template <class> class Op>
void reduce_integer(const ReduceArguments& arguments) {
  constexpr size_t kSize = sizeof(Integer);
  if (count_used(arguments) == 0) {
    store_zero(arguments, kSize);
    return;
  }
  Integer result[kBlock];
  Integer values[kBlock];
  for (size_t done = 0; done < arguments.count; done += kBlock) {
    const size_t left = arguments.count - done;
    const size_t count = left < kBlock ? left : kBlock;
    bool started = false;
    for (int rank = 0; rank < arguments.source_count; ++rank) {
      if (arguments.pre[rank] == 0) continue;
      const char* from = static_cast<const char*>(arguments.sources[rank]) + done * kSize;
      // By way of an aligned copy, which costs little and lets any compiler vectorize the loop.
      __builtin_memcpy(started ? values : result, from, count * kSize);
      if (started) {
        for (size_t i = 0; i < count; ++i) result[i] = Op<Integer>::apply(result[i], values[i]);
      }
      started = true;
    }
    __builtin_memcpy(static_cast<char*>(arguments.out) + done * kSize, result, count * kSize);
    if (arguments.second_out) {
      __builtin_memcpy(static_cast<char*>(arguments.second_out) + done * kSize, result,
                       count * kSize);
    }
  }
}

// ---- Conversion ------------------------------------------------------------------------------

template <bool kWide>
struct Choose {
  using Accumulator = InFloat;
};
template <>
struct Choose<true> {
  using Accumulator = InDouble;
};

template <class From, class To>
void convert_kernel(void* dst, const void* src, size_t count, double factor) {
  constexpr bool kWide = From::kSize == 8 || To::kSize == 8;
  using Accumulator = typename Choose<kWide>::Accumulator;
  const auto scale = spread(static_cast<typename Accumulator::Scalar>(factor));
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  size_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    const auto value = Accumulator::template read<From>(from + index * From::kSize);
    Accumulator::template write<To>(to + index * To::kSize, value * scale);
  }
  if (index < count) {
    const size_t rest = count - index;
    char source_tail[kLanes * From::kSize] = {};
    char tail[kLanes * To::kSize];
    __builtin_memcpy(source_tail, from + index * From::kSize, rest * From::kSize);
    const auto value = Accumulator::template read<From>(source_tail);
    Accumulator::template write<To>(tail, value * scale);
    __builtin_memcpy(to + index * To::kSize, tail, rest * To::kSize);
  }
}

// ---- The wire: 16 bits between ranks ---------------------------------------------------------

template <class Wire>
constexpr void fill_wire(KernelTable* table, int row) {
  table->sum_of_wire[row][0] = reduce_floating<Wire, InFloat, Sum, Float32>;
  table->sum_of_wire[row][1] = reduce_floating<Wire, InDouble, Sum, Float32>;
  table->sum_of_wire[row][2] = reduce_floating<Wire, InDouble, Sum, Float64>;
}

// ---- The table -------------------------------------------------------------------------------

template <class Element, class Accumulator>
constexpr void fill_floating(KernelTable* table, DType dtype) {
  const int row = static_cast<int>(dtype);
  table->reduce[row][0] = reduce_floating<Element, Accumulator, Sum>;
  table->reduce[row][1] = reduce_floating<Element, Accumulator, Min>;
  table->reduce[row][2] = reduce_floating<Element, Accumulator, Max>;
  table->sum_in_double[row] = reduce_floating<Element, InDouble, Sum>;
  table->convert[row][static_cast<int>(DType::f32)] = convert_kernel<Element, Float32>;
  table->convert[row][static_cast<int>(DType::f64)] = convert_kernel<Element, Float64>;
  table->convert[row][static_cast<int>(DType::f16)] = convert_kernel<Element, Float16>;
  table->convert[row][static_cast<int>(DType::bf16)] = convert_kernel<Element, BFloat16>;
}

template <class Signed, class Unsigned>
constexpr void fill_integer(KernelTable* table, DType dtype) {
  const int row = static_cast<int>(dtype);
  table->reduce[row][0] = reduce_integer<Unsigned, IntegerSum>;
  table->reduce[row][1] = reduce_integer<Signed, IntegerMin>;
  table->reduce[row][2] = reduce_integer<Signed, IntegerMax>;
}

constexpr KernelTable make_table() {
  KernelTable table{};
  fill_floating<Float32, InFloat>(&table, DType::f32);
  fill_floating<Float64, InDouble>(&table, DType::f64);
  fill_floating<Float16, InFloat>(&table, DType::f16);
  fill_floating<BFloat16, InFloat>(&table, DType::bf16);
  fill_integer<int8_t, uint8_t>(&table, DType::i8);
  fill_integer<int16_t, uint16_t>(&table, DType::i16);
  fill_integer<int32_t, uint32_t>(&table, DType::i32);
  fill_integer<int64_t, uint64_t>(&table, DType::i64);
  fill_integer<uint8_t, uint8_t>(&table, DType::u8);
  fill_integer<uint8_t, uint8_t>(&table, DType::boolean);
  // A bool is the byte 0 or 1: "or" is the maximum, and "and" the minimum.
  const int row = static_cast<int>(DType::boolean);
  table.reduce[row][0] = table.reduce[row][2];
  table.largest[static_cast<int>(DType::f32)] = largest_of_floats;
  table.largest[static_cast<int>(DType::f64)] = largest_of_doubles;
  table.to_finite_bf16 = to_finite_bfloat_kernel;
  fill_wire<Float16>(&table, 0);
  fill_wire<BFloat16>(&table, 1);
  table.hash = hash_kernel;
  return table;
}

}  // namespace
}  // namespace hvd
