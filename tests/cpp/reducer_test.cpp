// Plan, flush records and the reducer's state machine, ranks as threads.

#include "reducer/reducer.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "base/clock.h"
#include "sessions.h"

namespace hvd::test {
namespace {

// One rank's reducer with the gradients of its parameters.
struct Model {
  Model(Session& session, const std::vector<uint64_t>& sizes, uint64_t bucket_bytes,
        bool by_products = false) {
    ReducerSettings settings;
    settings.bucket_bytes = bucket_bytes;
    settings.want_by_products = by_products;
    auto communicator = open_communicator(session, {4096, 3});
    auto channel = session.open_channel(*communicator, 30'000'000'000u, nullptr);
    reducer = std::make_unique<Reducer>(communicator, std::move(channel), settings);
    std::vector<Reducer::Parameter> parameters;
    for (size_t i = 0; i < sizes.size(); ++i) {
      parameters.push_back({"p" + std::to_string(i), sizes[i], DType::f32, 0});
      gradients.emplace_back(sizes[i]);
    }
    reducer->add_parameters(parameters);
  }

  void fire(uint32_t index, float value) {
    std::fill(gradients[index].begin(), gradients[index].end(), value);
    reducer->fired(index);
    reducer->take(index, gradients[index].data());
  }

  // What the Python side does at the end of a backward; what is missing counts as zero.
  void flush(uint64_t step = 0) {
    for (const uint32_t index : reducer->exchange({step, 0}, soon())) {
      std::fill(gradients[index].begin(), gradients[index].end(), 0.0f);
      reducer->provide(index, gradients[index].data());
    }
    reducer->complete(soon());
  }

  std::vector<std::vector<float>> gradients;
  std::unique_ptr<Reducer> reducer;  // ends first: it may be at work on the gradients
};

const std::vector<uint64_t> kSizes{100, 3000, 1, 0, 700, 64};

}  // namespace

TEST(plan_keeps_order_type_group_and_size) {
  const std::vector<PlanParameter> parameters{{10, DType::f32, 0},  {10, DType::f64, 0},
                                              {10, DType::f32, 1},  {10, DType::f32, 0},
                                              {100, DType::f32, 0}, {1, DType::f32, 0}};
  const auto buckets = plan_buckets({3, 0, 1, 2, 4, 5}, parameters, 80);
  const std::vector<std::vector<uint32_t>> expected{{3, 0}, {1}, {2}, {4}, {5}};
  CHECK(buckets == expected);
}

TEST(plan_properties_hold_for_random_models) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<PlanParameter> parameters;
    std::vector<uint32_t> arrivals;
    for (uint32_t i = 0; i < random() % 40; ++i) {
      parameters.push_back({random() % 50, random() % 2 == 0 ? DType::f32 : DType::f16,
                            static_cast<uint32_t>(random() % 3)});
      arrivals.push_back(i);
    }
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    const uint64_t cap = 1 + random() % 200;
    std::vector<int> seen(parameters.size(), 0);
    for (const auto& bucket : plan_buckets(arrivals, parameters, cap)) {
      CHECK(!bucket.empty());
      uint64_t bytes = 0;
      for (const uint32_t index : bucket) {
        ++seen[index];
        bytes += parameters[index].count * size_of(parameters[index].dtype);
        CHECK(parameters[index].dtype == parameters[bucket[0]].dtype);
        CHECK_EQ(parameters[index].group, parameters[bucket[0]].group);
      }
      CHECK(bytes <= cap || bucket.size() == 1 ||
            bytes == parameters[bucket.back()].count * size_of(parameters[bucket[0]].dtype));
    }
    for (const int times : seen) CHECK_EQ(times, 1);
  }
}

TEST(order_of_arrival_is_that_of_the_lowest_rank_that_saw_it) {
  const std::vector<uint32_t> expected{4, 2, 7, 1};
  CHECK(agree_on_order({{4, 2}, {2, 7, 4}, {}, {1, 7}}) == expected);
}

TEST(flush_records_survive_the_wire) {
  FlushRecord record;
  record.flags = FlushRecord::kMore;
  record.round = 1ull << 40;
  record.step = 12;
  record.step_digest = 0x123456789abcdef0;
  record.optimizer = 3;
  record.parameters = 11;
  record.present = {true, false, true, true, false, false, false, true, true, false, true};
  record.posted = {false, true, true};
  record.arrivals = {3, 1, 2};
  record.text = "what happened";
  const std::string bytes = record.encode();
  const FlushRecord copy = FlushRecord::decode(bytes);
  CHECK_EQ(copy.flags, record.flags);
  CHECK_EQ(copy.round, record.round);
  CHECK_EQ(copy.step, record.step);
  CHECK_EQ(copy.step_digest, record.step_digest);
  CHECK_EQ(copy.optimizer, record.optimizer);
  CHECK(copy.present == record.present && copy.posted == record.posted);
  CHECK(copy.arrivals == record.arrivals);
  CHECK_EQ(copy.text, record.text);
  for (size_t length = 0; length < bytes.size(); ++length) {
    CHECK_THROWS(FlushRecord::decode(bytes.substr(0, length)), ErrorKind::mismatch);
  }
}

TEST(gradients_become_means_step_after_step) {
  for (const int ranks : {1, 2, 4}) {
    for (const uint64_t cap : {64u, 5000u, 1000000u}) {
      with_sessions(ranks, [&](Session& session) {
        Model model(session, kSizes, cap);
        for (uint64_t step = 0; step < 5; ++step) {
          for (uint32_t i = 6; i-- > 0;) {
            model.fire(i, static_cast<float>((session.rank() + 1) * (i + 1) + step));
          }
          model.flush(step);
          for (uint32_t i = 0; i < 6; ++i) {
            const float mean = 0.5f * static_cast<float>(ranks + 1) * static_cast<float>(i + 1) +
                               static_cast<float>(step);
            for (const float x : model.gradients[i]) CHECK(std::fabs(x - mean) <= 1e-5f * mean);
          }
        }
      });
    }
  }
}

TEST(what_a_rank_lacks_counts_as_nothing) {
  with_sessions(3, [](Session& session) {
    Model model(session, kSizes, 5000);
    for (uint64_t step = 0; step < 6; ++step) {
      // Which parameters fire depends on rank and step; 5 never does before step 3.
      const auto fires = [&](int rank, uint32_t i) {
        return i == 5 ? step >= 3 : (static_cast<uint64_t>(rank) + i + step) % 3 != 0;
      };
      for (uint32_t i = 0; i < 6; ++i) {
        if (fires(session.rank(), i)) model.fire(i, static_cast<float>(session.rank() + 1));
      }
      if (step < 3) model.gradients[5][0] = -1.0f;
      model.flush(step);
      if (step < 3) CHECK_EQ(model.gradients[5][0], -1.0f);  // unused by all: left alone
      for (uint32_t i = 0; i < 6; ++i) {
        float sum = 0;
        for (int rank = 0; rank < 3; ++rank) {
          if (fires(rank, i)) sum += static_cast<float>(rank + 1);
        }
        if (i == 5 && step < 3) continue;
        for (const float x : model.gradients[i]) CHECK(std::fabs(x - sum / 3) <= 1e-6f);
      }
    }
  });
}

TEST(buckets_leave_while_backward_goes_on) {
  with_sessions(2, [](Session& session) {
    Model model(session, {1000, 1000, 1000}, 4000);
    model.reducer->events().enable(1000);
    for (uint64_t step = 0; step < 2; ++step) {
      model.fire(2, 1.0f);
      if (step == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      model.fire(1, 1.0f);
      model.fire(0, 1.0f);
      model.flush(step);
    }
    uint64_t done = 0, fired = 0;
    for (const Event& event : model.reducer->events().read()) {
      if (event.step != 1) continue;
      if (event.kind == EventKind::done && event.object == 0) done = event.time_ns;
      if (event.kind == EventKind::fired && event.object == 0) fired = event.time_ns;
    }
    CHECK(done != 0 && fired != 0);
    CHECK(done < fired);
  });
}

TEST(extra_rounds_reduce_what_fired_twice) {
  with_sessions(2, [](Session& session) {
    Model model(session, {10, 20}, 1000000);
    for (uint64_t step = 0; step < 3; ++step) {
      model.fire(0, 1.0f);
      model.fire(1, 2.0f);
      // Only rank 1 has a second gradient.
      const uint32_t flags = session.rank() == 1 ? +FlushRecord::kMore : 0u;
      CHECK(model.reducer->exchange({step, flags}, soon()).empty());
      CHECK(model.reducer->extra_round_needed());
      model.reducer->complete(soon());
      std::vector<float> delta(20, session.rank() == 1 ? 8.0f : 0.0f);
      if (session.rank() == 1) model.reducer->take(1, delta.data());
      for (const uint32_t index : model.reducer->exchange({step, FlushRecord::kExtra}, soon())) {
        CHECK_EQ(index, 1u);
        model.reducer->provide(index, delta.data());
      }
      model.reducer->complete(soon());
      CHECK(!model.reducer->extra_round_needed());
      CHECK_EQ(delta[19], 4.0f);
      CHECK_EQ(model.gradients[1][19], 2.0f);
    }
  });
}

TEST(a_failed_backward_is_an_error_on_the_others_and_the_next_works) {
  with_sessions(3, [](Session& session) {
    Model model(session, kSizes, 400);
    const auto good_step = [&](uint64_t step) {
      for (uint32_t i = 0; i < 6; ++i) model.fire(i, static_cast<float>(session.rank()));
      model.flush(step);
      CHECK(std::fabs(model.gradients[1][2999] - 1.0f) < 1e-6f);
    };
    good_step(0);
    for (int failures = 0; failures < 3; ++failures) {
      for (uint32_t i = 0; i < 6; ++i) {
        if (session.rank() == 1 && i == 3) break;
        model.fire(i, 5.0f);
      }
      if (session.rank() == 1) {
        model.reducer->fail("out of memory");
        CHECK(model.reducer->must_recover());
        model.reducer->recover(soon());
        CHECK(!model.reducer->must_recover());
      } else {
        const std::string text =
            CHECK_THROWS(model.reducer->exchange({1, 0}, soon()), ErrorKind::rank_failed).what();
        CHECK(text.find("rank 1: out of memory") != std::string::npos);
      }
    }
    good_step(1);
  });
}

TEST(ranks_in_different_steps_are_told_so) {
  with_sessions(2, [](Session& session) {
    Model model(session, {10}, 400);
    model.fire(0, 1.0f);
    model.flush(0);
    model.fire(0, 1.0f);
    const auto step = static_cast<uint64_t>(session.rank() + 1);
    const std::string text =
        CHECK_THROWS(model.reducer->exchange({step, 0}, soon()), ErrorKind::mismatch).what();
    CHECK(text.find("optimizer step 1") != std::string::npos);
    CHECK(text.find("optimizer step 2") != std::string::npos);
    model.fire(0, 3.0f);
    model.flush(3);
    CHECK_EQ(model.gradients[0][9], 3.0f);
  });
}

TEST(ranks_that_stepped_different_optimizers_are_told_so) {
  with_sessions(2, [](Session& session) {
    Model model(session, {10}, 400);
    model.fire(0, 1.0f);
    const auto optimizer = static_cast<uint32_t>(session.rank() + 1);
    const std::string text =
        CHECK_THROWS(model.reducer->exchange({1, 0, 70 + optimizer, optimizer}, soon()),
                     ErrorKind::mismatch)
            .what();
    CHECK(text.find("the last one of optimizer 1") != std::string::npos);
    CHECK(text.find("the last one of optimizer 2") != std::string::npos);
    model.fire(0, 3.0f);
    model.flush(3);
    CHECK_EQ(model.gradients[0][9], 3.0f);
  });
}

TEST(what_one_rank_announces_all_ranks_know) {
  with_sessions(3, [](Session& session) {
    Model model(session, {10}, 400);
    for (uint64_t step = 0; step < 4; ++step) {
      model.fire(0, 1.0f);
      uint32_t flags = 0;
      if (session.rank() == 1 && step == 1) flags = FlushRecord::kSparse;
      if (session.rank() == 2 && step >= 1) flags = FlushRecord::kChanged;
      CHECK(model.reducer->exchange({step, flags}, soon()).empty());
      const uint32_t expected = step == 0   ? 0u
                                : step == 1 ? FlushRecord::kSparse | FlushRecord::kChanged
                                            : +FlushRecord::kChanged;
      CHECK_EQ(model.reducer->announced(), expected);
      model.reducer->complete(soon());
    }
  });
}

// The parameter leaves its bucket, the others of the bucket stay together, and slots of buckets
// that have become empty are used again: this could go on for ever.
TEST(redefined_parameters_are_planned_anew) {
  with_sessions(2, [](Session& session) {
    Model model(session, kSizes, 1000000);
    const auto step = [&](uint64_t number) {
      for (uint32_t i = 0; i < 6; ++i) {
        model.fire(i, static_cast<float>((session.rank() + 1) * (i + 1)));
      }
      model.flush(number);
      for (uint32_t i = 0; i < 6; ++i) {
        for (const float x : model.gradients[i]) CHECK_EQ(x, 1.5f * static_cast<float>(i + 1));
      }
    };
    step(0);
    const auto sorted_buckets = [&] {
      auto buckets = model.reducer->buckets();
      for (auto& bucket : buckets) std::sort(bucket.begin(), bucket.end());
      return buckets;
    };
    CHECK_EQ(sorted_buckets().size(), size_t{1});
    for (uint64_t number = 1; number < 1100; ++number) {
      const auto index = static_cast<uint32_t>(number % 6);
      const uint64_t size = number % 2 == 0 ? 50 : 500 + number;
      model.reducer->redefine_parameter(
          index, {"p" + std::to_string(index), size, DType::f32, static_cast<uint32_t>(index % 2)});
      model.gradients[index].resize(size);
      CHECK(!model.reducer->planned(index));
      if (number < 30 || number % 100 == 0) {
        step(number);
        CHECK(model.reducer->planned(index));
        CHECK(model.reducer->buckets().size() <= 7);
      }
    }
    // Those that do not change lie in the order of their bucket still.
    model.reducer->redefine_parameter(2, {"p2", 3, DType::f64, 0});
    for (uint32_t i = 0; i < 6; ++i) {
      if (i != 2) model.fire(i, 1.0f);
    }
    double wide[3] = {1.0, 2.0, static_cast<double>(session.rank())};
    model.reducer->take(2, wide);
    model.flush(2000);
    CHECK_EQ(wide[1], 2.0);
    CHECK_EQ(wide[2], 0.5);
    CHECK_THROWS(
        [&] {
          model.fire(0, 1.0f);
          model.reducer->redefine_parameter(0, {"p0", 1, DType::f32, 0});
        }(),
        ErrorKind::error);
    for (uint32_t i = 1; i < 6; ++i) {
      if (i != 2) model.fire(i, 1.0f);
    }
    model.flush(2001);
    CHECK_EQ(model.gradients[5].back(), 1.0f);
  });
}

TEST(norms_come_with_the_reduction) {
  with_sessions(2, [](Session& session) {
    Model model(session, {10, 5000, 7}, 1000000, true);
    for (uint64_t step = 0; step < 2; ++step) {
      model.fire(0, 1.0f);
      model.fire(1, session.rank() == 0 ? 1.0f : 3.0f);
      model.flush(step);
      CHECK_EQ(model.reducer->by_products(0)->sum_of_squares, 10.0);
      CHECK_EQ(model.reducer->by_products(1)->sum_of_squares, 20000.0);
      CHECK(model.reducer->by_products(1)->finite);
      CHECK(model.reducer->by_products(2) == nullptr);
    }
  });
}

TEST(several_reducers_at_once) {
  with_sessions(2, [](Session& session) {
    Model first(session, kSizes, 400), second(session, {50, 60}, 400);
    for (uint64_t step = 0; step < 10; ++step) {
      // The backwards of the two interleave.
      for (uint32_t i = 0; i < 3; ++i) first.fire(i, static_cast<float>(session.rank()));
      for (uint32_t i = 0; i < 2; ++i) second.fire(i, static_cast<float>(2 * session.rank()));
      for (uint32_t i = 3; i < 6; ++i) first.fire(i, static_cast<float>(session.rank()));
      second.flush(step);
      first.flush(step);
      CHECK_EQ(first.gradients[4][0], 0.5f);
      CHECK_EQ(second.gradients[1][0], 1.0f);
    }
  });
}

TEST(new_parameters_join_later) {
  with_sessions(2, [](Session& session) {
    Model model(session, {10}, 400);
    model.fire(0, 1.0f);
    model.flush(0);
    model.reducer->add_parameters({{"later", 30, DType::f32, 0}});
    model.gradients.emplace_back(30);
    model.fire(0, 1.0f);
    model.fire(1, static_cast<float>(session.rank()));
    model.flush(1);
    CHECK_EQ(model.gradients[1][29], 0.5f);
    if (session.rank() == 0) model.reducer->add_parameters({{"only here", 3, DType::f32, 0}});
    CHECK_THROWS(model.reducer->exchange({2, 0}, soon()), ErrorKind::mismatch);
  });
}

// A rank that dies in the middle is a failure that ends the others' wait; no gradient is touched
// after that.
TEST(a_rank_that_leaves_ends_the_flush) {
  with_sessions(3, [](Session& session) {
    Model model(session, kSizes, 400);
    for (uint32_t i = 0; i < 6; ++i) model.fire(i, 1.0f);
    model.flush(0);
    for (uint32_t i = 0; i < 6; ++i) model.fire(i, 1.0f);
    if (session.rank() == 2) return;
    CHECK_THROWS(model.flush(1), ErrorKind::rank_failed);
    CHECK_THROWS(model.flush(2), ErrorKind::rank_failed);
  });
}

// Between exchange and complete the others already count on this rank: its failure ends the job.
TEST(a_failure_between_exchange_and_complete_ends_the_others_wait) {
  with_sessions(2, [](Session& session) {
    Model model(session, kSizes, 400);
    model.fire(static_cast<uint32_t>(session.rank()), 1.0f);
    const auto missing = model.reducer->exchange({0, 0}, soon());
    CHECK_EQ(missing.size(), size_t{1});
    if (session.rank() == 0) {
      model.reducer->fail("no memory for a gradient");
      CHECK_THROWS(model.reducer->exchange({0, 0}, soon()), ErrorKind::rank_failed);
      return;
    }
    model.reducer->provide(missing[0], model.gradients[missing[0]].data());
    const std::string text =
        CHECK_THROWS(model.reducer->complete(soon()), ErrorKind::rank_failed).what();
    CHECK(text.find("no memory for a gradient") != std::string::npos);
  });
}

TEST(too_many_buckets_are_an_error_after_which_no_gradient_is_touched) {
  with_sessions(2, [](Session& session) {
    const std::vector<uint64_t> sizes(1000, 8);
    Model model(session, sizes, 4);  // one bucket for each
    for (uint32_t i = 0; i < 900; ++i) model.fire(i, 1.0f);
    model.flush(0);
    for (uint32_t i = 0; i < 1000; ++i) model.fire(i, 1.0f);
    const std::string text = CHECK_THROWS(model.flush(1), ErrorKind::bad_argument).what();
    CHECK(text.find("bucket_cap_mb") != std::string::npos);
    for (auto& gradient : model.gradients) std::fill(gradient.begin(), gradient.end(), -1.0f);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const auto& gradient : model.gradients) CHECK_EQ(gradient[0], -1.0f);
    for (uint32_t i = 0; i < 900; ++i) model.fire(i, 3.0f);
    model.flush(2);
    CHECK_EQ(model.gradients[899][7], 3.0f);
  });
}

// A thread that helps may find the pipeline in the hands of the communicator's own thread, which
// then goes to rest: the helper has to be woken, or each such meeting costs a nap of 100 ms.
// On one processor about 20 of 6000 steps met that way.
TEST(helpers_are_woken_when_the_thread_goes_to_rest) {
  std::atomic<int> naps{0};
  with_sessions(2, [&](Session& session) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    sched_setaffinity(0, sizeof one, &one);  // of this rank's threads only
    Model model(session, {16, 16}, 64);
    for (uint64_t step = 0; step < 6000; ++step) {
      const uint64_t started = now_ns();
      model.fire(0, 1.0f);
      model.fire(1, 1.0f);
      model.flush(step);
      if (now_ns() - started > 90'000'000u) ++naps;
    }
  });
  CHECK(naps.load() < 10);
}

// Rank 0 has no loss of its own; the others' have different scales and weights.
TEST(weights_and_scales_are_values_of_the_reduction) {
  for (const bool unscale : {false, true}) {
    with_sessions(3, [&](Session& session) {
      Model model(session, kSizes, 1 << 20, true);
      const int rank = session.control().rank();
      const double weights[] = {0, 3, 1};
      const double scales[] = {0, 8, 2};
      const double weight = weights[rank];
      for (uint64_t step = 0; step < 3; ++step) {
        // What is multiplied by the weight on the way is the rank's mean, times its scale.
        model.reducer->set_contribution({weight, weight, scales[rank], unscale});
        if (rank != 0) {
          for (uint32_t i = 0; i < kSizes.size(); ++i) {
            model.fire(i, static_cast<float>(rank * scales[rank]));
          }
        }
        if (rank == 1) {
          CHECK_THROWS(model.reducer->set_contribution({1, 1, 4, unscale}), ErrorKind::error);
        }
        // What the fronts tell each other travels along.
        model.reducer->set_notes({static_cast<uint64_t>(rank), ~step});
        model.flush(step);
        CHECK(model.reducer->notes() == (std::vector<Notes>{{0, ~step}, {1, ~step}, {2, ~step}}));
        CHECK_EQ(model.reducer->total_weight(), 4.0);
        CHECK_EQ(model.reducer->agreed_scale(), 8.0);
        CHECK(model.reducer->scales_differ());
        // (3 * 1 + 1 * 2) / 4, on all ranks.
        const float expected = unscale ? 1.25f : 10.0f;
        for (uint32_t i = 0; i < kSizes.size(); ++i) {
          for (const float value : model.gradients[i]) CHECK_EQ(value, expected);
          const ByProducts* found = model.reducer->by_products(i);
          CHECK(found != nullptr && found->finite);
          CHECK_EQ(found->sum_of_squares,
                   static_cast<double>(kSizes[i]) * static_cast<double>(expected * expected));
        }
      }
    });
  }
}

TEST(a_mean_over_nobody_is_zero) {
  with_sessions(2, [](Session& session) {
    Model model(session, {5, 70}, 1 << 20);
    model.reducer->set_contribution({0, 0, 1, false});
    model.fire(0, 3);
    model.fire(1, 4);
    model.flush();
    CHECK_EQ(model.reducer->total_weight(), 0.0);
    for (const auto& gradient : model.gradients) {
      for (const float value : gradient) CHECK_EQ(value, 0.0f);
    }
  });
}

}  // namespace hvd::test
