// A libnccl.so.2 over host memory and the fake libcuda.so.1.
//
// Ranks are threads of one process or processes of one machine; they meet in a piece of shared
// memory that the unique id leads to. Collectives run on the stream that they are put on, through
// cuLaunchHostFunc, and give what NCCL gives: sums in the dtype of the data. Like NCCL, it demands
// one GPU per rank (unless NCCL_HOSTID differs), reads no more of the configuration than both sides
// know, answers ncclInProgress while a nonblocking communicator is at it (and refuses what is asked
// meanwhile), and ends what runs on the stream after an abort, leaving garbage. Unlike NCCL, it
// notices ranks that do not call the same thing: all of them get ncclInvalidUsage.
//
// An abort or a death of another rank is not noticed, as inside of one machine, unless
// HVD_FAKE_NCCL_REMOTE_ERRORS is set: then it shows as ncclRemoteError, as over a network. Failures
// on request: see faults.h, the bracket is the rank. Built in several versions, each without the
// functions that came later; HVD_FAKE_NCCL_VERSION is NCCL's version code.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_nccl_parts.h"

#ifndef HVD_FAKE_NCCL_VERSION
#define HVD_FAKE_NCCL_VERSION 22902
#endif

#define EXPORTED __attribute__((visibility("default")))

using hvd::CudaContext;
using hvd::CudaResult;
using hvd::CudaStream;
using hvd::NcclComm;
using hvd::NcclConfig;
using hvd::NcclDataType;
using hvd::NcclRedOp;
using hvd::NcclResult;
using hvd::NcclUniqueId;
using hvd::NcclWindow;
using namespace hvd::fakes;

const int hvd::fakes::kVersion = HVD_FAKE_NCCL_VERSION;

namespace {

Operation collective(Kind kind, const void* send, void* receive, size_t count, NcclDataType type,
                     CudaStream stream, NcclRedOp op = NcclRedOp::sum, int root = 0) {
  Operation operation;
  operation.header = {kind, type, op, root, count};
  operation.send = send;
  operation.receive = receive;
  operation.stream = stream;
  return operation;
}
}  // namespace

// ---- NCCL's functions

extern "C" {

EXPORTED NcclResult ncclGetVersion(int* version) {
  *version = HVD_FAKE_NCCL_VERSION;
  return NcclResult::success;
}

EXPORTED const char* ncclGetErrorString(NcclResult result) {
  switch (result) {
    case NcclResult::success:
      return "no error";
    case NcclResult::unhandled_cuda_error:
      return "unhandled cuda error";
    case NcclResult::system_error:
      return "unhandled system error";
    case NcclResult::internal_error:
      return "internal error";
    case NcclResult::invalid_argument:
      return "invalid argument";
    case NcclResult::invalid_usage:
      return "invalid usage";
    case NcclResult::remote_error:
      return "remote process exited or there was a network error";
    case NcclResult::in_progress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

EXPORTED const char* ncclGetLastError(NcclComm handle) {
  const CommRef comm = find(handle);
  return comm && comm->region->failure.load() != 0 ? comm->region->failure_text
                                                   : last_error.c_str();
}

EXPORTED NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  const Fault fault = library().faults.at_call("ncclGetUniqueId", 0);
  if (fault.kind == Fault::Kind::result) return static_cast<NcclResult>(fault.value);
  return make_id(id) ? NcclResult::success : fail(NcclResult::system_error, "no shared memory");
}

EXPORTED NcclResult ncclCommInitRankConfig(NcclComm* comm, int ranks, NcclUniqueId id, int rank,
                                           NcclConfig* config) {
  bool blocking = true;
  const NcclResult result = read_config(config, &blocking);
  if (result != NcclResult::success) return result;
  return create("ncclCommInitRankConfig", comm, ranks, id, rank, blocking);
}

EXPORTED NcclResult ncclCommGetAsyncError(NcclComm handle, NcclResult* result) {
  const CommRef comm = find(handle);
  if (!comm) return fail(NcclResult::invalid_argument, "not a communicator, or no longer one");
  const Fault fault = library().faults.at_call("ncclCommGetAsyncError", comm->rank);
  if (fault.kind == Fault::Kind::result) {
    comm->state = static_cast<NcclResult>(fault.value);
  } else if (comm->state.load() == NcclResult::success && !comm->finalized &&
             peers_have_left(*comm)) {
    comm->state = NcclResult::remote_error;
  }
  *result = comm->state.load();
  return NcclResult::success;
}

EXPORTED NcclResult ncclCommFinalize(NcclComm handle) {
  const CommRef comm = find(handle);
  const NcclResult usable = check_usable(comm);
  if (usable != NcclResult::success) return usable;
  comm->finalized = true;
  const Fault fault = library().faults.at_call("ncclCommFinalize", comm->rank);
  comm->state = NcclResult::in_progress;
  const auto finalize = [comm, fault] {
    if (fault.kind == Fault::Kind::hang) wait_until(*comm, [] { return false; });
    wait_for_launched(*comm);
    comm->region->members[comm->rank].stage = Stage::finalized;
    ring(*comm);
    wait_until(*comm, [&] {
      for (int peer = 0; peer < comm->ranks; ++peer) {
        if (comm->region->members[peer].stage.load() == Stage::joined) return false;
      }
      return true;
    });
    NcclResult expected = NcclResult::in_progress;
    comm->state.compare_exchange_strong(expected, NcclResult::success);
  };
  if (comm->blocking) {
    finalize();
    return comm->state.load();
  }
  std::thread(finalize).detach();
  return NcclResult::in_progress;
}

EXPORTED NcclResult ncclCommDestroy(NcclComm handle) {
  const CommRef comm = find(handle);
  if (!comm) return fail(NcclResult::invalid_argument, "not a communicator, or no longer one");
  wait_for_launched(*comm);
  comm->region->members[comm->rank].stage = Stage::gone;
  ring(*comm);
  forget(comm);
  return NcclResult::success;
}

EXPORTED NcclResult ncclCommAbort(NcclComm handle) {
  const CommRef comm = find(handle);
  if (!comm) return fail(NcclResult::invalid_argument, "not a communicator, or no longer one");
  const Fault fault = library().faults.at_call("ncclCommAbort", comm->rank);
  if (fault.kind == Fault::Kind::slow) {
    std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
  }
  comm->stop = true;
  comm->region->members[comm->rank].stage = Stage::aborted;
  ring(*comm);
  wait_for_launched(*comm);
  forget(comm);
  return NcclResult::success;
}

EXPORTED NcclResult ncclAllReduce(const void* send, void* receive, size_t count, NcclDataType type,
                                  NcclRedOp op, NcclComm comm, CudaStream stream) {
  return start_operation("ncclAllReduce", comm,
                         collective(Kind::all_reduce, send, receive, count, type, stream, op));
}

// The broken build is one whose makers forgot it.
#ifndef HVD_FAKE_NCCL_BROKEN
EXPORTED NcclResult ncclBroadcast(const void* send, void* receive, size_t count, NcclDataType type,
                                  int root, NcclComm comm, CudaStream stream) {
  // Only the root's send buffer counts.
  if (send == nullptr) send = receive;
  return start_operation(
      "ncclBroadcast", comm,
      collective(Kind::broadcast, send, receive, count, type, stream, NcclRedOp::sum, root));
}
#endif

EXPORTED NcclResult ncclAllGather(const void* send, void* receive, size_t send_count,
                                  NcclDataType type, NcclComm comm, CudaStream stream) {
  return start_operation("ncclAllGather", comm,
                         collective(Kind::all_gather, send, receive, send_count, type, stream));
}

EXPORTED NcclResult ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                                      NcclDataType type, NcclRedOp op, NcclComm comm,
                                      CudaStream stream) {
  return start_operation(
      "ncclReduceScatter", comm,
      collective(Kind::reduce_scatter, send, receive, receive_count, type, stream, op));
}

EXPORTED NcclResult ncclSend(const void* send, size_t count, NcclDataType type, int peer,
                             NcclComm comm, CudaStream stream) {
  Operation operation = collective(Kind::send, send, nullptr, count, type, stream);
  operation.peer = peer;
  return start_operation("ncclSend", comm, operation);
}

EXPORTED NcclResult ncclRecv(void* receive, size_t count, NcclDataType type, int peer,
                             NcclComm comm, CudaStream stream) {
  Operation operation = collective(Kind::receive, nullptr, receive, count, type, stream);
  operation.peer = peer;
  return start_operation("ncclRecv", comm, operation);
}

EXPORTED NcclResult ncclGroupStart() {
  ++group.depth;
  return NcclResult::success;
}

EXPORTED NcclResult ncclGroupEnd() {
  if (group.depth == 0) return fail(NcclResult::invalid_usage, "no group was started");
  if (--group.depth > 0) return NcclResult::success;
  NcclResult result = std::exchange(group.error, NcclResult::success);
  const auto work = std::exchange(group.work, {});
  if (result != NcclResult::success) return result;
  for (const auto& [comm, operations] : work) {
    const NcclResult one = launch_or_start(comm, operations);
    if (one != NcclResult::success &&
        (result == NcclResult::success || result == NcclResult::in_progress)) {
      result = one;
    }
  }
  return result;
}

#if HVD_FAKE_NCCL_VERSION >= 21800
EXPORTED NcclResult ncclCommSplit(NcclComm handle, int color, int key, NcclComm* new_comm,
                                  NcclConfig* config) {
  *new_comm = nullptr;
  const CommRef comm = find(handle);
  const NcclResult usable = check_usable(comm);
  if (usable != NcclResult::success) return usable;
  bool blocking = true;
  const NcclResult result = config_or_parents(config, *comm, &blocking);
  if (result != NcclResult::success) return result;
  Region& region = *comm->region;
  const uint64_t round = ++comm->split_rounds;
  Member& own = region.members[comm->rank];
  own.color = color;
  own.key = key;
  own.split_round = round;
  ring(*comm);
  const bool there = wait_until(*comm, [&] {
    for (int peer = 0; peer < comm->ranks; ++peer) {
      if (region.members[peer].split_round.load() < round) return false;
    }
    return true;
  });
  if (!there) return comm->state.load();
  std::vector<std::pair<int, int>> members;  // by key, then rank
  int leader = -1;
  for (int peer = 0; peer < comm->ranks; ++peer) {
    if (region.members[peer].color.load() != color) continue;
    members.emplace_back(region.members[peer].key.load(), peer);
    if (leader < 0) leader = peer;
  }
  if (color == hvd::kNcclSplitNoColor) {
    ++comm->next_child;
    return NcclResult::success;
  }
  std::sort(members.begin(), members.end());
  const auto place = std::find(members.begin(), members.end(), std::make_pair(key, comm->rank));
  NcclUniqueId id;
  if (!meet(*comm, leader, &id)) return fail(NcclResult::system_error, "the ranks did not meet");
  return create("ncclCommSplit", new_comm, static_cast<int>(members.size()), id,
                static_cast<int>(place - members.begin()), blocking);
}
#endif

#if HVD_FAKE_NCCL_VERSION >= 21900
EXPORTED NcclResult ncclMemAlloc(void** pointer, size_t bytes) {
  hvd::CudaPointer memory = 0;
  if (!cuda().there || cuda().functions.cuMemAlloc_v2(&memory, bytes) != CudaResult::success) {
    return fail(NcclResult::unhandled_cuda_error, "cuMemAlloc failed");
  }
  *pointer = reinterpret_cast<void*>(memory);
  return NcclResult::success;
}

EXPORTED NcclResult ncclMemFree(void* pointer) {
  const auto memory = reinterpret_cast<hvd::CudaPointer>(pointer);
  return cuda().there && cuda().functions.cuMemFree_v2(memory) == CudaResult::success
             ? NcclResult::success
             : fail(NcclResult::unhandled_cuda_error, "cuMemFree failed");
}

NcclResult register_buffer(NcclComm handle, void* buffer, size_t bytes, void** registration) {
  const NcclResult usable = check_usable(find(handle));
  if (usable != NcclResult::success) return usable;
  if (buffer == nullptr || bytes == 0) return NcclResult::invalid_argument;
  auto* made = new char;
  const std::lock_guard<std::mutex> lock(library().mutex);
  library().registrations.insert(made);
  *registration = made;
  return NcclResult::success;
}

NcclResult forget_registration(NcclComm handle, void* registration) {
  if (!find(handle)) return NcclResult::invalid_argument;
  const std::lock_guard<std::mutex> lock(library().mutex);
  if (library().registrations.erase(registration) == 0) return NcclResult::invalid_argument;
  delete static_cast<char*>(registration);
  return NcclResult::success;
}

EXPORTED NcclResult ncclCommRegister(NcclComm comm, void* buffer, size_t bytes, void** handle) {
  return register_buffer(comm, buffer, bytes, handle);
}

EXPORTED NcclResult ncclCommDeregister(NcclComm comm, void* handle) {
  return forget_registration(comm, handle);
}
#endif

#if HVD_FAKE_NCCL_VERSION >= 22700
EXPORTED NcclResult ncclCommWindowRegister(NcclComm comm, void* buffer, size_t bytes,
                                           NcclWindow* window, int) {
  void* registration = nullptr;
  const NcclResult result = register_buffer(comm, buffer, bytes, &registration);
  *window = static_cast<NcclWindow>(registration);
  return result;
}

EXPORTED NcclResult ncclCommWindowDeregister(NcclComm comm, NcclWindow window) {
  return forget_registration(comm, window);
}

EXPORTED NcclResult ncclCommShrink(NcclComm handle, int* excluded, int excluded_count,
                                   NcclComm* new_comm, NcclConfig* config, int flags) {
  *new_comm = nullptr;
  const CommRef comm = find(handle);
  if (!comm) return fail(NcclResult::invalid_argument, "not a communicator, or no longer one");
  if ((flags & hvd::kNcclShrinkAbort) != 0) {
    comm->stop = true;
    ring(*comm);
    wait_for_launched(*comm);
  } else if (!comm->revoked) {
    const NcclResult usable = check_usable(comm);
    if (usable != NcclResult::success) return usable;
  }
  bool blocking = true;
  const NcclResult result = config_or_parents(config, *comm, &blocking);
  if (result != NcclResult::success) return result;
  int leader = -1;
  int rank = -1;
  int ranks = 0;
  for (int peer = 0; peer < comm->ranks; ++peer) {
    if (std::find(excluded, excluded + excluded_count, peer) != excluded + excluded_count) continue;
    if (leader < 0) leader = peer;
    if (peer == comm->rank) rank = ranks;
    ++ranks;
  }
  if (rank < 0) return fail(NcclResult::invalid_argument, "a rank cannot exclude itself");
  NcclUniqueId id;
  if (!meet(*comm, leader, &id)) return fail(NcclResult::system_error, "the ranks did not meet");
  return create("ncclCommShrink", new_comm, ranks, id, rank, blocking);
}
#endif

#if HVD_FAKE_NCCL_VERSION >= 22807
EXPORTED NcclResult ncclCommRevoke(NcclComm handle, int flags) {
  const CommRef comm = find(handle);
  if (!comm || flags != 0) return fail(NcclResult::invalid_argument, "bad argument");
  comm->revoked = true;
  comm->stop = true;
  ring(*comm);
  wait_for_launched(*comm);
  comm->state = NcclResult::success;
  return NcclResult::success;
}
#endif

#if HVD_FAKE_NCCL_VERSION >= 22902
EXPORTED NcclResult ncclCommGetUniqueId(NcclComm handle, NcclUniqueId* id) {
  const CommRef comm = find(handle);
  const NcclResult usable = check_usable(comm);
  if (usable != NcclResult::success) return usable;
  // The root of the growth is the leader of the meeting that the others look for.
  return make_id(id) ? NcclResult::success : fail(NcclResult::system_error, "no shared memory");
}

EXPORTED NcclResult ncclCommGrow(NcclComm handle, int ranks, const NcclUniqueId* id, int rank,
                                 NcclComm* new_comm, NcclConfig* config) {
  *new_comm = nullptr;
  bool blocking = true;
  if (handle == nullptr) {
    if (id == nullptr) return fail(NcclResult::invalid_argument, "a new rank needs the id");
    const NcclResult result = read_config(config, &blocking);
    if (result != NcclResult::success) return result;
    return create("ncclCommGrow", new_comm, ranks, *id, rank, blocking);
  }
  const CommRef comm = find(handle);
  const NcclResult usable = check_usable(comm);
  if (usable != NcclResult::success) return usable;
  const NcclResult result = config_or_parents(config, *comm, &blocking);
  if (result != NcclResult::success) return result;
  if (rank != -1 || ranks <= comm->ranks) {
    return fail(NcclResult::invalid_argument, "an existing rank keeps its number");
  }
  // One of the existing ranks has the id; the first place of the meeting is for it.
  const int child = comm->next_child++ % kMaxChildren;
  Meeting& meeting = comm->region->children[child][0];
  IdContent content = {};
  NcclUniqueId found = {};
  if (id != nullptr) {
    std::memcpy(&content, id->internal, sizeof(content));
    meeting.descriptor = content.descriptor;
    meeting.pid = content.pid;
    ring(*comm);
    found = *id;
  } else {
    if (!wait_until(*comm, [&] { return meeting.pid.load() != 0; })) return comm->state.load();
    std::memcpy(content.magic, kIdMagic, sizeof(kIdMagic));
    content.pid = meeting.pid.load();
    content.descriptor = meeting.descriptor;
    std::memcpy(found.internal, &content, sizeof(content));
  }
  return create("ncclCommGrow", new_comm, ranks, found, comm->rank, blocking);
}
#endif

// ---- For the tests

// See faults.h. Null or empty: no faults.
EXPORTED void hvd_fake_nccl_set_faults(const char* faults) {
  library().faults.set(faults != nullptr ? faults : "");
}

// "comms": how many communicators live in this process; the name of a function: its calls since the
// last set_faults.
EXPORTED long hvd_fake_nccl_count(const char* what) {
  if (std::strcmp(what, "comms") != 0) return library().faults.calls(what);
  const std::lock_guard<std::mutex> lock(library().mutex);
  return static_cast<long>(library().comms.size());
}
}

// The fake is called through the product's own table: the two must agree.
#define HVD_SAME(function, since, code) \
  static_assert(std::is_same_v<decltype(&function), decltype(hvd::NcclFunctions::function)>);
#ifndef HVD_FAKE_NCCL_BROKEN
HVD_NCCL_REQUIRED_FUNCTIONS(HVD_SAME)
#endif
#if HVD_FAKE_NCCL_VERSION >= 22902
HVD_NCCL_OPTIONAL_FUNCTIONS(HVD_SAME)
#endif
