#include "comm/shared_memory_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <new>

#include "base/clock.h"
#include "base/quiet_thread.h"
#include "kernels/wire.h"

namespace hvd {
namespace {

constexpr uint64_t kThreadSpinNs = 5'000;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash;
}

// Everything that has to be equal on all ranks for a work to make sense.
uint64_t signature_of(const Work& work) {
  uint64_t hash = mix(0, static_cast<uint64_t>(work.kind));
  if (work.layout) {
    hash = mix(hash, static_cast<uint64_t>(work.layout->dtype));
    hash = mix(hash, work.layout->total);
    for (uint64_t count : work.layout->counts) hash = mix(hash, count);
  }
  hash = mix(hash, static_cast<uint64_t>(work.op));
  hash = mix(hash, work.wire ? 1 + static_cast<uint64_t>(*work.wire) : 0);
  hash = mix(hash, (work.accumulate_f64 ? 1u : 0u) | (work.divide_by_weight ? 2u : 0u) |
                       (work.want_by_products ? 4u : 0u) | (work.unscale ? 8u : 0u));
  uint64_t post = 0;
  std::memcpy(&post, &work.post, sizeof post);
  hash = mix(hash, post);
  hash = mix(hash, static_cast<uint64_t>(work.root));
  for (uint64_t size : work.sizes) hash = mix(hash, size);
  return mix(hash, work.tag);
}

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<HostControlPlane> control,
                                                   std::vector<int> members, uint64_t id,
                                                   const StagingSettings& settings,
                                                   uint64_t timeout_ns, const Interrupt* interrupt)
    : control_(std::move(control)),
      members_(std::move(members)),
      key_((id << 1) | 1),
      rank_(static_cast<int>(std::find(members_.begin(), members_.end(), control_->rank()) -
                             members_.begin())),
      size_(static_cast<int>(members_.size())),
      generation_(fork_generation()),
      staging_(nullptr, size_, settings.slots, settings.slot_bytes),
      // Reading `size` shares redundantly beats a second wait as long as they are few bytes.
      redundant_bytes_(
          std::min<uint64_t>(settings.slot_bytes, (64u << 10) / static_cast<uint64_t>(size_))),
      pending_(kAllSlots) {
  const uint64_t least = std::max<uint64_t>(4096, WireLayout::least_slot_bytes(size_));
  if (settings.slots < 2 || settings.slots > kMostRingSlots || settings.slot_bytes < least ||
      settings.slot_bytes % 64 != 0) {
    throw Error(ErrorKind::bad_argument,
                "the staging ring takes 2 to " + std::to_string(kMostRingSlots) +
                    " slots of at least " + std::to_string(least) +
                    " bytes, a multiple of 64; got " + std::to_string(settings.slots) +
                    " slots of " + std::to_string(settings.slot_bytes) + " bytes");
  }
  control_->check_usable();
  memory_ = control_->share(members_, key_,
                            Staging::bytes_needed(size_, settings.slots, settings.slot_bytes),
                            timeout_ns, interrupt);
  staging_ = Staging(memory_->data(), size_, settings.slots, settings.slot_bytes);
}

SharedMemoryCommunicator::~SharedMemoryCommunicator() { close(); }

void SharedMemoryCommunicator::check_open() const {
  control_->check_usable();
  if (!closed_.load(std::memory_order_acquire)) return;
  throw Error(ErrorKind::rank_failed, closed_because_);
}

// ---- posting and the log ----

void SharedMemoryCommunicator::post(uint32_t slot, std::shared_ptr<Work> work) {
  control_->check_usable();
  start_thread();  // may fail; afterwards the other ranks count on this one
  outstanding_.fetch_add(1, std::memory_order_relaxed);
  try {
    const uint64_t step = work->step;
    post_record(slot, step, std::move(work));
  } catch (...) {
    outstanding_.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
  wake_thread();
}

void SharedMemoryCommunicator::post_record(uint32_t slot, uint64_t step,
                                           std::shared_ptr<Work> work) {
  bool appended = false;
  {
    std::lock_guard<std::mutex> lock(schedule_mutex_);
    check_open();
    PostRecord& record = staging_.record(slot, rank_);
    record.signature = signature_of(*work);
    record.pre = work->pre;
    record.weight = work->weight;
    record.scale = work->scale;
    record.bytes = work->kind == WorkKind::allgather ? work->sizes[static_cast<size_t>(rank_)] : 0;
    const size_t count = std::min(work->name.size(), kNameBytes);
    std::memcpy(record.name, work->name.data(), count);
    record.name[count] = 0;
    pending_[slot] = std::move(work);
    // Release for the fields above. The fence orders this store before the loads of the other
    // ranks' tickets: of two ranks that post at the same time at least one sees both.
    record.ticket.store(step + 1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    read_log();
    if (pending_[slot] && all_posted(slot, step + 1)) appended = append_to_log(slot);
  }
  if (appended) control_->notify();
}

bool SharedMemoryCommunicator::all_posted(uint32_t slot, uint64_t ticket) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (staging_.record(slot, rank).ticket.load(std::memory_order_acquire) != ticket) return false;
  }
  return true;
}

// With schedule_mutex_. The slot is pending here and posted by all ranks. False when another rank
// put it into the log first.
bool SharedMemoryCommunicator::append_to_log(uint32_t slot) {
  bool won = false;
  while (pending_[slot]) {
    const uint64_t position = log_position_.load(std::memory_order_relaxed);
    std::atomic<uint64_t>& entry = staging_.log(position);
    uint64_t seen = entry.load(std::memory_order_acquire);
    if (seen >> 16 != position + 1) {
      // Whatever lies here is of an earlier lap and read by everybody (see kLogEntries).
      won = entry.compare_exchange_strong(seen, (position + 1) << 16 | slot,
                                          std::memory_order_acq_rel);
    }
    read_log();
  }
  return won;
}

// With schedule_mutex_. Takes over every entry that the ranks have agreed on.
void SharedMemoryCommunicator::read_log() {
  for (;;) {
    const uint64_t position = log_position_.load(std::memory_order_relaxed);
    const uint64_t entry = staging_.log(position).load(std::memory_order_acquire);
    if (entry >> 16 != position + 1) return;
    const auto slot = static_cast<uint32_t>(entry & 0xffff);
    scheduled_.emplace_back(slot, std::move(pending_[slot]));
    pending_[slot] = nullptr;
    // In this order: who finds the entry read (absorb, without the lock) finds that there is work.
    has_scheduled_.store(true, std::memory_order_relaxed);
    log_position_.store(position + 1, std::memory_order_release);
  }
}

void SharedMemoryCommunicator::withdraw(uint32_t slot) {
  std::lock_guard<std::mutex> lock(schedule_mutex_);
  if (!pending_[slot]) return;
  pending_[slot] = nullptr;
  staging_.record(slot, rank_).ticket.store(0, std::memory_order_release);
  outstanding_.fetch_sub(1, std::memory_order_relaxed);
}

std::vector<int> SharedMemoryCommunicator::missing(uint32_t slot, uint64_t step) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    // Who has posted its next work there has posted this one.
    if (staging_.record(slot, rank).ticket.load(std::memory_order_acquire) < step + 1) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// With drive_mutex_. Moves what the log has into the pipeline.
void SharedMemoryCommunicator::absorb() {
  const uint64_t position = log_position_.load(std::memory_order_acquire);
  const bool news = staging_.log(position).load(std::memory_order_acquire) >> 16 == position + 1;
  if (!news && !has_scheduled_.load(std::memory_order_relaxed)) return;
  std::vector<std::pair<uint32_t, std::shared_ptr<Work>>> taken;
  {
    std::lock_guard<std::mutex> lock(schedule_mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    read_log();
    taken.swap(scheduled_);
    has_scheduled_.store(false, std::memory_order_relaxed);
  }
  for (auto& [slot, work] : taken) {
    if (active_.empty()) busy_since_ = now_ns();
    active_.push_back(start(slot, std::move(work)));
    if (active_.back().slot < kSlots && on_started) on_started(slot, *active_.back().work);
  }
}

std::unique_ptr<Error> SharedMemoryCommunicator::check_agreement(uint32_t slot,
                                                                 const Work& work) const {
  const uint64_t own = staging_.record(slot, rank_).signature;
  for (int rank = 0; rank < size_; ++rank) {
    const PostRecord& record = staging_.record(slot, rank);
    if (record.signature == own) continue;
    return std::make_unique<Error>(
        ErrorKind::mismatch,
        "ranks do not agree: rank " + std::to_string(members_[static_cast<size_t>(rank_)]) +
            " came with " + work.name + ", rank " +
            std::to_string(members_[static_cast<size_t>(rank)]) + " with " +
            std::string(record.name, strnlen(record.name, kNameBytes)) +
            "; all ranks have to call the same collectives with the same types and sizes");
  }
  return nullptr;
}

SharedMemoryCommunicator::Active SharedMemoryCommunicator::start(uint32_t slot,
                                                                 std::shared_ptr<Work> work) {
  Active active;
  active.slot = slot;
  work->started_ns = now_ns();
  work->error = check_agreement(slot, *work);
  // A work that failed still takes its place in the pipeline, as one empty chunk, on all ranks.
  active.redundant = true;
  active.data_chunks = 1;
  const uint64_t slot_bytes = staging_.slot_bytes();
  if (!work->error && work->layout) {
    const size_t width = size_of(work->layout->dtype);
    const uint64_t total = work->layout->total;
    const bool by_wire = work->wire && work->kind == WorkKind::reduce && size_ > 1 &&
                         work->op == ReduceOp::sum && has_wire_form(work->layout->dtype);
    if (by_wire) active.wire.emplace(*work->wire, work->layout->dtype, size_, slot_bytes);
    active.chunk_elements = active.wire ? active.wire->chunk_elements : slot_bytes / width;
    active.redundant = work->kind == WorkKind::reduce && total * width <= redundant_bytes_;
    active.data_chunks =
        std::max<uint64_t>(1, (total + active.chunk_elements - 1) / active.chunk_elements);
  } else if (!work->error && work->kind == WorkKind::allgather) {
    uint64_t most = 0;
    for (uint64_t size : work->sizes) most = std::max(most, size);
    active.chunk_elements = slot_bytes;
    active.redundant = false;
    active.data_chunks = std::max<uint64_t>(1, (most + slot_bytes - 1) / slot_bytes);
  }
  active.chunks = active.data_chunks;
  if (!work->error && work->kind == WorkKind::reduce) {
    active.kernel =
        active.wire ? find_wire_kernel(active.wire->type, work->layout->dtype, work->accumulate_f64)
                    : find_reduce_kernel(work->layout->dtype, work->op, work->accumulate_f64);
    double weights = 0;
    double scale = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const PostRecord& record = staging_.record(slot, rank);
      active.pre.push_back(record.pre);
      weights += record.weight;
      if (scale == 0) scale = record.scale;
    }
    for (int rank = 0; rank < size_; ++rank) {
      const double told = staging_.record(slot, rank).scale;
      const double own = told != 0 ? told : scale;
      // Equal scales leave the factor as it is, bit for bit.
      if (own != 0) active.pre[static_cast<size_t>(rank)] *= (work->unscale ? 1.0 : scale) / own;
    }
    active.post = work->post;
    if (work->divide_by_weight && weights != 0) active.post /= weights;
    if (work->want_by_products) {
      const size_t segments = work->layout->counts.size();
      work->by_products.assign(segments, ByProducts{});
      active.partial.assign(segments, ByProducts{});
      if (!active.redundant) {
        active.chunks += (segments * sizeof(double) + slot_bytes - 1) / slot_bytes;
      }
    }
  }
  active.work = std::move(work);
  return active;
}

// ---- waiting, the thread, the end ----

void SharedMemoryCommunicator::run(const std::shared_ptr<Work>& work, Wait settings) {
  control_->enter_wait();
  // Another thread of this rank may be inside a collective for long. Polled, because waits of the
  // standard library with a deadline are unknown to older ThreadSanitizers.
  std::unique_lock<std::mutex> in_order(in_order_mutex_, std::try_to_lock);
  const uint64_t asked = in_order.owns_lock() ? 0 : now_ns();
  while (!in_order.owns_lock()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (settings.interrupt != nullptr && *settings.interrupt) (*settings.interrupt)();
    if (settings.timeout_ns != 0 && now_ns() - asked >= settings.timeout_ns) {
      throw Error(ErrorKind::timeout, "rank " + std::to_string(control_->rank()) +
                                          " could not start " + work->name +
                                          ": another thread of it is still in a collective");
    }
    (void)in_order.try_lock();
  }
  const uint64_t number = in_order_count_++;
  const auto slot = static_cast<uint32_t>(kSlots + number % kInOrderSlots);
  post_record(slot, number, work);
  const auto late = [&] {
    std::vector<int> ranks = missing(slot, number);
    for (int& rank : ranks) rank = members_[static_cast<size_t>(rank)];
    return ranks;
  };
  if (!settings.describe) {
    settings.describe = [&late, &work] {
      std::string text = work->name;
      const char* before = ", which has not been called by rank ";
      for (const int rank : late()) {
        text += before + std::to_string(rank);
        before = ", ";
      }
      return text;
    };
  }
  settings.channel = key_;
  settings.operation = number;
  settings.missing = std::ref(late);
  const Helping helping(*this);
  try {
    control_->wait(
        [&] { return work->finished.load(std::memory_order_acquire) ? Step::done : drive(); },
        settings, members_);
  } catch (...) {
    abandon();
    throw;
  }
  if (work->error) throw Error(*work->error);
}

void SharedMemoryCommunicator::abandon() {
  if (generation_ != fork_generation()) return;
  std::lock_guard<std::mutex> drive_lock(drive_mutex_);
  std::lock_guard<std::mutex> lock(schedule_mutex_);
  const Failure* failure = control_->failure();
  mark_closed("rank " + std::to_string(control_->rank()) + " cannot communicate any more: " +
              (failure != nullptr ? failure->text : std::string("a collective was broken off")) +
              "; end this process, or close the session and open a new one");
  active_.clear();
  scheduled_.clear();
  for (auto& work : pending_) work = nullptr;
  has_scheduled_.store(false, std::memory_order_relaxed);
  outstanding_.store(0, std::memory_order_relaxed);
}

// With schedule_mutex_. The first reason stands.
void SharedMemoryCommunicator::mark_closed(const std::string& why) {
  if (closed_.load(std::memory_order_relaxed)) return;
  closed_because_ = why;
  closed_.store(true, std::memory_order_release);
}

void SharedMemoryCommunicator::close() {
  if (generation_ != fork_generation()) {
    (void)thread_.release();  // runs in the parent; nothing to join here
    // The thread may have been waiting for it at the fork, and its destructor waits for waiters.
    new (&idle_) std::condition_variable();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(schedule_mutex_);
    mark_closed("this communicator has been closed");
  }
  abandon();
  {
    std::lock_guard<std::mutex> lock(idle_mutex_);
    stop_ = true;
    idle_.notify_all();
  }
  control_->notify_self();
  // Two threads may close at once; one of them joins.
  std::unique_ptr<std::thread> ended;
  {
    std::lock_guard<std::mutex> lock(idle_mutex_);
    ended = std::move(thread_);
  }
  if (ended) ended->join();
}

void SharedMemoryCommunicator::set_helping(bool on) {
  if (on) {
    helpers_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  helpers_.fetch_sub(1, std::memory_order_relaxed);
  if (outstanding_.load(std::memory_order_relaxed) > 0) wake_thread();
}

void SharedMemoryCommunicator::start_thread() {
  std::lock_guard<std::mutex> lock(idle_mutex_);
  if (thread_ || stop_) return;
  thread_ = start_quiet_thread("hvd-comm", [this] { thread_main(); });
}

void SharedMemoryCommunicator::wake_thread() {
  std::lock_guard<std::mutex> lock(idle_mutex_);
  if (thread_idle_) idle_.notify_one();
}

void SharedMemoryCommunicator::thread_main() {
  uint64_t blocked_since = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(idle_mutex_);
      const auto wanted = [this] {
        return outstanding_.load(std::memory_order_relaxed) > 0 &&
               helpers_.load(std::memory_order_relaxed) == 0;
      };
      if (!stop_ && !wanted()) {
        // A helper that found the pipeline in our hands sleeps until somebody rings.
        if (helpers_.load(std::memory_order_relaxed) > 0) control_->notify_self();
        thread_idle_ = true;
        idle_.wait(lock, [&] { return stop_ || wanted(); });
        thread_idle_ = false;
        blocked_since = 0;
      }
      if (stop_) return;
    }
    if (try_drive() == Step::progressed) {
      blocked_since = 0;
      continue;
    }
    if (blocked_since == 0) blocked_since = now_ns();
    if (now_ns() - blocked_since < kThreadSpinNs) continue;
    Bells::Sleep sleep(control_->bells());
    if (!stop_.load() && try_drive() != Step::progressed) sleep.wait(100'000'000u);
    blocked_since = 0;
  }
}

}  // namespace hvd
