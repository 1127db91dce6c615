// Collectives of the shared-memory communicator, ranks as threads.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "comm/exchange.h"
#include "sessions.h"

namespace hvd::test {
namespace {

// Small slots, so that little data makes many chunks.
StagingSettings tiny() { return {4096, 3}; }

float value(int rank, uint64_t i) {
  return static_cast<float>((static_cast<uint64_t>(rank) * 7919 + i * 31) % 1009) / 64.0f - 5.0f;
}

std::shared_ptr<Work> reduce_work(DType dtype, std::vector<uint64_t> counts,
                                  std::vector<void*> pointers) {
  auto work = std::make_shared<Work>();
  work->layout = std::make_shared<Layout>(dtype, std::move(counts));
  work->pointers = std::move(pointers);
  work->name = "test reduction";
  return work;
}

void check_sum(int ranks, uint64_t count, const StagingSettings& settings) {
  with_sessions(ranks, [&](Session& session) {
    auto communicator = open_communicator(session, settings);
    for (int round = 0; round < 3; ++round) {
      std::vector<float> data(count);
      for (uint64_t i = 0; i < count; ++i) data[i] = value(session.rank(), i + round);
      auto work = reduce_work(DType::f32, {count}, {data.data()});
      work->post = 0.5;
      communicator->run(work, soon());
      for (uint64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          sum = rank == 0 ? value(0, i + round) : sum + value(rank, i + round);
        }
        CHECK_EQ(data[i], 0.5f * sum);
      }
    }
  });
}

}  // namespace

TEST(sums_of_every_size_and_number_of_ranks) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const uint64_t count : {0u, 1u, 5u, 1000u, 4097u, 30011u}) check_sum(ranks, count, tiny());
  }
}

TEST(sums_with_default_slots) {
  check_sum(2, 1 << 20, StagingSettings{});
  check_sum(3, (1 << 18) + 17, StagingSettings{});
}

TEST(sums_of_sixty_four_ranks) { check_sum(64, 5000, tiny()); }

TEST(segments_and_missing_segments) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    const int rank = session.rank();
    std::vector<uint64_t> counts{7, 0, 3000, 1, 900, 64};
    std::vector<std::vector<float>> data;
    std::vector<void*> pointers;
    for (size_t s = 0; s < counts.size(); ++s) {
      data.emplace_back(counts[s]);
      for (uint64_t i = 0; i < counts[s]; ++i) data[s][i] = value(rank, i * (s + 1));
      // Every rank lacks another segment; segment 5 is lacking everywhere.
      const bool lacks = static_cast<int>(s) == 2 + rank || s == 5;
      pointers.push_back(lacks ? nullptr : data[s].data());
    }
    auto work = reduce_work(DType::f32, counts, pointers);
    work->divide_by_weight = true;
    work->want_by_products = true;
    communicator->run(work, soon());
    for (size_t s = 0; s < counts.size(); ++s) {
      double squares = 0;
      for (uint64_t i = 0; i < counts[s]; ++i) {
        float sum = 0;
        for (int other = 0; other < 3; ++other) {
          const bool lacks = static_cast<int>(s) == 2 + other || s == 5;
          if (!lacks) sum += value(other, i * (s + 1));
        }
        const float mean = static_cast<float>(sum * static_cast<float>(1.0 / 3.0));
        squares += static_cast<double>(mean) * mean;
        if (pointers[s] != nullptr) CHECK(std::fabs(data[s][i] - mean) <= 1e-6f * 20);
      }
      CHECK(work->by_products[s].finite);
      CHECK(std::fabs(work->by_products[s].sum_of_squares - squares) <= 1e-5 * (1 + squares));
    }
  });
}

TEST(weights_and_factors) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (const uint64_t count : {10u, 9000u}) {
      std::vector<double> data(count, session.rank() + 1.0);
      auto work = reduce_work(DType::f64, {count}, {data.data()});
      // Rank 1 has run out of data: nobody reads what it has.
      const double factors[] = {2.0, 0.0, 0.5};
      const double weights[] = {3.0, 0.0, 5.0};
      if (session.rank() == 1) std::fill(data.begin(), data.end(), std::nan(""));
      work->pre = factors[session.rank()];
      work->weight = weights[session.rank()];
      work->divide_by_weight = true;
      communicator->run(work, soon());
      for (const double x : data) CHECK_EQ(x, (2.0 * 1.0 + 0.5 * 3.0) * (1.0 / 8.0));
    }
  });
}

TEST(by_products_find_what_is_not_finite) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (const uint64_t count : {100u, 5000u}) {
      std::vector<float> clean(count, 1.0f), dirty(count, 1.0f);
      if (session.rank() == 1) dirty[count - 1] = INFINITY;
      auto work = reduce_work(DType::f32, {count, count}, {clean.data(), dirty.data()});
      work->want_by_products = true;
      communicator->run(work, soon());
      CHECK(work->by_products[0].finite);
      CHECK(!work->by_products[1].finite);
      CHECK_EQ(work->by_products[0].sum_of_squares, 4.0 * static_cast<double>(count));
    }
  });
}

TEST(minimum_maximum_and_integers) {
  with_sessions(4, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (const uint64_t count : {3u, 20000u}) {
      std::vector<int64_t> data(count);
      for (uint64_t i = 0; i < count; ++i) data[i] = static_cast<int64_t>(i) * (session.rank() - 1);
      auto work = reduce_work(DType::i64, {count}, {data.data()});
      communicator->run(work, soon());
      for (uint64_t i = 0; i < count; ++i) CHECK_EQ(data[i], static_cast<int64_t>(i) * 2);
      std::vector<int32_t> small(count, session.rank());
      work = reduce_work(DType::i32, {count}, {small.data()});
      work->op = ReduceOp::max;
      communicator->run(work, soon());
      CHECK_EQ(small[count - 1], 3);
      std::fill(small.begin(), small.end(), session.rank() + 1);
      work = reduce_work(DType::i32, {count}, {small.data()});
      work->op = ReduceOp::min;
      communicator->run(work, soon());
      CHECK_EQ(small[0], 1);
    }
  });
}

TEST(broadcast_from_every_root) {
  for (const int ranks : {1, 2, 5}) {
    with_sessions(ranks, [&](Session& session) {
      auto communicator = open_communicator(session, tiny());
      for (int root = 0; root < ranks; ++root) {
        for (const uint64_t count : {0u, 1u, 4096u, 50001u}) {
          std::string first(count, static_cast<char>('a' + session.rank()));
          std::string second(3, static_cast<char>('A' + session.rank()));
          auto work = reduce_work(DType::u8, {count, 3}, {first.data(), second.data()});
          work->kind = WorkKind::broadcast;
          work->root = root;
          communicator->run(work, soon());
          CHECK_EQ(first, std::string(count, static_cast<char>('a' + root)));
          CHECK_EQ(second, std::string(3, static_cast<char>('A' + root)));
        }
      }
    });
  }
}

TEST(records_of_unequal_length) {
  with_sessions(4, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (int round = 0; round < 5; ++round) {
      const size_t length = static_cast<size_t>(session.rank() * round) * 3001;
      const auto records =
          exchange(*communicator, std::string(length, static_cast<char>('0' + round)), soon());
      for (size_t rank = 0; rank < 4; ++rank) {
        CHECK_EQ(records[rank], std::string(rank * static_cast<size_t>(round) * 3001,
                                            static_cast<char>('0' + round)));
      }
    }
  });
}

TEST(barrier_holds_everybody) {
  std::atomic<int> arrived{0};
  with_sessions(4, [&](Session& session) {
    auto communicator = open_communicator(session, tiny());
    for (int round = 1; round <= 20; ++round) {
      arrived.fetch_add(1);
      auto work = std::make_shared<Work>();
      work->kind = WorkKind::barrier;
      work->name = "barrier";
      communicator->run(work, soon());
      CHECK(arrived.load() >= 4 * round);
    }
  });
}

// Slots posted in another order on every rank, by the hundred, served by the communicators' own
// threads.
TEST(posts_in_any_order) {
  with_sessions(4, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    std::mt19937 random(static_cast<unsigned>(session.rank()));
    constexpr uint32_t kCount = 40;
    for (uint64_t step = 0; step < 15; ++step) {
      std::vector<std::vector<float>> data(kCount);
      std::vector<std::shared_ptr<Work>> works(kCount);
      std::vector<uint32_t> order(kCount);
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), random);
      for (const uint32_t slot : order) {
        data[slot].assign(10 + slot * 97, static_cast<float>(session.rank() + 1) * (slot + 1));
        works[slot] = reduce_work(DType::f32, {data[slot].size()}, {data[slot].data()});
        works[slot]->step = step;
        communicator->post(slot, works[slot]);
      }
      const bool helps = session.rank() % 2 == 0;
      if (helps) {
        const Communicator::Helping helping(*communicator);
        size_t first = 0;
        session.control().wait(
            [&] {
              while (first < kCount && works[first]->finished.load()) ++first;
              return first == kCount ? Step::done : communicator->drive();
            },
            soon(), {});
      } else {
        while (!std::all_of(works.begin(), works.end(),
                            [](const auto& work) { return work->finished.load(); })) {
          std::this_thread::yield();
        }
      }
      for (uint32_t slot = 0; slot < kCount; ++slot) {
        CHECK(!works[slot]->error);
        CHECK_EQ(data[slot].back(), 10.0f * (slot + 1));
      }
    }
  });
}

TEST(one_late_slot_blocks_no_other) {
  std::atomic<bool> looked{false};
  with_sessions(2, [&](Session& session) {
    auto communicator = open_communicator(session, tiny());
    std::vector<float> late(100, 1.0f), early(100, 1.0f);
    auto late_work = reduce_work(DType::f32, {100}, {late.data()});
    auto early_work = reduce_work(DType::f32, {100}, {early.data()});
    if (session.rank() == 0) communicator->post(0, late_work);
    communicator->post(1, early_work);
    while (!early_work->finished.load()) std::this_thread::yield();
    if (session.rank() == 0) {
      CHECK(!late_work->finished.load());
      looked = true;
    } else {
      while (!looked.load() && session.control().failure() == nullptr) std::this_thread::yield();
      communicator->post(0, late_work);
    }
    while (!late_work->finished.load()) std::this_thread::yield();
    CHECK_EQ(late[99], 2.0f);
  });
}

TEST(mismatches_are_errors_everywhere_and_leave_the_engine_usable) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    const uint64_t count = session.rank() == 2 ? 11 : 10;
    std::vector<float> data(11, 1.0f);
    auto work = reduce_work(DType::f32, {count}, {data.data()});
    work->name = "a sum of " + std::to_string(count);
    const std::string text =
        CHECK_THROWS(communicator->run(work, soon()), ErrorKind::mismatch).what();
    CHECK(text.find("a sum of 10") != std::string::npos);
    CHECK(text.find("a sum of 11") != std::string::npos);
    auto barrier = std::make_shared<Work>();
    barrier->kind = WorkKind::barrier;
    barrier->name = "barrier";
    if (session.rank() == 0) {
      CHECK_THROWS(communicator->run(barrier, soon()), ErrorKind::mismatch);
    } else {
      auto other = reduce_work(DType::f32, {2}, {data.data()});
      CHECK_THROWS(communicator->run(other, soon()), ErrorKind::mismatch);
    }
    std::vector<float> good(10, 1.0f);
    work = reduce_work(DType::f32, {10}, {good.data()});
    communicator->run(work, soon());
    CHECK_EQ(good[9], 3.0f);
  });
}

TEST(several_communicators_at_once) {
  with_sessions(4, [](Session& session) {
    const int rank = session.rank();
    auto all = open_communicator(session, tiny());
    const std::vector<int> half = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    auto group = session.open_communicator(half, tiny(), 30'000'000'000u, nullptr);
    auto second = open_communicator(session, tiny());
    std::vector<std::thread> threads;
    std::atomic<bool> wrong{false};
    for (const auto& communicator : {all, group, second}) {
      threads.emplace_back([&wrong, communicator] {
        for (int round = 0; round < 30; ++round) {
          std::vector<float> data(777, 1.0f);
          communicator->run(reduce_work(DType::f32, {777}, {data.data()}), soon());
          if (data[776] != static_cast<float>(communicator->size())) wrong = true;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(!wrong.load());
  });
}

TEST(deadline_names_who_is_missing) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    if (session.rank() == 1) {
      while (session.control().failure() == nullptr) std::this_thread::yield();
      return;
    }
    std::vector<float> data(10, 1.0f);
    Wait wait;
    wait.timeout_ns = 200'000'000u;
    const std::string text =
        CHECK_THROWS(communicator->run(reduce_work(DType::f32, {10}, {data.data()}), wait),
                     ErrorKind::timeout)
            .what();
    CHECK(text.find("not been called by rank 1") != std::string::npos);
    // The ring may hold half of a reduction: nothing more goes through it.
    CHECK_THROWS(communicator->run(reduce_work(DType::f32, {10}, {data.data()}), soon()),
                 ErrorKind::rank_failed);
  });
}

TEST(a_rank_that_leaves_is_an_error_for_who_waits) {
  with_sessions(2, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    if (session.rank() == 1) return;  // closes its session
    std::vector<float> data(10, 1.0f);
    const std::string text =
        CHECK_THROWS(communicator->run(reduce_work(DType::f32, {10}, {data.data()}), soon()),
                     ErrorKind::rank_failed)
            .what();
    CHECK(text.find("rank 1 has left") != std::string::npos);
  });
}

TEST(a_posted_error_ends_every_wait) {
  with_sessions(3, [](Session& session) {
    auto communicator = open_communicator(session, tiny());
    auto barrier = std::make_shared<Work>();
    barrier->kind = WorkKind::barrier;
    barrier->name = "barrier";
    communicator->run(barrier, soon());  // before it, a rank may still be opening
    if (session.rank() == 2) {
      session.control().post_failure(ErrorKind::rank_failed, "the disk is full");
      return;
    }
    std::vector<float> data(10, 1.0f);
    const std::string text =
        CHECK_THROWS(communicator->run(reduce_work(DType::f32, {10}, {data.data()}), soon()),
                     ErrorKind::rank_failed)
            .what();
    CHECK(text.find("the disk is full") != std::string::npos);
  });
}

TEST(sessions_open_and_close_many_times) {
  for (int round = 0; round < 30; ++round) {
    with_sessions(2, [&](Session& session) {
      auto communicator = open_communicator(session, tiny());
      std::vector<float> data(5, static_cast<float>(round));
      communicator->run(reduce_work(DType::f32, {5}, {data.data()}), soon());
      CHECK_EQ(data[4], 2.0f * static_cast<float>(round));
    });
  }
}

TEST(bad_arguments_of_communicators) {
  with_sessions(2, [](Session& session) {
    const auto open = [&](std::vector<int> ranks, StagingSettings settings) {
      session.open_communicator(ranks, settings, 1'000'000'000u, nullptr);
    };
    CHECK_THROWS(open({1, 0}, tiny()), ErrorKind::bad_argument);
    CHECK_THROWS(open({0, 0, 1}, tiny()), ErrorKind::bad_argument);
    CHECK_THROWS(open({0, 2}, tiny()), ErrorKind::bad_argument);
    CHECK_THROWS(open({1 - session.rank()}, tiny()), ErrorKind::bad_argument);
    CHECK_THROWS(open({0, 1}, {100, 3}), ErrorKind::bad_argument);
    CHECK_THROWS(open({0, 1}, {4096, 1}), ErrorKind::bad_argument);
  });
}

}  // namespace hvd::test
