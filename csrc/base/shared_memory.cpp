#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hvd {

std::unique_ptr<SharedMemory> SharedMemory::create(const char* name, size_t bytes) {
  Descriptor descriptor(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor || ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    throw Error(ErrorKind::error, "cannot create " + std::to_string(bytes) +
                                      " bytes of shared memory: " + std::strerror(errno));
  }
  // Nobody may shrink it under our feet: that would turn an access into SIGBUS.
  fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return std::unique_ptr<SharedMemory>(new SharedMemory(std::move(descriptor), bytes));
}

std::unique_ptr<SharedMemory> SharedMemory::adopt(Descriptor descriptor, size_t bytes) {
  struct stat status{};
  if (fstat(descriptor.get(), &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    throw Error(ErrorKind::mismatch,
                "the shared memory of another rank has " + std::to_string(status.st_size) +
                    " bytes where this rank expects " + std::to_string(bytes) +
                    "; all ranks must run the same version with the same settings");
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(std::move(descriptor), bytes));
}

SharedMemory::SharedMemory(Descriptor descriptor, size_t bytes)
    : descriptor_(std::move(descriptor)), bytes_(bytes), generation_(fork_generation()) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorKind::error, "cannot map " + std::to_string(bytes) +
                                      " bytes of shared memory: " + std::strerror(errno));
  }
  data_ = static_cast<char*>(address);
  madvise(address, bytes, MADV_DONTFORK);
}

SharedMemory::~SharedMemory() {
  // In a forked child the range is not mapped, and may have been given to somebody else.
  if (data_ != nullptr && generation_ == fork_generation()) munmap(data_, bytes_);
}

}  // namespace hvd
