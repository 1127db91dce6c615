// The fake CUDA driver and the fake NCCL of tests/fakes, opened as the product opens the real ones.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../fakes/fake_cuda.h"
#include "check.h"
#include "gpu/driver_api.h"
#include "gpu/nccl_api.h"
#include "gpu/shared_library.h"

namespace hvd::test {

inline std::string fake_file(const std::string& folder, const std::string& name) {
  return std::string(HVD_FAKES_DIR) + "/" + folder + "/" + name;
}

inline SharedLibrary fake_library(const std::string& folder, const std::string& name) {
  LibraryRequest request;
  request.file = fake_file(folder, name);
  return SharedLibrary::open(request);
}

// A function that only the fake has: fake_function<long(const char*)>("cuda", "libcuda.so.1", ...).
template <class Signature>
Signature* fake_function(const std::string& folder, const std::string& name, const char* symbol) {
  Signature* function = nullptr;
  fake_library(folder, name).require(symbol, "the fake", &function);
  return function;
}

inline DriverApi& fake_driver() {
  static const std::unique_ptr<DriverApi> driver = [] {
    LibraryRequest request = driver_library();
    request.file = fake_file("cuda", "libcuda.so.1");
    std::unique_ptr<DriverApi> made = open_driver(request);
    made->check(made->init(), "cuInit");
    return made;
  }();
  return *driver;
}

inline std::unique_ptr<NcclApi> open_fake_nccl(const std::string& folder = "nccl_22902") {
  LibraryRequest request = nccl_library({});
  request.file = fake_file(folder, "libnccl.so.2");
  return open_nccl(request);
}

inline NcclApi& fake_nccl() {
  fake_driver();  // the fake NCCL looks for a libcuda.so.1 that is there
  static const std::unique_ptr<NcclApi> nccl = open_fake_nccl();
  return *nccl;
}

inline long cuda_count(const std::string& what) {
  static auto* const count =
      fake_function<long(const char*)>("cuda", "libcuda.so.1", "hvd_fake_cuda_count");
  return count(what.c_str());
}

// Failures for as long as it lives; see tests/fakes/faults.h.
class CudaFaults {
 public:
  explicit CudaFaults(const std::string& faults) { set(faults.c_str()); }
  ~CudaFaults() { set(""); }
  CudaFaults(const CudaFaults&) = delete;
  CudaFaults& operator=(const CudaFaults&) = delete;

 private:
  static void set(const char* faults) {
    fake_function<void(const char*)>("cuda", "libcuda.so.1", "hvd_fake_cuda_set_faults")(faults);
  }
};

class NcclFaults {
 public:
  explicit NcclFaults(const std::string& faults, const std::string& folder = "nccl_22902")
      : folder_(folder) {
    set(faults.c_str());
  }
  ~NcclFaults() { set(""); }
  NcclFaults(const NcclFaults&) = delete;
  NcclFaults& operator=(const NcclFaults&) = delete;

 private:
  void set(const char* faults) {
    fake_function<void(const char*)>(folder_, "libnccl.so.2", "hvd_fake_nccl_set_faults")(faults);
  }
  std::string folder_;
};

// A device's primary context, current for as long as it lives, with a stream that does not wait for
// the default stream.
class Gpu {
 public:
  explicit Gpu(int ordinal) : ordinal_(ordinal) {
    DriverApi& driver = fake_driver();
    driver.check(driver.primary_context_retain(&context_, ordinal), "cuDevicePrimaryCtxRetain");
    scope_ = std::make_unique<CudaContextScope>(driver, context_);
    stream = new_stream();
  }
  ~Gpu() {
    for (const CudaPointer pointer : memory_) {
      static_cast<void>(fake_driver().memory_free(pointer));
    }
    for (const CudaStream made : streams_) static_cast<void>(fake_driver().stream_destroy(made));
    scope_.reset();
    static_cast<void>(fake_driver().primary_context_release(ordinal_));
  }

  CudaStream new_stream(unsigned int flags = kCudaStreamNonBlocking) {
    CudaStream made = nullptr;
    fake_driver().check(fake_driver().stream_create(&made, flags, 0), "cuStreamCreate");
    streams_.push_back(made);
    return made;
  }

  template <class Value>
  Value* allocate(size_t count) {
    CudaPointer pointer = 0;
    fake_driver().check(fake_driver().memory_allocate(&pointer, count * sizeof(Value)),
                        "cuMemAlloc");
    memory_.push_back(pointer);
    return reinterpret_cast<Value*>(pointer);
  }

  template <class Value>
  Value* upload(const std::vector<Value>& values) {
    Value* memory = allocate<Value>(values.size());
    fake_driver().check(fake_driver().copy_to_device(pointer(memory), values.data(),
                                                     values.size() * sizeof(Value), stream),
                        "cuMemcpyHtoDAsync");
    synchronize();
    return memory;
  }

  template <class Value>
  std::vector<Value> download(const Value* memory, size_t count) {
    std::vector<Value> values(count);
    fake_driver().check(
        fake_driver().copy_to_host(values.data(), pointer(memory), count * sizeof(Value), stream),
        "cuMemcpyDtoHAsync");
    synchronize();
    return values;
  }

  void synchronize() {
    fake_driver().check(fake_driver().stream_synchronize(stream), "cuStreamSynchronize");
  }

  static CudaPointer pointer(const void* memory) { return reinterpret_cast<CudaPointer>(memory); }

  CudaContext context() const { return context_; }

  CudaStream stream = nullptr;

 private:
  int ordinal_;
  CudaContext context_ = nullptr;
  std::unique_ptr<CudaContextScope> scope_;
  std::vector<CudaStream> streams_;
  std::vector<CudaPointer> memory_;
};

// Tries until it holds, for at most a minute.
inline bool eventually(const std::function<bool()>& holds) {
  for (int tries = 0; tries < 60'000; ++tries) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// What a nonblocking communicator's last call came to.
inline NcclResult settled(NcclApi& nccl, NcclComm comm) {
  NcclResult result = NcclResult::in_progress;
  eventually([&] {
    return nccl.comm_get_async_error(comm, &result) != NcclResult::success ||
           result != NcclResult::in_progress;
  });
  return result;
}

// This rank's communicator of `ranks`; throws if it does not come about.
inline NcclComm join_nccl(NcclApi& nccl, const NcclUniqueId& id, int rank, int ranks,
                          int blocking = 0) {
  NcclConfig config;
  config.blocking = blocking;
  NcclComm comm = nullptr;
  nccl.check(nccl.comm_init_rank_config(&comm, ranks, id, rank, &config), nullptr,
             "ncclCommInitRankConfig");
  nccl.check(settled(nccl, comm), comm, "ncclCommInitRankConfig");
  return comm;
}

inline NcclUniqueId new_id(NcclApi& nccl) {
  NcclUniqueId id;
  nccl.check(nccl.get_unique_id(&id), nullptr, "ncclGetUniqueId");
  return id;
}

}  // namespace hvd::test
