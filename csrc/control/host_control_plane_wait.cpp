// The part of the control plane that runs on the threads that wait for other ranks.

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "control/control_page.h"
#include "control/host_control_plane.h"
#include "control/process.h"

namespace hvd {

namespace {
constexpr uint64_t kNapNs = 100'000'000u;  // the longest sleep between two looks for signals
constexpr uint32_t kMostSpinNs = 100'000;
// A nap that takes longer than this beyond its time: the process itself was stopped.
constexpr uint64_t kPauseNs = 1'000'000'000u;
constexpr size_t kRanksInText = 5;  // that wait for each other
// Stands for the making of a channel or communicator, among the operations of that.
constexpr uint64_t kMaking = UINT64_MAX;
}  // namespace

void HostControlPlane::tell_wait(const std::string& text) {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  page_->cells[rank_].wait.write(text);
}

// Lets the others know of a wait in which nothing has moved for a while; `missing` is as it was at
// looked_ns or later. Throws when this rank waits for ever.
void HostControlPlane::tell(const Wait& settings, uint64_t looked_ns, Waited* waited) {
  const auto what = [&] {
    return settings.describe ? settings.describe() : std::string("the other ranks");
  };
  const uint64_t before = waited->number;
  if (settings.missing) {
    waited->number = deadlocks_->tell(before, looked_ns, settings.channel, settings.operation,
                                      settings.missing());
  }
  // Again as well after a signal handler that had a wait of its own.
  if (!waited->told || waited->number != before) tell_wait(what());
  waited->told = true;
  if (waited->number == 0 || looked_ns - waited->last_progress < settings_.deadlock_ns) return;
  const std::vector<int> circle = deadlocks_->find();
  if (!circle.empty()) throw_deadlock(circle, what());
}

void HostControlPlane::untell(Waited* waited) {
  deadlocks_->withdraw(waited->number);
  tell_wait("");
  waited->number = 0;
  waited->told = false;
}

void HostControlPlane::count_wait(const Waited& waited) {
  if (waited.last_progress == 0) return;
  waited_ns_.fetch_add(now_ns() - waited.last_progress, std::memory_order_relaxed);
}

std::unique_ptr<SharedMemory> HostControlPlane::share(const std::vector<int>& members, uint64_t key,
                                                      size_t bytes, uint64_t timeout_ns,
                                                      const Interrupt* interrupt) {
  const uint64_t deadline = now_ns() + timeout_ns;
  const int maker = members.front();
  if (maker == rank_) {
    auto memory = SharedMemory::create("hvd", bytes);
    for (int member : members) {
      if (member == rank_) continue;
      if (!send_memory(mesh_.sockets[static_cast<size_t>(member)].get(), key, *memory)) {
        throw_lost(member);
      }
    }
    memory->close_descriptor();
    return memory;
  }
  if (deadlocks_) enter_wait();
  Wait place;
  place.describe = [] { return "a communicator or reducer to be made"; };
  place.channel = key;
  place.operation = kMaking;
  place.missing = [maker] { return std::vector<int>{maker}; };
  Waited waited;
  waited.last_progress = now_ns();
  struct Untell {
    HostControlPlane& control;
    Waited& waited;
    ~Untell() {
      if (waited.told) control.untell(&waited);
    }
  } const at_end{*this, waited};
  // Several threads may wait for memory of the same maker, which arrives in the maker's order:
  // whoever reads a piece that is not its own leaves it in the mailbox.
  const int socket = mesh_.sockets[static_cast<size_t>(maker)].get();
  for (;;) {
    const uint64_t looked = now_ns();
    // Looked at before the socket: what it sent before it left is found there.
    const bool left = page_ != nullptr && has_left(maker);
    bool ended = false;
    {
      std::lock_guard<std::mutex> lock(mailbox_mutex_);
      auto& box = mailbox_[static_cast<size_t>(maker)];
      while (auto received = receive_memory(socket, &ended)) {
        box[received->key] = std::move(received->descriptor);
      }
      const auto found = box.find(key);
      if (found != box.end()) {
        Descriptor descriptor = std::move(found->second);
        box.erase(found);
        auto memory = SharedMemory::adopt(std::move(descriptor), bytes);
        memory->close_descriptor();
        return memory;
      }
    }
    if (page_ != nullptr && failure() != nullptr) throw_failure();
    if (left) throw_left(maker, "a communicator or reducer to be made");
    if (ended) throw_lost(maker);
    if (now_ns() >= deadline) {
      throw Error(ErrorKind::timeout,
                  "rank " + std::to_string(rank_) + " waited " + in_seconds(timeout_ns) +
                      " in vain for shared memory of rank " + std::to_string(maker) +
                      "; every rank has to make its communicators and "
                      "reducers in the same order");
    }
    if (deadlocks_ && looked - waited.last_progress >= kNapNs) tell(place, looked, &waited);
    // Without the lock, or the thread that polls here would keep the others from the mailbox.
    (void)wait_readable(socket, std::min(deadline, now_ns() + kNapNs));
    if (interrupt != nullptr && *interrupt) (*interrupt)();
  }
}

// A rank whose connection has ended: it is dead, or closed its session.
void HostControlPlane::throw_lost(int rank) {
  if (page_ != nullptr) {
    // The watch knows more, in a moment.
    const uint64_t deadline = now_ns() + 1'000'000'000u;
    while (failure() == nullptr && !has_left(rank) && now_ns() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (failure() != nullptr) throw_failure();
    if (has_left(rank)) throw_left(rank, "a communicator or reducer to be made");
  }
  throw Error(ErrorKind::rank_failed, "rank " + std::to_string(rank_) + " cannot go on: rank " +
                                          std::to_string(rank) +
                                          " ended while it was to take part in the start of a "
                                          "session; look at what it printed last");
}

void HostControlPlane::throw_left(int rank, const std::string& what) {
  post_failure_of(rank, ErrorKind::rank_failed,
                  "rank " + std::to_string(rank) + " has left the job while rank " +
                      std::to_string(rank_) + " waits for " + what +
                      "; all ranks have to take part in the same steps");
  throw_failure();
}

void HostControlPlane::throw_failure() {
  failure_raised_.store(true, std::memory_order_relaxed);
  const Failure* known = failure();
  throw Error(known->kind, "rank " + std::to_string(rank_) + " cannot go on: " + known->text);
}

void HostControlPlane::throw_deadlock(const std::vector<int>& circle, const std::string& own) {
  std::vector<int> ranks = circle;
  std::sort(ranks.begin(), ranks.end());
  std::string text = "the ranks wait for each other in different places, and none can go on: ";
  for (size_t i = 0; i < std::min(ranks.size(), kRanksInText); ++i) {
    const int rank = ranks[i];
    uint64_t since = 0;
    const std::string wait = rank == rank_ ? own : page_->cells[rank].wait.read(&since);
    text += "rank " + std::to_string(rank) + " waits for " +
            (wait.empty() ? "another rank" : wait) + "; ";
  }
  if (ranks.size() > kRanksInText) {
    text += "and so on for " + std::to_string(ranks.size() - kRanksInText) + " more; ";
  }
  post_failure(ErrorKind::mismatch,
               text +
                   "all ranks have to do the same things in the same order: look for code "
                   "whose course depends on the rank or on local data");
  throw_failure();
}

int HostControlPlane::first_left(const std::vector<int>& ranks) const {
  for (int peer : ranks) {
    if (peer != rank_ && has_left(peer)) return peer;
  }
  return -1;
}

// What the other ranks do instead of coming. Ranks that wait in the engine themselves are of
// interest only when all do: then they wait for each other, in different places.
std::string HostControlPlane::report(const std::vector<int>& needed) const {
  std::string elsewhere;
  std::string waiting;
  const uint64_t now = now_ns();
  for (const int peer : needed) {
    if (peer == rank_ || has_left(peer)) continue;
    const RankCell& cell = page_->cells[peer];
    uint64_t since = 0;
    const std::string wait = cell.wait.read(&since);
    const pid_t pid = mesh_.pids[static_cast<size_t>(peer)];
    const ProcessState process = read_process(pid);
    const bool known = process.state != 0 && process.started == started_[static_cast<size_t>(peer)];
    std::string who = "; rank " + std::to_string(peer);
    if (pid > 0)
      who +=
          " (pid " + std::to_string(pid) + ", " + describe_state(known ? process.state : 'X') + ")";
    const bool stopped = known && (process.state == 'T' || process.state == 't');
    if (!wait.empty()) {
      const std::string text = who + " waits for " + wait;
      (stopped ? elsewhere : waiting) += text;
      continue;
    }
    const std::string activity = cell.activity.read(&since);
    elsewhere +=
        who + " is in: " +
        (activity.empty() ? "code outside the engine"
                          : activity + " (for " + in_seconds(now - std::min(now, since)) + ")");
  }
  return elsewhere.empty() ? waiting : elsewhere;
}

// A job that has been given up because of ranks that are stopped: they are woken, so that their
// own watch can end them. Nobody else would, and a stopped process takes no SIGTERM.
void HostControlPlane::wake_stopped(const std::vector<int>& ranks) const {
  for (const int peer : ranks) {
    const pid_t pid = mesh_.pids[static_cast<size_t>(peer)];
    const ProcessState process = read_process(pid);
    if (peer == rank_ || process.state != 'T') continue;
    if (process.started == started_[static_cast<size_t>(peer)]) kill(pid, SIGCONT);
  }
}

void HostControlPlane::check_limits(const Wait& settings, const std::vector<int>& needed,
                                    Waited* waited) {
  const uint64_t now = now_ns();
  const auto what = [&] {
    return settings.describe ? settings.describe() : std::string("the other ranks");
  };
  const auto give_up = [&](ErrorKind kind, const std::string& reason) {
    post_failure(kind, "rank " + std::to_string(rank_) + " waited for " + what() + "; " + reason +
                           report(needed));
    wake_stopped(needed);
    throw_failure();
  };
  const uint64_t blocked = now - waited->last_progress;
  if (settings.timeout_ns != 0 && now - waited->started >= settings.timeout_ns) {
    give_up(ErrorKind::timeout, "gave up after the timeout of " + in_seconds(settings.timeout_ns));
  }
  if (settings_.stall_abort_ns != 0 && blocked >= settings_.stall_abort_ns) {
    give_up(ErrorKind::stall,
            "gave up after " + in_seconds(settings_.stall_abort_ns) + " (stall_abort_seconds)");
  }
  if (settings_.abort_grace_ns != 0 && stop_requested()) {
    // Whoever sends SIGTERM does not wait for long. The ranks still get the time to come to the
    // end of their batch.
    const uint64_t asked = page_->stop_asked_ns.load(std::memory_order_relaxed);
    const uint64_t since = std::max(asked, waited->last_progress);
    if (now > since && now - since >= settings_.abort_grace_ns) {
      give_up(ErrorKind::stall, "gave up, because the job was asked to end and nothing moved for " +
                                    in_seconds(settings_.abort_grace_ns) +
                                    " (abort_grace_seconds)");
    }
  }
  const uint64_t interval =
      settings.first ? settings_.first_stall_warning_ns : settings_.stall_warning_ns;
  if (interval == 0) return;
  if (waited->next_warning == 0) waited->next_warning = waited->last_progress + interval;
  if (now < waited->next_warning) return;
  waited->next_warning += interval;
  waited->warned = true;
  print_line(rank_,
             "has been waiting for " + in_seconds(blocked) + " for " + what() + report(needed));
}

void HostControlPlane::wait(const std::function<Step()>& step, const Wait& settings,
                            const std::vector<int>& needed) {
  check_usable();
  mark_seen();
  enter_wait();
  Waited waited;
  // Whatever ends the wait, the others must not read on that it lasts.
  struct Untell {
    HostControlPlane& control;
    Waited& waited;
    ~Untell() {
      control.count_wait(waited);
      if (waited.told) control.untell(&waited);
    }
  } const at_end{*this, waited};
  bool slept = false;
  const auto moved = [&] {
    if (waited.warned) {
      print_line(rank_, "goes on after " + in_seconds(now_ns() - waited.last_progress));
    }
    if (waited.told) untell(&waited);
    count_wait(waited);
    waited.last_progress = waited.next_warning = 0;
    waited.warned = false;
  };
  for (;;) {
    Step result = step();
    if (result == Step::done) return moved();
    if (result == Step::progressed) {
      if (waited.last_progress != 0) {
        // What came while spinning was worth spinning for.
        if (!slept) {
          const uint32_t spin = spin_ns_.load(std::memory_order_relaxed);
          spin_ns_.store(std::min(kMostSpinNs, spin + spin / 8 + 100), std::memory_order_relaxed);
        }
        moved();
      }
      slept = false;
      continue;
    }
    if (failure() != nullptr) throw_failure();
    const uint64_t now = now_ns();
    if (waited.started == 0) waited.started = now;
    if (waited.last_progress == 0) waited.last_progress = now;
    if (may_spin_ && now - waited.last_progress < spin_ns_.load(std::memory_order_relaxed)) {
      for (int i = 0; i < 32; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
      continue;
    }
    mark_seen();
    if (!slept) {
      const uint32_t spin = spin_ns_.load(std::memory_order_relaxed);
      spin_ns_.store(std::max(kLeastSpinNs, spin - spin / 4), std::memory_order_relaxed);
    }
    slept = true;
    {
      Bells::Sleep sleep(bells_);
      // Looked at before the step: if the rank finished its part and then left, the step finds it.
      const int left = first_left(needed);
      result = step();
      if (result == Step::done) return moved();
      if (result == Step::progressed) {
        moved();
        continue;
      }
      if (failure() != nullptr) throw_failure();
      if (result == Step::blocked && left >= 0) {
        throw_left(left, settings.describe ? settings.describe() : "it");
      }
      sleep.wait(kNapNs);
    }
    const uint64_t woken = now_ns();
    if (woken - now >= kNapNs + kPauseNs) {
      // This process was stopped, perhaps together with all others (Ctrl-Z): time that nobody
      // could use does not count.
      waited.started += woken - now;
      waited.last_progress += woken - now;
      waited.next_warning = 0;
    } else if (woken - waited.last_progress >= kNapNs) {
      tell(settings, now_ns(), &waited);
    }
    if (settings.interrupt != nullptr && *settings.interrupt) {
      try {
        (*settings.interrupt)();
      } catch (...) {
        // This rank gives up in the middle of something that the others wait for.
        post_failure(ErrorKind::rank_failed,
                     "rank " + std::to_string(rank_) + " was interrupted while it waited for " +
                         (settings.describe ? settings.describe() : "the other ranks") +
                         report(needed));
        throw;
      }
    }
    check_limits(settings, needed, &waited);
  }
}

}  // namespace hvd
