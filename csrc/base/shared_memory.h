#pragma once

#include <cstddef>
#include <memory>

#include "base/descriptor.h"

namespace hvd {

// A mapping of anonymous shared memory. The memory has no name in any file system: it is gone
// with the last process that maps it, whatever way that process ends, and no limit of /dev/shm
// applies. Forked children do not inherit the mapping (MADV_DONTFORK).
class SharedMemory {
 public:
  // New memory of `bytes`, all zero; pages take up memory once they are touched.
  static std::unique_ptr<SharedMemory> create(const char* name, size_t bytes);
  // Maps memory that another process made.
  static std::unique_ptr<SharedMemory> adopt(Descriptor descriptor, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  char* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }
  int descriptor() const noexcept { return descriptor_.get(); }
  // The mapping stays without it.
  void close_descriptor() noexcept { descriptor_.reset(); }

 private:
  SharedMemory(Descriptor descriptor, size_t bytes);

  Descriptor descriptor_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t generation_ = 0;
};

}  // namespace hvd
