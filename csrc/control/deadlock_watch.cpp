#include "control/deadlock_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"

namespace hvd {
namespace {

pid_t own_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// A number that another thread has got since counts as the one that had it before.
bool lives(pid_t thread) { return syscall(SYS_tgkill, getpid(), thread, 0) == 0; }

std::atomic<uint64_t> objects{0};

// The fact described at DeadlockWatch.
bool waits_for(const WaitRecord& waiting, const WaitRecord& other, int other_rank, uint64_t now,
               uint64_t settled_ns) {
  if (waiting.wait == 0 || other.wait == 0 || !waiting.is_missing(other_rank)) return false;
  // In the same operation it comes with what is missing while it waits.
  if (waiting.channel == other.channel && waiting.operation == other.operation) return false;
  return waiting.looked_ns >= other.since_ns + settled_ns &&
         now <= waiting.looked_ns + DeadlockWatch::kFreshNs;
}

}  // namespace

DeadlockWatch::DeadlockWatch(std::vector<SharedWaitRecord*> records, int rank, uint64_t settled_ns)
    : records_(std::move(records)),
      rank_(rank),
      id_(objects.fetch_add(1, std::memory_order_relaxed) + 1),
      opener_(own_thread()),
      settled_ns_(settled_ns) {}

void DeadlockWatch::enter() {
  static thread_local uint64_t entered = 0;  // so that the list is looked through once
  if (entered == id_ && !told_.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (entered != id_) {
    const pid_t thread = own_thread();
    if (thread != opener_ && std::find(others_.begin(), others_.end(), thread) == others_.end()) {
      others_.push_back(thread);
    }
    entered = id_;
  }
  // Another thread, or a signal handler in the middle of the wait that has been told.
  withdraw_locked();
}

// With mutex_.
bool DeadlockWatch::alone() const {
  return own_thread() == opener_ && std::none_of(others_.begin(), others_.end(), lives);
}

// With mutex_.
void DeadlockWatch::withdraw_locked() {
  if (own_.wait == 0) return;
  own_ = WaitRecord{};
  records_[static_cast<size_t>(rank_)]->write(own_);
  told_.store(false, std::memory_order_relaxed);
}

uint64_t DeadlockWatch::tell(uint64_t wait, uint64_t looked_ns, uint64_t channel,
                             uint64_t operation, const std::vector<int>& missing) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!alone()) {
    withdraw_locked();
    return 0;
  }
  WaitRecord record;
  const bool goes_on = wait != 0 && wait == own_.wait;
  record.wait = goes_on ? wait : ++waits_;
  record.since_ns = goes_on ? own_.since_ns : now_ns();
  record.looked_ns = looked_ns;
  record.channel = channel;
  record.operation = operation;
  for (const int rank : missing) record.add_missing(rank);
  own_ = record;
  records_[static_cast<size_t>(rank_)]->write(own_);
  told_.store(true, std::memory_order_relaxed);
  return record.wait;
}

void DeadlockWatch::withdraw(uint64_t wait) {
  if (wait == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (own_.wait == wait) withdraw_locked();
}

std::vector<int> DeadlockWatch::find() const {
  const int size = std::min(static_cast<int>(records_.size()), WaitRecord::kRanks);
  std::vector<WaitRecord> records(static_cast<size_t>(size));
  std::vector<bool> known(static_cast<size_t>(size));
  const auto record_of = [&](int rank) -> const WaitRecord& {
    const auto index = static_cast<size_t>(rank);
    if (!known[index]) records[index] = records_[index]->read();
    known[index] = true;
    return records[index];
  };
  if (rank_ >= size) return {};
  const uint64_t now = now_ns();
  std::vector<int> circle = find_circle(record_of, size, rank_, now, settled_ns_);
  // All of these waits lasted from the last reading above to the first one below.
  for (const int rank : circle) {
    const auto index = static_cast<size_t>(rank);
    if (records_[index]->read().wait != records[index].wait) return {};
  }
  std::vector<int> found = circle;
  for (int rank = 0; rank < size && !circle.empty(); ++rank) {
    const WaitRecord& record = record_of(rank);
    const bool told = std::any_of(found.begin(), found.end(), [&](int other) {
      return record.channel == record_of(other).channel &&
             record.operation == record_of(other).operation;
    });
    const bool doomed = std::any_of(circle.begin(), circle.end(), [&](int other) {
      return waits_for(record, record_of(other), other, now, 0);
    });
    if (doomed && !told) found.push_back(rank);
  }
  return found;
}

std::vector<int> find_circle(const std::function<const WaitRecord&(int)>& record_of, int size,
                             int from, uint64_t now, uint64_t settled_ns) {
  // Depth first. A rank that comes up again while it is on the path closes a circle.
  std::vector<int> path{from};
  std::vector<int> next{0};  // by place in the path: the rank to look at next
  std::vector<bool> seen(static_cast<size_t>(size));
  seen[static_cast<size_t>(from)] = true;
  while (!path.empty()) {
    const int other = next.back()++;
    if (other >= size) {
      path.pop_back();
      next.pop_back();
      continue;
    }
    if (!waits_for(record_of(path.back()), record_of(other), other, now, settled_ns)) continue;
    const auto place = std::find(path.begin(), path.end(), other);
    if (place != path.end()) return std::vector<int>(place, path.end());
    if (seen[static_cast<size_t>(other)]) continue;  // no circle behind that one
    seen[static_cast<size_t>(other)] = true;
    path.push_back(other);
    next.push_back(0);
  }
  return {};
}

}  // namespace hvd
