#include "control/watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/quiet_thread.h"
#include "control/process.h"

namespace hvd {
namespace {

// From the kernel's interface of 6.15 on: how a process ended, for others than its parent.
// Spelled out here because the headers of older systems do not have it.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroup_id;
  uint32_t pid, tgid, ppid;
  uint32_t ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64, "the first published size of struct pidfd_info");
constexpr uint64_t kPidfdInfoExit = 1u << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

Descriptor open_pidfd(pid_t pid) {
  // For tests, and for systems whose sandbox answers pidfd calls wrongly.
  const char* off = std::getenv("HVD_DISABLE_PIDFD");
  if (pid <= 0 || (off != nullptr && std::strcmp(off, "1") == 0)) return Descriptor();
#ifdef SYS_pidfd_open
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return Descriptor(static_cast<int>(syscall(434, pid, 0)));  // the same number everywhere
#endif
}

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return "was killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  return "exited with status " + std::to_string(WEXITSTATUS(status));
}

// The status of a process that has ended: from the zombie, as long as its parent has not waited
// for it, afterwards from the pidfd where the kernel keeps it there.
std::string describe_end(int pidfd, pid_t pid, uint64_t started) {
  for (int look = 0; look < 2; ++look) {
    const ProcessState process = read_process(pid);
    if (process.state == 'Z' && process.started == started) {
      return describe_status(process.exit_status);
    }
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (pidfd >= 0 && ioctl(pidfd, kPidfdGetInfo, &info) == 0 &&
        (info.mask & kPidfdInfoExit) != 0) {
      return describe_status(info.exit_code);
    }
  }
  return "ended";
}

// How long the process may take to follow when its connection has ended.
constexpr uint64_t kPatienceNs = 300'000'000u;
constexpr int kPatienceStepMs = 10;

}  // namespace

Watch::Watch(const std::vector<WatchedPeer>& peers, std::function<void(int, std::string)> gone,
             std::function<bool(int)> explained, std::function<int()> tick)
    : gone_(std::move(gone)),
      explained_(std::move(explained)),
      tick_(std::move(tick)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      generation_(fork_generation()) {
  for (const WatchedPeer& peer : peers) {
    Entry entry{};
    entry.rank = peer.rank;
    entry.socket = peer.socket;
    entry.pid = peer.pid;
    entry.started = read_process(peer.pid).started;
    entry.pidfd = open_pidfd(peer.pid);
    entries_.push_back(std::move(entry));
  }
  thread_ = start_quiet_thread("hvd-watch", [this] { run(); });
}

Watch::~Watch() {
  if (generation_ != fork_generation()) {
    (void)thread_.release();  // the thread does not exist in a forked child: nothing to join
    return;
  }
  stop_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
  thread_->join();
}

void Watch::run() {
  std::vector<pollfd> set;
  int next_tick_ms = tick_();
  while (!stop_.load(std::memory_order_acquire)) {
    set.clear();
    set.push_back({wake_.get(), POLLIN, 0});
    bool patient = false;
    for (const Entry& entry : entries_) {
      // A negative descriptor is skipped by poll. POLLIN is left out for the socket: what peers
      // send (descriptors of shared memory) is for others to read.
      const bool look_at_socket = !entry.gone && !entry.socket_done && entry.socket_ended_at == 0;
      set.push_back({entry.gone || !entry.pidfd ? -1 : entry.pidfd.get(), POLLIN, 0});
      set.push_back({look_at_socket ? entry.socket : -1, POLLRDHUP, 0});
      patient |= entry.socket_ended_at != 0 && !entry.gone;
    }
    const int count = ::poll(set.data(), set.size(), patient ? kPatienceStepMs : next_tick_ms);
    if (stop_.load(std::memory_order_acquire)) return;
    for (size_t i = 0; i < entries_.size(); ++i) {
      Entry& entry = entries_[i];
      if (entry.gone) continue;
      if (count > 0 && set[1 + 2 * i].revents != 0) look_at_pidfd(entry);
      const bool ended = count > 0 && set[2 + 2 * i].revents != 0;
      if (!entry.gone && (ended || entry.socket_ended_at != 0)) look_at_socket(entry);
    }
    next_tick_ms = tick_();
  }
}

void Watch::look_at_pidfd(Entry& entry) {
  report(entry, describe_end(entry.pidfd.get(), entry.pid, entry.started));
}

void Watch::look_at_socket(Entry& entry) {
  if (explained_(entry.rank)) {
    entry.socket_done = true;
    entry.socket_ended_at = 0;
    entry.gone = !entry.pidfd;
    return;
  }
  const uint64_t now = now_ns();
  if (entry.socket_ended_at == 0) entry.socket_ended_at = now;
  const bool patient = now - entry.socket_ended_at < kPatienceNs;
  if (entry.started == 0) {  // not visible from here: there is nothing to wait for
    report(entry, "closed its connection");
    return;
  }
  const ProcessState process = read_process(entry.pid);
  const bool runs = process.started == entry.started && process.state != 'Z';
  if (runs && patient) return;
  if (!runs && entry.pidfd && patient) return;  // it will say so
  report(entry, runs ? "closed its connection" : describe_end(-1, entry.pid, entry.started));
}

void Watch::report(Entry& entry, const std::string& how) {
  entry.gone = true;
  gone_(entry.rank, how);
}

}  // namespace hvd
