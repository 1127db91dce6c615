#pragma once

#include <cstdint>
#include <utility>

namespace hvd {

// Owns a file descriptor. Every descriptor of the engine lives in one of these, because a forked
// child has to close its copies: a child that keeps a socket of ours open would hide the death of
// its parent from the other ranks. The fork handler closes what is registered here.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
  uint64_t generation_ = 0;
};

// How many forks lie between this process and the one that loaded the library. An object that was
// made under another number belongs to a parent: its threads, mappings and descriptors do not
// exist here, so it must neither be used nor torn down.
uint64_t fork_generation() noexcept;

}  // namespace hvd
