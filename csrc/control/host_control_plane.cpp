#include "control/host_control_plane.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "control/control_page.h"
#include "control/number_board.h"
#include "control/process.h"
#include "control/record_channel.h"

namespace hvd {

namespace {
constexpr uint32_t kPageMagic = 0x68766432;
constexpr uint64_t kControlKey = 0;
// A failure that another rank tells is printed when no call has raised it by then.
constexpr uint64_t kPrintAfterNs = 500'000'000u;
constexpr int kTickMs = 100;
// See await_culprit. The first is a little more than it takes until something is printed.
constexpr uint64_t kSignsNs = kPrintAfterNs + 300'000'000u;
constexpr uint64_t kNoSignsNs = 20'000'000u;
// A rank that learns late of a failure, because it was stopped, still gets this time to raise it.
constexpr uint64_t kLeastGraceNs = 1'000'000'000u;
constexpr size_t kSaidProbes = 32;

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

std::string in_seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

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
  page_->cells[rank].state.store(RankCell::kJoined, std::memory_order_release);

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
  return usable() && page_->cells[rank].state.load(std::memory_order_acquire) == RankCell::kLeft;
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
    page_->cells[rank_].state.store(RankCell::kLeft, std::memory_order_release);
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

}  // namespace hvd
