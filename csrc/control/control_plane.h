#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"

namespace hvd {

// What a rank tells all others once and for all: the job cannot go on.
struct Failure {
  int rank;        // who is to blame: the rank that died, failed or stayed away
  ErrorKind kind;  // what waiting calls raise: rank_failed, timeout or stall
  std::string text;
};

// How a wait goes on, said by the function that looks whether it is over.
enum class Step {
  blocked,     // nothing to do until another rank moves
  elsewhere,   // another thread of this process is at work on it
  progressed,  // did some work; ask again at once
  done,
};

// Settings of a wait. All times are CLOCK_MONOTONIC nanoseconds.
struct Wait {
  uint64_t timeout_ns = 0;  // 0 = no deadline
  bool first = false;       // the first step of a job may take much longer (compilation, warm-up)
  // Called at least every 100 ms while the wait sleeps; may throw, which ends the wait. The
  // bindings look for Ctrl-C here. May be null.
  const std::function<void()>* interrupt = nullptr;
  // What is being waited for, and whom: "gradient bucket 2 of step 7 (layer.weight, ...)".
  std::function<std::string()> describe;
  // The same for machines, who find out by it that ranks wait for each other: an operation that
  // all members come to between their waits (its channel's number, which is the same on all of
  // them and no other channel's, and its own in that), and the session ranks that have not come
  // there yet. Null: nobody looks.
  uint64_t channel = 0;
  uint64_t operation = 0;
  std::function<std::vector<int>()> missing;
};

// Small records of one group of ranks, exchanged in rounds: every member gives one record per
// round and gets all of them. Records of a round may differ in length.
//
// Thread contract: one thread at a time.
class RecordChannel {
 public:
  virtual ~RecordChannel() = default;
  // The same on all members, and no other channel's or communicator's.
  virtual uint64_t key() const = 0;
  // Gives this rank's record of the next round. Never blocks. The round before must be complete.
  virtual void begin(std::string record) = 0;
  // Moves the round on; true once the records of all members are here.
  virtual bool poll() = 0;
  // By member index; valid from poll() == true until the next begin().
  virtual const std::vector<std::string>& records() const = 0;
  // Members (as indices) whose record of the running round has not come yet.
  virtual std::vector<int> missing() const = 0;
};

// Numbers that each member of a group keeps for the others to look at, without a round: how far it
// has come, say. All zero at first.
//
// Thread contract: any thread at any time; one thread at a time writes a place.
class NumberBoard {
 public:
  virtual ~NumberBoard() = default;
  // What this rank wrote before it is there for those who read the number.
  virtual void publish(uint32_t place, uint64_t number) = 0;
  virtual uint64_t read(size_t member, uint32_t place) const = 0;
};

// Carries what ranks have to know of each other besides the data: liveness, failures, a request
// to stop, and small records. Nothing here assumes one host; the form for one host is a page of
// shared memory.
//
// Thread contract: every function may be called from any thread at any time.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collective over `members` (session ranks, ascending): a channel that only they use. `id`
  // tells channels of the same members apart; the members have to agree on it.
  virtual std::unique_ptr<RecordChannel> open_channel(const std::vector<int>& members, uint64_t id,
                                                      uint64_t timeout_ns,
                                                      const std::function<void()>* interrupt) = 0;
  // The same for a board with `places` numbers of each member.
  virtual std::unique_ptr<NumberBoard> open_board(const std::vector<int>& members, uint64_t id,
                                                  uint32_t places, uint64_t timeout_ns,
                                                  const std::function<void()>* interrupt) = 0;

  // The first failure of all ranks, or null. Cheap enough for a loop.
  virtual const Failure* failure() = 0;
  // Makes `text` the failure of the job, on behalf of this rank, unless there is one already.
  virtual void post_failure(ErrorKind kind, const std::string& text) = 0;
  // True when the rank has closed its session: it will not take part in anything any more.
  virtual bool has_left(int rank) const = 0;
  // When the rank last called the engine (now_ns clock).
  virtual uint64_t last_seen(int rank) const = 0;

  // A run ends in good order (SIGTERM): after the same point on all ranks, whoever asks for it.
  // Points are places that all ranks pass in the same order; each rank calls pass_point there,
  // from one thread, which never waits and says false when the run ends before this point.
  virtual void begin_run() = 0;  // on all ranks; a request in an earlier run is over
  virtual void request_stop() = 0;
  virtual bool stop_requested() const = 0;
  virtual bool pass_point() = 0;

  // What this rank is about outside the engine ("validation"), for the others' stall reports.
  virtual void set_activity(const std::string& text) = 0;

  // Wakes every rank that sleeps in wait().
  virtual void notify() = 0;
  virtual void notify_self() = 0;

  // Calls `step` until it says done. Spins for a short, adapting time, then sleeps until another
  // rank notifies. Throws the job's failure, and posts one when the deadline or the stall limit
  // passes. `needed`: session ranks without which `step` cannot get done; when one of them has
  // left and nothing moves any more, that is a failure too.
  virtual void wait(const std::function<Step()>& step, const Wait& settings,
                    const std::vector<int>& needed) = 0;
};

}  // namespace hvd
