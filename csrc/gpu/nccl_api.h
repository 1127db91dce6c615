#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu/nccl_functions.h"
#include "gpu/shared_library.h"

namespace hvd {

// What a library may be too old for.
enum class NcclFeature {
  split,   // 2.18: comm_split
  memory,  // 2.19: memory_allocate, memory_free, comm_register, comm_deregister
  shrink,  // 2.27: comm_shrink
  window,  // 2.27: window_register, window_deregister
  revoke,  // 2.28.7: comm_revoke
  grow,    // 2.29.2: comm_get_unique_id, comm_grow
};

// NCCL, one virtual function per function of libnccl.so.2 with the same arguments and results: what
// its documentation says of ncclAllReduce holds for all_reduce. Tests put objects of their own in
// its place. Any version from 2.14 on.
//
// NcclResult::in_progress is no error: a nonblocking communicator is still at it, and nothing may
// be asked of it or put on the stream behind it before comm_get_async_error gives success.
//
// Different communicators may be used by different threads at the same time; one communicator only
// by one thread at a time, but for comm_abort and comm_get_async_error.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  // "libnccl.so.2, version 2.21.5 (/usr/lib/libnccl.so.2)".
  virtual std::string describe() const = 0;
  // As NCCL writes it: 22105 for 2.21.5.
  virtual int version() const = 0;
  // Whether the library has the functions of a feature. Calling one that is not there throws Error
  // naming the library, its version and the version that is needed.
  virtual bool has(NcclFeature feature) const = 0;

  virtual const char* get_error_string(NcclResult result) = 0;
  // NCCL's own account of the last failure in this process; may be empty, never null.
  virtual const char* get_last_error(NcclComm comm) = 0;

  [[nodiscard]] virtual NcclResult get_unique_id(NcclUniqueId* id) = 0;
  // The calling thread's current device becomes the communicator's.
  [[nodiscard]] virtual NcclResult comm_init_rank_config(NcclComm* comm, int ranks,
                                                         const NcclUniqueId& id, int rank,
                                                         NcclConfig* config) = 0;
  [[nodiscard]] virtual NcclResult comm_get_async_error(NcclComm comm, NcclResult* result) = 0;
  [[nodiscard]] virtual NcclResult comm_finalize(NcclComm comm) = 0;
  [[nodiscard]] virtual NcclResult comm_destroy(NcclComm comm) = 0;
  // Ends what runs on the device; its results are garbage from then on. Frees the communicator.
  [[nodiscard]] virtual NcclResult comm_abort(NcclComm comm) = 0;

  [[nodiscard]] virtual NcclResult all_reduce(const void* send, void* receive, size_t count,
                                              NcclDataType type, NcclRedOp op, NcclComm comm,
                                              CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult broadcast(const void* send, void* receive, size_t count,
                                             NcclDataType type, int root, NcclComm comm,
                                             CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult all_gather(const void* send, void* receive, size_t send_count,
                                              NcclDataType type, NcclComm comm,
                                              CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult reduce_scatter(const void* send, void* receive,
                                                  size_t receive_count, NcclDataType type,
                                                  NcclRedOp op, NcclComm comm,
                                                  CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult send(const void* send, size_t count, NcclDataType type, int peer,
                                        NcclComm comm, CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult receive(void* receive, size_t count, NcclDataType type, int peer,
                                           NcclComm comm, CudaStream stream) = 0;
  [[nodiscard]] virtual NcclResult group_start() = 0;
  [[nodiscard]] virtual NcclResult group_end() = 0;

  [[nodiscard]] virtual NcclResult comm_split(NcclComm comm, int color, int key, NcclComm* new_comm,
                                              NcclConfig* config) = 0;
  [[nodiscard]] virtual NcclResult memory_allocate(void** pointer, size_t bytes) = 0;
  [[nodiscard]] virtual NcclResult memory_free(void* pointer) = 0;
  [[nodiscard]] virtual NcclResult comm_register(NcclComm comm, void* buffer, size_t bytes,
                                                 void** handle) = 0;
  [[nodiscard]] virtual NcclResult comm_deregister(NcclComm comm, void* handle) = 0;
  [[nodiscard]] virtual NcclResult comm_shrink(NcclComm comm, const std::vector<int>& excluded,
                                               NcclComm* new_comm, NcclConfig* config,
                                               int flags) = 0;
  [[nodiscard]] virtual NcclResult window_register(NcclComm comm, void* buffer, size_t bytes,
                                                   NcclWindow* window, int flags) = 0;
  [[nodiscard]] virtual NcclResult window_deregister(NcclComm comm, NcclWindow window) = 0;
  [[nodiscard]] virtual NcclResult comm_revoke(NcclComm comm) = 0;
  [[nodiscard]] virtual NcclResult comm_get_unique_id(NcclComm comm, NcclUniqueId* id) = 0;
  // Existing ranks: their comm and rank -1, the id only on the one that asked for it. New ranks:
  // no comm, the id and their rank.
  [[nodiscard]] virtual NcclResult comm_grow(NcclComm comm, int ranks, const NcclUniqueId* id,
                                             int rank, NcclComm* new_comm, NcclConfig* config) = 0;

  // Throws Error where `result` is neither success nor in_progress: `call` as NCCL names it, NCCL's
  // words for the error, its account of the failure, and the library.
  void check(NcclResult result, NcclComm comm, const char* call);
};

// Where NCCL is looked for: `folders` are those of installed nvidia/nccl packages. A second copy of
// NCCL beside torch's is avoided wherever torch brings one.
LibraryRequest nccl_library(std::vector<std::string> folders);

// Opens the library and looks the functions up; touches no GPU, none has to be there. Throws Error
// if the library is not there or older than 2.14.
std::unique_ptr<NcclApi> open_nccl(const LibraryRequest& request);

// "2.21.5" for 22105.
std::string nccl_version_text(int version);

}  // namespace hvd
