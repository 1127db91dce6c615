#pragma once

#include <optional>
#include <string>

namespace hvd {

// Compiled kernels on disk, by what they were made from. Any number of processes may use a folder
// at once: entries are renamed into place when they are complete, and what is read is checked, so
// that an entry which is damaged, or comes from somebody else, counts as none. Nothing here
// throws: without a cache everything works, and takes longer.
class KernelCache {
 public:
  // An empty folder: nothing is kept.
  explicit KernelCache(std::string folder);

  // HVD_CACHE_DIR if it is set; otherwise hvd_strategy in $XDG_CACHE_HOME or in ~/.cache; empty
  // where there is no home.
  static std::string default_folder();

  const std::string& folder() const { return folder_; }

  // `key` describes everything that the image depends on.
  std::optional<std::string> find(const std::string& key) const;
  // Makes the folder if need be. Returns why the image could not be kept, or an empty text.
  std::string store(const std::string& key, const std::string& image) const;
  // The file in which the entry is kept.
  std::string path(const std::string& key) const;

 private:
  std::string folder_;
};

}  // namespace hvd
