#pragma once

#include <atomic>
#include <cstdint>

namespace hvd {

// One bell per rank, in shared memory: what a rank sleeps on while it waits for the others.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};     // the futex word
  std::atomic<uint32_t> sleepers{0};  // threads of the rank that sleep, or are about to
};

// Sleeping and waking between ranks without a lost wake-up, and without a system call as long as
// nobody sleeps.
//
// A publisher stores its news, then calls ring(); a sleeper announces itself (Sleep), looks for
// news once more, then sleeps. Both sides put a full fence between their store and their load
// (the publisher: news, fence, sleepers; the sleeper: sleepers, fence, news), so at least one of
// them sees the other: either the sleeper finds the news or the publisher finds the sleeper.
// In the second case `rings` changes; if it does so before the sleeper has read it, the news
// came even earlier and the look that follows finds it; if after, the futex refuses to sleep.
// The futex is a shared one (no FUTEX_PRIVATE_FLAG): its word lies in memory of several processes.
class Bells {
 public:
  Bells(Bell* bells, int rank, int size) : bells_(bells), rank_(rank), size_(size) {}

  void ring_all() { ring_some(0, size_); }
  void ring_self() { ring_some(rank_, rank_ + 1); }

  // Announces a sleeper of this rank for as long as it lives.
  class Sleep {
   public:
    explicit Sleep(Bells& bells);
    ~Sleep() { bell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }
    Sleep(const Sleep&) = delete;
    Sleep& operator=(const Sleep&) = delete;
    // Sleeps until the bell rings or the time is up, unless it rang since the announcement.
    void wait(uint64_t timeout_ns);

   private:
    Bell& bell_;
    uint32_t seen_;
  };

 private:
  void ring_some(int first, int last);

  Bell* bells_;
  int rank_;
  int size_;
};

}  // namespace hvd
