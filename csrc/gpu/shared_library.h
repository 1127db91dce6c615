#pragma once

#include <string>
#include <vector>

namespace hvd {

// Which library to open, and where to look for it.
struct LibraryRequest {
  // File names that will do, best first: "libnccl.so.2".
  std::vector<std::string> names;
  // Folders of installed wheels (site-packages/nvidia/nccl/lib), best first. The front fills this
  // in: only Python knows where its packages are.
  std::vector<std::string> folders;
  // What it is for, as part of a sentence: "NCCL, which sums gradients between GPUs".
  std::string purpose;
  // What helps where there is none: "install it with: pip install nvidia-nccl-cu12".
  std::string remedy;
  // This very file and no other, where the user has named one.
  std::string file;
};

// A library opened with dlopen. It is never unloaded: the GPU libraries start threads and register
// exit handlers of their own, and code of theirs would be gone from under them. Copies refer to the
// same library. Thread-safe but for set_version.
class SharedLibrary {
 public:
  // Takes the first of: a copy that is already in this process (torch has loaded the one that its
  // own calls use, and two copies of NCCL would not know of each other), a file in one of the
  // folders, whatever the system's loader finds. Throws Error naming every place and why it was
  // not taken.
  [[nodiscard]] static SharedLibrary open(const LibraryRequest& request);

  // The file, as the loader knows it.
  const std::string& path() const { return path_; }
  // Whether somebody else, torch as a rule, had loaded it.
  bool was_loaded() const { return was_loaded_; }
  // The files that were there but could not be loaded, with the loader's reasons; mostly empty.
  const std::string& passed_over() const { return passed_over_; }

  // How errors name the version; unknown until the owner has asked the library.
  void set_version(const std::string& version) { version_ = version; }
  const std::string& version() const { return version_; }

  // "libnccl.so.2, version 2.21.5 (/usr/lib/libnccl.so.2)" for messages.
  std::string describe() const;

  // A function's address; null if the library has none of that name.
  [[nodiscard]] void* find(const char* symbol) const;

  // The same, but a missing one throws Error naming the file, its version, the function and the
  // first version that has it ("NCCL 2.18").
  [[nodiscard]] void* require(const char* symbol, const std::string& needed_version) const;

  // find and require with the function's type: library.get("ncclSend", &send_).
  template <class Function>
  bool get(const char* symbol, Function** function) const {
    *function = reinterpret_cast<Function*>(find(symbol));
    return *function != nullptr;
  }
  template <class Function>
  void require(const char* symbol, const std::string& needed_version, Function** function) const {
    *function = reinterpret_cast<Function*>(require(symbol, needed_version));
  }

 private:
  SharedLibrary(void* handle, std::string purpose, bool was_loaded, std::string passed_over);

  void* handle_;
  std::string path_;
  std::string purpose_;
  std::string version_;
  std::string passed_over_;
  bool was_loaded_;
};

}  // namespace hvd
