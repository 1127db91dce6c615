// Where a library is looked for, in which order, and what is said when it is not there.

#include "gpu/shared_library.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "check.h"

namespace hvd {
namespace {

const std::string kFakes = HVD_FAKES_DIR;

int probe_value(const SharedLibrary& library) {
  int (*value)() = nullptr;
  library.require("hvd_probe_value", "probe 1.0", &value);
  return value();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A folder with one file in it that bears a library's name and is none.
class BrokenLibrary {
 public:
  explicit BrokenLibrary(const std::string& name) {
    folder_ = (std::filesystem::temp_directory_path() / "hvd-broken-library-XXXXXX").string();
    if (mkdtemp(folder_.data()) == nullptr) std::abort();
    file_ = folder_ + "/" + name;
    const int fd = open(file_.c_str(), O_CREAT | O_WRONLY, 0600);
    if (write(fd, "not a library", 13) != 13) std::abort();
    close(fd);
  }
  ~BrokenLibrary() {
    unlink(file_.c_str());
    rmdir(folder_.c_str());
  }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
  std::string file_;
};

TEST(shared_library_comes_from_the_first_folder_and_then_from_what_is_loaded) {
  LibraryRequest request;
  request.names = {"libhvd_no_such_probe.so.1", "libhvd_probe.so.1"};
  request.folders = {"/no/such/folder", kFakes + "/first", kFakes + "/second"};
  request.purpose = "a probe";
  const SharedLibrary first = SharedLibrary::open(request);
  CHECK_EQ(first.path(), kFakes + "/first/libhvd_probe.so.1");
  CHECK_EQ(first.was_loaded(), false);
  CHECK_EQ(first.passed_over(), std::string());
  CHECK_EQ(probe_value(first), 1);

  // Now it is in the process: another installed copy must not come beside it.
  request.folders = {kFakes + "/second"};
  const SharedLibrary again = SharedLibrary::open(request);
  CHECK_EQ(again.path(), first.path());
  CHECK_EQ(again.was_loaded(), true);

  // Unless the user has named that file.
  request.file = kFakes + "/second/libhvd_probe.so.1";
  const SharedLibrary named = SharedLibrary::open(request);
  CHECK_EQ(named.path(), request.file);
  CHECK_EQ(named.was_loaded(), false);
  CHECK_EQ(probe_value(named), 2);
  CHECK_EQ(SharedLibrary::open(request).was_loaded(), true);
}

TEST(shared_library_that_does_not_load_is_passed_over_and_remembered) {
  const BrokenLibrary broken("libhvd_other_probe.so.1");
  LibraryRequest request;
  request.names = {"libhvd_other_probe.so.1"};
  request.folders = {broken.folder(), kFakes + "/second"};
  const SharedLibrary library = SharedLibrary::open(request);
  CHECK_EQ(probe_value(library), 3);
  CHECK(contains(library.passed_over(), broken.folder() + "/libhvd_other_probe.so.1"));
}

TEST(shared_library_that_is_nowhere_names_all_places) {
  const BrokenLibrary broken("libhvd_nowhere.so.3");
  LibraryRequest request;
  request.names = {"libhvd_nowhere.so.3", "libhvd_nowhere.so.2"};
  request.folders = {"/no/such/folder"};
  request.purpose = "a probe, which probes";
  request.remedy = "install it with: pip install probe";
  std::string text = CHECK_THROWS(SharedLibrary::open(request), ErrorKind::error).what();
  CHECK(contains(text, "libhvd_nowhere.so.3 or libhvd_nowhere.so.2 (a probe, which probes)"));
  CHECK(contains(text, "not in /no/such/folder"));
  CHECK(contains(text, "the system has none (libhvd_nowhere.so.3: cannot open"));
  CHECK(contains(text, "To have it, install it with: pip install probe."));

  request.folders = {broken.folder()};
  text = CHECK_THROWS(SharedLibrary::open(request), ErrorKind::error).what();
  CHECK(contains(text, "the installed copy does not load (" + broken.folder()));

  request.folders.clear();
  text = CHECK_THROWS(SharedLibrary::open(request), ErrorKind::error).what();
  CHECK(contains(text, "no installed package brings it"));

  request.file = "/no/such/libhvd_nowhere.so.9";
  text = CHECK_THROWS(SharedLibrary::open(request), ErrorKind::error).what();
  CHECK(contains(text, "cannot load /no/such/libhvd_nowhere.so.9 (a probe, which probes)"));
}

TEST(shared_library_without_a_function_says_which_version_has_it) {
  LibraryRequest request;
  request.file = kFakes + "/second/libhvd_other_probe.so.1";
  request.purpose = "a probe";
  SharedLibrary library = SharedLibrary::open(request);
  CHECK(library.find("hvd_probe_split") == nullptr);
  void (*split)() = nullptr;
  CHECK(!library.get("hvd_probe_split", &split));
  std::string text =
      CHECK_THROWS(library.require("hvd_probe_split", "probe 2.18"), ErrorKind::error).what();
  CHECK_EQ(text, "libhvd_other_probe.so.1, version unknown (" + request.file +
                     ") (a probe) has no function hvd_probe_split: probe 2.18 or newer is needed.");
  library.set_version("2.14.3");
  text = CHECK_THROWS(library.require("hvd_probe_split", "probe 2.18"), ErrorKind::error).what();
  CHECK(contains(text, "libhvd_other_probe.so.1, version 2.14.3 ("));
}

}  // namespace
}  // namespace hvd
