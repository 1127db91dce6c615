// Compiled kernels on disk: what is kept, what counts as damaged, and what costs only time.

#include "gpu/kernel_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "check.h"
#include "fake_nvrtc.h"
#include "gpu/kernel_compiler.h"

namespace hvd {
namespace {

namespace fs = std::filesystem;
using test::FakeNvrtc;
using test::TemporaryFolder;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

size_t files_in(const std::string& folder) {
  return static_cast<size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// An environment variable for the length of a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> before_;
};

TEST(kernel_cache_folder_comes_from_the_environment) {
  const Variable home("HOME", "/no/such/home");
  const Variable caches("XDG_CACHE_HOME", nullptr);
  const Variable own("HVD_CACHE_DIR", nullptr);
  CHECK_EQ(KernelCache::default_folder(), std::string("/no/such/home/.cache/hvd_strategy"));
  {
    const Variable relative("XDG_CACHE_HOME", "relative");
    CHECK_EQ(KernelCache::default_folder(), std::string("/no/such/home/.cache/hvd_strategy"));
  }
  {
    const Variable other("XDG_CACHE_HOME", "/var/cache/somebody");
    CHECK_EQ(KernelCache::default_folder(), std::string("/var/cache/somebody/hvd_strategy"));
    const Variable named("HVD_CACHE_DIR", "/scratch/kernels");
    CHECK_EQ(KernelCache::default_folder(), std::string("/scratch/kernels"));
    const Variable empty("HVD_CACHE_DIR", "");
    CHECK_EQ(KernelCache::default_folder(), std::string("/var/cache/somebody/hvd_strategy"));
  }
  const Variable homeless("HOME", nullptr);
  CHECK_EQ(KernelCache::default_folder(), std::string());
  CHECK(contains(KernelCache("").store("key", "image"), "HVD_CACHE_DIR"));
  CHECK(!KernelCache("").find("key"));
}

TEST(kernel_cache_keeps_what_belongs_to_the_key) {
  const TemporaryFolder folder;
  const KernelCache cache(folder.path() + "/made/when/needed/");
  CHECK(!cache.find("key"));
  CHECK_EQ(cache.store("key", "image"), std::string());
  CHECK_EQ(cache.store("", ""), std::string());
  CHECK_EQ(cache.find("key").value_or("none"), std::string("image"));
  CHECK_EQ(cache.find("").value_or("none"), std::string());
  CHECK(!cache.find("another key"));
  CHECK_EQ(cache.store("key", "a newer image"), std::string());
  CHECK_EQ(cache.find("key").value_or("none"), std::string("a newer image"));
  // Of another key under this key's name, as if their hashes were equal.
  fs::copy_file(cache.path("key"), cache.path("another key"));
  CHECK(!cache.find("another key"));
  struct stat status{};
  CHECK_EQ(stat(cache.path("key").c_str(), &status), 0);
  CHECK_EQ(status.st_mode & 0777u, 0600u);
  CHECK_EQ(stat(cache.folder().c_str(), &status), 0);
  CHECK_EQ(status.st_mode & 0777u, 0700u);
  CHECK_EQ(files_in(cache.folder()), size_t{3});
}

TEST(kernel_cache_compiles_once_for_equal_inputs) {
  const TemporaryFolder folder;
  const KernelCache cache(folder.path());
  FakeNvrtc nvrtc;
  const CompiledKernels first = compile_kernels(nvrtc, 80, cache);
  CHECK_EQ(first.from_cache, false);
  CHECK_EQ(first.target, std::string("sm_80"));
  CHECK(contains(first.image, "cubin --gpu-architecture=sm_80"));
  const CompiledKernels second = compile_kernels(nvrtc, 80, cache);
  CHECK_EQ(second.from_cache, true);
  CHECK(second.image == first.image);
  CHECK_EQ(nvrtc.compilations.load(), 1);
  // Another device, another version.
  CHECK(compile_kernels(nvrtc, 90, cache).image != first.image);
  nvrtc.minor = 8;
  CHECK_EQ(compile_kernels(nvrtc, 80, cache).from_cache, false);
  CHECK_EQ(nvrtc.compilations.load(), 3);
  // PTX, which is for another use than machine code.
  CHECK(contains(compile_kernels(nvrtc, 86, cache).image, "ptx --gpu-architecture=compute_80"));
  CHECK_EQ(nvrtc.programs.load(), 0);
}

TEST(kernel_cache_recompiles_what_is_damaged) {
  const TemporaryFolder folder;
  const KernelCache cache(folder.path());
  FakeNvrtc nvrtc;
  const std::string image = compile_kernels(nvrtc, 80, cache).image;
  CHECK_EQ(files_in(folder.path()), size_t{1});
  const std::string file = fs::directory_iterator(folder.path())->path();
  const uintmax_t size = fs::file_size(file);
  int compilations = 1;
  const auto check_recompiled = [&] {
    const CompiledKernels again = compile_kernels(nvrtc, 80, cache);
    CHECK_EQ(again.from_cache, false);
    CHECK_EQ(again.cache_problem, std::string());
    CHECK(again.image == image);
    CHECK_EQ(nvrtc.compilations.load(), ++compilations);
    CHECK_EQ(compile_kernels(nvrtc, 80, cache).from_cache, true);
  };
  for (const uintmax_t length : {uintmax_t{0}, uintmax_t{7}, uintmax_t{31}, uintmax_t{32},
                                 uintmax_t{100}, size - 1, size + 1}) {
    fs::resize_file(file, length);
    check_recompiled();
  }
  // One bit: of the header, the key, the first and the last byte of the image.
  for (const uintmax_t place : {uintmax_t{0}, uintmax_t{9}, uintmax_t{17}, uintmax_t{30},
                                uintmax_t{40}, size - image.size(), size - 1}) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(place));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(place));
    stream.put(static_cast<char>(byte ^ 4));
    stream.close();
    check_recompiled();
  }
  // What others may write to is not run.
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  check_recompiled();
  // Not a file.
  fs::remove(file);
  CHECK_EQ(mkfifo(file.c_str(), 0600), 0);
  check_recompiled();
  if (geteuid() == 0) {
    CHECK_EQ(chown(file.c_str(), 12345, 12345), 0);
    check_recompiled();
  }
  CHECK_EQ(files_in(folder.path()), size_t{1});
}

TEST(kernel_cache_that_cannot_be_written_costs_only_time) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() + "/file") << "not a folder";
  FakeNvrtc nvrtc;
  for (const std::string& closed :
       {folder.path() + "/file/below", std::string("/proc/hvd"), std::string()}) {
    const CompiledKernels kernels = compile_kernels(nvrtc, 80, KernelCache(closed));
    CHECK(contains(kernels.image, "cubin"));
    CHECK(!kernels.cache_problem.empty());
    CHECK(closed.empty() || contains(kernels.cache_problem, closed));
  }
  CHECK_EQ(nvrtc.compilations.load(), 3);
  // The entry's place is taken by a folder: nothing is left behind.
  const KernelCache cache(folder.path() + "/cache");
  fs::create_directories(cache.path("key") + "/something");
  CHECK(contains(cache.store("key", "image"), cache.path("key")));
  CHECK(!cache.find("key"));
  CHECK_EQ(files_in(cache.folder()), size_t{1});
}

TEST(kernel_cache_of_many_at_once) {
  const TemporaryFolder folder;
  FakeNvrtc nvrtc;
  const std::string wanted = compile_kernels(nvrtc, 80, KernelCache("")).image;
  test::run_ranks(8, [&](int rank) {
    // Nothing is shared but the folder, as between processes.
    const KernelCache cache(folder.path() + "/cache");
    for (int turn = 0; turn < 10; ++turn) {
      CHECK(compile_kernels(nvrtc, 80, cache).image == wanted);
      if (rank == 0) {
        std::error_code ignored;
        fs::remove_all(cache.folder(), ignored);
      }
      if (rank == 1 && turn % 3 == 0) {
        std::error_code ignored;
        for (const auto& entry : fs::directory_iterator(cache.folder(), ignored)) {
          fs::resize_file(entry.path(), 1000, ignored);
        }
      }
    }
  });
  CHECK_EQ(nvrtc.programs.load(), 0);
}

TEST(kernel_cache_tells_what_the_compiler_says) {
  const TemporaryFolder folder;
  FakeNvrtc nvrtc;
  nvrtc.compile_result = 6;
  nvrtc.log = "gpu/kernels.cu(1): error: something";
  const std::string text =
      CHECK_THROWS(compile_kernels(nvrtc, 80, KernelCache(folder.path())), ErrorKind::error).what();
  CHECK(contains(text, "a fake NVRTC cannot compile the kernels for sm_80: FAKE_ERROR_6"));
  CHECK(contains(text, nvrtc.log));
  CHECK_EQ(nvrtc.programs.load(), 0);
  CHECK_EQ(files_in(folder.path()), size_t{0});
}

}  // namespace
}  // namespace hvd
