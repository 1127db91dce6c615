#include "control/bells.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace hvd {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
              "a futex word is four bytes that the kernel compares");

void Bells::ring_some(int first, int last) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = first; rank < last; ++rank) {
    Bell& bell = bells_[rank];
    if (bell.sleepers.load(std::memory_order_relaxed) == 0) continue;
    bell.rings.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &bell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

Bells::Sleep::Sleep(Bells& bells) : bell_(bells.bells_[bells.rank_]) {
  bell_.sleepers.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  seen_ = bell_.rings.load(std::memory_order_acquire);
}

void Bells::Sleep::wait(uint64_t timeout_ns) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000u);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000u);
  syscall(SYS_futex, &bell_.rings, FUTEX_WAIT, seen_, &timeout, nullptr, 0);
  seen_ = bell_.rings.load(std::memory_order_acquire);
}

}  // namespace hvd
