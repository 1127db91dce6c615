#include "control/host_control_plane.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "control/number_board.h"
#include "control/process.h"
#include "control/record_channel.h"
#include "control/shared_text.h"

namespace hvd {

namespace {
constexpr uint32_t kPageMagic = 0x68766432;
constexpr size_t kFailureText = 1400;
constexpr uint64_t kNapNs = 100'000'000u;  // the longest sleep between two looks for signals
constexpr uint32_t kLeastSpinNs = 2'000;
constexpr uint32_t kMostSpinNs = 100'000;
constexpr uint64_t kControlKey = 0;
// A failure that another rank tells is printed when no call has raised it by then.
constexpr uint64_t kPrintAfterNs = 500'000'000u;
constexpr int kTickMs = 100;
// See await_culprit. The first is a little more than it takes until something is printed.
constexpr uint64_t kSignsNs = kPrintAfterNs + 300'000'000u;
constexpr uint64_t kNoSignsNs = 20'000'000u;
// A rank that learns late of a failure, because it was stopped, still gets this time to raise it.
constexpr uint64_t kLeastGraceNs = 1'000'000'000u;
// A nap that takes longer than this beyond its time: the process itself was stopped.
constexpr uint64_t kPauseNs = 1'000'000'000u;
constexpr size_t kRanksInText = 5;  // that wait for each other
// Stands for the making of a channel or communicator, among the operations of that.
constexpr uint64_t kMaking = UINT64_MAX;
constexpr size_t kSaidEntries = 512;
constexpr size_t kSaidProbes = 32;

enum : uint32_t { kUnknown = 0, kJoined = 1, kLeft = 2 };
}  // namespace

struct alignas(64) RankCell {
  std::atomic<uint32_t> state{kUnknown};
  std::atomic<uint64_t> last_seen_ns{0};
  SharedText activity;  // what the rank is about outside the engine
  SharedText wait;      // what it waits for inside; empty when it does not, or not for long
  SharedWaitRecord wait_record;  // the same for machines
  // Written once by the owner of the cell, before first_failure points at it.
  int32_t culprit = 0;
  int32_t failure_kind = 0;
  uint64_t failed_ns = 0;
  char failure_text[kFailureText] = {};
};

struct ControlPage {
  std::atomic<uint32_t> magic{0};
  std::atomic<int32_t> first_failure{0};   // 1 + the rank whose cell tells; set once
  std::atomic<uint64_t> stop_asked_ns{0};  // when the end of a run was asked for
  alignas(64) std::atomic<uint64_t> stop_line{0};
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
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would not be shared");
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
  stop_line_ = std::make_unique<StopLine>(&page_->stop_line);
  std::vector<SharedWaitRecord*> records;
  for (int i = 0; i < size; ++i) records.push_back(&page_->cells[i].wait_record);
  deadlocks_ = std::make_unique<DeadlockWatch>(std::move(records), rank, settings.deadlock_ns);
  for (const pid_t pid : mesh_.pids) started_.push_back(read_process(pid).started);
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

std::unique_ptr<RecordChannel> HostControlPlane::open_channel(const std::vector<int>& members,
                                                              uint64_t id, uint64_t timeout_ns,
                                                              const Interrupt* interrupt) {
  check_usable();
  return open_page_channel(*this, members, id, timeout_ns, interrupt);
}

std::unique_ptr<NumberBoard> HostControlPlane::open_board(const std::vector<int>& members,
                                                          uint64_t id, uint32_t places,
                                                          uint64_t timeout_ns,
                                                          const Interrupt* interrupt) {
  check_usable();
  return open_page_board(*this, members, id, places, timeout_ns, interrupt);
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
    cell.failed_ns = now_ns();
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

void HostControlPlane::await_culprit() {
  const uint64_t began = now_ns();
  for (bool signs = false; usable() && now_ns() - began < (signs ? kSignsNs : kNoSignsNs);) {
    // What a call has raised, or the watch has printed, has been told.
    if (failure_raised_.load(std::memory_order_relaxed) || failure_printed_.load()) return;
    const Failure* known = failure();
    if (known != nullptr && known->rank == rank_) return;
    signs = known != nullptr;
    for (int peer = 0; peer < size_ && !signs; ++peer) {
      const Descriptor& socket = mesh_.sockets[static_cast<size_t>(peer)];
      if (peer == rank_ || !socket || has_left(peer)) continue;
      pollfd entry{socket.get(), POLLRDHUP, 0};
      signs = ::poll(&entry, 1, 0) > 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
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

void HostControlPlane::begin_run() {
  if (usable()) stop_line_->begin_run();
}

void HostControlPlane::request_stop() {
  // The first request counts: a launcher may repeat it, and waits for no one longer for that.
  if (!usable() || stop_line_->closed()) return;
  page_->stop_asked_ns.store(now_ns(), std::memory_order_relaxed);
  stop_line_->close();
}

bool HostControlPlane::stop_requested() const { return usable() && stop_line_->closed(); }

bool HostControlPlane::pass_point() { return !usable() || stop_line_->pass(); }

void HostControlPlane::set_activity(const std::string& text) {
  if (!usable()) return;
  std::lock_guard<std::mutex> lock(texts_mutex_);
  page_->cells[rank_].activity.write(text);
}

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
  post_failure_of(rank, ErrorKind::rank_failed, who);
  failure_printed_ = true;  // only now: whoever waits for it goes on to tell of itself
  notice_failure();
}

// True: the rank itself said why, so its end is no news. The process is watched on.
bool HostControlPlane::on_connection_ended(int rank) {
  const int teller = page_->first_failure.load(std::memory_order_acquire) - 1;
  if (teller >= 0) notice_failure();
  return teller == rank || has_left(rank);
}

void HostControlPlane::notice_failure() {
  if (noticed_at_ != 0) return;
  noticed_at_ = now_ns();
  const int teller = page_->first_failure.load(std::memory_order_acquire) - 1;
  // The grace counts from the failure; a rank that was stopped learns of it late.
  failed_at_ = teller < 0 ? noticed_at_ : page_->cells[teller].failed_ns;
}

int HostControlPlane::on_tick() {
  if (noticed_at_ == 0 || failure_raised_.load(std::memory_order_relaxed)) return -1;
  const uint64_t now = now_ns();
  if (!failure_printed_ && now - noticed_at_ >= kPrintAfterNs) {
    print_line(rank_, failure()->text);
    failure_printed_ = true;
  }
  const uint64_t grace = settings_.abort_grace_ns;
  if (grace == 0) return failure_printed_ ? -1 : kTickMs;
  if (now - failed_at_ < grace || now - noticed_at_ < std::min(grace, kLeastGraceNs)) {
    return kTickMs;
  }
  // The main thread sits somewhere that we cannot interrupt and that will never return.
  print_line(rank_, "no call has returned to the engine for " + in_seconds(grace) +
                        " (abort_grace_seconds) after that failure; ending this process");
  kill_forked_children(mesh_.pids);
  _exit(1);
}

// ---- on the threads that wait ----

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
