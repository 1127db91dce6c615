#include "base/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace hvd {
namespace {

// A plain table and not a container with a lock: the fork handler runs in a child in which any
// lock may be held by a thread that does not exist any more.
constexpr int kTableSize = 16384;
std::atomic<int> open_descriptors[kTableSize];  // fd + 1, 0 = free
std::atomic<uint64_t> generation{0};

void after_fork_in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (auto& entry : open_descriptors) {
    const int fd = entry.exchange(0, std::memory_order_relaxed) - 1;
    if (fd >= 0) ::close(fd);
  }
}

void install_fork_handler() {
  static const int installed = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)installed;
}

// Descriptors are small integers, so the number itself is the place in the table.
std::atomic<int>& table_entry(int fd) { return open_descriptors[fd % kTableSize]; }

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd), generation_(fork_generation()) {
  install_fork_handler();
  if (fd >= 0) table_entry(fd).store(fd + 1, std::memory_order_relaxed);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

void Descriptor::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  // A forked child has closed this number already, and it may name something else by now.
  if (generation_ != fork_generation()) return;
  table_entry(fd).store(0, std::memory_order_relaxed);
  ::close(fd);
}

uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace hvd
