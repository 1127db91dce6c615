#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

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

struct SharedMemory::Mapping {
  Mapping(int descriptor, size_t bytes_) : bytes(bytes_), generation(fork_generation()) {
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
      throw Error(ErrorKind::error, "cannot map " + std::to_string(bytes) +
                                        " bytes of shared memory: " + std::strerror(errno));
    }
    data = static_cast<char*>(address);
    madvise(address, bytes, MADV_DONTFORK);
  }
  // In a forked child the range is not mapped, and may have been given to somebody else.
  ~Mapping() {
    if (generation == fork_generation()) munmap(data, bytes);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data = nullptr;
  size_t bytes;
  uint64_t generation;
};

SharedMemory::SharedMemory(Descriptor descriptor, size_t bytes)
    : descriptor_(std::move(descriptor)) {
  // The live mappings of this process, by the identity of their memory.
  using Identity = std::tuple<uint64_t, dev_t, ino_t>;
  static std::mutex mutex;
  static auto& live = *new std::map<Identity, std::weak_ptr<Mapping>>;
  struct stat status{};
  fstat(descriptor_.get(), &status);
  std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = live.begin(); entry != live.end();) {
    entry = entry->second.expired() ? live.erase(entry) : std::next(entry);
  }
  auto& known = live[{fork_generation(), status.st_dev, status.st_ino}];
  mapping_ = known.lock();
  if (mapping_) return;
  mapping_ = std::make_shared<Mapping>(descriptor_.get(), bytes);
  known = mapping_;
}

char* SharedMemory::data() const noexcept { return mapping_->data; }
size_t SharedMemory::size() const noexcept { return mapping_->bytes; }

}  // namespace hvd
