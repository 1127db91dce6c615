// Bells, handshake, handing over of memory, and records; ranks as threads.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>
#include <thread>

#include "base/clock.h"
#include "controls.h"

namespace hvd::test {
namespace {

// Listeners of all ranks, and what connect_mesh takes.
struct Meeting {
  explicit Meeting(int size) {
    for (int rank = 0; rank < size; ++rank) {
      listeners.push_back(std::make_unique<Listener>());
      names.push_back(listeners.back()->name());
    }
    for (size_t i = 0; i < token.size(); ++i) token[i] = static_cast<uint8_t>(i * 7 + 1);
  }
  Mesh connect(int rank, uint64_t timeout_ns = 30 * kSecond) {
    return connect_mesh(rank, listeners[static_cast<size_t>(rank)].get(), names, token, timeout_ns);
  }

  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::string> names;
  Token token{};
};

// Somebody who connects to a listener.
class Stranger {
 public:
  explicit Stranger(const std::string& name) : socket_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    CHECK_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), length), 0);
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  void say(const void* bytes, size_t count) {
    CHECK_EQ(send(socket_, bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
  }
  // Without a word: the end of the connection, and not its loss by our own doing.
  bool turned_away() {
    char byte;
    return recv(socket_, &byte, 1, 0) <= 0;
  }

 private:
  int socket_;
};

}  // namespace

// ---- bells ----

// Two ranks hand a number to and fro, and sleep whenever it is not their turn: a wake-up that is
// lost costs a second, which ten thousand turns do not have.
TEST(bells_lose_no_wake_up) {
  std::vector<Bell> bells(2);
  std::atomic<uint32_t> turn{0};
  constexpr uint32_t kTurns = 10000;
  std::atomic<int> late{0};
  run_ranks(2, [&](int rank) {
    Bells own(bells.data(), rank, 2);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (;;) {
      const uint32_t now = turn.load(std::memory_order_acquire);
      if (now >= kTurns) return;
      if (now % 2 == static_cast<uint32_t>(rank)) {
        for (volatile unsigned i = random() % 200; i > 0; i = i - 1) {
        }
        turn.store(now + 1, std::memory_order_release);
        own.ring_all();
        continue;
      }
      Bells::Sleep sleep(own);
      if (turn.load(std::memory_order_acquire) != now) continue;
      const uint64_t start = now_ns();
      sleep.wait(kSecond);
      if (now_ns() - start >= kSecond) late.fetch_add(1);
    }
  });
  CHECK_EQ(late.load(), 0);
}

TEST(bells_wake_every_sleeper_of_a_rank) {
  std::vector<Bell> bells(2);
  std::atomic<bool> news{false};
  std::atomic<int> asleep{0};
  run_ranks(4, [&](int thread) {
    Bells own(bells.data(), thread == 0 ? 0 : 1, 2);
    if (thread == 0) {
      while (asleep.load() < 3) std::this_thread::yield();
      sleep_ms(20);
      news.store(true);
      own.ring_all();
      return;
    }
    Bells::Sleep sleep(own);
    asleep.fetch_add(1);
    const uint64_t start = now_ns();
    while (!news.load()) sleep.wait(5 * kSecond);
    CHECK(now_ns() - start < 4 * kSecond);
  });
  CHECK_EQ(bells[1].sleepers.load(), 0u);
}

TEST(sleep_ends_at_its_deadline) {
  Bell bell;
  Bells bells(&bell, 0, 1);
  Bells::Sleep sleep(bells);
  const uint64_t start = now_ns();
  sleep.wait(30'000'000u);
  CHECK(now_ns() - start >= 30'000'000u);
}

// ---- handshake ----

TEST(mesh_connects_everybody) {
  for (const int size : {1, 2, 5, 16}) {
    Meeting meeting(size);
    run_ranks(size, [&](int rank) {
      const Mesh mesh = meeting.connect(rank);
      for (int peer = 0; peer < size; ++peer) {
        CHECK_EQ(static_cast<bool>(mesh.sockets[static_cast<size_t>(peer)]), peer != rank);
        CHECK_EQ(mesh.pids[static_cast<size_t>(peer)], getpid());
      }
    });
  }
}

TEST(handshake_turns_strangers_away_and_goes_on) {
  Meeting meeting(2);
  Stranger silent(meeting.names[0]);
  Stranger slow(meeting.names[0]);
  slow.say("DVH", 3);  // and never the rest
  Stranger leaving(meeting.names[0]);
  Stranger noisy(meeting.names[0]);
  const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  noisy.say(request.data(), request.size());
  Hello hello{kHelloProtocol, 1, meeting.token};
  hello.token[15] ^= 1;
  Stranger guesser(meeting.names[0]);
  guesser.say(&hello, sizeof hello);
  hello.token = meeting.token;
  Stranger old(meeting.names[0]);
  hello.protocol = kHelloProtocol - 1;
  old.say(&hello, sizeof hello);
  hello.protocol = kHelloProtocol;
  Stranger outside(meeting.names[0]);
  hello.rank = 2;
  outside.say(&hello, sizeof hello);
  Stranger impostor(meeting.names[0]);
  hello.rank = 0;
  impostor.say(&hello, sizeof hello);
  const uint64_t start = now_ns();
  run_ranks(2, [&](int rank) {
    if (rank == 1) sleep_ms(100);  // all others come first
    const Mesh mesh = meeting.connect(rank);
    CHECK(mesh.sockets[static_cast<size_t>(1 - rank)]);
  });
  CHECK(now_ns() - start < 3 * kSecond);  // nobody held it up
  for (Stranger* stranger : {&silent, &slow, &noisy, &guesser, &old, &outside, &impostor}) {
    CHECK(stranger->turned_away());
  }
}

TEST(handshake_takes_a_rank_once) {
  Meeting meeting(3);
  run_ranks(2, [&](int thread) {
    if (thread == 0) {
      CHECK(meeting.connect(0).sockets[2]);
      return;
    }
    Hello hello{kHelloProtocol, 1, meeting.token};
    Stranger first(meeting.names[0]);
    first.say(&hello, sizeof hello);
    sleep_ms(50);
    Stranger second(meeting.names[0]);
    second.say(&hello, sizeof hello);
    CHECK(second.turned_away());
    hello.rank = 2;
    Stranger third(meeting.names[0]);
    third.say(&hello, sizeof hello);
    CHECK(!first.turned_away());  // it is answered
    CHECK(!third.turned_away());
  });
}

// A rank that needs nothing more of the others may be gone before they are done.
TEST(handshake_ends_well_although_a_rank_closes_at_once) {
  for (int round = 0; round < 50; ++round) {
    with_sessions(4, [](Session& session) { open_communicator(session); });
  }
}

TEST(handshake_refuses_a_listener_that_does_not_know_the_token) {
  Meeting meeting(2);
  Meeting other(2);
  other.names = meeting.names;
  other.token[0] ^= 1;
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      CHECK_THROWS(meeting.connect(0, kSecond / 2), ErrorKind::timeout);
      return;
    }
    const std::string text = CHECK_THROWS(other.connect(1), ErrorKind::rank_failed).what();
    CHECK(contains(text, "rank 0"));
  });
}

TEST(handshake_names_who_stays_away_on_every_rank) {
  Meeting meeting(4);
  run_ranks(4, [&](int rank) {
    if (rank == 2) return;  // hangs: its listener is there
    try {
      meeting.connect(rank, kSecond / 2);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::rank_failed);
      CHECK(contains(error.what(), "rank 2 "));
      return;
    }
    CHECK(!"it connected without rank 2");
  });
}

TEST(handshake_notices_at_once_that_a_rank_has_died) {
  for (const int dead : {0, 1, 2, 3}) {
    Meeting meeting(4);
    meeting.listeners[static_cast<size_t>(dead)].reset();
    const uint64_t start = now_ns();
    run_ranks(4, [&](int rank) {
      if (rank == dead) return;
      const std::string text = CHECK_THROWS(meeting.connect(rank), ErrorKind::rank_failed).what();
      CHECK(contains(text, "rank " + std::to_string(dead) + " "));
    });
    CHECK(now_ns() - start < 2 * kSecond);
  }
}

TEST(handshake_notices_that_a_connected_rank_dies) {
  Meeting meeting(3);
  const uint64_t start = now_ns();
  run_ranks(3, [&](int rank) {
    if (rank == 1) return;  // stays away
    if (rank == 0) {
      const std::string text = CHECK_THROWS(meeting.connect(0), ErrorKind::rank_failed).what();
      CHECK(contains(text, "rank 2 ended"));
      return;
    }
    const Hello hello{kHelloProtocol, 2, meeting.token};
    Stranger rank_two(meeting.names[0]);
    rank_two.say(&hello, sizeof hello);
    sleep_ms(50);
  });
  CHECK(now_ns() - start < 2 * kSecond);
}

TEST(handshake_can_be_interrupted) {
  Meeting meeting(2);
  const Interrupt interrupt = [] { throw Error(ErrorKind::error, "Ctrl-C"); };
  const uint64_t start = now_ns();
  CHECK_THROWS(connect_mesh(0, meeting.listeners[0].get(), meeting.names, meeting.token,
                            30 * kSecond, &interrupt),
               ErrorKind::error);
  CHECK(now_ns() - start < kSecond);
}

// ---- memory ----

TEST(memory_arrives_whatever_the_order_in_which_it_is_asked_for) {
  with_control(3, [](HostControlPlane& control) {
    std::vector<uint64_t> keys;
    for (uint64_t key = 100; key < 140; ++key) keys.push_back(key);
    if (control.rank() != 0) {
      std::shuffle(keys.begin(), keys.end(), std::mt19937(static_cast<unsigned>(control.rank())));
    }
    std::vector<std::unique_ptr<SharedMemory>> memories(keys.size());
    for (const uint64_t key : keys) {
      auto memory = control.share(ranks_up_to(3), key, 4096 + key, 20 * kSecond, nullptr);
      CHECK_EQ(memory->size(), 4096 + key);
      auto* cells = reinterpret_cast<std::atomic<uint64_t>*>(memory->data());
      cells[control.rank()].store(key);
      memories[static_cast<size_t>(key - 100)] = std::move(memory);
    }
    for (size_t i = 0; i < memories.size(); ++i) {
      auto* cells = reinterpret_cast<std::atomic<uint64_t>*>(memories[i]->data());
      control.notify();
      control.wait(
          [&] {
            for (int rank = 0; rank < 3; ++rank) {
              if (cells[rank].load() != i + 100) return Step::blocked;
            }
            return Step::done;
          },
          soon(), {});
    }
  });
}

// The thread that waits for what does not come leaves the others their turn at the socket.
TEST(memory_reaches_several_threads_that_wait_at_once) {
  std::atomic<int> served{0};
  with_control(2, [&](HostControlPlane& control) {
    if (control.rank() == 0) {
      sleep_ms(50);
      for (uint64_t key = 1; key <= 4; ++key) {
        control.share({0, 1}, key, 4096, 20 * kSecond, nullptr);
      }
      while (served.load() < 4 && control.failure() == nullptr) std::this_thread::yield();
      control.share({0, 1}, 5, 4096, 20 * kSecond, nullptr);
      return;
    }
    std::vector<std::thread> threads;
    for (uint64_t key = 5; key >= 1; --key) {
      threads.emplace_back([&, key] {
        control.share({0, 1}, key, 4096, 20 * kSecond, nullptr);
        served.fetch_add(1);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  CHECK_EQ(served.load(), 5);
}

TEST(memory_of_a_rank_that_has_left_is_not_waited_for) {
  with_control(2, [](HostControlPlane& control) {
    if (control.rank() == 0) return;
    const std::string text =
        CHECK_THROWS(control.share({0, 1}, 7, 4096, 20 * kSecond, nullptr), ErrorKind::rank_failed)
            .what();
    CHECK(contains(text, "rank 0 has left"));
  });
}

TEST(memory_of_another_size_is_refused) {
  with_control(2, [](HostControlPlane& control) {
    if (control.rank() == 0) {
      control.share({0, 1}, 7, 8192, kSecond, nullptr);
    } else {
      CHECK_THROWS(control.share({0, 1}, 7, 4096, kSecond, nullptr), ErrorKind::mismatch);
    }
  });
}

// ---- records ----

TEST(record_channel_carries_long_and_unequal_records) {
  with_control(4, [](HostControlPlane& control) {
    auto channel = control.open_channel(ranks_up_to(4), 3, 20 * kSecond, nullptr);
    // Around the size of a fragment, none at all, and many fragments.
    const std::vector<size_t> lengths{0, 1, 4031, 4032, 4033, 8064, 8065, 100'000, 3, 0};
    const auto record = [&](int rank, size_t round) {
      const size_t length = lengths[(round + 3 * static_cast<size_t>(rank)) % lengths.size()];
      std::string text(length, ' ');
      for (size_t i = 0; i < length; ++i) {
        text[i] = static_cast<char>(i * 31 + round * 7 + static_cast<size_t>(rank));
      }
      return text;
    };
    for (size_t round = 0; round < 40; ++round) {
      channel->begin(record(control.rank(), round));
      control.wait([&] { return channel->poll() ? Step::done : Step::blocked; }, soon(),
                   ranks_up_to(4));
      CHECK(channel->missing().empty());
      for (int rank = 0; rank < 4; ++rank) {
        CHECK(channel->records()[static_cast<size_t>(rank)] == record(rank, round));
      }
    }
  });
}

TEST(record_channel_of_some_ranks_names_who_is_missing) {
  std::atomic<bool> looked{false};
  with_control(4, [&](HostControlPlane& control) {
    if (control.rank() == 0 || control.rank() == 2) return;
    auto channel = control.open_channel({1, 3}, 3, 20 * kSecond, nullptr);
    if (control.rank() == 3) {
      while (!looked.load() && control.failure() == nullptr) std::this_thread::yield();
      channel->begin("three");
    } else {
      channel->begin("one");
      CHECK(!channel->poll());
      CHECK(channel->missing() == std::vector<int>{1});
      CHECK_THROWS(channel->begin("again"), ErrorKind::error);
      looked = true;
    }
    control.wait([&] { return channel->poll() ? Step::done : Step::blocked; }, soon(), {});
    CHECK_EQ(channel->records()[0], "one");
    CHECK_EQ(channel->records()[1], "three");
  });
}

}  // namespace hvd::test
