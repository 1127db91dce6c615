#include "gpu/kernel_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/descriptor.h"
#include "kernels/hash.h"

namespace hvd {
namespace {

struct Header {
  char magic[8];
  uint64_t key_bytes;
  uint64_t image_bytes;
  uint64_t image_hash;
};
constexpr char kMagic[8] = {'h', 'v', 'd', 'k', 'e', 'r', 'n', '1'};
constexpr uint64_t kMostBytes = 256u << 20;

// An empty variable counts as one that is not set.
const char* unless_empty(const char* value) {
  return value != nullptr && *value != '\0' ? value : nullptr;
}

bool read_all(int fd, void* to, size_t bytes) {
  char* place = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = read(fd, place, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    place += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool write_all(int fd, const void* from, size_t bytes) {
  const char* place = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = write(fd, place, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return false;
    place += done;
    bytes -= static_cast<size_t>(done);
  }
  return true;
}

// As mkdir -p, for nobody else to read.
bool make_folder(const std::string& folder) {
  for (size_t end = 1; end <= folder.size(); ++end) {
    if (end != folder.size() && folder[end] != '/') continue;
    if (mkdir(folder.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST) {
      // A folder above may be closed to us and there all the same.
      if (access(folder.substr(0, end).c_str(), F_OK) != 0) return false;
    }
  }
  return true;
}

// What runs on the GPU in the user's name must not come from another user.
bool is_trusted(const struct stat& status) {
  return S_ISREG(status.st_mode) && (status.st_uid == geteuid() || status.st_uid == 0) &&
         (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace

KernelCache::KernelCache(std::string folder) : folder_(std::move(folder)) {
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
}

std::string KernelCache::default_folder() {
  if (const char* named = unless_empty(std::getenv("HVD_CACHE_DIR"))) return named;
  // A relative path there is to be ignored, says the XDG specification.
  const char* caches = unless_empty(std::getenv("XDG_CACHE_HOME"));
  if (caches != nullptr && *caches == '/') return std::string(caches) + "/hvd_strategy";
  if (const char* home = unless_empty(std::getenv("HOME"))) {
    return std::string(home) + "/.cache/hvd_strategy";
  }
  return "";
}

std::string KernelCache::path(const std::string& key) const {
  char name[40];
  std::snprintf(name, sizeof(name), "/kernels-%016llx",
                static_cast<unsigned long long>(hash_memory(key.data(), key.size())));
  return folder_ + name;
}

std::optional<std::string> KernelCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  const Descriptor file(open(path(key).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  Header header{};
  if (!file || fstat(file.get(), &status) != 0 || !is_trusted(status) ||
      !read_all(file.get(), &header, sizeof(header)) ||
      std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.key_bytes != key.size() ||
      header.image_bytes > kMostBytes ||
      static_cast<uint64_t>(status.st_size) !=
          sizeof(header) + header.key_bytes + header.image_bytes) {
    return std::nullopt;
  }
  std::string found_key(header.key_bytes, '\0');
  std::string image(header.image_bytes, '\0');
  if (!read_all(file.get(), found_key.data(), found_key.size()) || found_key != key ||
      !read_all(file.get(), image.data(), image.size()) ||
      hash_memory(image.data(), image.size()) != header.image_hash) {
    return std::nullopt;
  }
  return image;
}

std::string KernelCache::store(const std::string& key, const std::string& image) const {
  if (folder_.empty()) return "there is no folder for a cache: set HVD_CACHE_DIR or HOME";
  const std::string target = path(key);
  std::string temporary = target + ".XXXXXX";
  if (!make_folder(folder_)) {
    return "cannot make the folder " + folder_ + ": " + std::strerror(errno);
  }
  // mkostemp makes files that are for their owner alone.
  const Descriptor file(mkostemp(temporary.data(), O_CLOEXEC));
  if (!file) return "cannot write to " + folder_ + ": " + std::strerror(errno);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key_bytes = key.size();
  header.image_bytes = image.size();
  header.image_hash = hash_memory(image.data(), image.size());
  if (write_all(file.get(), &header, sizeof(header)) &&
      write_all(file.get(), key.data(), key.size()) &&
      write_all(file.get(), image.data(), image.size()) &&
      rename(temporary.c_str(), target.c_str()) == 0) {
    return "";
  }
  const std::string reason = std::strerror(errno);
  unlink(temporary.c_str());
  return "cannot write " + target + ": " + reason;
}

}  // namespace hvd
