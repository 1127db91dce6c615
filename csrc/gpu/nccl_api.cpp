#include "gpu/nccl_api.h"

#include <utility>

#include "base/error.h"

namespace hvd {
namespace {

constexpr int kOldestVersion = 21400;

class LoadedNccl final : public NcclApi {
 public:
  explicit LoadedNccl(SharedLibrary library) : library_(std::move(library)) {
    // Asked first, so that an error about another function can tell it.
    library_.require("ncclGetVersion", "NCCL 2.14", &functions_.ncclGetVersion);
    if (functions_.ncclGetVersion(&version_) == NcclResult::success) {
      library_.set_version(nccl_version_text(version_));
    }
    if (version_ < kOldestVersion) {
      throw Error(ErrorKind::error, library_.describe() +
                                        " is too old: NCCL 2.14 or newer is "
                                        "needed, for nonblocking communicators.");
    }
#define HVD_LOAD(function, since, code) \
  library_.require(#function, "NCCL " since, &functions_.function);
    HVD_NCCL_REQUIRED_FUNCTIONS(HVD_LOAD)
#undef HVD_LOAD
#define HVD_LOAD(function, since, code) library_.get(#function, &functions_.function);
    HVD_NCCL_OPTIONAL_FUNCTIONS(HVD_LOAD)
#undef HVD_LOAD
  }

  std::string describe() const override { return library_.describe(); }
  int version() const override { return version_; }

  bool has(NcclFeature feature) const override {
    switch (feature) {
      case NcclFeature::split:
        return functions_.ncclCommSplit != nullptr;
      case NcclFeature::memory:
        return functions_.ncclMemAlloc != nullptr && functions_.ncclMemFree != nullptr &&
               functions_.ncclCommRegister != nullptr && functions_.ncclCommDeregister != nullptr;
      case NcclFeature::shrink:
        return functions_.ncclCommShrink != nullptr;
      case NcclFeature::window:
        return functions_.ncclCommWindowRegister != nullptr &&
               functions_.ncclCommWindowDeregister != nullptr;
      case NcclFeature::revoke:
        return functions_.ncclCommRevoke != nullptr;
      case NcclFeature::grow:
        return functions_.ncclCommGetUniqueId != nullptr && functions_.ncclCommGrow != nullptr;
    }
    return false;
  }

  const char* get_error_string(NcclResult result) override {
    const char* text = functions_.ncclGetErrorString(result);
    return text != nullptr ? text : "unknown result";
  }
  const char* get_last_error(NcclComm comm) override {
    const char* text = functions_.ncclGetLastError(comm);
    return text != nullptr ? text : "";
  }

  NcclResult get_unique_id(NcclUniqueId* id) override { return functions_.ncclGetUniqueId(id); }
  NcclResult comm_init_rank_config(NcclComm* comm, int ranks, const NcclUniqueId& id, int rank,
                                   NcclConfig* config) override {
    return functions_.ncclCommInitRankConfig(comm, ranks, id, rank, config);
  }
  NcclResult comm_get_async_error(NcclComm comm, NcclResult* result) override {
    return functions_.ncclCommGetAsyncError(comm, result);
  }
  NcclResult comm_finalize(NcclComm comm) override { return functions_.ncclCommFinalize(comm); }
  NcclResult comm_destroy(NcclComm comm) override { return functions_.ncclCommDestroy(comm); }
  NcclResult comm_abort(NcclComm comm) override { return functions_.ncclCommAbort(comm); }

  NcclResult all_reduce(const void* send, void* receive, size_t count, NcclDataType type,
                        NcclRedOp op, NcclComm comm, CudaStream stream) override {
    return functions_.ncclAllReduce(send, receive, count, type, op, comm, stream);
  }
  NcclResult broadcast(const void* send, void* receive, size_t count, NcclDataType type, int root,
                       NcclComm comm, CudaStream stream) override {
    return functions_.ncclBroadcast(send, receive, count, type, root, comm, stream);
  }
  NcclResult all_gather(const void* send, void* receive, size_t send_count, NcclDataType type,
                        NcclComm comm, CudaStream stream) override {
    return functions_.ncclAllGather(send, receive, send_count, type, comm, stream);
  }
  NcclResult reduce_scatter(const void* send, void* receive, size_t receive_count,
                            NcclDataType type, NcclRedOp op, NcclComm comm,
                            CudaStream stream) override {
    return functions_.ncclReduceScatter(send, receive, receive_count, type, op, comm, stream);
  }
  NcclResult send(const void* send, size_t count, NcclDataType type, int peer, NcclComm comm,
                  CudaStream stream) override {
    return functions_.ncclSend(send, count, type, peer, comm, stream);
  }
  NcclResult receive(void* receive, size_t count, NcclDataType type, int peer, NcclComm comm,
                     CudaStream stream) override {
    return functions_.ncclRecv(receive, count, type, peer, comm, stream);
  }
  NcclResult group_start() override { return functions_.ncclGroupStart(); }
  NcclResult group_end() override { return functions_.ncclGroupEnd(); }

// The function, or the error that it is not there.
#define HVD_OPTIONAL(function) optional(functions_.function, #function)
  NcclResult comm_split(NcclComm comm, int color, int key, NcclComm* new_comm,
                        NcclConfig* config) override {
    return HVD_OPTIONAL(ncclCommSplit)(comm, color, key, new_comm, config);
  }
  NcclResult memory_allocate(void** pointer, size_t bytes) override {
    return HVD_OPTIONAL(ncclMemAlloc)(pointer, bytes);
  }
  NcclResult memory_free(void* pointer) override { return HVD_OPTIONAL(ncclMemFree)(pointer); }
  NcclResult comm_register(NcclComm comm, void* buffer, size_t bytes, void** handle) override {
    return HVD_OPTIONAL(ncclCommRegister)(comm, buffer, bytes, handle);
  }
  NcclResult comm_deregister(NcclComm comm, void* handle) override {
    return HVD_OPTIONAL(ncclCommDeregister)(comm, handle);
  }
  NcclResult comm_shrink(NcclComm comm, const std::vector<int>& excluded, NcclComm* new_comm,
                         NcclConfig* config, int flags) override {
    std::vector<int> list = excluded;  // NCCL's parameter is not const
    return HVD_OPTIONAL(ncclCommShrink)(comm, list.data(), static_cast<int>(list.size()), new_comm,
                                        config, flags);
  }
  NcclResult window_register(NcclComm comm, void* buffer, size_t bytes, NcclWindow* window,
                             int flags) override {
    return HVD_OPTIONAL(ncclCommWindowRegister)(comm, buffer, bytes, window, flags);
  }
  NcclResult window_deregister(NcclComm comm, NcclWindow window) override {
    return HVD_OPTIONAL(ncclCommWindowDeregister)(comm, window);
  }
  NcclResult comm_revoke(NcclComm comm) override { return HVD_OPTIONAL(ncclCommRevoke)(comm, 0); }
  NcclResult comm_get_unique_id(NcclComm comm, NcclUniqueId* id) override {
    return HVD_OPTIONAL(ncclCommGetUniqueId)(comm, id);
  }
  NcclResult comm_grow(NcclComm comm, int ranks, const NcclUniqueId* id, int rank,
                       NcclComm* new_comm, NcclConfig* config) override {
    return HVD_OPTIONAL(ncclCommGrow)(comm, ranks, id, rank, new_comm, config);
  }
#undef HVD_OPTIONAL

 private:
  static const char* since(const std::string& function) {
#define HVD_SINCE(name, version, code) \
  if (function == #name) return "NCCL " version;
    HVD_NCCL_OPTIONAL_FUNCTIONS(HVD_SINCE)
#undef HVD_SINCE
    return "a newer NCCL";
  }

  template <class Function>
  Function optional(Function function, const char* name) const {
    if (function == nullptr) static_cast<void>(library_.require(name, since(name)));
    return function;
  }

  SharedLibrary library_;
  NcclFunctions functions_ = {};
  int version_ = 0;
};

}  // namespace

std::string nccl_version_text(int version) {
  // The code had four digits up to 2.8.
  const int base = version < 10000 ? 1000 : 10000;
  return std::to_string(version / base) + "." + std::to_string(version % base / 100) + "." +
         std::to_string(version % 100);
}

void NcclApi::check(NcclResult result, NcclComm comm, const char* call) {
  if (result == NcclResult::success || result == NcclResult::in_progress) return;
  std::string text = std::string(call) + " failed: " + get_error_string(result);
  const std::string account = get_last_error(comm);
  if (!account.empty()) text += " (" + account + ")";
  throw Error(result == NcclResult::remote_error ? ErrorKind::rank_failed : ErrorKind::error,
              text + "; " + describe());
}

LibraryRequest nccl_library(std::vector<std::string> folders) {
  LibraryRequest request;
  request.names = {"libnccl.so.2"};
  request.folders = std::move(folders);
  request.purpose = "NCCL, which sums gradients between GPUs";
  request.remedy =
      "install the package that fits torch's CUDA: pip install hvd-strategy[cu12] or "
      "hvd-strategy[cu13]";
  return request;
}

std::unique_ptr<NcclApi> open_nccl(const LibraryRequest& request) {
  return std::make_unique<LoadedNccl>(SharedLibrary::open(request));
}

}  // namespace hvd
