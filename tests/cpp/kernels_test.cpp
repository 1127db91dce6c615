// The kernels of every instruction set of this machine against scalar references that are exact:
// results are compared bit for bit, apart from which NaN a NaN is. So the forms are also equal
// among themselves.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "kernels/convert.h"
#include "kernels/reduce.h"
#include "kernels/rescale.h"
#include "number_formats.h"

namespace hvd {

using namespace test;

namespace {

const DType kFloatTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
const ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max};

// ---- Reduction of floating types ----

struct Case {
  DType dtype;
  ReduceOp op = ReduceOp::sum;
  bool accumulate_f64 = false;
  int source_count = 2;
  size_t count = 0;
  size_t misalignment = 0;
  bool second_out = false;
  int out_alias = -1;     // the source that the result replaces
  int second_alias = -1;  // the same of second_out
  bool factors = false;   // with pre and post other than 1
  bool skips = false;     // some sources are left out
  bool tame = false;
};

// Sums step by step in the type of the accumulator; volatile keeps the compiler from fusing.
template <class Scalar>
double reference_sum(const std::vector<double>& values, const std::vector<double>& pre,
                     double post) {
  bool started = false;
  Scalar sum = 0;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (pre[rank] == 0) continue;
    volatile Scalar product = static_cast<Scalar>(values[rank]) * static_cast<Scalar>(pre[rank]);
    sum = started ? sum + product : Scalar{product};
    started = true;
  }
  volatile Scalar result = sum * static_cast<Scalar>(post);
  return started ? static_cast<double>(Scalar{result}) : 0;
}

double reference(const Case& test, const std::vector<double>& values,
                 const std::vector<double>& pre, double post) {
  if (test.op == ReduceOp::sum) {
    const bool wide = test.accumulate_f64 || test.dtype == DType::f64;
    const double sum =
        wide ? reference_sum<double>(values, pre, post) : reference_sum<float>(values, pre, post);
    return rounded(test.dtype, sum);
  }
  bool started = false;
  double best = 0;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (pre[rank] == 0) continue;
    const double x = values[rank];
    const bool better = test.op == ReduceOp::min ? x < best : x > best;
    if (!started || (!std::isnan(best) && (better || std::isnan(x)))) best = x;
    started = true;
  }
  return best;
}

// Runs the case on one instruction set, checks every element, and gives the by-products back.
ByProducts run_case(const Case& test, Isa isa, uint64_t seed) {
  Random random(seed);
  const size_t size = size_of(test.dtype);
  const size_t ranks = static_cast<size_t>(test.source_count);
  const char kGuard = 0x5c;
  // The last two are for out and second_out. Guards stand right behind the last element.
  std::vector<std::vector<char>> memory(
      ranks + 2, std::vector<char>(test.misalignment + test.count * size + 16, kGuard));
  const auto at = [&](size_t buffer) { return memory[buffer].data() + test.misalignment; };
  std::vector<double> pre(ranks, 1.0);
  std::vector<const void*> sources(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (test.factors) pre[rank] = 0.25 + random.unit();
    const bool aliased =
        static_cast<int>(rank) == test.out_alias || static_cast<int>(rank) == test.second_alias;
    if (test.skips && !aliased && random.below(3) == 0) pre[rank] = 0;
    sources[rank] = pre[rank] == 0 ? nullptr : at(rank);
    for (size_t i = 0; i < test.count; ++i) {
      write_element(test.dtype, at(rank) + i * size, draw(test.dtype, &random, test.tame));
    }
  }
  const double post = test.factors ? 0.1 + random.unit() : 1;
  std::vector<double> expected(test.count);
  std::vector<double> values(ranks);
  for (size_t i = 0; i < test.count; ++i) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      values[rank] = read_element(test.dtype, at(rank) + i * size);
    }
    expected[i] = reference(test, values, pre, post);
  }

  ByProducts by_products;
  const size_t out = test.out_alias >= 0 ? static_cast<size_t>(test.out_alias) : ranks;
  const size_t second = test.second_alias >= 0 ? static_cast<size_t>(test.second_alias) : ranks + 1;
  ReduceArguments arguments{};
  arguments.out = at(out);
  arguments.second_out = test.second_out ? at(second) : nullptr;
  arguments.sources = sources.data();
  arguments.pre = pre.data();
  arguments.source_count = test.source_count;
  arguments.post = post;
  arguments.count = test.count;
  arguments.by_products = &by_products;
  find_reduce_kernel(test.dtype, test.op, test.accumulate_f64, isa)(arguments);

  long double squares = 0;
  bool finite = true;
  for (size_t i = 0; i < test.count; ++i) {
    const double result = read_element(test.dtype, at(out) + i * size);
    if (!same(result, expected[i])) {
      throw test::CheckFailure(
          __FILE__, __LINE__,
          std::string(name_of(isa)) + " " + name_of(test.dtype) + " op " + test::describe(test.op) +
              " sources " + test::describe(test.source_count) + " element " + test::describe(i) +
              " of " + test::describe(test.count) + ": " + test::describe(result) + " instead of " +
              test::describe(expected[i]));
    }
    squares += static_cast<long double>(result) * result;
    finite = finite && std::isfinite(result);
  }
  for (size_t buffer = 0; buffer < memory.size(); ++buffer) {
    for (size_t i = test.misalignment + test.count * size; i < memory[buffer].size(); ++i) {
      CHECK_EQ(memory[buffer][i], kGuard);
    }
  }
  if (test.second_out) CHECK_EQ(std::memcmp(at(out), at(second), test.count * size), 0);
  CHECK_EQ(by_products.finite, finite);
  if (squares < std::numeric_limits<double>::max()) {
    CHECK(std::fabs(static_cast<double>(by_products.sum_of_squares - squares)) <=
          1e-13 * static_cast<double>(squares));
  } else {
    CHECK(!std::isfinite(by_products.sum_of_squares));
  }

  // Nobody asks for by-products: another path to the same bits.
  if (test.out_alias < 0 && test.second_alias < 0) {
    const std::vector<char> before = memory[out];
    arguments.by_products = nullptr;
    find_reduce_kernel(test.dtype, test.op, test.accumulate_f64, isa)(arguments);
    CHECK(before == memory[out]);
  }
  return by_products;
}

void run_case_everywhere(const Case& test, uint64_t seed) {
  const ByProducts portable = run_case(test, Isa::portable, seed);
  for (const Isa isa : usable_isas()) {
    if (isa == Isa::portable) continue;
    const ByProducts other = run_case(test, isa, seed);
    CHECK(same(portable.sum_of_squares, other.sum_of_squares));
    CHECK_EQ(portable.finite, other.finite);
  }
}

std::vector<size_t> odd_sizes() {
  std::vector<size_t> sizes;
  for (size_t size = 0; size <= 67; ++size) sizes.push_back(size);
  for (const size_t size : {1000u, 1023u, 1024u, 1025u, 2047u, 3333u, 4999u}) sizes.push_back(size);
  return sizes;
}

TEST(reduce_floating_sizes_and_alignments) {
  uint64_t seed = 1;
  for (const DType dtype : kFloatTypes) {
    for (const ReduceOp op : kOps) {
      for (const size_t count : odd_sizes()) {
        Case test{dtype};
        test.op = op;
        test.count = count;
        test.source_count = 1 + static_cast<int>(seed % 4);
        test.misalignment = seed % 5;
        test.second_out = seed % 2 == 0;
        test.factors = seed % 3 == 0;
        test.accumulate_f64 = seed % 7 == 0;
        test.tame = seed % 4 == 1;
        run_case_everywhere(test, seed++);
      }
    }
  }
}

TEST(reduce_floating_many_sources) {
  uint64_t seed = 1000;
  for (const DType dtype : kFloatTypes) {
    for (const ReduceOp op : kOps) {
      for (const int sources : {1, 2, 3, 5, 7, 8, 9, 16, 17, 64}) {
        for (const bool wide : {false, true}) {
          Case test{dtype};
          test.op = op;
          test.accumulate_f64 = wide;
          test.source_count = sources;
          test.count = 1024 + seed % 1100;
          test.misalignment = seed % 3;
          test.second_out = seed % 2 == 0;
          test.factors = seed % 4 != 0;
          test.skips = seed % 3 == 0;
          test.tame = sources > 8 || seed % 2 == 0;  // so that not every sum ends as a NaN
          run_case_everywhere(test, seed++);
        }
      }
    }
  }
}

TEST(reduce_floating_in_place) {
  uint64_t seed = 5000;
  for (const DType dtype : kFloatTypes) {
    for (const int sources : {1, 2, 3, 9, 20}) {
      for (int out = 0; out < sources; out += 1 + sources / 3) {
        Case test{dtype};
        test.source_count = sources;
        test.count = 2100;
        test.out_alias = out;
        test.tame = true;
        test.skips = true;
        run_case_everywhere(test, seed++);
        test.second_out = true;
        run_case_everywhere(test, seed++);
        test.second_alias = sources - 1;
        run_case_everywhere(test, seed++);
        test.op = ReduceOp::max;
        run_case_everywhere(test, seed++);
      }
    }
  }
}

TEST(reduce_leaves_out_sources_with_factor_zero) {
  const float values[] = {-0.0f, 1.5f, -2.0f};
  for (const DType dtype : {DType::f32, DType::i32}) {
    for (const ReduceOp op : kOps) {
      for (const Isa isa : usable_isas()) {
        const void* sources[] = {nullptr, values, nullptr};
        const double pre[] = {0, 1, 0};
        float out[3];
        float second_out[3];
        ReduceArguments arguments{out, second_out, sources, pre, 3, 1, 3, nullptr};
        find_reduce_kernel(dtype, op, false, isa)(arguments);
        CHECK_EQ(std::memcmp(out, values, sizeof(out)), 0);  // -0 too
        const double none[] = {0, 0, 0};
        ByProducts by_products;
        arguments.pre = none;
        arguments.by_products = &by_products;
        find_reduce_kernel(dtype, op, false, isa)(arguments);
        const float zero[3] = {};
        CHECK_EQ(std::memcmp(out, zero, sizeof(out)), 0);
        CHECK_EQ(std::memcmp(second_out, zero, sizeof(out)), 0);
        CHECK_EQ(by_products.sum_of_squares, 0.0);
        CHECK(by_products.finite);
      }
    }
  }
}

TEST(reduce_is_finite_although_squares_overflow) {
  for (const Isa isa : usable_isas()) {
    std::vector<double> values(100, 1e200);
    const void* sources[] = {values.data()};
    const double pre[] = {1};
    ByProducts by_products;
    ReduceArguments arguments{values.data(), nullptr, sources, pre, 1, 1, 100, &by_products};
    const ReduceKernel reduce = find_reduce_kernel(DType::f64, ReduceOp::sum, false, isa);
    reduce(arguments);
    CHECK(by_products.finite);
    CHECK_EQ(by_products.sum_of_squares, kInfinity);
    values[99] = kNan;
    reduce(arguments);
    CHECK(!by_products.finite);
  }
}

TEST(reduce_adds_by_products_up) {
  std::vector<float> values(50, 2.0f);
  const void* sources[] = {values.data()};
  const double pre[] = {1};
  ByProducts by_products;
  const ReduceArguments arguments{values.data(), nullptr, sources, pre, 1, 0.5, 50, &by_products};
  const ReduceKernel reduce = find_reduce_kernel(DType::f32, ReduceOp::sum);
  reduce(arguments);
  CHECK_EQ(by_products.sum_of_squares, 50.0);
  reduce(arguments);
  CHECK_EQ(by_products.sum_of_squares, 62.5);
  values[3] = static_cast<float>(kInfinity);
  reduce(arguments);
  values[3] = 0;
  reduce(arguments);
  CHECK(!by_products.finite);  // stays
}

// 1 + 2^-11 is halfway between two halves, and 2^-30 more than halfway once in double, but not
// seen in float: rounding to float in between would give the even neighbour.
TEST(reduce_in_double_rounds_once) {
  for (const Isa isa : usable_isas()) {
    const uint16_t one[] = {kHalf.encode(1)};
    const uint16_t half_unit[] = {kHalf.encode(0x1p-11)};
    const uint16_t little[] = {kHalf.encode(0x1p-15)};
    const void* sources[] = {one, half_unit, little};
    const double pre[] = {1, 1, 0x1p-20};
    uint16_t out[1];
    const ReduceArguments arguments{out, nullptr, sources, pre, 3, 1, 1, nullptr};
    find_reduce_kernel(DType::f16, ReduceOp::sum, true, isa)(arguments);
    CHECK_EQ(kHalf.decode(out[0]), 1 + 0x1p-10);
    find_reduce_kernel(DType::f16, ReduceOp::sum, false, isa)(arguments);
    CHECK_EQ(kHalf.decode(out[0]), 1.0);
  }
}

// ---- Integers ----

template <class Integer>
Integer reference_integer(DType dtype, ReduceOp op, Integer a, Integer b) {
  if (dtype == DType::boolean) return op == ReduceOp::min ? a && b : a || b;
  if (op == ReduceOp::min) return std::min(a, b);
  if (op == ReduceOp::max) return std::max(a, b);
  return static_cast<Integer>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class Integer>
void check_integers(DType dtype) {
  uint64_t seed = 1;
  for (const ReduceOp op : kOps) {
    for (const Isa isa : usable_isas()) {
      for (const size_t count : odd_sizes()) {
        Random random(seed++);
        const int ranks = 1 + random.below(6);
        const size_t offset = static_cast<size_t>(random.below(3));
        const bool in_place = random.below(2) == 0;
        std::vector<std::vector<char>> memory(static_cast<size_t>(ranks) + 2,
                                              std::vector<char>(offset + count * sizeof(Integer)));
        std::vector<const void*> sources;
        std::vector<double> pre;
        std::vector<Integer> expected(count);
        bool started = false;
        for (int rank = 0; rank < ranks; ++rank) {
          char* to = memory[static_cast<size_t>(rank)].data() + offset;
          pre.push_back(rank > 0 && random.below(4) == 0 ? 0 : 0.5);
          sources.push_back(pre.back() == 0 ? nullptr : to);
          for (size_t i = 0; i < count; ++i) {
            auto value = static_cast<Integer>(random.bits());
            if (dtype == DType::boolean) value = static_cast<Integer>(value & 1);
            std::memcpy(to + i * sizeof(value), &value, sizeof(value));
            if (pre.back() == 0) continue;
            expected[i] = started ? reference_integer(dtype, op, expected[i], value) : value;
          }
          started = true;
        }
        char* out = memory[in_place ? 0 : static_cast<size_t>(ranks)].data() + offset;
        char* second_out = memory.back().data() + offset;
        const ReduceArguments arguments{out,   second_out, sources.data(), pre.data(),
                                        ranks, 3,          count,          nullptr};
        find_reduce_kernel(dtype, op, false, isa)(arguments);
        if (count == 0) continue;
        CHECK_EQ(std::memcmp(out, expected.data(), count * sizeof(Integer)), 0);
        CHECK_EQ(std::memcmp(second_out, expected.data(), count * sizeof(Integer)), 0);
      }
    }
  }
}

TEST(reduce_integers) {
  check_integers<int8_t>(DType::i8);
  check_integers<int16_t>(DType::i16);
  check_integers<int32_t>(DType::i32);
  check_integers<int64_t>(DType::i64);
  check_integers<uint8_t>(DType::u8);
  check_integers<uint8_t>(DType::boolean);
}

// ---- Conversion ----

TEST(convert_every_16_bit_pattern) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> singles(patterns.size());
  std::vector<double> doubles(patterns.size());
  std::vector<uint16_t> back(patterns.size());
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Format& format = dtype == DType::f16 ? kHalf : kBfloat;
    for (const Isa isa : usable_isas()) {
      const size_t count = patterns.size();
      convert(singles.data(), DType::f32, patterns.data(), dtype, count, 1, isa);
      convert(doubles.data(), DType::f64, patterns.data(), dtype, count, 1, isa);
      for (const DType wide : {DType::f32, DType::f64}) {
        const void* from = wide == DType::f32 ? static_cast<void*>(singles.data()) : doubles.data();
        convert(back.data(), dtype, from, wide, count, 1, isa);
        for (size_t i = 0; i < count; ++i) {
          const double expected = format.decode(patterns[i]);
          CHECK(same(singles[i], expected));
          CHECK(same(doubles[i], expected));
          // Of a NaN the sign stays; its bits may be quietened.
          if (std::isnan(expected)) {
            CHECK(std::isnan(format.decode(back[i])));
            CHECK_EQ(back[i] & 0x8000, patterns[i] & 0x8000);
          } else {
            CHECK_EQ(back[i], patterns[i]);
          }
        }
      }
    }
  }
}

// All halfway points between neighbours, and what lies next to them.
TEST(convert_rounds_to_nearest_even) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Format& format = dtype == DType::f16 ? kHalf : kBfloat;
    std::vector<double> values;
    for (int bits = 0; bits < 0x7fff; ++bits) {
      const double low = format.decode(static_cast<uint16_t>(bits));
      double high = format.decode(static_cast<uint16_t>(bits + 1));
      if (!std::isfinite(low)) break;
      if (!std::isfinite(high)) high = 2 * low - format.decode(static_cast<uint16_t>(bits - 1));
      const double middle = (low + high) / 2;
      for (const double sign : {1.0, -1.0}) {
        values.push_back(sign * middle);
        values.push_back(sign * std::nextafter(middle, kInfinity));
        values.push_back(sign * std::nextafter(middle, 0));
        values.push_back(sign *
                         static_cast<double>(std::nextafterf(static_cast<float>(middle), 0)));
      }
    }
    for (const double x : {1e300, -1e300, 1e-300, -1e-300, kInfinity, -kInfinity, kNan}) {
      values.push_back(x);
    }
    std::vector<uint16_t> out(values.size());
    std::vector<float> singles(values.size());
    for (const Isa isa : usable_isas()) {
      convert(out.data(), dtype, values.data(), DType::f64, values.size(), 1, isa);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(same(format.decode(out[i]), format.round(values[i])));
      }
      convert(singles.data(), DType::f32, values.data(), DType::f64, values.size(), 1, isa);
      convert(out.data(), dtype, singles.data(), DType::f32, values.size(), 1, isa);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(same(singles[i], kSingle.round(values[i])));
        CHECK(same(format.decode(out[i]), format.round(static_cast<double>(singles[i]))));
      }
    }
  }
}

TEST(convert_between_all_floating_types) {
  uint64_t seed = 1;
  for (const DType from : kFloatTypes) {
    for (const DType to : kFloatTypes) {
      for (const size_t count : odd_sizes()) {
        Random random(seed++);
        const double factor = random.below(3) == 0 ? 1 : 0.3 + random.unit();
        const size_t offset = static_cast<size_t>(random.below(3));
        std::vector<char> source(offset + count * size_of(from));
        std::vector<char> target(offset + count * size_of(to));
        const bool wide = from == DType::f64 || to == DType::f64;
        std::vector<double> expected(count);
        for (size_t i = 0; i < count; ++i) {
          char* at = source.data() + offset + i * size_of(from);
          write_element(from, at, draw(from, &random, false));
          const double x = read_element(from, at);
          expected[i] = rounded(
              to, wide ? x * factor
                       : static_cast<double>(static_cast<float>(x) * static_cast<float>(factor)));
        }
        for (const Isa isa : usable_isas()) {
          const bool in_place = size_of(from) == size_of(to) && seed % 2 == 0;
          std::vector<char> copy = source;
          char* out = in_place ? copy.data() : target.data();
          convert(out + offset, to, copy.data() + offset, from, count, factor, isa);
          for (size_t i = 0; i < count; ++i) {
            CHECK(same(read_element(to, out + offset + i * size_of(to)), expected[i]));
          }
        }
      }
    }
  }
}

TEST(convert_copies_and_refuses) {
  const int32_t from[] = {1, -2, 3};
  int32_t to[3] = {};
  convert(to, DType::i32, from, DType::i32, 3, 1);
  CHECK_EQ(std::memcmp(to, from, sizeof(from)), 0);
  CHECK_THROWS(convert(to, DType::i32, from, DType::i32, 3, 2), ErrorKind::bad_argument);
  CHECK_THROWS(convert(to, DType::f32, from, DType::i32, 3, 1), ErrorKind::bad_argument);
}

TEST(dtype_names) {
  const DType all[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                       DType::i16, DType::i32, DType::i64, DType::u8,   DType::boolean};
  for (const DType dtype : all) {
    DType parsed = dtype == DType::f32 ? DType::f64 : DType::f32;
    CHECK(parse_dtype(name_of(dtype), &parsed));
    CHECK_EQ(parsed, dtype);
  }
  DType untouched = DType::i16;
  CHECK(!parse_dtype("complex64", &untouched));
  CHECK_EQ(untouched, DType::i16);
  CHECK_EQ(std::string(name_of(DType::boolean)), "bool");
  CHECK(is_floating(DType::bf16) && !is_floating(DType::i8));
}

TEST(rescale_multiplies_in_place_and_tells_what_the_result_is_like) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{2048}, size_t{5000}}) {
    for (const double factor : {1.0, 0.5}) {
      std::vector<float> values(count);
      double squares = 0;
      for (size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(i % 17) - 8;
        squares += factor * factor * static_cast<double>(values[i]) * values[i];
      }
      const std::vector<float> before = values;
      const ByProducts found = rescale(values.data(), DType::f32, count, factor);
      CHECK(found.finite);
      CHECK_EQ(found.sum_of_squares, squares);
      for (size_t i = 0; i < count; ++i) {
        CHECK_EQ(values[i], static_cast<float>(factor) * before[i]);
      }
      for (const double bad : {kInfinity, kNan}) {
        if (count == 0) continue;
        values[count / 2] = static_cast<float>(bad);
        CHECK(!rescale(values.data(), DType::f32, count, factor).finite);
      }
    }
  }
  int32_t whole = 3;
  CHECK_THROWS(rescale(&whole, DType::i32, 1, 2.0), ErrorKind::bad_argument);
}

}  // namespace
}  // namespace hvd
