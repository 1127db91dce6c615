// Waits for other ranks: how they end, and what counts as one; ranks as threads.

#include <atomic>
#include <string>
#include <thread>

#include "base/clock.h"
#include "controls.h"

namespace hvd::test {

TEST(wait_gives_up_at_its_deadline_and_tells_everybody) {
  with_control(3, [](HostControlPlane& control) {
    Wait wait = soon();
    if (control.rank() == 1) {
      wait.timeout_ns = 200'000'000u;
      wait.describe = [] { return "Godot"; };
    }
    const uint64_t start = now_ns();
    const std::string text = CHECK_THROWS(control.wait(never, wait, {}), ErrorKind::timeout).what();
    CHECK(now_ns() - start >= 150'000'000u && now_ns() - start < 5 * kSecond);
    CHECK(contains(text, "rank 1 waited for Godot; gave up after the timeout of 0.2 s"));
    CHECK(contains(text, "rank " + std::to_string(control.rank()) + " cannot go on"));
  });
}

TEST(stall_limit_is_an_error_on_all_ranks) {
  SessionSettings settings = quick_settings();
  settings.control.stall_abort_ns = 300'000'000u;
  with_control(
      2,
      [](HostControlPlane& control) {
        Wait wait = soon();
        wait.describe = [] { return "bucket 7"; };
        const std::string text =
            CHECK_THROWS(control.wait(never, wait, {}), ErrorKind::stall).what();
        CHECK(contains(text, "bucket 7; gave up after 0.3 s (stall_abort_seconds)"));
        CHECK(contains(text, "cannot go on"));
      },
      settings);
}

TEST(progress_defers_the_stall_limit_but_not_the_deadline) {
  SessionSettings settings = quick_settings();
  settings.control.stall_abort_ns = 300'000'000u;
  with_control(
      1,
      [](HostControlPlane& control) {
        Wait wait;
        wait.timeout_ns = 900'000'000u;
        uint64_t next = 0;
        const auto slow = [&] {
          if (now_ns() < next) return Step::blocked;
          next = now_ns() + 120'000'000u;
          return Step::progressed;
        };
        CHECK_THROWS(control.wait(slow, wait, {}), ErrorKind::timeout);
      },
      settings);
}

TEST(stall_warnings_come_at_every_interval_and_later_in_the_first_step) {
  for (const bool first : {false, true}) {
    SessionSettings settings = quick_settings();
    settings.control.stall_warning_ns = 150'000'000u;
    settings.control.first_stall_warning_ns = 100 * kSecond;
    int described = 0;
    with_control(
        1,
        [&](HostControlPlane& control) {
          Wait wait;
          wait.first = first;
          wait.describe = [&] {
            ++described;
            return "something (a line of a test)";
          };
          const uint64_t end = now_ns() + 700'000'000u;
          control.wait([&] { return now_ns() < end ? Step::blocked : Step::done; }, wait, {});
        },
        settings);
    // Once for the others to read. 100 ms is how often a wait looks up.
    CHECK(first ? described == 1 : described >= 3 && described <= 6);
  }
}

TEST(exception_of_the_interrupt_ends_a_wait_and_tells_the_others) {
  with_control(2, [](HostControlPlane& control) {
    Wait wait = soon();
    const Interrupt interrupt = [] { throw Error(ErrorKind::error, "Ctrl-C"); };
    if (control.rank() == 0) {
      wait.interrupt = &interrupt;
      CHECK_THROWS(control.wait(never, wait, {}), ErrorKind::error);
    } else {
      const std::string text =
          CHECK_THROWS(control.wait(never, wait, {}), ErrorKind::rank_failed).what();
      CHECK(contains(text, "rank 0 was interrupted"));
    }
  });
}

TEST(ranks_are_seen_when_they_call) {
  std::atomic<int> arrived{0};
  with_control(2, [&](HostControlPlane& control) {
    meet(control, arrived);
    const uint64_t before = now_ns();
    sleep_ms(5);
    control.wait([] { return Step::done; }, Wait{}, {});
    CHECK(control.last_seen(control.rank()) > before);
    CHECK(!control.has_left(control.rank()));
  });
}

TEST(nothing_goes_through_a_session_that_is_closed) {
  with_sessions(2, [](Session& session) {
    HostControlPlane& control = session.control();
    auto channel = control.open_channel(ranks_up_to(2), 3, 20 * kSecond, nullptr);
    session.close();
    CHECK_THROWS(channel->begin("too late"), ErrorKind::error);
    CHECK_THROWS(control.wait(never, soon(), {}), ErrorKind::error);
  });
}

TEST(time_spent_waiting_for_others_is_counted) {
  std::atomic<int> arrived{0};
  with_control(2, [&](HostControlPlane& control) {
    meet(control, arrived);
    const uint64_t before = control.waited_ns();
    const uint64_t end = now_ns() + 30'000'000u;
    control.wait([&] { return now_ns() < end ? Step::blocked : Step::done; }, soon(), {0, 1});
    const uint64_t waited = control.waited_ns() - before;
    CHECK(waited >= 20'000'000u);
    control.wait([] { return Step::done; }, soon(), {0, 1});
    CHECK_EQ(control.waited_ns() - before, waited);
  });
}

TEST(rank_that_leaves_is_a_failure_only_for_who_needs_it) {
  std::atomic<int> arrived{0};
  with_control(3, [&](HostControlPlane& control) {
    meet(control, arrived);
    if (control.rank() == 2) return;
    while (!control.has_left(2)) std::this_thread::yield();
    const uint64_t end = now_ns() + 150'000'000u;
    const auto step = [&] { return now_ns() < end ? Step::blocked : Step::done; };
    control.wait(step, soon(), {0, 1});
    meet(control, arrived);  // three and two more
    Wait wait = soon();
    wait.describe = [] { return "bucket 3"; };
    const std::string text =
        CHECK_THROWS(control.wait(never, wait, {0, 1, 2}), ErrorKind::rank_failed).what();
    CHECK(contains(text, "rank 2 has left the job while rank"));
    CHECK(contains(text, "waits for bucket 3"));
  });
}

// Were it otherwise, this program would end here with status 1.
TEST(grace_after_a_failure_ends_nobody_who_has_raised_it_or_left) {
  SessionSettings settings = quick_settings();
  settings.control.abort_grace_ns = 300'000'000u;
  std::atomic<int> arrived{0};
  std::atomic<int> over{0};
  with_sessions(
      3,
      [&](Session& session) {
        HostControlPlane& control = session.control();
        meet(control, arrived);
        if (control.rank() == 2) control.post_failure(ErrorKind::rank_failed, "the disk is full");
        while (control.failure() == nullptr) std::this_thread::yield();
        if (control.rank() == 0) {
          CHECK_THROWS(control.wait(never, soon(), {}), ErrorKind::rank_failed);
        }
        if (control.rank() == 1) session.close();
        sleep_ms(800);
        // The connections end while the others' watches still look at them.
        over.fetch_add(1);
        while (over.load() < 3) std::this_thread::yield();
      },
      settings);
}

}  // namespace hvd::test
