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

  char* data() const noexcept;
  size_t size() const noexcept;
  int descriptor() const noexcept { return descriptor_.get(); }
  // The mapping stays without it.
  void close_descriptor() noexcept { descriptor_.reset(); }

 private:
  // Ranks that are threads of one process share one mapping of a memory: nothing is mapped twice,
  // and ThreadSanitizer, which knows memory by its address, sees all accesses to it.
  struct Mapping;
  explicit SharedMemory(Descriptor descriptor, size_t bytes);

  Descriptor descriptor_;
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace hvd
