#include "control/watch.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/clock.h"

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

std::string describe_end(int pidfd) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(pidfd, kPidfdGetInfo, &info) != 0 || (info.mask & kPidfdInfoExit) == 0) {
    return "ended";
  }
  if (WIFSIGNALED(info.exit_code)) {
    const int signal = WTERMSIG(info.exit_code);
    return "was killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  return "exited with status " + std::to_string(WEXITSTATUS(info.exit_code));
}

// How long the pidfd may take to follow when a socket has ended.
constexpr uint64_t kPatienceNs = 300'000'000u;

}  // namespace

Watch::Watch(const std::vector<WatchedPeer>& peers, std::function<void(int, std::string)> gone,
             std::function<void()> tick)
    : gone_(std::move(gone)),
      tick_(std::move(tick)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      generation_(fork_generation()) {
  for (const WatchedPeer& peer : peers) {
    Entry entry{};
    entry.rank = peer.rank;
    entry.socket = peer.socket;
    entry.pidfd = open_pidfd(peer.pid);
    entries_.push_back(std::move(entry));
  }
  // Signals belong to the main thread, where Python looks for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::make_unique<std::thread>([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_->native_handle(), "hvd-watch");
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
  while (!stop_.load(std::memory_order_acquire)) {
    set.clear();
    set.push_back({wake_.get(), POLLIN, 0});
    bool waiting_for_pidfd = false;
    for (const Entry& entry : entries_) {
      // A negative descriptor is skipped by poll. POLLIN is left out for the socket: what peers
      // send (descriptors of shared memory) is for others to read.
      const bool socket_open = !entry.gone && entry.socket_ended_at == 0;
      set.push_back({entry.gone || !entry.pidfd ? -1 : entry.pidfd.get(), POLLIN, 0});
      set.push_back({socket_open ? entry.socket : -1, POLLRDHUP, 0});
      waiting_for_pidfd |= entry.socket_ended_at != 0 && !entry.gone;
    }
    const bool ticking = ticking_.load(std::memory_order_relaxed);
    const int count = ::poll(set.data(), set.size(), ticking || waiting_for_pidfd ? 100 : 1000);
    if (ticking) tick_();
    if (count > 0 && (set[0].revents & POLLIN) != 0) {
      uint64_t value;
      (void)!read(wake_.get(), &value, sizeof value);
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      Entry& entry = entries_[i];
      if (entry.gone) continue;
      if (set[1 + 2 * i].revents != 0) look_at_pidfd(entry);
      if (!entry.gone && set[2 + 2 * i].revents != 0 && entry.socket_ended_at == 0) {
        entry.socket_ended_at = now_ns();
      }
      if (!entry.gone && entry.socket_ended_at != 0) look_at_socket(entry);
    }
  }
}

void Watch::look_at_pidfd(Entry& entry) { report(entry, describe_end(entry.pidfd.get())); }

void Watch::look_at_socket(Entry& entry) {
  if (entry.pidfd && now_ns() - entry.socket_ended_at < kPatienceNs) return;
  report(entry, "closed its connection");
}

void Watch::report(Entry& entry, const std::string& how) {
  entry.gone = true;
  gone_(entry.rank, how);
}

}  // namespace hvd
