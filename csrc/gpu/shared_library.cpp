#include "gpu/shared_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <utility>

#include "base/error.h"

namespace hvd {
namespace {

// Undefined functions of a library show here and not at its first call.
constexpr int kMode = RTLD_NOW | RTLD_LOCAL;

std::string loader_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "the loader gives no reason";
}

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);  // all of it, if there is no slash
}

}  // namespace

SharedLibrary::SharedLibrary(void* handle, std::string purpose, bool was_loaded,
                             std::string passed_over)
    : handle_(handle),
      purpose_(std::move(purpose)),
      passed_over_(std::move(passed_over)),
      was_loaded_(was_loaded) {
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) path_ = map->l_name;
}

SharedLibrary SharedLibrary::open(const LibraryRequest& request) {
  if (!request.file.empty()) {
    void* handle = dlopen(request.file.c_str(), kMode | RTLD_NOLOAD);
    const bool was_loaded = handle != nullptr;
    if (handle == nullptr) handle = dlopen(request.file.c_str(), kMode);
    if (handle != nullptr) return SharedLibrary(handle, request.purpose, was_loaded, "");
    throw Error(ErrorKind::error, "cannot load " + request.file + " (" + request.purpose +
                                      "), the file that was asked for: " + loader_error());
  }

  for (const std::string& name : request.names) {
    if (void* handle = dlopen(name.c_str(), kMode | RTLD_NOLOAD)) {
      return SharedLibrary(handle, request.purpose, true, "");
    }
    dlerror();  // not an error yet
  }
  std::string passed_over;
  for (const std::string& folder : request.folders) {
    for (const std::string& name : request.names) {
      const std::string file = folder + "/" + name;
      if (access(file.c_str(), F_OK) != 0) continue;
      if (void* handle = dlopen(file.c_str(), kMode)) {
        return SharedLibrary(handle, request.purpose, false, passed_over);
      }
      if (!passed_over.empty()) passed_over += "; ";
      passed_over += loader_error();
    }
  }
  std::string system_reasons;
  for (const std::string& name : request.names) {
    if (void* handle = dlopen(name.c_str(), kMode)) {
      return SharedLibrary(handle, request.purpose, false, passed_over);
    }
    if (!system_reasons.empty()) system_reasons += "; ";
    system_reasons += loader_error();
  }

  std::string message = "cannot find " + joined(request.names, " or ") + " (" + request.purpose +
                        "). It is not loaded in this process, ";
  if (request.folders.empty()) {
    message += "no installed package brings it, ";
  } else if (passed_over.empty()) {
    message += "not in " + joined(request.folders, ", ") + ", ";
  } else {
    message += "the installed copy does not load (" + passed_over + "), ";
  }
  message += "and the system has none (" + system_reasons + ").";
  if (!request.remedy.empty()) message += " To have it, " + request.remedy + ".";
  throw Error(ErrorKind::error, message);
}

std::string SharedLibrary::describe() const {
  std::string text = file_name(path_);
  text += version_.empty() ? ", version unknown" : ", version " + version_;
  return text + " (" + path_ + ")";
}

void* SharedLibrary::find(const char* symbol) const {
  void* address = dlsym(handle_, symbol);
  if (address == nullptr) dlerror();
  return address;
}

void* SharedLibrary::require(const char* symbol, const std::string& needed_version) const {
  void* address = find(symbol);
  if (address != nullptr) return address;
  throw Error(ErrorKind::error, describe() + " (" + purpose_ + ") has no function " + symbol +
                                    ": " + needed_version + " or newer is needed.");
}

}  // namespace hvd
