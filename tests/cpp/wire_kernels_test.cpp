// The kernels of sums whose values travel in 16 bits, on every instruction set, against arithmetic
// that says how each value is rounded; and the layout of the slots that hold them.

#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "comm/wire_layout.h"
#include "kernels/wire.h"
#include "wire_values.h"

namespace hvd::test {

TEST(wire_kernels_keep_every_value_within_the_bound) {
  Random random(1);
  for (const Pair& pair : kPairs) {
    for (int round = 0; round < 120; ++round) {
      const auto count = static_cast<size_t>(random.below(round % 10 == 0 ? 3000 : 100));
      const auto misalignment = static_cast<size_t>(random.below(3));
      const std::vector<double> values = some_values(pair.type, count, &random);
      const std::vector<char> memory = packed(pair.type, values, misalignment);
      const double most = largest_of(values);
      const double scale = wire_scale(pair.wire, pair.type, most);
      CHECK_EQ(scale, std::ldexp(1, std::ilogb(scale)));
      std::vector<uint16_t> first;
      for (const Isa isa : usable_isas()) {
        CHECK_EQ(largest_magnitude(memory.data() + misalignment, pair.type, count, isa), most);
        std::vector<uint16_t> wire(count + 1, 0x5c5c);
        to_wire(wire.data(), pair.wire, memory.data() + misalignment, pair.type, count, scale, isa);
        CHECK_EQ(wire[count], 0x5c5c);
        for (size_t i = 0; i < count; ++i) {
          const double back =
              read_element(pair.wire, reinterpret_cast<const char*>(&wire[i])) / scale;
          if (std::isfinite(values[i])) {
            CHECK(std::fabs(back - values[i]) <= bound(pair, values[i], most));
            const double nearest = on_wire(pair.wire, values[i] * scale) / scale;
            // Only where that is beyond the range of the type is there another.
            CHECK(back == nearest || std::fabs(rounded(pair.type, nearest)) > largest(pair.type));
          } else {
            CHECK(std::isnan(values[i]) ? std::isnan(back) : back == values[i]);
          }
        }
        if (first.empty()) first = wire;
        // Any NaN will do for another.
        for (size_t i = 0; i < count; ++i) CHECK(std::isnan(values[i]) || wire[i] == first[i]);
      }
    }
  }
}

// Every float that is a boundary of bfloat16's rounding, at both ends of the range.
TEST(values_at_the_ends_of_bfloat16) {
  std::vector<float> values;
  for (const uint32_t high : {0x7f7fu, 0x7f7eu, 0x0000u, 0x0001u, 0x007fu, 0x0080u}) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (const uint32_t sign : {0u, 0x80000000u}) {
        const uint32_t bits = sign | high << 16 | low;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        values.push_back(value);
      }
    }
  }
  for (const Isa isa : usable_isas()) {
    std::vector<uint16_t> wire(values.size());
    to_wire(wire.data(), DType::bf16, values.data(), DType::f32, values.size(), 1, isa);
    for (size_t i = 0; i < values.size(); ++i) {
      const double back = kBfloat.decode(wire[i]);
      CHECK(same(back, on_wire(DType::bf16, values[i])));
      CHECK(std::fabs(back - static_cast<double>(values[i])) <=
            bound({DType::bf16, DType::f32}, values[i], 0));
    }
  }
}

TEST(sums_of_the_wire_are_the_same_on_every_instruction_set) {
  Random random(2);
  for (const Pair& pair : kPairs) {
    for (int round = 0; round < 150; ++round) {
      const bool in_f64 = round % 2 == 1 || pair.type == DType::f64;
      const auto ranks = static_cast<size_t>(round % 20 == 0 ? 19 : random.below(6));
      const auto count = static_cast<size_t>(random.below(round % 10 == 0 ? 2500 : 150));
      const bool twice = random.below(2) == 0;
      std::vector<std::vector<double>> values(ranks);
      std::vector<std::vector<char>> memory;
      std::vector<const void*> sources;
      std::vector<double> factors;
      for (auto& of_rank : values) {
        of_rank = some_values(pair.wire, count, &random);
        memory.push_back(packed(pair.wire, of_rank, 0));
        sources.push_back(memory.back().data());
        factors.push_back(
            random.below(5) == 0 ? 0 : std::ldexp(0.5 + random.unit(), random.below(40) - 20));
      }
      const double post = 0.1 + random.unit();
      const size_t width = size_of(pair.type);
      std::vector<char> first;
      ByProducts first_products;
      for (const Isa isa : usable_isas()) {
        std::vector<char> out(count * width + 1), second(count * width + 1);
        ByProducts products;
        ReduceArguments arguments{};
        arguments.out = out.data();
        arguments.second_out = twice ? second.data() : nullptr;
        arguments.sources = sources.data();
        arguments.pre = factors.data();
        arguments.source_count = static_cast<int>(ranks);
        arguments.post = post;
        arguments.count = count;
        arguments.by_products = &products;
        find_wire_kernel(pair.wire, pair.type, in_f64, isa)(arguments);
        bool finite = true;
        long double squares = 0;
        for (size_t i = 0; i < count; ++i) {
          std::vector<double> column;
          for (const auto& of_rank : values) column.push_back(of_rank[i]);
          const double sum =
              in_f64 ? sum_of<double>(column, factors, post) : sum_of<float>(column, factors, post);
          const double result = read_element(pair.type, out.data() + i * width);
          CHECK(same(result, rounded(pair.type, sum)));
          finite = finite && std::isfinite(result);
          squares += static_cast<long double>(result) * result;
        }
        CHECK_EQ(products.finite, finite);
        if (std::isfinite(products.sum_of_squares)) {
          CHECK(std::fabs(static_cast<double>(products.sum_of_squares - squares)) <=
                1e-12 * static_cast<double>(squares));
        }
        if (twice) CHECK_EQ(std::memcmp(out.data(), second.data(), out.size()), 0);
        if (isa == Isa::portable) {
          first = out;
          first_products = products;
        }
        for (size_t i = 0; i < count; ++i) {
          CHECK(same(read_element(pair.type, out.data() + i * width),
                     read_element(pair.type, first.data() + i * width)));
        }
        CHECK(same(products.sum_of_squares, first_products.sum_of_squares));
      }
    }
  }
}

TEST(slots_hold_the_wire_of_any_number_of_ranks) {
  for (const Pair& pair : kPairs) {
    for (const int ranks : {2, 3, 5, 17, 64, 200}) {
      const uint64_t least = (WireLayout::least_slot_bytes(ranks) + 63) / 64 * 64;
      for (const uint64_t slot : {least, uint64_t{16384}, uint64_t{192 << 10}}) {
        const WireLayout layout(pair.wire, pair.type, ranks, slot);
        const auto owners = static_cast<uint64_t>(ranks);
        const uint64_t slice = (layout.chunk_elements + owners * 64 - 1) / (owners * 64) * 64;
        CHECK(layout.chunk_elements >= 64);
        if (slot > least) CHECK(layout.chunk_elements >= slot / size_of(pair.type) / 2);
        CHECK(layout.units_offset >= layout.chunk_elements * 2);
        CHECK(layout.blocks * WireLayout::kBlock >= slice);
        CHECK(layout.results_offset >= layout.units_offset + owners * layout.blocks * 8);
        CHECK(layout.results_offset + slice * size_of(pair.type) <= slot);
      }
    }
  }
}

}  // namespace hvd::test
