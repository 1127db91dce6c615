// The end of runs, and what ranks tell and find out of each other; ranks as threads.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/clock.h"
#include "control/process.h"
#include "control/shared_text.h"
#include "control/stop_line.h"
#include "controls.h"

namespace hvd::test {

// Each rank passes points at its own pace; one of them asks for the end at a moment of chance.
TEST(runs_end_after_the_same_point_on_all_ranks) {
  constexpr int kRuns = 40;
  std::vector<std::atomic<int>> arrived(2 * kRuns);
  std::vector<std::vector<int>> passed(4, std::vector<int>(kRuns));
  with_control(4, [&](HostControlPlane& control) {
    std::mt19937 random(static_cast<unsigned>(control.rank()));
    for (int run = 0; run < kRuns; ++run) {
      control.begin_run();
      CHECK(!control.stop_requested());
      meet(control, arrived[static_cast<size_t>(2 * run)]);
      int points = 0;
      const int request_at = static_cast<int>(random() % 30);
      // In every third run nobody asks for it.
      const int points_of_run = run % 3 == 2 ? 20 : 100000;
      while (points < points_of_run && control.pass_point()) {
        if (points == request_at && run % 3 != 2 && (control.rank() == run % 4 || run % 2 == 0)) {
          control.request_stop();
          CHECK(control.stop_requested());
        }
        ++points;
        for (unsigned i = random() % 2000; i > 0; --i)
          std::atomic_signal_fence(std::memory_order_seq_cst);
      }
      passed[static_cast<size_t>(control.rank())][static_cast<size_t>(run)] = points;
      CHECK_EQ(control.stop_requested(), run % 3 != 2);
      if (points < points_of_run) CHECK(!control.pass_point());  // and stays so
      meet(control, arrived[static_cast<size_t>(2 * run + 1)]);
    }
  });
  for (int run = 0; run < kRuns; ++run) {
    for (const auto& rank : passed) {
      CHECK_EQ(rank[static_cast<size_t>(run)], passed[0][static_cast<size_t>(run)]);
      CHECK(run % 3 != 2 || rank[static_cast<size_t>(run)] == 20);
    }
  }
}

TEST(ranks_in_front_and_behind_stop_at_the_point_of_the_one_in_front) {
  std::atomic<uint64_t> word{0};
  StopLine front(&word);
  StopLine behind(&word);
  for (int run = 0; run < 2; ++run) {
    front.begin_run();
    behind.begin_run();
    for (int point = 0; point < 5; ++point) CHECK(front.pass());
    CHECK(behind.pass());
    behind.close();
    CHECK(front.closed());
    CHECK(!front.pass());
    for (int point = 1; point < 5; ++point) CHECK(behind.pass());
    CHECK(!behind.pass());
  }
  // Before anybody has passed a point of the run: nobody does.
  front.begin_run();
  behind.begin_run();
  front.close();
  CHECK(!behind.pass());
  CHECK(!front.pass());
}

TEST(texts_are_read_whole_while_they_change) {
  SharedText text;
  uint64_t since = 0;
  CHECK_EQ(text.read(&since), std::string());
  std::atomic<bool> stop{false};
  run_ranks(3, [&](int rank) {
    if (rank == 0) {
      for (int i = 0; i < 20000; ++i) {
        text.write(std::string(static_cast<size_t>(1 + i % 150), static_cast<char>('a' + i % 26)));
      }
      stop.store(true);
      return;
    }
    uint64_t when = 0;
    while (!stop.load()) {
      const std::string read = text.read(&when);
      for (const char c : read) CHECK_EQ(c, read[0]);
      // The writer's i is known from the length but for a multiple of 150, and fits the letter.
      bool fits = read.empty();
      for (size_t i = read.size() - 1; !fits && i < 20000; i += 150) {
        fits = read[0] == static_cast<char>('a' + i % 26);
      }
      CHECK(fits);
    }
  });
  std::string wide;
  while (wide.size() < 400) wide += "\u20ac";  // three bytes each
  text.write(wide);
  const std::string cut = text.read(&since);
  CHECK(cut.size() > SharedText::kBytes - 4 && cut.size() < SharedText::kBytes);
  CHECK_EQ(cut.size() % 3, 0u);
  text.write("short");
  CHECK_EQ(text.read(&since), std::string("short"));
  CHECK(now_ns() - since < 10 * kSecond);
}

TEST(first_failure_stands_and_is_cut_between_characters) {
  std::string text = "xy";
  while (text.size() < 900) text += "\u20ac";  // three bytes each
  std::atomic<int> arrived{0};
  with_control(3, [&](HostControlPlane& control) {
    CHECK(control.failure() == nullptr);
    meet(control, arrived);
    if (control.rank() == 2) control.post_failure(ErrorKind::rank_failed, text);
    while (control.failure() == nullptr) std::this_thread::yield();
    control.post_failure(ErrorKind::stall, "too late");
    const Failure* failure = control.failure();
    CHECK_EQ(failure->rank, 2);
    CHECK(failure->kind == ErrorKind::rank_failed);
    CHECK(failure->text.size() > 600);
    CHECK_EQ(failure->text.size() % 3, 2u);
    CHECK_EQ(failure->text, text.substr(0, failure->text.size()));
  });
}

TEST(a_text_is_said_by_one_rank) {
  constexpr uint64_t kTexts = 300;
  std::atomic<int> first[kTexts] = {};
  std::atomic<int> arrived{0};
  with_control(3, [&](HostControlPlane& control) {
    meet(control, arrived);
    for (uint64_t text = 0; text < kTexts; ++text) {
      // Neighbours in the table, and the digest that looks like a free entry.
      if (control.first_to_say(text)) ++first[text];
    }
    for (uint64_t text = 0; text < kTexts; ++text) CHECK(!control.first_to_say(text));
  });
  // 0 and 1 are one digest.
  CHECK_EQ(first[0].load() + first[1].load(), 1);
  for (uint64_t text = 2; text < kTexts; ++text) CHECK_EQ(first[text].load(), 1);
}

TEST(a_full_table_of_texts_loses_none) {
  with_control(1, [&](HostControlPlane& control) {
    int said = 0;
    for (uint64_t text = 1; text <= 5000; ++text) said += control.first_to_say(text * 977) ? 1 : 0;
    CHECK_EQ(said, 5000);
  });
}

TEST(forked_children_are_told_from_others_and_killed) {
  CHECK(read_process(getpid()).state == 'R' || read_process(getpid()).state == 'S');
  CHECK_EQ(read_process(0).state, '\0');
  pid_t children[2];
  for (pid_t& child : children) {
    child = fork();
    if (child == 0) {
      for (;;) pause();
    }
    CHECK(child > 0);
    const ProcessState process = read_process(child);
    CHECK(process.forked);
    CHECK_EQ(process.parent, getpid());
    CHECK(process.started >= read_process(getpid()).started);
  }
  kill_forked_children({children[1]});
  int status = 0;
  CHECK_EQ(waitpid(children[0], &status, 0), children[0]);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  CHECK_EQ(waitpid(children[1], &status, WNOHANG), 0);
  kill(children[1], SIGSTOP);
  while (read_process(children[1]).state != 'T') sleep_ms(1);
  CHECK_EQ(describe_state('T'), std::string("stopped by a signal"));
  kill(children[1], SIGKILL);
  CHECK_EQ(waitpid(children[1], &status, 0), children[1]);
  CHECK_EQ(read_process(children[1]).state, '\0');
}

TEST(who_gives_up_says_what_the_others_do_instead) {
  SessionSettings settings = quick_settings();
  settings.control.stall_abort_ns = 400'000'000u;
  std::atomic<int> arrived{0};
  with_control(
      3,
      [&](HostControlPlane& control) {
        if (control.rank() == 2) control.set_activity("validation");
        meet(control, arrived);
        if (control.rank() == 2) {
          while (control.failure() == nullptr) sleep_ms(1);
          return;
        }
        Wait wait = soon();
        wait.describe = [] { return "bucket 5"; };
        const std::string text =
            CHECK_THROWS(control.wait(never, wait, {0, 1, 2}), ErrorKind::stall).what();
        CHECK(contains(text, "bucket 5; gave up after 0.4 s"));
        CHECK(contains(text, "; rank 2 (pid " + std::to_string(getpid())));
        CHECK(contains(text, "is in: validation (for 0.4"));
        // Those that wait as well are no news.
        CHECK(!contains(text, "; rank 0") && !contains(text, "; rank 1"));
      },
      settings);
}

TEST(who_ends_waits_for_the_culprit_only_where_there_are_signs) {
  std::atomic<int> arrived{0};
  std::atomic<bool> over{false};
  with_control(2, [&](HostControlPlane& control) {
    meet(control, arrived);
    if (control.rank() == 1) {
      uint64_t began = now_ns();
      control.await_culprit();
      CHECK(now_ns() - began < 10 * kSecond);
      CHECK(control.failure() == nullptr);
      control.post_failure(ErrorKind::rank_failed, "rank 1 failed: the disk is full");
      began = now_ns();
      control.await_culprit();  // it is the culprit
      CHECK(now_ns() - began < 400'000'000u);
      while (!over.load()) sleep_ms(1);
      return;
    }
    while (control.failure() == nullptr) std::this_thread::yield();
    const uint64_t began = now_ns();
    control.await_culprit();
    // Until it has been printed, half a second after it became known.
    CHECK(now_ns() - began >= 300'000'000u);
    over.store(true);
  });
}

TEST(ranks_that_wait_for_each_other_are_told_where) {
  SessionSettings settings = quick_settings();
  settings.control.stall_abort_ns = 500'000'000u;
  std::atomic<int> arrived{0};
  with_control(
      2,
      [&](HostControlPlane& control) {
        meet(control, arrived);
        Wait wait = soon();
        wait.describe = [&] { return control.rank() == 0 ? "a barrier" : "bucket 9"; };
        const std::string text =
            CHECK_THROWS(control.wait(never, wait, {0, 1}), ErrorKind::stall).what();
        const int blamed = contains(text, "rank 0 waited for a barrier;") ? 1 : 0;
        CHECK(contains(text, "; rank " + std::to_string(blamed) + " (pid"));
        CHECK(contains(text, blamed == 1 ? "waits for bucket 9" : "waits for a barrier"));
      },
      settings);
}

TEST(a_request_to_stop_shortens_the_wait_for_a_rank_that_does_not_come) {
  SessionSettings settings = quick_settings();
  settings.control.abort_grace_ns = 500'000'000u;
  std::atomic<int> arrived{0};
  with_control(
      2,
      [&](HostControlPlane& control) {
        control.begin_run();
        meet(control, arrived);
        if (control.rank() == 1) {
          sleep_ms(200);
          control.request_stop();
        }
        const std::string text =
            CHECK_THROWS(control.wait(never, soon(), {}), ErrorKind::stall).what();
        CHECK(contains(text, "asked to end and nothing moved for 0.5 s (abort_grace_seconds)"));
      },
      settings);
}

}  // namespace hvd::test
