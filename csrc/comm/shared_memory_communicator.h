#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/shared_memory.h"
#include "comm/communicator.h"
#include "comm/staging.h"
#include "comm/wire_layout.h"
#include "control/host_control_plane.h"

namespace hvd {

// The smaller the ring, the more of it stays in caches: on 64 MB, 8 slots of 192 KiB took 5.2 ms,
// of 512 KiB 5.6, of 2 MiB 7.5; below 128 KiB the waits between ranks show.
struct StagingSettings {
  uint64_t slot_bytes = 192 << 10;  // of one chunk
  uint32_t slots = 8;               // how many chunks a rank may be ahead of the slowest
};

// Collectives of ranks that share a host, through a ring of staging slots.
//
// A work is cut into chunks. For each chunk a rank copies in (its values go to its own slot),
// reduces (the slice it owns, reading everybody's slots and writing the result into its own slot
// and into its own memory) and copies out (the other slices, from their owners' slots). The own
// slice is never copied in: it is read where it lies, and its place in the slot takes the result.
// Chunks of consecutive works follow one another without a break; each rank moves as far as the
// others allow and a thread that cannot move does not hold up the others until the ring is full.
// Small works are reduced by everybody at once, which saves one of the two waits.
// With a wire type all values are converted on their way into the slots, the own slice's as well,
// so that no element's rounding depends on who owns it; results lie there in the work's type.
//
// Which work comes next is agreed in a log: whoever sees that all ranks have posted a slot appends
// it (compare-and-swap on the first free entry), and everybody serves the entries in order.
class SharedMemoryCommunicator final : public Communicator {
 public:
  // Collective over `members` (session ranks, ascending, this rank among them).
  SharedMemoryCommunicator(std::shared_ptr<HostControlPlane> control, std::vector<int> members,
                           uint64_t id, const StagingSettings& settings, uint64_t timeout_ns,
                           const Interrupt* interrupt);
  ~SharedMemoryCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<int>& members() const override { return members_; }
  ControlPlane& control() override { return *control_; }

  void post(uint32_t slot, std::shared_ptr<Work> work) override;
  void withdraw(uint32_t slot) override;
  std::vector<int> missing(uint32_t slot, uint64_t step) const override;
  Step drive() override;
  void run(const std::shared_ptr<Work>& work, Wait settings) override;
  void abandon() override;
  void close() override;
  uint64_t busy_ns() const override { return busy_ns_.load(std::memory_order_relaxed); }

 protected:
  void set_helping(bool on) override;

 private:
  // A work in the pipeline.
  struct Active {
    std::shared_ptr<Work> work;
    uint32_t slot;
    bool redundant = false;  // small: everybody reduces everything
    uint64_t chunk_elements = 0;
    uint64_t data_chunks = 0;  // then chunks that carry the by-products
    uint64_t chunks = 0;
    double post = 1.0;
    ReduceKernel kernel = nullptr;
    std::optional<WireLayout> wire;   // of a slot, where values travel in 16 bits
    std::vector<double> pre;          // by rank
    std::vector<ByProducts> partial;  // of the slices this rank owns
  };
  // A stage of the pipeline: which chunk it will do next.
  struct Cursor {
    uint64_t chunk = 0;      // since the communicator exists
    uint64_t operation = 0;  // number of the operation it belongs to
    uint64_t local = 0;      // number of the chunk within the operation
  };
  struct Range {
    uint64_t low, high;
    uint64_t count() const { return high - low; }
  };

  void post_record(uint32_t slot, uint64_t step, std::shared_ptr<Work> work);
  bool all_posted(uint32_t slot, uint64_t ticket) const;
  bool append_to_log(uint32_t slot);
  void read_log();
  void absorb();
  Active start(uint32_t slot, std::shared_ptr<Work> work);
  std::unique_ptr<Error> check_agreement(uint32_t slot, const Work& work) const;
  void finish_front();

  Step try_drive();
  Step drive_locked();
  bool try_copy_in();
  bool try_reduce();
  bool try_copy_out();
  void copy_in(Active& active, uint64_t local, uint64_t chunk);
  void reduce(Active& active, uint64_t local, uint64_t chunk);
  void copy_out(Active& active, uint64_t local, uint64_t chunk);
  // The three of them where values travel in 16 bits.
  void copy_in_wire(Active& active, uint64_t local, uint64_t chunk);
  void reduce_wire(Active& active, uint64_t local, uint64_t chunk);
  void copy_out_wire(Active& active, uint64_t local, uint64_t chunk);
  void put_block(const Active& active, Range block, int owner, uint64_t number, uint64_t first,
                 char* slot);
  void combine_by_products(Active& active, uint64_t local, uint64_t chunk);
  Active* at(const Cursor& cursor);
  void advance(Cursor& cursor, const Active& active);
  uint64_t least(std::atomic<uint64_t> Progress::* counter) const;
  Range chunk_range(const Active& active, uint64_t local) const;
  Range slice(Range chunk, int owner) const;

  void check_open() const;
  void mark_closed(const std::string& why);
  void start_thread();
  void wake_thread();
  void thread_main();

  std::shared_ptr<HostControlPlane> control_;
  std::vector<int> members_;
  uint64_t key_;  // the same on all members, and nobody else's
  int rank_;
  int size_;
  uint64_t generation_;
  std::unique_ptr<SharedMemory> memory_;
  Staging staging_;
  uint64_t redundant_bytes_;

  // Posting and the log. Held for moments only: the hook of a gradient takes it.
  std::mutex schedule_mutex_;
  std::vector<std::shared_ptr<Work>> pending_;  // by slot: posted, not in the log yet
  std::vector<std::pair<uint32_t, std::shared_ptr<Work>>> scheduled_;
  std::atomic<uint64_t> log_position_{0};
  std::atomic<bool> has_scheduled_{false};
  std::atomic<bool> closed_{false};
  std::string closed_because_;  // written once, before closed_

  // The pipeline. Held by whoever drives, for one chunk at a time.
  std::mutex drive_mutex_;
  std::deque<Active> active_;
  uint64_t first_operation_ = 0;
  Cursor in_, reduce_, out_;
  std::vector<char> scratch_;
  uint64_t busy_since_ = 0;
  std::atomic<uint64_t> busy_ns_{0};

  // The thread that works while nobody waits.
  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::atomic<int> outstanding_{0};  // posted works that have not finished
  std::atomic<int> helpers_{0};
  std::atomic<bool> stop_{false};
  bool thread_idle_ = false;
  std::unique_ptr<std::thread> thread_;

  std::mutex in_order_mutex_;
  uint64_t in_order_count_ = 0;
};

}  // namespace hvd
