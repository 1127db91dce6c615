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
  // All of these run on the watch thread.
  // gone(rank, how): once per peer, with what is known about its end: "was killed by signal 9
  // (Killed)", "exited with status 1", "ended".
  // explained(rank): its connection has ended; true = the caller knows why, so only its process is
  // watched from now on.
  // tick(): after every event; gives the milliseconds until it wants to be called again, or -1
  // for "after the next event". Between events the thread sleeps.
  Watch(const std::vector<WatchedPeer>& peers, std::function<void(int, std::string)> gone,
        std::function<bool(int)> explained, std::function<int()> tick);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  struct Entry {
    int rank;
    int socket;
    pid_t pid;
    uint64_t started;  // when the process started, in the kernel's clock ticks; 0 = unknown
    Descriptor pidfd;
    uint64_t socket_ended_at = 0;  // waiting a moment for the process, which tells more
    bool socket_done = false;
    bool gone = false;
  };
  void run();
  void look_at_pidfd(Entry& entry);
  void look_at_socket(Entry& entry);
  void report(Entry& entry, const std::string& how);

  std::vector<Entry> entries_;
  std::function<void(int, std::string)> gone_;
  std::function<bool(int)> explained_;
  std::function<int()> tick_;
  Descriptor wake_;
  std::atomic<bool> stop_{false};
  uint64_t generation_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace hvd
