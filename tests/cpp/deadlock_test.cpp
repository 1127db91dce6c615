// Ranks that wait for each other: what is told of waits, what closes a circle, and what does not.

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "base/clock.h"
#include "control/deadlock_watch.h"
#include "controls.h"
#include "reducer/reducer.h"

namespace hvd::test {
namespace {

constexpr uint64_t kSettled = 300'000'000u;
constexpr int kSettledMs = static_cast<int>(kSettled / 1'000'000);
constexpr uint64_t kNow = 100 * kSecond;

SessionSettings settled_soon() {
  SessionSettings settings = quick_settings();
  settings.control.deadlock_ns = kSettled;
  return settings;
}

// A rank that waits in an operation of its own for others, long enough to be looked at.
WaitRecord waiting(uint64_t channel, const std::vector<int>& missing) {
  WaitRecord record;
  record.wait = 1;
  record.since_ns = kNow - 3 * kSettled;
  record.looked_ns = kNow - kSettled / 2;
  record.channel = channel;
  for (const int rank : missing) record.add_missing(rank);
  return record;
}

std::vector<int> circle_in(const std::vector<WaitRecord>& records, int from) {
  return find_circle(
      [&](int rank) -> const WaitRecord& { return records[static_cast<size_t>(rank)]; },
      static_cast<int>(records.size()), from, kNow, kSettled);
}

std::shared_ptr<Work> make_barrier() {
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::barrier;
  work->name = "barrier";
  return work;
}

void wait_on(HostControlPlane& control, RecordChannel& channel, const std::string& what) {
  Wait wait = soon();
  wait.describe = [&] { return what; };
  wait.channel = channel.key();
  wait.missing = [&] { return channel.missing(); };
  control.wait([&] { return channel.poll() ? Step::done : Step::blocked; }, wait, {});
}

struct Net {
  Net(Session& session, const std::string& parameter) {
    auto communicator = open_communicator(session);
    auto channel = session.open_channel(*communicator, 30 * kSecond, nullptr);
    reducer = std::make_unique<Reducer>(communicator, std::move(channel), ReducerSettings{});
    reducer->add_parameters({{parameter, 4, DType::f32, 0}});
  }
  void backward() {
    reducer->take(0, gradient);
    reducer->exchange({}, soon());
    reducer->complete(soon());
  }

  float gradient[4] = {};
  std::unique_ptr<Reducer> reducer;  // ends first: it may be at work on the gradient
};

}  // namespace

TEST(circles_of_waits_are_found) {
  const WaitRecord outside;
  CHECK(circle_in({outside}, 0).empty());
  CHECK_EQ(circle_in({waiting(1, {1}), waiting(2, {0})}, 0), (std::vector<int>{0, 1}));
  CHECK_EQ(circle_in({waiting(1, {1}), waiting(2, {0})}, 1), (std::vector<int>{1, 0}));
  CHECK_EQ(circle_in({waiting(1, {1, 2}), waiting(2, {2}), waiting(3, {0})}, 0),
           (std::vector<int>{0, 1, 2}));
  // One that waits for ranks which wait for each other does not go on either.
  CHECK_EQ(circle_in({waiting(1, {3, 1}), waiting(2, {2}), waiting(3, {1}), outside}, 0),
           (std::vector<int>{1, 2}));
  // Behind all of these there is a rank that may move.
  CHECK(circle_in({waiting(1, {1}), outside}, 0).empty());
  CHECK(circle_in({waiting(1, {1}), waiting(2, {2}), waiting(3, {3}), outside}, 0).empty());
  CHECK(circle_in({waiting(1, {1, 2}), waiting(1, {2}), outside}, 0).empty());
  // Who has come is not waited for; who is in the same operation comes by waiting.
  CHECK(circle_in({waiting(1, {1}), waiting(2, {})}, 0).empty());
  CHECK(circle_in({waiting(1, {1}), waiting(1, {0})}, 0).empty());
  // The operation counts as well as the channel.
  std::vector<WaitRecord> pair{waiting(1, {1}), waiting(1, {0})};
  pair[1].operation = 1;
  CHECK_EQ(circle_in(pair, 0).size(), 2u);
}

TEST(what_is_not_known_for_certain_closes_no_circle) {
  const std::vector<WaitRecord> pair{waiting(1, {1}), waiting(2, {0})};
  for (size_t rank = 0; rank < 2; ++rank) {
    // It looked before the other had been in its wait for long: that may have come since.
    std::vector<WaitRecord> records = pair;
    records[rank].since_ns = kNow - kSettled;
    CHECK(circle_in(records, 0).empty());
    // It is stopped, or has no processor.
    records = pair;
    records[rank].looked_ns = kNow - DeadlockWatch::kFreshNs - 1;
    records[1 - rank].since_ns = 0;
    CHECK(circle_in(records, 0).empty());
  }
}

// Against a search that tries all sets of ranks: each member waits for another one of the set.
TEST(random_waits_hold_a_circle_when_some_set_of_ranks_waits_for_itself) {
  std::mt19937 random(7);
  int found = 0;
  for (int round = 0; round < 3000; ++round) {
    const int size = 2 + static_cast<int>(random() % 5);
    std::vector<WaitRecord> records;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<int> missing;
      for (int other = 0; other < size; ++other) {
        if (other != rank && random() % 4 == 0) missing.push_back(other);
      }
      records.push_back(random() % 6 == 0 ? WaitRecord{} : waiting(random() % 4, missing));
      if (random() % 8 == 0) records.back().looked_ns = kNow - 2 * DeadlockWatch::kFreshNs;
    }
    const auto waits = [&](int rank, int other) {
      const WaitRecord& one = records[static_cast<size_t>(rank)];
      const WaitRecord& two = records[static_cast<size_t>(other)];
      return one.wait != 0 && two.wait != 0 && one.is_missing(other) &&
             one.channel != two.channel && one.looked_ns >= two.since_ns + kSettled &&
             one.looked_ns + DeadlockWatch::kFreshNs >= kNow;
    };
    bool expected = false;
    for (int set = 1; set < 1 << size; ++set) {
      bool closed = true;
      for (int rank = 0; rank < size; ++rank) {
        bool inside = (set >> rank & 1) == 0;
        for (int other = 0; other < size; ++other) {
          inside |= (set >> other & 1) != 0 && waits(rank, other);
        }
        closed &= inside;
      }
      expected |= closed;
    }
    bool any = false;
    for (int from = 0; from < size; ++from) {
      const std::vector<int> circle = circle_in(records, from);
      any |= !circle.empty();
      for (size_t i = 0; i < circle.size(); ++i) {
        CHECK(waits(circle[i], circle[(i + 1) % circle.size()]));
      }
    }
    CHECK_EQ(any, expected);
    found += any ? 1 : 0;
  }
  CHECK(found > 300 && found < 2700);
}

TEST(records_of_waits_are_read_whole_while_they_change) {
  SharedWaitRecord shared;
  CHECK_EQ(shared.read().wait, 0u);
  std::atomic<int> reading{2};
  run_ranks(3, [&](int rank) {
    if (rank == 0) {
      for (uint64_t i = 1; reading.load() > 0; ++i) {
        WaitRecord record;
        record.wait = record.since_ns = record.looked_ns = record.channel = record.operation = i;
        for (uint64_t& word : record.missing) word = i;
        shared.write(record);
      }
      return;
    }
    uint64_t last = 0;
    for (int seen = 0; seen < 300;) {
      const WaitRecord record = shared.read();
      if (record.wait == 0) continue;  // not yet, or it changed too often
      CHECK(record.wait >= last);
      seen += record.wait > last ? 1 : 0;
      last = record.wait;
      CHECK(record.since_ns == last && record.looked_ns == last && record.channel == last);
      for (const uint64_t word : record.missing) CHECK_EQ(word, last);
    }
    reading.fetch_sub(1);
  });
}

TEST(a_collective_against_records_is_an_error_that_names_both) {
  with_sessions(
      2,
      [&](Session& session) {
        HostControlPlane& control = session.control();
        const auto communicator = open_communicator(session);
        const auto channel = session.open_channel(*communicator, 30 * kSecond, nullptr);
        communicator->run(make_barrier(), soon());
        const auto wait_somewhere = [&] {
          if (session.rank() == 0) return communicator->run(make_barrier(), soon());
          channel->begin("record");
          wait_on(control, *channel, "the end of a backward");
        };
        const std::string text = CHECK_THROWS(wait_somewhere(), ErrorKind::mismatch).what();
        CHECK(contains(text, "the ranks wait for each other in different places"));
        CHECK(contains(text,
                       "rank 0 waits for barrier, which has not been called by rank 1; "
                       "rank 1 waits for the end of a backward; all ranks have to"));
      },
      settled_soon());
}

TEST(three_ranks_in_a_circle) {
  with_sessions(
      3,
      [&](Session& session) {
        HostControlPlane& control = session.control();
        const int rank = session.rank();
        // One channel for each two ranks; each waits for the next one.
        std::vector<std::unique_ptr<RecordChannel>> channels(3);
        for (int first = 0; first < 3; ++first) {
          const int second = (first + 1) % 3;
          if (rank != first && rank != second) continue;
          const std::vector<int> members{std::min(first, second), std::max(first, second)};
          channels[static_cast<size_t>(first)] =
              control.open_channel(members, static_cast<uint64_t>(first), 30 * kSecond, nullptr);
        }
        RecordChannel& channel = *channels[static_cast<size_t>(rank)];
        channel.begin("x");
        Wait wait = soon();
        wait.describe = [&] { return "rank " + std::to_string((rank + 1) % 3); };
        wait.channel = channel.key();
        wait.missing = [&] { return std::vector<int>{(rank + 1) % 3}; };
        const std::string text =
            CHECK_THROWS(
                control.wait([&] { return channel.poll() ? Step::done : Step::blocked; }, wait, {}),
                ErrorKind::mismatch)
                .what();
        CHECK(contains(text,
                       "rank 0 waits for rank 1; rank 1 waits for rank 2; rank 2 waits for "
                       "rank 0; "));
      },
      settled_soon());
}

// Each of the first three waits for all others in a place of its own; the last is where the first
// is.
TEST(every_place_is_named_once) {
  std::vector<SharedWaitRecord> memory(4);
  std::vector<SharedWaitRecord*> records;
  for (SharedWaitRecord& record : memory) records.push_back(&record);
  std::vector<std::unique_ptr<DeadlockWatch>> ranks;
  std::vector<uint64_t> waits(4);
  for (int rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<DeadlockWatch>(records, rank, 0));
  }
  const auto look = [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    const int place = rank % 3;
    std::vector<int> missing;
    for (int other = 0; other < 4; ++other) {
      if (other % 3 != place) missing.push_back(other);
    }
    waits[index] =
        ranks[index]->tell(waits[index], now_ns(), static_cast<uint64_t>(place), 7, missing);
  };
  for (int rank = 0; rank < 4; ++rank) look(rank);
  // Rank 0 looked before the others were in their waits, so did 1 and 2: who knows where they are?
  CHECK(ranks[0]->find().empty());
  for (int rank = 0; rank < 4; ++rank) look(rank);
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<int> found = ranks[static_cast<size_t>(rank)]->find();
    std::sort(found.begin(), found.end());
    CHECK_EQ(found.size(), 3u);
    CHECK(found[0] == 0 ? found[1] == 1 : found[2] == 3 && found[0] == 1);
  }
  // Rank 1 goes on; the others still wait for each other.
  ranks[1]->withdraw(waits[1]);
  std::vector<int> found = ranks[0]->find();
  CHECK_EQ(found.size(), 2u);
  // It has begun another wait: who looked before then knows nothing of it.
  waits[1] = 0;
  look(1);
  found = ranks[1]->find();
  CHECK_EQ(found.size(), 3u);
  ranks[2]->withdraw(waits[2]);
  CHECK(ranks[0]->find().empty());
  CHECK(ranks[1]->find().empty());
  look(3);
  CHECK_EQ(ranks[1]->find().size(), 2u);
}

TEST(two_reducers_in_another_order) {
  with_sessions(
      2,
      [&](Session& session) {
        Net a(session, "a.weight");
        Net b(session, "b.weight");
        a.backward();
        b.backward();
        const auto in_this_order = [](Net& first, Net& second) {
          first.backward();
          second.backward();
        };
        const std::string text =
            CHECK_THROWS(session.rank() == 0 ? in_this_order(a, b) : in_this_order(b, a),
                         ErrorKind::mismatch)
                .what();
        CHECK(contains(text, "rank 0 waits for the end of backward 1 on rank 1"));
        CHECK(contains(text, "rank 1 waits for the end of backward 1 on rank 0"));
        CHECK(contains(text, "a.weight") && contains(text, "b.weight"));
      },
      settled_soon());
}

TEST(a_communicator_to_be_made_against_a_barrier) {
  with_sessions(
      3,
      [&](Session& session) {
        const auto communicator = open_communicator(session);
        const std::string text =
            session.rank() != 0
                ? CHECK_THROWS(open_communicator(session), ErrorKind::mismatch).what()
                : CHECK_THROWS(communicator->run(make_barrier(), soon()), ErrorKind::mismatch)
                      .what();
        CHECK(contains(text, "rank 0 waits for barrier, which has not been called by rank 1, 2"));
        CHECK(contains(text, " waits for a communicator or reducer to be made; all ranks"));
      },
      settled_soon());
}

// Rank 0 waits for both others in one place, rank 1 for rank 2 in another, and rank 2 is away for
// longer than it takes to find a deadlock.
TEST(ranks_that_are_away_are_waited_for) {
  with_sessions(
      3,
      [&](Session& session) {
        HostControlPlane& control = session.control();
        const auto communicator = open_communicator(session);
        if (session.rank() != 0) {
          const auto channel = control.open_channel({1, 2}, 1, 30 * kSecond, nullptr);
          for (int round = 0; round < 2; ++round) {
            if (session.rank() == 2) sleep_ms(2 * kSettledMs);
            channel->begin("x");
            wait_on(control, *channel, "the other one");
          }
        }
        communicator->run(make_barrier(), soon());
        CHECK(control.failure() == nullptr);
      },
      settled_soon());
}

// Rank 1 waits in the barrier for rank 0; rank 0 waits in a backward, to which rank 1 has come: its
// own one failed, which it told without waiting. Both wait for rank 2, which is away.
TEST(who_has_come_is_not_waited_for) {
  with_sessions(
      3,
      [&](Session& session) {
        const auto communicator = open_communicator(session);
        Net net(session, "weight");
        if (session.rank() == 2) sleep_ms(3 * kSettledMs);
        if (session.rank() == 1) {
          net.reducer->fail("out of memory");
        } else {
          CHECK_THROWS(net.backward(), ErrorKind::rank_failed);
        }
        communicator->run(make_barrier(), soon());
        if (session.rank() == 1) net.reducer->recover(soon());
        net.backward();
      },
      settled_soon());
}

// With a second thread that uses the engine nobody can say what a rank waits for.
TEST(ranks_with_several_threads_tell_nothing) {
  SessionSettings settings = settled_soon();
  settings.control.stall_abort_ns = 3 * kSettled;
  std::atomic<int> ended{0};
  with_sessions(
      2,
      [&](Session& session) {
        const auto communicator = open_communicator(session);
        const auto channel = session.open_channel(*communicator, 30 * kSecond, nullptr);
        std::thread other([&] {
          session.control().enter_wait();
          while (ended.load() < 2) sleep_ms(1);
        });
        Error error(ErrorKind::error, "");
        try {
          if (session.rank() == 0) {
            communicator->run(make_barrier(), soon());
          } else {
            channel->begin("x");
            wait_on(session.control(), *channel, "records");
          }
        } catch (const Error& caught) {
          error = caught;
        }
        ended.fetch_add(1);
        other.join();
        CHECK(error.kind() == ErrorKind::stall);
      },
      settings);
}

TEST(a_thread_that_has_ended_is_no_hindrance) {
  with_sessions(
      2,
      [&](Session& session) {
        const auto communicator = open_communicator(session);
        const auto channel = session.open_channel(*communicator, 30 * kSecond, nullptr);
        std::thread([&] { communicator->run(make_barrier(), soon()); }).join();
        const auto wait_somewhere = [&] {
          if (session.rank() == 0) return communicator->run(make_barrier(), soon());
          channel->begin("x");
          wait_on(session.control(), *channel, "records");
        };
        CHECK_THROWS(wait_somewhere(), ErrorKind::mismatch);
      },
      settled_soon());
}

// What a signal handler does in the middle of a wait brings the rank somewhere after all.
TEST(a_wait_inside_of_a_wait_counts_as_movement) {
  with_sessions(
      2,
      [&](Session& session) {
        HostControlPlane& control = session.control();
        const auto communicator = open_communicator(session);
        const auto channel = session.open_channel(*communicator, 30 * kSecond, nullptr);
        if (session.rank() == 1) {
          communicator->run(make_barrier(), soon());
          sleep_ms(2 * kSettledMs);
          channel->begin("x");
          return wait_on(control, *channel, "records");
        }
        const uint64_t started = now_ns();
        bool called = false;
        const std::function<void()> handler = [&] {
          if (called || now_ns() - started < kSettled / 2) return;
          called = true;
          communicator->run(make_barrier(), soon());
        };
        channel->begin("x");
        Wait wait = soon();
        wait.interrupt = &handler;
        wait.channel = channel->key();
        wait.missing = [&] { return channel->missing(); };
        control.wait([&] { return channel->poll() ? Step::done : Step::blocked; }, wait, {});
        CHECK(called);
      },
      settled_soon());
}

}  // namespace hvd::test
