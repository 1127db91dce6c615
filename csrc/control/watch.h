#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"

namespace hvd {

struct WatchedPeer {
  int rank;
  pid_t pid;   // 0: not visible from here, only the socket is watched
  int socket;  // kept connection; borrowed, must outlive the watch
};

// A thread that learns of the end of peers at once. It looks at two witnesses, because each has a
// blind spot: a pidfd does not reach into another pid namespace, and the end of a socket does not
// come as long as a forked child of the dead rank (a DataLoader worker) holds a copy.
class Watch {
 public:
  // `gone(rank, how)` runs on the watch thread, once per peer, with what is known about the end:
  // "was killed by signal 9 (Killed)", "exited with status 1", "ended". `tick` runs there about
  // every 100 ms while `arm_ticks` is on.
  Watch(const std::vector<WatchedPeer>& peers, std::function<void(int, std::string)> gone,
        std::function<void()> tick);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void arm_ticks() noexcept { ticking_.store(true, std::memory_order_relaxed); }

 private:
  struct Entry {
    int rank;
    int socket;
    Descriptor pidfd;
    uint64_t socket_ended_at = 0;  // waiting a moment for the pidfd, which knows more
    bool gone = false;
  };
  void run();
  void look_at_pidfd(Entry& entry);
  void look_at_socket(Entry& entry);
  void report(Entry& entry, const std::string& how);

  std::vector<Entry> entries_;
  std::function<void(int, std::string)> gone_;
  std::function<void()> tick_;
  Descriptor wake_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> ticking_{false};
  uint64_t generation_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace hvd
