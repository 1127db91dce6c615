#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "control/control_plane.h"
#include "kernels/reduce.h"

namespace hvd {

// Where the elements of a collective lie: a list of segments that are treated as one long vector.
// Made once, used in every step; the pointers come with each Work.
struct Layout {
  Layout(DType dtype, std::vector<uint64_t> counts);

  DType dtype;
  std::vector<uint64_t> counts;  // elements of each segment
  std::vector<uint64_t> starts;  // place of each segment in the long vector
  uint64_t total = 0;            // elements
};

enum class WorkKind : uint8_t { reduce, broadcast, allgather, barrier };

// One collective, as one rank sees it. The owner keeps it, and the memory it points at, alive
// until `finished`.
struct Work {
  WorkKind kind = WorkKind::reduce;
  std::shared_ptr<const Layout> layout;  // reduce, broadcast
  // One per segment. Null: this rank gives nothing (zero) and takes nothing back.
  std::vector<void*> pointers;

  // reduce: out = post * sum over ranks of pre_r * x_r; post is `post`, over the sum of the
  // ranks' weights when divide_by_weight. A rank whose pre is 0 is not read.
  ReduceOp op = ReduceOp::sum;
  bool accumulate_f64 = false;
  // f16 or bf16: what ranks give each other has this type (see kernels/wire.h), which rounds every
  // rank's values once; sum and result have the types they have without it. For sums of f32 and
  // f64; others, and a world of one, have no use for it and ignore it.
  std::optional<DType> wire;
  bool divide_by_weight = false;
  double pre = 1.0;
  double weight = 1.0;
  double post = 1.0;
  // What x_r has been multiplied by already (a loss scale); 0: by whatever the others' is. The
  // result has the scale of the first rank that tells one; with `unscale` it has none.
  double scale = 1.0;
  bool unscale = false;
  bool want_by_products = false;
  std::vector<ByProducts> by_products;  // one per segment, when wanted

  int root = 0;  // broadcast: member index

  // allgather: bytes; member r's part goes to receive + sum of the sizes below r.
  const void* send = nullptr;
  void* receive = nullptr;
  std::vector<uint64_t> sizes;

  // Posted work: the ranks' works of a slot belong together when their steps are equal.
  uint64_t step = 0;
  // Compared between the ranks before anything moves, together with kind, type and size: what
  // differs is an error on every rank that shows the names.
  uint64_t tag = 0;
  std::string name;

  // Outcome. `finished` is stored with release after everything else.
  std::atomic<bool> finished{false};
  std::unique_ptr<Error> error;
  uint64_t started_ns = 0;
  uint64_t done_ns = 0;
};

// A group of ranks that reduces together. Collectives come in two forms:
// * posted: belongs to a slot number that the ranks agreed on (a gradient bucket); different
//   ranks may post in different order, and what all have posted is served first;
// * run: all ranks call them in the same order, and the call waits.
//
// Thread contract: one thread posts; any thread may run or drive.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // index among the members
  virtual int size() const = 0;
  virtual const std::vector<int>& members() const = 0;  // session ranks
  virtual ControlPlane& control() = 0;

  static constexpr uint32_t kSlots = 1024;
  // Starts the work once all ranks have posted theirs for this slot with the same step. An error
  // lands in work->error.
  virtual void post(uint32_t slot, std::shared_ptr<Work> work) = 0;
  // Takes back what was posted but not started on any rank. The caller knows (by agreement) that
  // not all ranks posted it.
  virtual void withdraw(uint32_t slot) = 0;
  // Members (as indices) that have not posted the slot for that step.
  virtual std::vector<int> missing(uint32_t slot, uint64_t step) const = 0;
  // Does a piece of the posted work, if there is any to do. For threads that wait anyway.
  virtual Step drive() = 0;
  // While one of these lives, the communicator's own thread leaves the work to the caller.
  class Helping {
   public:
    explicit Helping(Communicator& communicator) : communicator_(communicator) {
      communicator_.set_helping(true);
    }
    ~Helping() { communicator_.set_helping(false); }
    Helping(const Helping&) = delete;
    Helping& operator=(const Helping&) = delete;

   private:
    Communicator& communicator_;
  };

  // Runs a collective to its end. Throws work.error, or the job's failure; after any other
  // exception than a mismatch the communicator is unusable.
  virtual void run(const std::shared_ptr<Work>& work, Wait settings) = 0;
  // Drops all work without regard to the other ranks, after a failure: memory of the caller is
  // not touched after this returns, and the communicator takes no more work.
  virtual void abandon() = 0;
  // abandon(), and the end of the communicator's own thread. Idempotent.
  virtual void close() = 0;

  // Observers; set before the first post.
  std::function<void(uint32_t slot, const Work&)> on_started;
  std::function<void(uint32_t slot, const Work&)> on_done;
  // Nanoseconds during which posted work was under way.
  virtual uint64_t busy_ns() const = 0;

 protected:
  virtual void set_helping(bool on) = 0;
};

}  // namespace hvd
