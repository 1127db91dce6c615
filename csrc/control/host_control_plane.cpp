#include "control/host_control_plane.h"

#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "control/record_channel.h"

namespace hvd {

namespace {
constexpr uint32_t kPageMagic = 0x68766431;
constexpr size_t kFailureText = 700;
constexpr uint64_t kNapNs = 100'000'000u;  // the longest sleep between two looks for signals
constexpr uint32_t kLeastSpinNs = 2'000;
constexpr uint32_t kMostSpinNs = 100'000;
constexpr uint64_t kControlKey = 0;
// A failure that another rank tells is printed when no call has raised it by then.
constexpr uint64_t kPrintAfterNs = 500'000'000u;
constexpr int kTickMs = 100;
constexpr size_t kSaidEntries = 512;
constexpr size_t kSaidProbes = 32;

enum : uint32_t { kUnknown = 0, kJoined = 1, kLeft = 2 };
}  // namespace

struct alignas(64) RankCell {
  std::atomic<uint32_t> state{kUnknown};
  std::atomic<uint32_t> stop_requested{0};
  std::atomic<uint64_t> last_seen_ns{0};
  // Written once by the owner of the cell, before first_failure points at it.
  int32_t culprit = 0;
  int32_t failure_kind = 0;
  char failure_text[kFailureText] = {};
};

struct ControlPage {
  std::atomic<uint32_t> magic{0};
  std::atomic<int32_t> first_failure{0};  // 1 + the rank whose cell tells; set once
  // Digests of the texts that some rank has printed for all: an open hash table, 0 = free entry.
  std::atomic<uint64_t> said[kSaidEntries] = {};
  RankCell cells[1];  // `size` of them, then the bells
};

namespace {
size_t page_bytes(int size) {
  return sizeof(ControlPage) + sizeof(RankCell) * static_cast<size_t>(size) +
         sizeof(Bell) * static_cast<size_t>(size);
}
Bell* bells_of(ControlPage* page, int size) {
  return reinterpret_cast<Bell*>(page->cells + size + 1);
}
std::string in_seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}
// The longest start of `text` that fits and does not end inside a UTF-8 sequence.
size_t fitting(const std::string& text, size_t most) {
  if (text.size() <= most) return text.size();
  size_t count = most;
  while (count > 0 && (static_cast<unsigned char>(text[count]) & 0xC0) == 0x80) --count;
  return count;
}
int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}
}  // namespace

void print_line(int rank, const std::string& text) {
  const std::string line = "hvd_strategy: [rank " + std::to_string(rank) + "] " + text + "\n";
  (void)!write(STDERR_FILENO, line.data(), line.size());
}

HostControlPlane::HostControlPlane(int rank, int size, Mesh mesh, const ControlSettings& settings,
                                   uint64_t timeout_ns, const Interrupt* interrupt)
    : rank_(rank),
      size_(size),
      mesh_(std::move(mesh)),
      settings_(settings),
      generation_(fork_generation()),
      bells_(nullptr, 0, 0),
      spin_ns_(kLeastSpinNs * 8),
      // With more ranks than processors a spinning rank keeps the one it waits for from running.
      may_spin_(size <= usable_cpus()),
      mailbox_(static_cast<size_t>(size)) {
  std::vector<int> everybody(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) everybody[static_cast<size_t>(i)] = i;
  memory_ = share(everybody, kControlKey, page_bytes(size), timeout_ns, interrupt);
  page_ = reinterpret_cast<ControlPage*>(memory_->data());
  bells_ = Bells(bells_of(page_, size), rank, size);
  page_->magic.store(kPageMagic, std::memory_order_release);
  mark_seen();
  page_->cells[rank].state.store(kJoined, std::memory_order_release);

  if (size == 1) return;
  std::vector<WatchedPeer> peers;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) peers.push_back({peer, mesh_.pids[peer], mesh_.sockets[peer].get()});
  }
  watch_ = std::make_unique<Watch>(
      peers, [this](int peer, const std::string& how) { on_peer_gone(peer, how); },
      [this](int peer) { return on_connection_ended(peer); }, [this] { return on_tick(); });
}

HostControlPlane::~HostControlPlane() { leave(); }

void HostControlPlane::check_usable() const {
  if (usable() && !has_left(rank_)) return;
  if (usable()) {
    throw Error(ErrorKind::error, "rank " + std::to_string(rank_) +
                                      " has closed this session: open a new one, and make "
                                      "communicators and reducers in that");
  }
  throw Error(ErrorKind::error,
              "this process was forked from rank " + std::to_string(rank_) +
                  ": the engine stayed with the parent and cannot be used here; use it in the "
                  "parent, or start processes of their own (spawn)");
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
  // Several threads may wait for memory of the same maker, which arrives in the maker's order:
  // whoever reads a piece that is not its own leaves it in the mailbox.
  const int socket = mesh_.sockets[static_cast<size_t>(maker)].get();
  for (;;) {
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

std::unique_ptr<RecordChannel> HostControlPlane::open_channel(const std::vector<int>& members,
                                                              uint64_t id, uint64_t timeout_ns,
                                                              const Interrupt* interrupt) {
  check_usable();
  return open_page_channel(*this, members, id, timeout_ns, interrupt);
}

const Failure* HostControlPlane::failure() {
  if (!usable()) return nullptr;
  if (page_->first_failure.load(std::memory_order_acquire) == 0) return nullptr;
  if (!failure_cached_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_) {
      const RankCell& cell = page_->cells[page_->first_failure.load() - 1];
      failure_ = std::make_unique<Failure>(
          Failure{cell.culprit, static_cast<ErrorKind>(cell.failure_kind),
                  std::string(cell.failure_text, strnlen(cell.failure_text, kFailureText))});
      failure_cached_.store(true, std::memory_order_release);
    }
  }
  return failure_.get();
}

void HostControlPlane::post_failure(ErrorKind kind, const std::string& text) {
  post_failure_of(rank_, kind, text);
}

void HostControlPlane::post_failure_of(int culprit, ErrorKind kind, const std::string& text) {
  if (!usable()) return;
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    RankCell& cell = page_->cells[rank_];
    if (cell.failure_text[0] != 0) return;  // this rank has spoken; the first word counts
    cell.culprit = culprit;
    cell.failure_kind = static_cast<int32_t>(kind);
    std::memcpy(cell.failure_text, text.data(), fitting(text, kFailureText - 1));
    // Release: who reads the number with acquire sees the text. Still with the lock: a thread of
    // this rank that finds the text written relies on there being a failure.
    int32_t none = 0;
    first =
        page_->first_failure.compare_exchange_strong(none, rank_ + 1, std::memory_order_acq_rel);
  }
  bells_.ring_all();
  if (!first) return;
  // Wakes the watch of every other rank: its main thread may sleep in something that is not ours.
  // Nothing that would still have to go through the connections can come after a failure.
  for (const Descriptor& socket : mesh_.sockets) {
    if (socket) shutdown(socket.get(), SHUT_WR);
  }
}

bool HostControlPlane::has_left(int rank) const {
  return usable() && page_->cells[rank].state.load(std::memory_order_acquire) == kLeft;
}

uint64_t HostControlPlane::last_seen(int rank) const {
  return usable() ? page_->cells[rank].last_seen_ns.load(std::memory_order_relaxed) : 0;
}

void HostControlPlane::mark_seen() {
  page_->cells[rank_].last_seen_ns.store(now_ns(), std::memory_order_relaxed);
}

void HostControlPlane::request_stop(uint32_t value) {
  if (!usable()) return;
  page_->cells[rank_].stop_requested.store(value, std::memory_order_release);
}

uint32_t HostControlPlane::stop_requested() const {
  uint32_t value = 0;
  for (int peer = 0; usable() && peer < size_; ++peer) {
    value = std::max(value, page_->cells[peer].stop_requested.load(std::memory_order_acquire));
  }
  return value;
}

bool HostControlPlane::first_to_say(uint64_t digest) {
  if (digest == 0) digest = 1;
  for (size_t probe = 0; usable() && probe < kSaidProbes; ++probe) {
    std::atomic<uint64_t>& entry = page_->said[(digest + probe) % kSaidEntries];
    uint64_t seen = entry.load(std::memory_order_relaxed);
    if (seen == 0 && entry.compare_exchange_strong(seen, digest, std::memory_order_relaxed)) {
      return true;
    }
    if (seen == digest) return false;
  }
  return true;
}

void HostControlPlane::leave() {
  if (usable()) {
    page_->cells[rank_].state.store(kLeft, std::memory_order_release);
    bells_.ring_all();
  }
  // Whoever has left does not mind what happens to the others.
  watch_.reset();
}

// ---- on the watch thread ----

void HostControlPlane::on_peer_gone(int rank, const std::string& how) {
  const Failure* known = failure();
  const bool killed = how.find("killed") != std::string::npos;
  // A job that fails takes its ranks down one after the other: those that end by themselves after
  // the first are no news, nor are those that said goodbye first.
  if (has_left(rank) || (known != nullptr && known->rank != rank && !killed)) {
    if (known != nullptr) notice_failure();
    return;
  }
  const pid_t pid = mesh_.pids[static_cast<size_t>(rank)];
  const std::string who = "rank " + std::to_string(rank) +
                          (pid > 0 ? " (pid " + std::to_string(pid) + ") " : " ") + how +
                          " without leaving the job";
  print_line(rank_, who + "; look at what it printed last");
  failure_printed_ = true;
  post_failure_of(rank, ErrorKind::rank_failed, who);
  notice_failure();
}

// True: the rank itself said why, so its end is no news. The process is watched on.
bool HostControlPlane::on_connection_ended(int rank) {
  const int teller = page_->first_failure.load(std::memory_order_acquire) - 1;
  if (teller >= 0) notice_failure();
  return teller == rank || has_left(rank);
}

void HostControlPlane::notice_failure() {
  if (failed_at_ == 0) failed_at_ = now_ns();
}

int HostControlPlane::on_tick() {
  if (failed_at_ == 0 || failure_raised_.load(std::memory_order_relaxed)) return -1;
  const uint64_t passed = now_ns() - failed_at_;
  if (!failure_printed_ && passed >= kPrintAfterNs) {
    print_line(rank_, failure()->text);
    failure_printed_ = true;
  }
  if (settings_.abort_grace_ns == 0) return failure_printed_ ? -1 : kTickMs;
  if (passed < settings_.abort_grace_ns) return kTickMs;
  // The main thread sits somewhere that we cannot interrupt and that will never return.
  print_line(rank_, "no call has returned to the engine for " +
                        in_seconds(settings_.abort_grace_ns) +
                        " (abort_grace_seconds) after that failure; ending this process");
  _exit(1);
}

// ---- on the threads that wait ----

void HostControlPlane::throw_failure() {
  failure_raised_.store(true, std::memory_order_relaxed);
  const Failure* known = failure();
  throw Error(known->kind, "rank " + std::to_string(rank_) + " cannot go on: " + known->text);
}

int HostControlPlane::first_left(const std::vector<int>& ranks) const {
  for (int peer : ranks) {
    if (peer != rank_ && has_left(peer)) return peer;
  }
  return -1;
}

void HostControlPlane::check_limits(const Wait& settings, uint64_t started, uint64_t last_progress,
                                    uint64_t* next_warning) {
  const uint64_t now = now_ns();
  const auto give_up = [&](ErrorKind kind, const std::string& reason) {
    const std::string what = settings.describe ? settings.describe() : "the other ranks";
    post_failure(kind, "rank " + std::to_string(rank_) + " waited for " + what + "; " + reason);
    throw_failure();
  };
  if (settings.timeout_ns != 0 && now - started >= settings.timeout_ns) {
    give_up(ErrorKind::timeout, "gave up after the timeout of " + in_seconds(settings.timeout_ns));
  }
  if (settings_.stall_abort_ns != 0 && now - last_progress >= settings_.stall_abort_ns) {
    give_up(ErrorKind::stall,
            "gave up after " + in_seconds(settings_.stall_abort_ns) + " (stall_abort_seconds)");
  }
  const uint64_t interval =
      settings.first ? settings_.first_stall_warning_ns : settings_.stall_warning_ns;
  if (interval == 0) return;
  if (*next_warning == 0) *next_warning = last_progress + interval;
  if (now < *next_warning) return;
  *next_warning += interval;
  print_line(rank_, "has been waiting for " + in_seconds(now - last_progress) + " for " +
                        (settings.describe ? settings.describe() : "the other ranks"));
}

void HostControlPlane::wait(const std::function<Step()>& step, const Wait& settings,
                            const std::vector<int>& needed) {
  check_usable();
  mark_seen();
  uint64_t started = 0;
  uint64_t last_progress = 0;
  uint64_t next_warning = 0;
  bool slept = false;
  // Adds up the time without progress, whichever way the wait ends.
  struct Waited {
    HostControlPlane& plane;
    const uint64_t& since;
    void add() {
      if (since != 0) plane.waited_ns_.fetch_add(now_ns() - since, std::memory_order_relaxed);
    }
    ~Waited() { add(); }
  } waited{*this, last_progress};
  for (;;) {
    Step result = step();
    if (result == Step::done) return;
    if (result == Step::progressed) {
      if (last_progress != 0) {
        // What came while spinning was worth spinning for.
        if (!slept) {
          const uint32_t spin = spin_ns_.load(std::memory_order_relaxed);
          spin_ns_.store(std::min(kMostSpinNs, spin + spin / 8 + 100), std::memory_order_relaxed);
        }
        waited.add();
        last_progress = 0;
        next_warning = 0;
      }
      slept = false;
      continue;
    }
    if (failure() != nullptr) throw_failure();
    const uint64_t now = now_ns();
    if (started == 0) started = now;
    if (last_progress == 0) last_progress = now;
    if (may_spin_ && now - last_progress < spin_ns_.load(std::memory_order_relaxed)) {
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
      if (result == Step::done) return;
      if (result == Step::progressed) {
        waited.add();
        last_progress = 0;
        next_warning = 0;
        continue;
      }
      if (failure() != nullptr) throw_failure();
      if (result == Step::blocked && left >= 0) {
        throw_left(left, settings.describe ? settings.describe() : "it");
      }
      sleep.wait(kNapNs);
    }
    if (settings.interrupt != nullptr && *settings.interrupt) {
      try {
        (*settings.interrupt)();
      } catch (...) {
        // This rank gives up in the middle of something that the others wait for.
        post_failure(ErrorKind::rank_failed,
                     "rank " + std::to_string(rank_) + " was interrupted while it waited for " +
                         (settings.describe ? settings.describe() : "the other ranks"));
        throw;
      }
    }
    check_limits(settings, started, last_progress, &next_warning);
  }
}

}  // namespace hvd
