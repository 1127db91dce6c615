#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "control/wait_record.h"

namespace hvd {

// Ranks that wait for each other and can never go on: rank 0 in a barrier that rank 1 does not
// come to, because it is in a backward that rank 0 does not come to.
//
// Every rank tells where it waits and who has not come there (WaitRecord). That rank A waits for
// rank B, and will for ever unless B's own wait ends, is a fact when A looked, and found that B had
// not come, while B was in that other wait already, and B has not left it since: coming somewhere
// is what a rank does between its waits. Such facts that close a circle are a deadlock: nobody in
// it can be the first to go on. A rank outside the engine tells nothing, so it is never part of
// one. What one rank has read of the others at different times is put together only when none of
// them has moved from the first reading to the last.
//
// Nobody but the thread that waits could come to the other place: that holds as long as only the
// thread that opened the session calls the engine. As soon as another thread has done so, a rank
// tells nothing for as long as that thread lives. One that has yet to make its first call does no
// harm where the ranks' threads have the same parts: the session's first threads have one of these,
// in which all do the same in the same order, so among them one is behind and not waited for.
class DeadlockWatch {
 public:
  // On the thread that opens the session. records: by rank, in shared memory. settled_ns: how long
  // ranks have to be in their waits before they are looked at. What is a fact is one at once, so
  // this is politeness, and time for what one rank has stored to be seen by another.
  DeadlockWatch(std::vector<SharedWaitRecord*> records, int rank, uint64_t settled_ns);

  // Every call of any thread that may wait begins with it.
  void enter();

  // A wait in which nothing moves: who had not come to the operation when looking began. `wait` is
  // what the last call for the same wait has returned, 0 the first time.
  uint64_t tell(uint64_t wait, uint64_t looked_ns, uint64_t channel, uint64_t operation,
                const std::vector<int>& missing);
  // The wait is over, or something has moved. Nothing happens where it has not been told.
  void withdraw(uint64_t wait);

  // A circle of ranks that wait for each other, each for the next one, that this rank is in or
  // waits for; then one rank for each further place in which ranks wait for those. Empty when
  // there is no circle.
  std::vector<int> find() const;

  // A rank that has not looked for so long is stopped, or has no processor: no part of a circle.
  static constexpr uint64_t kFreshNs = 1'000'000'000u;

 private:
  bool alone() const;
  void withdraw_locked();

  std::vector<SharedWaitRecord*> records_;
  int rank_;
  uint64_t id_;  // of this object, in this process
  pid_t opener_;
  uint64_t settled_ns_;
  mutable std::mutex mutex_;
  std::vector<pid_t> others_;  // threads, besides the one that opened the session
  WaitRecord own_;             // as it stands in shared memory
  uint64_t waits_ = 0;
  std::atomic<bool> told_{false};  // own_.wait != 0
};

// For given records: a circle that can be reached from a rank.
std::vector<int> find_circle(const std::function<const WaitRecord&(int)>& record_of, int size,
                             int from, uint64_t now, uint64_t settled_ns);

}  // namespace hvd
