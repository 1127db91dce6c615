#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "control/bells.h"
#include "control/control_plane.h"
#include "control/deadlock_watch.h"
#include "control/handshake.h"
#include "control/stop_line.h"
#include "control/watch.h"

namespace hvd {

// Times in nanoseconds; 0 = never.
struct ControlSettings {
  uint64_t stall_warning_ns = 60'000'000'000u;
  uint64_t first_stall_warning_ns = 600'000'000'000u;
  uint64_t stall_abort_ns = 1'800'000'000'000u;
  uint64_t abort_grace_ns = 30'000'000'000u;
  uint64_t deadlock_ns = 2'000'000'000u;  // ranks wait for each other at least so long
};

struct ControlPage;  // see control_page.h

// The control plane of ranks that share a host: a page of shared memory with bells, a mesh of
// unix sockets that hands memory over and tells of deaths, and the watch thread.
class HostControlPlane final : public ControlPlane {
 public:
  // Collective. Takes over the connections.
  HostControlPlane(int rank, int size, Mesh mesh, const ControlSettings& settings,
                   uint64_t timeout_ns, const Interrupt* interrupt = nullptr);
  ~HostControlPlane() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<pid_t>& pids() const { return mesh_.pids; }

  // Collective over `members`: memory that the lowest of them makes and hands to the others, all
  // zero at first. `key` tells memories of the same members apart.
  std::unique_ptr<SharedMemory> share(const std::vector<int>& members, uint64_t key, size_t bytes,
                                      uint64_t timeout_ns, const Interrupt* interrupt);

  std::unique_ptr<RecordChannel> open_channel(const std::vector<int>& members, uint64_t id,
                                              uint64_t timeout_ns,
                                              const Interrupt* interrupt) override;
  std::unique_ptr<NumberBoard> open_board(const std::vector<int>& members, uint64_t id,
                                          uint32_t places, uint64_t timeout_ns,
                                          const Interrupt* interrupt) override;
  const Failure* failure() override;
  void post_failure(ErrorKind kind, const std::string& text) override;
  bool has_left(int rank) const override;
  uint64_t last_seen(int rank) const override;
  void begin_run() override;
  void request_stop() override;
  bool stop_requested() const override;
  bool pass_point() override;
  void set_activity(const std::string& text) override;
  void notify() override {
    if (usable()) bells_.ring_all();
  }
  void notify_self() override {
    if (usable()) bells_.ring_self();
  }
  void wait(const std::function<Step()>& step, const Wait& settings,
            const std::vector<int>& needed) override;

  // True for the first of all ranks that comes with this digest of a text. Never blocks; when the
  // table of digests is full, everybody is the first: a text may come twice, but is never lost.
  bool first_to_say(uint64_t digest);
  // Time that calls of wait() spent without progress, waiting for other ranks, since the start.
  uint64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }
  // Before this rank blames itself for an exception that may come of another rank's end (a broken
  // connection of torch.distributed, say): where there are signs of one, waits until the watch has
  // told of it, but not for long.
  void await_culprit();

  // What may wait begins with it, before it waits for another thread of this process.
  void enter_wait() {
    if (usable()) deadlocks_->enter();
  }
  Bells& bells() { return bells_; }
  // Marks this rank as alive now.
  void mark_seen();
  // Says that this rank takes part in nothing any more, and ends the watch. Idempotent; one thread
  // at a time.
  void leave();
  // False in a forked child: the engine stayed with the parent, its memory is not mapped here.
  bool usable() const noexcept { return generation_ == fork_generation(); }
  // Throws where it is not usable, and after leave().
  void check_usable() const;

 private:
  void post_failure_of(int culprit, ErrorKind kind, const std::string& text);
  void on_peer_gone(int rank, const std::string& how);
  bool on_connection_ended(int rank);
  int on_tick();
  void notice_failure();
  [[noreturn]] void throw_failure();
  [[noreturn]] void throw_left(int rank, const std::string& what);
  [[noreturn]] void throw_lost(int rank);
  // Of one wait: since when it lasts, and what has been said about it.
  struct Waited {
    uint64_t started = 0;        // 0: it has not been blocked yet
    uint64_t last_progress = 0;  // 0: something moved since the last look
    uint64_t next_warning = 0;
    bool warned = false;  // a line has been printed
    bool told = false;    // the others can read what is waited for
    uint64_t number = 0;  // of the DeadlockWatch
  };
  void check_limits(const Wait& settings, const std::vector<int>& needed, Waited* waited);
  void tell_wait(const std::string& text);
  void tell(const Wait& settings, uint64_t looked_ns, Waited* waited);
  void untell(Waited* waited);
  [[noreturn]] void throw_deadlock(const std::vector<int>& circle, const std::string& own);
  void count_wait(const Waited& waited);
  std::string report(const std::vector<int>& needed) const;
  void wake_stopped(const std::vector<int>& ranks) const;
  int first_left(const std::vector<int>& ranks) const;

  static constexpr uint32_t kLeastSpinNs = 2'000;

  int rank_;
  int size_;
  Mesh mesh_;
  ControlSettings settings_;
  uint64_t generation_;
  std::unique_ptr<SharedMemory> memory_;
  ControlPage* page_ = nullptr;
  Bells bells_;
  std::unique_ptr<StopLine> stop_line_;
  std::unique_ptr<DeadlockWatch> deadlocks_;
  std::vector<uint64_t> started_;  // by rank: when its process started, see ProcessState
  std::mutex texts_mutex_;         // of the texts in this rank's cell: one writer at a time
  std::atomic<uint32_t> spin_ns_;
  bool may_spin_;
  std::atomic<uint64_t> waited_ns_{0};

  std::mutex failure_mutex_;
  std::unique_ptr<Failure> failure_;  // cached copy of the page's, guarded
  std::atomic<bool> failure_cached_{false};
  std::atomic<bool> failure_raised_{false};   // some call of this process has thrown it
  uint64_t failed_at_ = 0;                    // of the watch thread: when the grace began
  uint64_t noticed_at_ = 0;                   // of the watch thread: when it learned of the failure
  std::atomic<bool> failure_printed_{false};  // by the watch thread

  std::mutex mailbox_mutex_;
  std::vector<std::map<uint64_t, Descriptor>> mailbox_;  // by sender: memory not yet asked for

  std::unique_ptr<Watch> watch_;  // last: its thread uses all of the above
};

// For messages: three digits, and the unit.
std::string in_seconds(uint64_t ns);

// A line on standard error, written in one piece so that lines of several ranks do not mix.
void print_line(int rank, const std::string& text);

}  // namespace hvd
