// How operations of the fake NCCL get onto streams, and how communicators come about.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "fake_nccl_parts.h"

namespace hvd::fakes {

// What a group puts on one stream at once.
struct Bundle {
  CommRef comm;
  std::vector<Operation> operations;
  uint64_t turn = 0;
};

void run_bundle(void* argument) {
  const std::unique_ptr<Bundle> bundle(static_cast<Bundle*>(argument));
  Comm& comm = *bundle->comm;
  {
    std::unique_lock<std::mutex> lock(comm.mutex);
    comm.changed.wait(lock, [&] { return comm.finished == bundle->turn; });
  }
  std::vector<Operation> messages;
  for (const Operation& operation : bundle->operations) {
    switch (operation.fault.kind) {
      case Fault::Kind::slow:
        std::this_thread::sleep_for(std::chrono::milliseconds(operation.fault.value));
        break;
      case Fault::Kind::hang:
        wait_until(comm, [] { return false; });
        break;
      case Fault::Kind::async:
        // NCCL's kernels go on waiting until somebody aborts.
        comm.state = static_cast<NcclResult>(operation.fault.value);
        wait_until(comm, [] { return false; });
        break;
      default:
        break;
    }
    if (operation.header.kind == Kind::send || operation.header.kind == Kind::receive) {
      messages.push_back(operation);
    } else {
      run_collective(comm, operation);
    }
  }
  if (!messages.empty()) run_messages(comm, messages);
  if (comm.stop.load()) {
    // After an abort the output is garbage, and nobody may take it for a result.
    for (const Operation& operation : bundle->operations) {
      size_t element = 0;
      element_of(operation.header.type, &element);
      if (operation.receive != nullptr) {
        std::memset(operation.receive, 0xff, operation.header.count * element);
      }
    }
  }
  // The last use: whoever waits for this to end frees the communicator.
  const std::lock_guard<std::mutex> lock(comm.mutex);
  ++comm.finished;
  comm.changed.notify_all();
}

NcclResult launch(const CommRef& comm, std::vector<Operation> operations) {
  hvd::DriverFunctions& driver = cuda().functions;
  if (driver.cuCtxPushCurrent_v2(comm->context) != CudaResult::success) {
    return fail(NcclResult::unhandled_cuda_error, "cuCtxPushCurrent failed");
  }
  CudaContext before = nullptr;
  NcclResult result = NcclResult::success;
  while (!operations.empty() && result == NcclResult::success) {
    const CudaStream stream = operations.front().stream;
    auto bundle = std::make_unique<Bundle>();
    bundle->comm = comm;
    const auto rest =
        std::stable_partition(operations.begin(), operations.end(),
                              [&](const Operation& one) { return one.stream == stream; });
    bundle->operations.assign(operations.begin(), rest);
    operations.erase(operations.begin(), rest);
    {
      const std::lock_guard<std::mutex> lock(comm->mutex);
      bundle->turn = comm->launched++;
    }
    if (driver.cuLaunchHostFunc(stream, run_bundle, bundle.get()) == CudaResult::success) {
      static_cast<void>(bundle.release());  // its own from now on
    } else {
      const std::lock_guard<std::mutex> lock(comm->mutex);
      --comm->launched;
      result = fail(NcclResult::unhandled_cuda_error, "cuLaunchHostFunc failed");
    }
  }
  static_cast<void>(driver.cuCtxPopCurrent_v2(&before));
  return result;
}

// The first launch of a nonblocking communicator connects the ranks, and does that behind the
// caller's back.
NcclResult launch_or_start(const CommRef& comm, std::vector<Operation> operations) {
  const bool first = !std::exchange(comm->launched_before, true);
  if (comm->blocking || !first) return launch(comm, std::move(operations));
  comm->state = NcclResult::in_progress;
  std::thread([comm, operations = std::move(operations)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const NcclResult result =
        comm->stop.load() ? NcclResult::success : launch(comm, std::move(operations));
    NcclResult expected = NcclResult::in_progress;
    comm->state.compare_exchange_strong(expected, result);
  }).detach();
  return NcclResult::in_progress;
}
thread_local Group group;

NcclResult check_usable(const CommRef& comm) {
  if (!comm) return fail(NcclResult::invalid_argument, "not a communicator, or no longer one");
  if (comm->state.load() == NcclResult::in_progress) {
    return fail(NcclResult::invalid_argument, "the communicator is still at its last call");
  }
  if (comm->state.load() != NcclResult::success) return comm->state.load();
  if (comm->revoked || comm->finalized) {
    return fail(NcclResult::invalid_usage, "the communicator was revoked or finalized");
  }
  return NcclResult::success;
}

NcclResult start_operation(const char* function, NcclComm handle, Operation operation) {
  const CommRef comm = find(handle);
  const NcclResult usable = check_usable(comm);
  size_t element = 0;
  NcclResult result = usable;
  if (result == NcclResult::success) {
    operation.fault = library().faults.at_call(function, comm->rank);
    if (operation.fault.kind == Fault::Kind::result) {
      result = fail(static_cast<NcclResult>(operation.fault.value), "asked for by a test");
    } else if (!element_of(operation.header.type, &element) ||
               operation.header.op > NcclRedOp::min || operation.header.root < 0 ||
               operation.header.root >= comm->ranks || operation.peer >= comm->ranks) {
      result = fail(NcclResult::invalid_argument, std::string(function) + ": bad argument");
    } else if (operation.header.count > 0 &&
               ((operation.send == nullptr && operation.header.kind != Kind::receive) ||
                (operation.receive == nullptr && operation.header.kind != Kind::send))) {
      result = fail(NcclResult::invalid_argument, std::string(function) + ": null pointer");
    }
  }
  if (result != NcclResult::success) {
    if (group.depth > 0) group.error = result;
    return result;
  }
  if (group.depth == 0) return launch_or_start(comm, {operation});
  for (auto& [known, operations] : group.work) {
    if (known != comm) continue;
    operations.push_back(operation);
    return NcclResult::success;
  }
  group.work.push_back({comm, {operation}});
  return NcclResult::success;
}
// How much of a configuration the version knows.
size_t config_bytes() {
  if (kVersion < 21700) return offsetof(NcclConfig, cga_cluster_size);
  return kVersion < 22700 ? offsetof(NcclConfig, traffic_class) : sizeof(NcclConfig);
}

// What NCCL makes of a caller's configuration: as many bytes as both know, and of those the fields
// that the version in it had.
NcclResult read_config(const NcclConfig* given, bool* blocking) {
  NcclConfig config;
  config.blocking = hvd::kNcclUndefined;
  if (given != nullptr) {
    size_t bytes = 0;
    std::memcpy(&bytes, given, sizeof(bytes));
    std::memcpy(static_cast<void*>(&config), given, std::min(bytes, config_bytes()));
    if (config.magic != hvd::kNcclConfigMagic) {
      return fail(NcclResult::invalid_argument, "the configuration was not initialized");
    }
  }
  const bool undefined_is_known = kVersion >= 21700;
  if (config.blocking == hvd::kNcclUndefined && (given == nullptr || undefined_is_known)) {
    config.blocking = 1;
  }
  if (config.blocking != 0 && config.blocking != 1) {
    return fail(NcclResult::invalid_argument, "blocking is neither 0 nor 1");
  }
  if (config.min_ctas != hvd::kNcclUndefined && config.max_ctas == hvd::kNcclUndefined) {
    return fail(NcclResult::invalid_argument, "minCTAs without maxCTAs");
  }
  *blocking = config.blocking == 1;
  return NcclResult::success;
}

// Where a rank runs. Two ranks of a communicator in one place are an error.
bool describe_place(char* place, size_t bytes) {
  hvd::DriverFunctions& driver = cuda().functions;
  int device = 0;
  char id[32] = {};
  if (driver.cuCtxGetDevice(&device) != CudaResult::success ||
      driver.cuDeviceGetPCIBusId(id, sizeof(id), device) != CudaResult::success) {
    return false;
  }
  const char* host = std::getenv("NCCL_HOSTID");
  std::snprintf(place, bytes, "%s %.100s", id, host != nullptr ? host : "");
  return true;
}

// Meets the other ranks; ends in comm->state.
void join(const CommRef& comm, Fault fault) {
  Region& region = *comm->region;
  if (fault.kind == Fault::Kind::hang) {
    wait_until(*comm, [] { return false; });
    return;
  }
  if (fault.kind == Fault::Kind::slow) {
    std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
  }
  Member& own = region.members[comm->rank];
  own.ranks = comm->ranks;
  own.pid = getpid();
  Stage away = Stage::away;
  if (!own.stage.compare_exchange_strong(away, Stage::joined)) {
    return fail_all(*comm, NcclResult::invalid_usage,
                    "rank " + std::to_string(comm->rank) + " is there twice");
  }
  ring(*comm);
  const bool there = wait_until(*comm, [&] {
    for (int peer = 0; peer < comm->ranks; ++peer) {
      if (region.members[peer].stage.load() == Stage::away) return false;
    }
    return true;
  });
  if (!there) return;
  for (int peer = 0; peer < comm->ranks; ++peer) {
    const Member& member = region.members[peer];
    if (member.ranks.load() != comm->ranks) {
      return fail_all(*comm, NcclResult::invalid_usage, "the ranks differ about their number");
    }
    if (peer != comm->rank && std::strcmp(member.place, own.place) == 0) {
      return fail_all(*comm, NcclResult::invalid_usage,
                      "Duplicate GPU detected: ranks " + std::to_string(peer) + " and " +
                          std::to_string(comm->rank) + " both on " + own.place);
    }
  }
  NcclResult expected = NcclResult::in_progress;
  comm->state.compare_exchange_strong(expected, fault.kind == Fault::Kind::async
                                                    ? static_cast<NcclResult>(fault.value)
                                                    : NcclResult::success);
}

NcclResult create(const char* function, NcclComm* handle, int ranks, const NcclUniqueId& id,
                  int rank, bool blocking) {
  *handle = nullptr;
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return fail(NcclResult::invalid_argument, "rank or number of ranks out of range");
  }
  const Fault fault = library().faults.at_call(function, rank);
  if (fault.kind == Fault::Kind::result) {
    return fail(static_cast<NcclResult>(fault.value), "asked for by a test");
  }
  auto comm = std::make_shared<Comm>();
  if (!cuda().there || cuda().functions.cuCtxGetCurrent(&comm->context) != CudaResult::success ||
      comm->context == nullptr) {
    return fail(NcclResult::unhandled_cuda_error, "no current CUDA context");
  }
  comm->region = open_region(id);
  if (!comm->region) return fail(NcclResult::system_error, "nobody answers under this unique id");
  comm->rank = rank;
  comm->ranks = ranks;
  comm->blocking = blocking;
  comm->state = NcclResult::in_progress;
  if (!describe_place(comm->region->members[rank].place,
                      sizeof(comm->region->members[rank].place))) {
    return fail(NcclResult::unhandled_cuda_error, "the device does not answer");
  }
  *handle = keep(comm);
  if (!blocking) {
    std::thread([comm, fault] { join(comm, fault); }).detach();
    return NcclResult::in_progress;
  }
  join(comm, fault);
  const NcclResult result = comm->state.load();
  if (result != NcclResult::success) {
    forget(comm);
    *handle = nullptr;
  }
  return result;
}

void wait_for_launched(Comm& comm) {
  std::unique_lock<std::mutex> lock(comm.mutex);
  comm.changed.wait(lock, [&] { return comm.finished == comm.launched; });
}

// The lowest rank of some ranks of a communicator makes the place where they meet anew, the others
// find it through the old one.
bool meet(Comm& parent, int leader, NcclUniqueId* id) {
  const int child = parent.next_child++ % kMaxChildren;
  Meeting& meeting = parent.region->children[child][leader];
  if (leader == parent.rank) {
    if (!make_id(id)) return false;
    IdContent content = {};
    std::memcpy(&content, id->internal, sizeof(content));
    meeting.descriptor = content.descriptor;
    meeting.pid = content.pid;
    ring(parent);
    return true;
  }
  // Also in a communicator that was aborted: the survivors come to shrink it.
  for (int tries = 0; meeting.pid.load() == 0; ++tries) {
    if (tries > 60'000) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  IdContent content = {};
  std::memcpy(content.magic, kIdMagic, sizeof(kIdMagic));
  content.pid = meeting.pid.load();
  content.descriptor = meeting.descriptor;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, &content, sizeof(content));
  return true;
}

NcclResult config_or_parents(const NcclConfig* config, const Comm& parent, bool* blocking) {
  *blocking = parent.blocking;
  return config != nullptr ? read_config(config, blocking) : NcclResult::success;
}

}  // namespace hvd::fakes
