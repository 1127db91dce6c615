#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl_communicator.h"
#include "comm/shared_memory_communicator.h"
#include "control/handshake.h"
#include "control/host_control_plane.h"

namespace hvd {

struct SessionSettings {
  ControlSettings control;
  uint64_t connect_timeout_ns = 1'800'000'000'000u;
};

// Everything that depends on the world: connections, control plane, watch, communicators. Closed
// and opened again, with another world if need be, any number of times in one process; every
// session has shared memory of its own, so a rank that was stopped and left behind can write
// nowhere that matters.
class Session {
 public:
  // Collective. `names` are the listeners' names by rank; with one rank neither is needed.
  Session(int rank, const Listener* listener, const std::vector<std::string>& names,
          const Token& token, const SessionSettings& settings, const Interrupt* interrupt);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  HostControlPlane& control() { return *control_; }
  std::shared_ptr<HostControlPlane> shared_control() { return control_; }

  // Collective over `members`. Communicators of the same members have to be made in the same
  // order on all of them; any number may be in use at a time.
  std::shared_ptr<Communicator> open_communicator(const std::vector<int>& members,
                                                  const StagingSettings& settings,
                                                  uint64_t timeout_ns, const Interrupt* interrupt);
  // The same for ranks with a GPU each, through NCCL; `context` is the primary context of this
  // one's.
  std::shared_ptr<NcclCommunicator> open_nccl_communicator(const std::vector<int>& members,
                                                           std::shared_ptr<DriverApi> driver,
                                                           std::shared_ptr<NcclApi> nccl,
                                                           CudaContext context,
                                                           const NcclSettings& settings,
                                                           const Interrupt* interrupt);
  std::unique_ptr<RecordChannel> open_channel(const Communicator& communicator, uint64_t timeout_ns,
                                              const Interrupt* interrupt);
  // Says goodbye to the other ranks and closes all communicators. Idempotent.
  void close();
  bool closed() const { return closed_.load(); }

 private:
  void check_members(const std::vector<int>& members) const;
  uint64_t next_id(const std::vector<int>& members);

  int rank_;
  int size_;
  std::shared_ptr<HostControlPlane> control_;
  std::mutex mutex_;
  std::map<std::vector<int>, uint64_t> ids_by_group_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  std::vector<std::weak_ptr<NcclCommunicator>> nccl_communicators_;
  std::atomic<bool> closed_{false};
};

}  // namespace hvd
