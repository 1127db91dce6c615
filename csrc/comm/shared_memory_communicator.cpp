#include "comm/shared_memory_communicator.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/clock.h"

namespace hvd {
namespace {

constexpr uint64_t kSliceGrain = 64;  // elements; slices begin on cache lines
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
  hash = mix(hash, (work.accumulate_f64 ? 1u : 0u) | (work.divide_by_weight ? 2u : 0u) |
                       (work.want_by_products ? 4u : 0u));
  uint64_t post = 0;
  std::memcpy(&post, &work.post, sizeof post);
  hash = mix(hash, post);
  hash = mix(hash, static_cast<uint64_t>(work.root));
  for (uint64_t size : work.sizes) hash = mix(hash, size);
  return mix(hash, work.tag);
}

// Calls use(segment, offset in the segment, place behind `low`, count) for every piece of a
// segment that lies in [low, high), all in elements.
template <class Use>
void for_pieces(const Layout& layout, uint64_t low, uint64_t high, Use use) {
  if (low >= high) return;
  size_t segment = static_cast<size_t>(
      std::upper_bound(layout.starts.begin(), layout.starts.end(), low) - layout.starts.begin() -
      1);
  for (uint64_t place = low; place < high; ++segment) {
    const uint64_t offset = place - layout.starts[segment];
    if (offset >= layout.counts[segment]) continue;  // an empty segment
    const uint64_t count = std::min(high - place, layout.counts[segment] - offset);
    use(segment, offset, place - low, count);
    place += count;
  }
}

char* element(void* base, uint64_t index, size_t width) {
  return static_cast<char*>(base) + index * width;
}

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<HostControlPlane> control,
                                                   std::vector<int> members, uint64_t id,
                                                   const StagingSettings& settings,
                                                   uint64_t timeout_ns, const Interrupt* interrupt)
    : control_(std::move(control)),
      members_(std::move(members)),
      rank_(static_cast<int>(std::find(members_.begin(), members_.end(), control_->rank()) -
                             members_.begin())),
      size_(static_cast<int>(members_.size())),
      generation_(fork_generation()),
      staging_(nullptr, size_, settings.slots, settings.slot_bytes),
      // Reading `size` shares redundantly beats a second wait as long as they are few bytes.
      redundant_bytes_(std::min<uint64_t>(settings.slot_bytes,
                                          (64u << 10) / static_cast<uint64_t>(size_))),
      pending_(kAllSlots) {
  if (settings.slots < 2 || settings.slots > kMostRingSlots || settings.slot_bytes < 4096 ||
      settings.slot_bytes % 64 != 0) {
    throw Error(ErrorKind::bad_argument,
                "the staging ring takes 2 to " + std::to_string(kMostRingSlots) +
                    " slots of at least 4096 bytes, a multiple of 64; got " +
                    std::to_string(settings.slots) + " slots of " +
                    std::to_string(settings.slot_bytes) + " bytes");
  }
  control_->check_usable();
  memory_ = control_->share(members_, (id << 1) | 1,
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
    log_position_.store(position + 1, std::memory_order_relaxed);
    has_scheduled_.store(true, std::memory_order_relaxed);
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
    if (staging_.record(slot, rank).ticket.load(std::memory_order_acquire) != step + 1) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// With drive_mutex_. Moves what the log has into the pipeline.
void SharedMemoryCommunicator::absorb() {
  const uint64_t position = log_position_.load(std::memory_order_relaxed);
  const bool news =
      staging_.log(position).load(std::memory_order_acquire) >> 16 == position + 1;
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
    active.chunk_elements = slot_bytes / width;
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
    active.kernel = find_reduce_kernel(work->layout->dtype, work->op, work->accumulate_f64);
    double weights = 0;
    for (int rank = 0; rank < size_; ++rank) {
      active.pre.push_back(staging_.record(slot, rank).pre);
      weights += staging_.record(slot, rank).weight;
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

// ---- the pipeline ----

SharedMemoryCommunicator::Active* SharedMemoryCommunicator::at(const Cursor& cursor) {
  const uint64_t index = cursor.operation - first_operation_;
  return index < active_.size() ? &active_[index] : nullptr;
}

void SharedMemoryCommunicator::advance(Cursor& cursor, const Active& active) {
  ++cursor.chunk;
  if (++cursor.local == active.chunks) {
    cursor.local = 0;
    ++cursor.operation;
  }
}

uint64_t SharedMemoryCommunicator::least(std::atomic<uint64_t> Progress::* counter) const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (int rank = 0; rank < size_; ++rank) {
    least = std::min(least, (staging_.progress(rank).*counter).load(std::memory_order_acquire));
  }
  return least;
}

SharedMemoryCommunicator::Range SharedMemoryCommunicator::chunk_range(const Active& active,
                                                                      uint64_t local) const {
  const uint64_t low = local * active.chunk_elements;
  return {low, std::min(low + active.chunk_elements, active.work->layout->total)};
}

SharedMemoryCommunicator::Range SharedMemoryCommunicator::slice(Range chunk, int owner) const {
  const uint64_t ranks = static_cast<uint64_t>(size_);
  const uint64_t share =
      (chunk.count() + ranks * kSliceGrain - 1) / (ranks * kSliceGrain) * kSliceGrain;
  const uint64_t low = std::min(chunk.high, chunk.low + share * static_cast<uint64_t>(owner));
  return {low, std::min(chunk.high, low + share)};
}

Step SharedMemoryCommunicator::drive() {
  // Who waits for work that was dropped would wait for ever.
  check_open();
  return try_drive();
}

Step SharedMemoryCommunicator::try_drive() {
  std::unique_lock<std::mutex> lock(drive_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Step::elsewhere;
  return drive_locked();
}

Step SharedMemoryCommunicator::drive_locked() {
  absorb();
  if (active_.empty()) return Step::blocked;
  // The last stage first: what it frees lets the others go on, and its data is still in a cache.
  const bool worked = try_copy_out() || try_reduce() || try_copy_in();
  return worked ? Step::progressed : Step::blocked;
}

bool SharedMemoryCommunicator::try_copy_in() {
  Active* active = at(in_);
  if (active == nullptr) return false;
  // The slot was last used `slots` chunks ago; nobody may read it any more.
  if (in_.chunk >= staging_.slots() &&
      least(&Progress::copied_out) <= in_.chunk - staging_.slots()) {
    return false;
  }
  if (in_.local >= active->data_chunks) {
    // By-products are complete once this rank has reduced its slices of all chunks before.
    if (reduce_.operation != in_.operation || reduce_.local < active->data_chunks) return false;
  }
  copy_in(*active, in_.local, in_.chunk);
  advance(in_, *active);
  staging_.progress(rank_).copied_in.store(in_.chunk, std::memory_order_release);
  control_->notify();
  return true;
}

bool SharedMemoryCommunicator::try_reduce() {
  if (reduce_.chunk >= in_.chunk) return false;
  Active* active = at(reduce_);
  const bool reduces = active->work->kind == WorkKind::reduce || active->redundant;
  if (reduces && least(&Progress::copied_in) <= reduce_.chunk) return false;
  if (active->kernel != nullptr && !active->work->error && reduce_.local < active->data_chunks) {
    reduce(*active, reduce_.local, reduce_.chunk);
  }
  const bool others_wait = !active->redundant;
  advance(reduce_, *active);
  staging_.progress(rank_).reduced.store(reduce_.chunk, std::memory_order_release);
  if (others_wait) control_->notify();
  return true;
}

bool SharedMemoryCommunicator::try_copy_out() {
  if (out_.chunk >= reduce_.chunk) return false;
  Active* active = at(out_);
  const Work& work = *active->work;
  if (!active->redundant) {
    if (work.kind == WorkKind::broadcast) {
      const auto& root = staging_.progress(work.root).copied_in;
      if (root.load(std::memory_order_acquire) <= out_.chunk) return false;
    } else if (work.kind == WorkKind::allgather || out_.local >= active->data_chunks) {
      if (least(&Progress::copied_in) <= out_.chunk) return false;
    } else if (least(&Progress::reduced) <= out_.chunk) {
      return false;
    }
    copy_out(*active, out_.local, out_.chunk);
  }
  const bool last = out_.local + 1 == active->chunks;
  advance(out_, *active);
  if (last) finish_front();
  staging_.progress(rank_).copied_out.store(out_.chunk, std::memory_order_release);
  control_->notify();
  return true;
}

void SharedMemoryCommunicator::finish_front() {
  Active done = std::move(active_.front());
  active_.pop_front();
  ++first_operation_;
  Work& work = *done.work;
  work.done_ns = now_ns();
  if (active_.empty()) {
    busy_ns_.fetch_add(work.done_ns - busy_since_, std::memory_order_relaxed);
  }
  if (done.slot < kSlots) {
    if (on_done) on_done(done.slot, work);
    outstanding_.fetch_sub(1, std::memory_order_relaxed);
  }
  // Release: who sees it may use the result and free the memory.
  work.finished.store(true, std::memory_order_release);
}

void SharedMemoryCommunicator::copy_in(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  char* slot = staging_.slot(rank_, chunk);
  if (work.error || work.kind == WorkKind::barrier) return;
  if (work.kind == WorkKind::allgather) {
    const uint64_t size = work.sizes[static_cast<size_t>(rank_)];
    const uint64_t low = std::min(size, local * active.chunk_elements);
    const uint64_t high = std::min(size, low + active.chunk_elements);
    if (high > low) std::memcpy(slot, static_cast<const char*>(work.send) + low, high - low);
    return;
  }
  if (local >= active.data_chunks) {
    // NaN stands for "not finite", which a sum of squares of finite values never is.
    const uint64_t per_slot = staging_.slot_bytes() / sizeof(double);
    const uint64_t low = (local - active.data_chunks) * per_slot;
    const uint64_t high = std::min<uint64_t>(low + per_slot, active.partial.size());
    auto* sums = reinterpret_cast<double*>(slot);
    for (uint64_t i = low; i < high; ++i) {
      const ByProducts& partial = active.partial[i];
      sums[i - low] = partial.finite ? partial.sum_of_squares
                                     : std::numeric_limits<double>::quiet_NaN();
    }
    return;
  }
  const bool gives = work.kind == WorkKind::broadcast
                         ? work.root == rank_
                         : active.pre[static_cast<size_t>(rank_)] != 0;
  if (!gives) return;
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const auto copy = [&](Range part) {
    char* target = slot + (part.low - range.low) * width;
    for_pieces(layout, part.low, part.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* source = work.pointers[segment];
                 if (source == nullptr) {
                   std::memset(target + place * width, 0, count * width);
                 } else {
                   std::memcpy(target + place * width, element(source, offset, width),
                               count * width);
                 }
               });
  };
  if (work.kind == WorkKind::broadcast || active.redundant) {
    copy(range);
    return;
  }
  for (int owner = 0; owner < size_; ++owner) {
    if (owner != rank_) copy(slice(range, owner));
  }
}

void SharedMemoryCommunicator::reduce(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const Range own = active.redundant ? range : slice(range, rank_);
  const uint64_t slot_offset = (own.low - range.low) * width;
  std::vector<const void*> sources(static_cast<size_t>(size_));
  std::vector<double> pre = active.pre;
  char* const own_slot = staging_.slot(rank_, chunk) + slot_offset;
  if (active.redundant) scratch_.resize(own.count() * width);

  for_pieces(layout, own.low, own.high,
             [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
    void* memory = work.pointers[segment];
    char* mine = memory == nullptr ? nullptr : element(memory, offset, width);
    for (int rank = 0; rank < size_; ++rank) {
      sources[static_cast<size_t>(rank)] =
          staging_.slot(rank, chunk) + slot_offset + place * width;
    }
    ReduceArguments arguments{};
    if (active.redundant) {
      // Every rank reads the same slots, its own as well, so that all get the same bits.
      arguments.out = mine != nullptr ? mine : scratch_.data();
    } else {
      sources[static_cast<size_t>(rank_)] = mine;
      pre[static_cast<size_t>(rank_)] =
          mine != nullptr ? active.pre[static_cast<size_t>(rank_)] : 0.0;
      arguments.out = own_slot + place * width;
      arguments.second_out = mine;
    }
    arguments.sources = sources.data();
    arguments.pre = pre.data();
    arguments.source_count = size_;
    arguments.post = active.post;
    arguments.count = count;
    if (work.want_by_products) {
      arguments.by_products =
          active.redundant ? &work.by_products[segment] : &active.partial[segment];
    }
    active.kernel(arguments);
  });
}

void SharedMemoryCommunicator::copy_out(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  if (work.error) return;
  if (work.kind == WorkKind::allgather) {
    char* target = static_cast<char*>(work.receive);
    for (int rank = 0; rank < size_; ++rank) {
      const uint64_t size = work.sizes[static_cast<size_t>(rank)];
      const uint64_t low = std::min(size, local * active.chunk_elements);
      const uint64_t high = std::min(size, low + active.chunk_elements);
      if (high > low) std::memcpy(target + low, staging_.slot(rank, chunk), high - low);
      target += size;
    }
    return;
  }
  if (local >= active.data_chunks) {
    combine_by_products(active, local, chunk);
    return;
  }
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const auto copy = [&](Range part, int owner) {
    const char* source = staging_.slot(owner, chunk) + (part.low - range.low) * width;
    for_pieces(layout, part.low, part.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* target = work.pointers[segment];
                 if (target == nullptr) return;
                 std::memcpy(element(target, offset, width), source + place * width,
                             count * width);
               });
  };
  if (work.kind == WorkKind::broadcast) {
    if (work.root != rank_) copy(range, work.root);
    return;
  }
  for (int owner = 0; owner < size_; ++owner) {
    if (owner != rank_) copy(slice(range, owner), owner);
  }
}

// Sums of squares of all ranks' slices, added in rank order: the same bits everywhere.
void SharedMemoryCommunicator::combine_by_products(Active& active, uint64_t local,
                                                   uint64_t chunk) {
  std::vector<ByProducts>& total = active.work->by_products;
  const uint64_t per_slot = staging_.slot_bytes() / sizeof(double);
  const uint64_t low = (local - active.data_chunks) * per_slot;
  const uint64_t high = std::min<uint64_t>(low + per_slot, total.size());
  for (int rank = 0; rank < size_; ++rank) {
    const auto* sums = reinterpret_cast<const double*>(staging_.slot(rank, chunk));
    for (uint64_t i = low; i < high; ++i) {
      const double sum = sums[i - low];
      total[i].sum_of_squares += sum;
      total[i].finite = total[i].finite && !std::isnan(sum);
    }
  }
}

// ---- waiting, the thread, the end ----

void SharedMemoryCommunicator::run(const std::shared_ptr<Work>& work, Wait settings) {
  std::lock_guard<std::mutex> in_order(in_order_mutex_);
  const uint64_t number = in_order_count_++;
  const auto slot = static_cast<uint32_t>(kSlots + number % kInOrderSlots);
  post_record(slot, number, work);
  if (!settings.describe) {
    settings.describe = [this, slot, number, &work] {
      std::string text = work->name;
      const std::vector<int> late = missing(slot, number);
      for (size_t i = 0; i < late.size(); ++i) {
        text += (i == 0 ? ", which has not been called by rank " : ", ") +
                std::to_string(members_[static_cast<size_t>(late[i])]);
      }
      return text;
    };
  }
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
              (failure != nullptr ? failure->text
                                  : std::string("a collective was broken off")) +
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
  if (thread_) thread_->join();
  thread_.reset();
}

void SharedMemoryCommunicator::set_helping(bool on) {
  if (on) {
    helpers_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  helpers_.fetch_sub(1, std::memory_order_relaxed);
  if (outstanding_.load(std::memory_order_relaxed) > 0) wake_thread();
}

void SharedMemoryCommunicator::wake_thread() {
  std::lock_guard<std::mutex> lock(idle_mutex_);
  if (!thread_ && !stop_) {
    // Signals belong to the main thread, where Python looks for them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::make_unique<std::thread>([this] { thread_main(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_->native_handle(), "hvd-comm");
  }
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
