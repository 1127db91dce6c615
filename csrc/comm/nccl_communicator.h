#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/control_plane.h"
#include "gpu/driver_api.h"
#include "gpu/nccl_api.h"

namespace hvd {

// Times in nanoseconds; 0 = never.
struct NcclSettings {
  std::string name = "gradients";  // in messages
  uint64_t init_timeout_ns = 1'800'000'000'000u;
  uint64_t timeout_ns = 1'800'000'000'000u;     // of an operation, once it is the next to finish
  uint64_t stall_warning_ns = 60'000'000'000u;  // then it is told what holds it up
  uint64_t close_timeout_ns = 10'000'000'000u;  // what runs at a close gets this time to finish
  uint64_t poll_ns = 2'000'000u;                // between two looks while something runs
  int max_ctas = 0;  // processors that its kernels may take; 0: NCCL's choice
};

// One NCCL communicator of one GPU per member, from its first call to its last.
//
// * It comes about without blocking, within a deadline; a rank on which that fails is named on all.
// * All launches come from one thread of its own, in the order of launch(): NCCL wants one thread
//   at a time, callers do not wait while NCCL connects at the first launch, and what is put on the
//   stream in what order does not depend on who called.
// * A watchdog thread owns the events behind the operations. While something runs it looks for
//   NCCL's asynchronous errors, errors of the device, a failure of another rank, ranks that have
//   left, and the deadline; at the first of them it aborts, tells the other ranks, and every later
//   call raises what happened. It prints what holds up an operation: ranks that have not launched
//   it, or, once all have, a GPU or a network that does not finish it.
// * After an abort kernels end and leave garbage. Whatever was under way then may have reached the
//   weights: weights_valid() is false, and stays so.
//
// Two communicators on a GPU (gradients; user collectives) and how they do not wait for each other:
// the ranks may launch an operation of one before or after one of the other, as it happens, so
// neither may keep the other from running.
// 1. Each has a stream and a launching thread of its own, and an operation waits only for events
//    that were recorded before it was given to launch(): never for an operation of the other
//    communicator that has not been launched.
// 2. Between the launches of a step nothing waits for the whole device: no memory is allocated or
//    freed and no module is loaded there. All that has been done before.
// 3. The kernels of both fit on the device at once (max_ctas), and streams do not share a hardware
//    queue: with CUDA_DEVICE_MAX_CONNECTIONS=1 they would, so a second communicator is refused.
// Where a producing stream waits for an operation of one communicator before it feeds the other,
// as after the end of backward, all ranks do, in the order of the program.
//
// Thread contract: any thread at any time, but for the constructor and close(). In a forked child
// every call throws; its destructor does nothing.
class NcclCommunicator {
 public:
  struct Operation {
    std::string name;  // "gradient bucket 2 (layer.weight, ...)"
    // On the launching thread, with the context current: what goes on the stream before, the
    // collective itself, and what goes behind it. `stream` is the communicator's. Each may be
    // null. Operations without a collective are this rank's own business; those with one are the
    // same on all members, in the same order.
    std::function<void(CudaStream stream)> prepare;
    std::function<NcclResult(NcclComm comm, CudaStream stream)> collective;
    std::function<void(CudaStream stream)> finish;
  };

  // Collective over `members` (session ranks, ascending, this one among them); `id` is one that
  // they agree on and use for nothing else. `context` is the primary context of the GPU that this
  // rank uses.
  NcclCommunicator(std::shared_ptr<ControlPlane> control, std::vector<int> members, uint64_t id,
                   std::shared_ptr<DriverApi> driver, std::shared_ptr<NcclApi> nccl,
                   CudaContext context, const NcclSettings& settings,
                   const std::function<void()>* interrupt);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return rank_; }  // index among the members
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }
  const NcclSettings& settings() const { return settings_; }
  DriverApi& driver() { return *driver_; }
  NcclApi& nccl() { return *nccl_; }
  CudaContext context() const { return context_; }
  // High priority, and not one that waits for the default stream.
  CudaStream stream() const { return stream_; }

  // Gives it to the launching thread; never blocks. Returns its ticket: 1, 2, ... Throws after an
  // abort, as all of these do.
  uint64_t launch(Operation operation);
  // From now on `stream` waits for that operation and all before it. The calling thread waits only
  // until the operation has been launched.
  void stream_wait(CudaStream stream, uint64_t ticket, const Wait& wait);
  // Waits until it has run. Not for use in a training step.
  void wait(uint64_t ticket, const Wait& wait);
  // The same for the end: gives the operation close_timeout to finish, also after close(), and
  // throws nothing. False: it was aborted, or still runs, and may go on using its memory.
  bool await_end(uint64_t ticket);
  // Throws if the communicator is closed, was aborted, or stayed with the parent process.
  void check();

  // False once a result may have been garbage: do not save the weights.
  bool weights_valid() const { return weights_valid_.load(); }
  bool usable() const;  // false in a forked child

  // What runs gets close_timeout to finish; then it is aborted. Idempotent.
  void close();

 private:
  // An operation on its way.
  struct Flight {
    uint64_t ticket = 0;
    uint64_t number = 0;  // among the collectives, from 1 on; 0: this rank's own business
    std::string name;
    CudaEvent event = nullptr;  // null: it is being launched
  };
  // What the members know of each other: places of the board, and what is in kState.
  enum : uint32_t { kState, kGiven, kLaunched, kFinished, kPlaces };
  enum : uint64_t { kAway, kBegun, kReady, kFailed, kClosed };
  struct Broken {
    ErrorKind kind;
    std::string text;
  };

  NcclUniqueId exchange_id(const std::function<void()>* interrupt);
  void initialize(const NcclUniqueId& id, const std::function<void()>* interrupt);
  std::vector<std::string> exchange(const std::string& record, const std::string& what,
                                    const std::function<void()>* interrupt);
  void check_records(const std::vector<std::string>& records) const;
  void count_on_device();
  void uncount_on_device();

  void launch_main();
  void launch_one(Operation& operation, const Flight& flight);
  bool settle();
  CudaEvent take_event();

  void watch_main();
  void look();
  void retire();
  void look_at_limits(const Flight& oldest);
  void report_failed(ErrorKind kind, const std::string& text);
  void fail(ErrorKind kind, const std::string& text, bool tell);
  void abort();
  void abort_nccl();
  static std::string list_ranks(const std::vector<int>& ranks);
  std::string title(const Flight& flight) const;
  std::string whereabouts(const Flight& flight) const;

  [[noreturn]] void throw_broken() const;
  void wait_for(uint64_t ticket, Wait wait, const std::function<bool()>& there);
  uint64_t number_of(uint64_t ticket) const;
  void finalize();
  void end_threads();
  void release();

  std::shared_ptr<ControlPlane> control_;
  std::vector<int> members_;
  std::shared_ptr<DriverApi> driver_;
  std::shared_ptr<NcclApi> nccl_;
  CudaContext context_;
  NcclSettings settings_;
  int rank_;
  int device_ = -1;
  uint64_t generation_;
  bool counted_ = false;
  std::unique_ptr<RecordChannel> channel_;
  std::unique_ptr<NumberBoard> board_;
  uint64_t exchanges_ = 0;
  CudaStream stream_ = nullptr;

  // Held during each call of NCCL but for the abort, which does not wait for it for ever.
  std::mutex nccl_mutex_;
  std::atomic<NcclComm> comm_{nullptr};

  mutable std::mutex mutex_;  // of all below
  std::condition_variable queued_;
  std::condition_variable watched_;
  std::deque<std::pair<Flight, Operation>> queue_;  // not yet taken
  std::deque<Flight> flights_;  // taken by the launching thread and not finished, in order
  std::vector<CudaEvent> free_events_;
  uint64_t tickets_ = 0;
  uint64_t collectives_ = 0;
  uint64_t oldest_ticket_ = 0;  // of the watchdog: since when which one is the next to finish
  uint64_t oldest_since_ns_ = 0;
  uint64_t next_warning_ns_ = 0;
  bool stop_ = false;
  bool closed_ = false;
  std::unique_ptr<Broken> broken_;
  bool tell_ = false;  // the watchdog has to tell the others what broke

  std::atomic<uint64_t> launched_{0};  // tickets
  std::atomic<uint64_t> finished_{0};
  std::atomic<bool> is_broken_{false};  // broken_ is there
  std::atomic<bool> aborted_{false};
  std::atomic<bool> weights_valid_{true};
  std::atomic<int> waiters_{0};
  std::atomic<bool> initializing_{false};

  std::unique_ptr<std::thread> launcher_;
  std::unique_ptr<std::thread> watchdog_;
};

}  // namespace hvd
