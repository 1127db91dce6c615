// Sums whose values travel in 16 bits: the communicator and the reducer with ranks as threads,
// against arithmetic that says how each value is rounded. The kernels are in wire_kernels_test.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/reducer.h"
#include "sessions.h"
#include "wire_values.h"

namespace hvd::test {

// ---- the communicator ----

namespace {

StagingSettings tiny() { return {4096, 3}; }

std::shared_ptr<Work> wire_work(const Pair& pair, std::vector<uint64_t> counts,
                                std::vector<void*> pointers) {
  auto work = std::make_shared<Work>();
  work->layout = std::make_shared<Layout>(pair.type, std::move(counts));
  work->pointers = std::move(pointers);
  work->wire = pair.wire;
  work->divide_by_weight = true;
  work->want_by_products = true;
  work->name = "a sum by wire";
  return work;
}

// Of which f16 keeps all bits it has, whatever else is in the block.
std::vector<double> ordinary(DType type, int rank, uint64_t seed, size_t count) {
  Random random(seed * 64 + static_cast<uint64_t>(rank));
  std::vector<double> values(count);
  for (double& x : values) {
    x = rounded(type, (random.unit() - 0.5) * std::ldexp(1, random.below(20)));
    if (std::fabs(x) < 0x1p-8) x = 0;
  }
  return values;
}

// The mean over the ranks of what each has on the wire.
double mean_by_wire(const Pair& pair, const std::vector<double>& values, bool in_f64) {
  std::vector<double> given;
  // In the middle of the range, so that nothing is lost at either end of it.
  const double scale = pair.wire == DType::f16 ? 0x1p-5 : 1;
  for (const double x : values) given.push_back(on_wire(pair.wire, x * scale) / scale);
  const std::vector<double> ones(values.size(), 1.0);
  const double post = 1.0 / static_cast<double>(values.size());
  const double sum = in_f64 ? sum_of<double>(given, ones, post) : sum_of<float>(given, ones, post);
  return rounded(pair.type, sum);
}

void check_mean(const Pair& pair, int ranks, const std::vector<uint64_t>& counts, bool in_f64,
                const StagingSettings& settings) {
  uint64_t total = 0;
  for (const uint64_t count : counts) total += count;
  std::vector<std::vector<double>> values;
  for (int rank = 0; rank < ranks; ++rank) {
    values.push_back(ordinary(pair.type, rank, total, total));
  }
  std::vector<double> expected(total);
  std::vector<double> column(values.size());
  for (uint64_t i = 0; i < total; ++i) {
    for (size_t rank = 0; rank < values.size(); ++rank) column[rank] = values[rank][i];
    // A world of one has no wire.
    expected[i] =
        ranks == 1 ? column[0] : mean_by_wire(pair, column, in_f64 || pair.type == DType::f64);
  }
  with_sessions(ranks, [&](Session& session) {
    auto communicator = open_communicator(session, settings);
    const size_t width = size_of(pair.type);
    for (int round = 0; round < 2; ++round) {
      std::vector<char> memory = packed(pair.type, values[static_cast<size_t>(session.rank())], 0);
      std::vector<void*> pointers;
      uint64_t start = 0;
      for (const uint64_t count : counts) {
        pointers.push_back(memory.data() + start * width);
        start += count;
      }
      auto work = wire_work(pair, counts, pointers);
      work->accumulate_f64 = in_f64;
      communicator->run(work, soon());
      start = 0;
      for (size_t segment = 0; segment < counts.size(); ++segment) {
        long double squares = 0;
        for (uint64_t i = start; i < start + counts[segment]; ++i) {
          CHECK_EQ(read_element(pair.type, memory.data() + i * width), expected[i]);
          squares += static_cast<long double>(expected[i]) * expected[i];
        }
        start += counts[segment];
        const ByProducts& products = work->by_products[segment];
        CHECK(products.finite);
        CHECK(std::fabs(static_cast<double>(products.sum_of_squares - squares)) <=
              1e-12 * static_cast<double>(squares));
      }
    }
  });
}

}  // namespace

TEST(means_by_wire_of_every_size_and_number_of_ranks) {
  for (const Pair& pair : kPairs) {
    for (const int ranks : {1, 2, 3, 4, 5}) {
      for (const uint64_t count : {0u, 1u, 5u, 1000u, 8191u}) {
        check_mean(pair, ranks, {count}, count % 2 == 1, tiny());
      }
      check_mean(pair, ranks, {7, 0, 3000, 1, 1, 900, 64, 2500}, false, tiny());
    }
  }
}

TEST(means_by_wire_with_default_slots) {
  check_mean(kPairs[0], 2, {40000, 5, 60000}, false, StagingSettings{});
  check_mean(kPairs[1], 3, {50001, 40000}, false, StagingSettings{});
  check_mean(kPairs[2], 2, {50003}, false, StagingSettings{});
}

// Random values of every kind, in pieces of random sizes; some ranks lack some of them, some are
// left out: the result is within the bound, what is not finite shows, ranks are bit-equal.
TEST(means_by_wire_of_anything) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed + 100);
    const Pair pair = kPairs[seed % 4];
    const int ranks = 2 + random.below(4);
    std::vector<uint64_t> counts;
    for (int i = random.below(6); i >= 0; --i) {
      counts.push_back(static_cast<uint64_t>(random.below(random.below(3) == 0 ? 9000 : 40)));
    }
    std::vector<std::vector<std::vector<double>>> values(static_cast<size_t>(ranks));
    std::vector<double> weights;
    std::vector<std::vector<bool>> lacks(static_cast<size_t>(ranks));
    for (size_t rank = 0; rank < values.size(); ++rank) {
      weights.push_back(random.below(4) == 0 ? 0 : 0.5 + random.unit());
      for (const uint64_t count : counts) {
        values[rank].push_back(some_values(pair.type, count, &random));
        lacks[rank].push_back(random.below(6) == 0);
      }
    }
    double total = 0;
    for (const double weight : weights) total += weight;
    std::vector<double> most(values.size());  // of all blocks together
    for (size_t rank = 0; rank < values.size(); ++rank) {
      for (const auto& part : values[rank]) most[rank] = std::max(most[rank], largest_of(part));
    }
    std::vector<std::vector<char>> results(static_cast<size_t>(ranks));
    with_sessions(ranks, [&](Session& session) {
      auto communicator = open_communicator(session, tiny());
      const auto me = static_cast<size_t>(session.rank());
      std::vector<std::vector<char>> memory;
      std::vector<void*> pointers;
      for (size_t s = 0; s < counts.size(); ++s) {
        memory.push_back(packed(pair.type, values[me][s], 0));
        pointers.push_back(lacks[me][s] ? nullptr : memory.back().data());
      }
      auto work = wire_work(pair, counts, pointers);
      work->pre = work->weight = weights[me];
      communicator->run(work, soon());
      for (size_t s = 0; s < counts.size(); ++s) {
        bool finite = true;
        for (uint64_t i = 0; i < counts[s]; ++i) {
          long double mean = 0, allowed = 0, magnitude = 0;
          bool special = false;
          for (size_t rank = 0; rank < values.size(); ++rank) {
            if (weights[rank] == 0 || lacks[rank][s]) continue;
            const double x = values[rank][s][i];
            mean += static_cast<long double>(weights[rank]) * x;
            magnitude += static_cast<long double>(weights[rank]) * std::fabs(x);
            allowed += static_cast<long double>(weights[rank]) * bound(pair, x, most[rank]);
            special = special || !std::isfinite(x);
          }
          const long double share = total == 0 ? 0 : 1 / static_cast<long double>(total);
          // The sum's own rounding, in float: of partial sums, each below the sum of magnitudes.
          allowed = (allowed * 1.01L + magnitude * ranks * 0x1p-22L) * share + 0x1p-125L;
          if (lacks[me][s]) continue;
          const double result = read_element(pair.type, memory[s].data() + i * size_of(pair.type));
          finite = finite && std::isfinite(result);
          if (special) {
            CHECK(!std::isfinite(result));
          } else if (magnitude < largest(pair.type) / 2) {
            CHECK(std::fabs(static_cast<long double>(result) - mean * share) <= allowed);
          }
        }
        if (!lacks[me][s]) CHECK_EQ(work->by_products[s].finite, finite);
        if (lacks[me][s]) memory[s].clear();  // holds what nobody wrote to
      }
      for (const auto& bytes : memory) {
        results[me].insert(results[me].end(), bytes.begin(), bytes.end());
      }
    });
    for (size_t s = 0, place = 0; s < counts.size(); ++s) {
      bool everybody = true;
      for (const auto& of_rank : lacks) everybody = everybody && !of_rank[s];
      const size_t bytes = counts[s] * size_of(pair.type);
      if (!everybody) break;  // from here on they are not at the same place
      for (const auto& other : results) {
        CHECK_EQ(std::memcmp(other.data() + place, results[0].data() + place, bytes), 0);
      }
      place += bytes + 1;
    }
  }
}

TEST(no_overflow_by_wire_that_the_mean_does_not_have) {
  for (const DType wire : {DType::f16, DType::bf16}) {
    for (const size_t count : {10u, 30000u}) {
      with_sessions(2, [&](Session& session) {
        auto communicator = open_communicator(session, tiny());
        const bool first = session.rank() == 0;
        struct Row {
          float of_first, of_second, mean;
        };
        const Row rows[] = {{1e5f, 0.0f, 5e4f},         {3e6f, 1e6f, 2e6f},
                            {1e-30f, 3e-30f, 2e-30f},   {3.4e38f, -3.4e38f, 0.0f},
                            {INFINITY, 1.0f, INFINITY}, {1e-8f, 1e-8f, 1e-8f}};
        for (const Row& row : rows) {
          std::vector<float> data(count, first ? row.of_first : row.of_second);
          auto work = wire_work({wire, DType::f32}, {count}, {data.data()});
          communicator->run(work, soon());
          const float relative = wire == DType::f16 ? 0x1p-11f : 0x1p-8f;
          for (const float x : data) {
            if (std::isinf(row.mean)) {
              CHECK(std::isinf(x));
            } else {
              CHECK(std::fabs(x - row.mean) <= 1.001f * relative * std::fabs(row.mean));
            }
          }
          CHECK_EQ(work->by_products[0].finite, std::isfinite(row.mean));
        }
        // Beyond the range of both: fp64 in blocks with a scale.
        std::vector<double> data(count, first ? 3e200 : 1e200);
        communicator->run(wire_work({wire, DType::f64}, {count}, {data.data()}), soon());
        for (const double x : data) CHECK(std::fabs(x / 2e200 - 1) <= 0.004);
      });
    }
  }
}

TEST(a_rank_that_is_left_out_is_not_read_by_wire) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (const DType wire : {DType::f16, DType::bf16}) {
      for (const size_t count : {10u, 9000u}) {
        // What an earlier sum left in the slots must not come back either.
        std::vector<float> before(count, NAN);
        communicator->run(wire_work({wire, DType::f32}, {count}, {before.data()}), soon());
        std::vector<float> data(count, session.rank() == 1 ? NAN : session.rank() + 1.0f);
        auto work = wire_work({wire, DType::f32}, {count}, {data.data()});
        if (session.rank() == 1) work->pre = work->weight = 0;
        communicator->run(work, soon());
        for (const float x : data) CHECK_EQ(x, 2.0f);
        CHECK(work->by_products[0].finite);
      }
    }
  });
}

TEST(loss_scales_are_undone_by_wire) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (const size_t count : {10u, 9000u}) {
      // A scale beyond the range of f16, another on each rank.
      const double scale = session.rank() == 0 ? 0x1p20 : 0x1p18;
      std::vector<float> data(count, static_cast<float>((session.rank() + 1) * 0.5 * scale));
      auto work = wire_work({DType::f16, DType::f32}, {count}, {data.data()});
      work->scale = scale;
      work->unscale = true;
      communicator->run(work, soon());
      for (const float x : data) CHECK_EQ(x, 0.75f);
    }
  });
}

TEST(types_that_have_no_form_on_the_wire_are_left_alone) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    std::vector<int64_t> integers(3000, (1 << 20) + session.rank());
    auto work = wire_work({DType::bf16, DType::i64}, {3000}, {integers.data()});
    work->want_by_products = false;
    work->divide_by_weight = false;
    communicator->run(work, soon());
    CHECK_EQ(integers[2999], (2 << 20) + 1);
    // A minimum is one of the values; rounding it would make it none.
    std::vector<float> floats(3000, 1.0f + 0x1p-20f + static_cast<float>(session.rank()));
    work = wire_work({DType::bf16, DType::f32}, {3000}, {floats.data()});
    work->op = ReduceOp::min;
    communicator->run(work, soon());
    CHECK_EQ(floats[2999], 1.0f + 0x1p-20f);
    // Halves are halves already.
    std::vector<char> halves = packed(DType::f16, std::vector<double>(3000, 1 + 0x1p-10), 0);
    work = wire_work({DType::bf16, DType::f16}, {3000}, {halves.data()});
    communicator->run(work, soon());
    CHECK_EQ(read_element(DType::f16, halves.data() + 2 * 2999), 1 + 0x1p-10);
  });
}

TEST(another_type_on_the_wire_is_an_error_everywhere) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    std::vector<float> data(10, 1.0f);
    auto work = wire_work({DType::bf16, DType::f32}, {10}, {data.data()});
    if (session.rank() == 1) work->wire = DType::f16;
    CHECK_THROWS(communicator->run(work, soon()), ErrorKind::mismatch);
    work = wire_work({DType::bf16, DType::f32}, {10}, {data.data()});
    communicator->run(work, soon());
    CHECK_EQ(data[9], 1.0f);
  });
}

// ---- the reducer ----

TEST(exact_parameters_have_buckets_of_their_own) {
  const std::vector<PlanParameter> parameters{{10, DType::f32, 0, false},
                                              {10, DType::f32, 0, true},
                                              {10, DType::f32, 0, false},
                                              {10, DType::f32, 0, true}};
  const std::vector<std::vector<uint32_t>> expected{{0, 2}, {1, 3}};
  CHECK(plan_buckets({0, 1, 2, 3}, parameters, 1000) == expected);
}

TEST(reducer_changes_the_type_on_the_wire_between_rounds) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    auto channel = session.open_channel(*communicator, 30'000'000'000u, nullptr);
    Reducer reducer(communicator, std::move(channel), ReducerSettings{});
    reducer.add_parameters(
        {{"rounded", 2000, DType::f32, 0, false}, {"exact", 2000, DType::f32, 0, true}});
    const float value = 1.0f + 0x1p-9f;  // halfway in bfloat16
    std::vector<std::vector<float>> gradients(2);
    const auto run = [&] {
      for (uint32_t index = 0; index < 2; ++index) {
        gradients[index].assign(2000, value);
        reducer.take(index, gradients[index].data());
      }
      reducer.exchange({}, soon());
      reducer.complete(soon());
      CHECK_EQ(gradients[1][1999], value);
      return gradients[0][1999];
    };
    CHECK_EQ(run(), value);
    reducer.set_wire(DType::bf16);
    CHECK_EQ(run(), 1.0f);
    reducer.set_wire(DType::f16);
    CHECK_EQ(run(), value);
    reducer.set_wire(std::nullopt);
    CHECK_EQ(run(), value);
    // Ranks that do not agree, say because their steps differ, learn of it, and of what it is.
    reducer.set_wire(session.rank() == 0 ? std::optional<DType>(DType::bf16) : std::nullopt);
    const std::string text = CHECK_THROWS(run(), ErrorKind::mismatch).what();
    CHECK(text.find("(sent as bfloat16) gradient bucket 0") != std::string::npos);
    reducer.set_wire(std::nullopt);
    CHECK_EQ(run(), value);
    gradients[0].assign(2000, value);
    reducer.take(0, gradients[0].data());
    CHECK_THROWS(reducer.set_wire(DType::f16), ErrorKind::error);
    reducer.set_wire(std::nullopt);
    reducer.close();
  });
}

TEST(reducer_sums_in_double_when_asked) {
  with_sessions(3, [](Session& session) {
    for (const bool in_f64 : {false, true}) {
      auto communicator = open_communicator(session, tiny());
      auto channel = session.open_channel(*communicator, 30'000'000'000u, nullptr);
      ReducerSettings settings;
      settings.sum_in_f64 = in_f64;
      Reducer reducer(communicator, std::move(channel), settings);
      reducer.add_parameters({{"p", 3, DType::f32, 0}});
      const float values[] = {0x1p25f, 3.0f, -0x1p25f};
      std::vector<float> gradient(3, values[session.rank()]);
      reducer.take(0, gradient.data());
      reducer.exchange({}, soon());
      reducer.complete(soon());
      CHECK_EQ(gradient[2], in_f64 ? 1.0f : static_cast<float>(4 * (1.0 / 3.0)));
    }
  });
}

}  // namespace hvd::test
