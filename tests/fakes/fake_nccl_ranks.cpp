// The shared memory in which the ranks of the fake NCCL meet, and how they wait in it.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_nccl_parts.h"

namespace hvd::fakes {
namespace {

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

}  // namespace

bool make_id(NcclUniqueId* id) {
  // It stays open as long as the process: others open it through /proc.
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "hvd-fake-nccl", MFD_CLOEXEC));
  if (descriptor < 0 || ftruncate(descriptor, sizeof(Region)) != 0) return false;
  std::memset(id, 0, sizeof(*id));
  IdContent content = {};
  std::memcpy(content.magic, kIdMagic, sizeof(kIdMagic));
  content.pid = getpid();
  content.descriptor = descriptor;
  std::memcpy(id->internal, &content, sizeof(content));
  return true;
}

std::shared_ptr<Region> open_region(const NcclUniqueId& id) {
  IdContent content = {};
  std::memcpy(&content, id.internal, sizeof(content));
  if (std::memcmp(content.magic, kIdMagic, sizeof(kIdMagic)) != 0) return nullptr;
  const std::string path =
      "/proc/" + std::to_string(content.pid) + "/fd/" + std::to_string(content.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  void* memory = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  return std::shared_ptr<Region>(static_cast<Region*>(memory),
                                 [](Region* region) { munmap(region, sizeof(Region)); });
}

Cuda& cuda() {
  static Cuda* const instance = [] {
    auto* made = new Cuda;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return made;
    made->there = true;
#define HVD_FIND(function, since)                                                      \
  made->functions.function =                                                           \
      reinterpret_cast<decltype(made->functions.function)>(dlsym(library, #function)); \
  made->there = made->there && made->functions.function != nullptr;
    HVD_DRIVER_FUNCTIONS(HVD_FIND)
#undef HVD_FIND
    return made;
  }();
  return *instance;
}

Library& library() {
  static Library* const instance = new Library;
  return *instance;
}

thread_local std::string last_error;

NcclResult fail(NcclResult result, const std::string& text) {
  last_error = text;
  return result;
}

CommRef find(NcclComm handle) {
  const std::lock_guard<std::mutex> lock(library().mutex);
  const auto found = library().comms.find(reinterpret_cast<Comm*>(handle));
  return found != library().comms.end() ? found->second : nullptr;
}

NcclComm keep(const CommRef& comm) {
  const std::lock_guard<std::mutex> lock(library().mutex);
  library().comms[comm.get()] = comm;
  return reinterpret_cast<NcclComm>(comm.get());
}

void forget(const CommRef& comm) {
  const std::lock_guard<std::mutex> lock(library().mutex);
  library().comms.erase(comm.get());
}

void ring(Comm& comm) {
  comm.region->bell.fetch_add(1);
  futex(&comm.region->bell, FUTEX_WAKE, INT_MAX, nullptr);
}

// Waits until the condition holds. False: this rank's communicator was aborted, or all have failed.
bool wait_until(Comm& comm, const std::function<bool()>& holds) {
  while (true) {
    const uint32_t bell = comm.region->bell.load();
    if (comm.stop.load()) return false;
    if (comm.region->failure.load() != 0) {
      comm.state = static_cast<NcclResult>(comm.region->failure.load());
      return false;
    }
    if (holds()) return true;
    const timespec while_nobody_rings = {0, 5'000'000};
    futex(&comm.region->bell, FUTEX_WAIT, bell, &while_nobody_rings);
  }
}

void fail_all(Comm& comm, NcclResult result, const std::string& text) {
  if (!comm.region->failing.exchange(true)) {
    std::snprintf(comm.region->failure_text, sizeof(comm.region->failure_text), "%s", text.c_str());
    comm.region->failure = static_cast<int>(result);
  }
  comm.state = result;
  ring(comm);
}

bool process_is_dead(int pid) {
  char text[512] = {};
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT;
  const ssize_t count = read(file, text, sizeof(text) - 1);
  close(file);
  const char* state = count > 0 ? std::strrchr(text, ')') : nullptr;
  return state == nullptr || state[2] == 'Z' || state[2] == 'X';
}

bool peers_have_left(const Comm& comm) {
  static const bool noticed = std::getenv("HVD_FAKE_NCCL_REMOTE_ERRORS") != nullptr;
  if (!noticed) return false;
  for (int peer = 0; peer < comm.ranks; ++peer) {
    const Member& member = comm.region->members[peer];
    const Stage stage = member.stage.load();
    if (stage == Stage::aborted) return true;
    if (stage == Stage::joined && peer != comm.rank && process_is_dead(member.pid.load())) {
      return true;
    }
  }
  return false;
}

}  // namespace hvd::fakes
