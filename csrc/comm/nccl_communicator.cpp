#include "comm/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/descriptor.h"
#include "base/quiet_thread.h"
#include "control/host_control_plane.h"

namespace hvd {
namespace {

// Between two looks: at a call that NCCL is at, and at what a thread waits for.
constexpr uint64_t kSettleNs = 100'000u;
constexpr uint64_t kWaitedForNs = 50'000u;
// A call of NCCL gets this time to return before an abort.
constexpr uint64_t kAbortAfterNs = 5'000'000'000u;
// The control plane gets this time to say which rank it is that NCCL misses.
constexpr uint64_t kCulpritNs = 1'000'000'000u;
// The other ranks get this time to close their parts as well.
constexpr uint64_t kPartingNs = 1'000'000'000u;

void nap(uint64_t ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

ErrorKind kind_of(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return known != nullptr ? known->kind() : ErrorKind::error;
}

// Lets the watchdog look more often for as long as it lives.
class Waiter {
 public:
  explicit Waiter(std::atomic<int>& waiters) : waiters_(waiters) { ++waiters_; }
  ~Waiter() { --waiters_; }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  std::atomic<int>& waiters_;
};

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<ControlPlane> control, std::vector<int> members,
                                   uint64_t id, std::shared_ptr<DriverApi> driver,
                                   std::shared_ptr<NcclApi> nccl, CudaContext context,
                                   const NcclSettings& settings,
                                   const std::function<void()>* interrupt)
    : control_(std::move(control)),
      members_(std::move(members)),
      driver_(std::move(driver)),
      nccl_(std::move(nccl)),
      context_(context),
      settings_(settings),
      rank_(static_cast<int>(std::find(members_.begin(), members_.end(), control_->rank()) -
                             members_.begin())),
      generation_(fork_generation()) {
  try {
    channel_ = control_->open_channel(members_, id, settings_.init_timeout_ns, interrupt);
    board_ = control_->open_board(members_, id, kPlaces, settings_.init_timeout_ns, interrupt);
    const NcclUniqueId unique_id = exchange_id(interrupt);
    watchdog_ = start_quiet_thread("hvd-nccl-watch", [this] { watch_main(); });
    initialize(unique_id, interrupt);
    launcher_ = start_quiet_thread("hvd-nccl", [this] { launch_main(); });
  } catch (...) {
    end_threads();
    release();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { close(); }

std::string NcclCommunicator::list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

bool NcclCommunicator::usable() const { return generation_ == fork_generation(); }

// ---- The callers' side ----

void NcclCommunicator::check() {
  if (!usable()) {
    throw Error(ErrorKind::error,
                "this process was forked from rank " + std::to_string(control_->rank()) +
                    ": CUDA and NCCL stayed with the parent and cannot be used here; use them in "
                    "the parent, or start processes of their own (spawn)");
  }
  if (const Failure* failure = control_->failure()) fail(failure->kind, failure->text, false);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) throw_broken();
  if (closed_) {
    throw Error(ErrorKind::error, "rank " + std::to_string(control_->rank()) +
                                      " has closed the NCCL communicator \"" + settings_.name +
                                      "\": open a new one");
  }
}

// With mutex_.
void NcclCommunicator::throw_broken() const {
  const std::string advice =
      weights_valid_
          ? "nothing was under way, so the weights are as they were"
          : "it was aborted in the middle of its work: gradients, and weights that were made of "
            "them, may be garbage, so do not save them";
  throw Error(broken_->kind,
              "rank " + std::to_string(control_->rank()) + " cannot go on: " + broken_->text +
                  "; the NCCL communicator \"" + settings_.name + "\" is no more: " + advice +
                  "; start again from the last checkpoint, in a new session or a new process");
}

uint64_t NcclCommunicator::launch(Operation operation) {
  check();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) throw_broken();
  Flight flight;
  flight.ticket = ++tickets_;
  flight.number = operation.collective ? ++collectives_ : 0;
  flight.name = operation.name;
  if (flight.number != 0) board_->publish(kGiven, flight.number);
  queue_.emplace_back(std::move(flight), std::move(operation));
  queued_.notify_all();
  return tickets_;
}

void NcclCommunicator::wait_for(uint64_t ticket, Wait wait, const std::function<bool()>& there) {
  check();
  if (there()) return;
  const Waiter waiter(waiters_);
  if (!wait.describe) {
    wait.describe = [this, ticket] {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const Flight& flight : flights_) {
        if (flight.ticket <= ticket) return title(flight) + ", " + whereabouts(flight);
      }
      return "the NCCL communicator \"" + settings_.name + "\"";
    };
  }
  try {
    control_->wait([&] { return is_broken_ || there() ? Step::done : Step::blocked; }, wait, {});
  } catch (...) {
    if (const Failure* failure = control_->failure()) fail(failure->kind, failure->text, false);
    throw;
  }
  if (is_broken_) check();
}

void NcclCommunicator::stream_wait(CudaStream stream, uint64_t ticket, const Wait& wait) {
  wait_for(ticket, wait, [&] { return launched_ >= ticket; });
  const CudaContextScope scope(*driver_, context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) throw_broken();
  for (const Flight& flight : flights_) {
    if (flight.ticket != ticket) continue;
    // With the lock: the watchdog lends the event to another operation once this one has finished.
    driver_->check(driver_->stream_wait_event(stream, flight.event), "cuStreamWaitEvent");
  }
}

// Of the last collective that this ticket waits for; 0: none that is under way.
uint64_t NcclCommunicator::number_of(uint64_t ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t number = 0;
  for (const Flight& flight : flights_) {
    if (flight.ticket <= ticket) number = std::max(number, flight.number);
  }
  for (const auto& queued : queue_) {
    if (queued.first.ticket <= ticket) number = std::max(number, queued.first.number);
  }
  return number;
}

void NcclCommunicator::wait(uint64_t ticket, const Wait& given) {
  Wait wait = given;
  const uint64_t number = number_of(ticket);
  if (number != 0) {
    // Ranks that wait elsewhere, and have not even called launch() for it, will never come.
    wait.channel = channel_->key();
    wait.operation = exchanges_ + number;
    wait.missing = [this, number] {
      std::vector<int> ranks;
      for (size_t member = 0; member < members_.size(); ++member) {
        if (board_->read(member, kGiven) < number) ranks.push_back(members_[member]);
      }
      return ranks;
    };
  }
  wait_for(ticket, std::move(wait), [&] { return finished_ >= ticket; });
}

bool NcclCommunicator::await_end(uint64_t ticket) {
  const uint64_t deadline = now_ns() + settings_.close_timeout_ns;
  const Waiter waiter(waiters_);
  while (finished_ < ticket) {
    if (is_broken_ || control_->failure() != nullptr || now_ns() >= deadline) return false;
    nap(kWaitedForNs);
  }
  return true;
}

// ---- The launching thread ----

CudaEvent NcclCommunicator::take_event() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_events_.empty()) {
      const CudaEvent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  CudaEvent event = nullptr;
  driver_->check(driver_->event_create(&event, kCudaEventDisableTiming), "cuEventCreate");
  return event;
}

void NcclCommunicator::launch_main() {
  std::unique_ptr<CudaContextScope> scope;
  for (;;) {
    Operation operation;
    Flight flight;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      queued_.wait(lock, [this] { return stop_ || (!broken_ && !queue_.empty()); });
      if (stop_) return;
      flight = std::move(queue_.front().first);
      operation = std::move(queue_.front().second);
      queue_.pop_front();
      flights_.push_back(flight);
      watched_.notify_all();
    }
    try {
      if (!scope) scope = std::make_unique<CudaContextScope>(*driver_, context_);
      launch_one(operation, flight);
    } catch (const std::exception& error) {
      fail(kind_of(error), title(flight) + " could not be launched: " + error.what(), true);
    }
  }
}

void NcclCommunicator::launch_one(Operation& operation, const Flight& flight) {
  if (operation.prepare) operation.prepare(stream_);
  if (operation.collective) {
    board_->publish(kLaunched, flight.number);
    NcclResult result = NcclResult::success;
    {
      const std::lock_guard<std::mutex> lock(nccl_mutex_);
      const NcclComm comm = comm_;
      if (comm == nullptr) return;  // aborted meanwhile
      result = operation.collective(comm, stream_);
      nccl_->check(result, comm, "the call of NCCL");
    }
    if (result == NcclResult::in_progress && !settle()) return;
  }
  if (operation.finish) operation.finish(stream_);
  const CudaEvent event = take_event();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (flights_.empty()) {  // aborted meanwhile
      free_events_.push_back(event);
      return;
    }
    flights_.back().event = event;
    driver_->check(driver_->event_record(event, stream_), "cuEventRecord");
    launched_ = flight.ticket;
  }
  control_->notify_self();
}

// Nothing may be put behind a call that NCCL is still at. False: it was aborted.
bool NcclCommunicator::settle() {
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(nccl_mutex_);
      const NcclComm comm = comm_;
      if (comm == nullptr) return false;
      NcclResult state = NcclResult::in_progress;
      nccl_->check(nccl_->comm_get_async_error(comm, &state), comm, "ncclCommGetAsyncError");
      nccl_->check(state, comm, "the call of NCCL");
      if (state == NcclResult::success) return true;
    }
    nap(kSettleNs);
  }
}

// ---- The watchdog ----

std::string NcclCommunicator::title(const Flight& flight) const {
  if (flight.number == 0) return flight.name;
  return flight.name + " (operation " + std::to_string(flight.number) +
         " of the NCCL communicator \"" + settings_.name + "\")";
}

// What holds an operation up.
std::string NcclCommunicator::whereabouts(const Flight& flight) const {
  if (flight.number == 0) return "which this rank's GPU has not finished";
  std::vector<int> away;
  std::vector<int> unfinished;
  for (size_t member = 0; member < members_.size(); ++member) {
    if (board_->read(member, kLaunched) < flight.number) away.push_back(members_[member]);
    if (board_->read(member, kFinished) < flight.number) unfinished.push_back(members_[member]);
  }
  if (!away.empty()) return "never launched by " + list_ranks(away);
  return "launched by all ranks, but not finished on " + list_ranks(unfinished) +
         ": a GPU or the network between them does not get on";
}

void NcclCommunicator::watch_main() {
  std::unique_ptr<CudaContextScope> scope;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      watched_.wait(lock, [this] {
        return stop_ || initializing_ || !flights_.empty() || (broken_ && !aborted_);
      });
      if (stop_) return;
    }
    try {
      if (!scope) scope = std::make_unique<CudaContextScope>(*driver_, context_);
      look();
    } catch (const std::exception& error) {
      fail(kind_of(error), error.what(), true);
    }
    if (is_broken_ && !aborted_) abort();
    const uint64_t pause = settings_.poll_ns;
    if (!aborted_) nap(waiters_ > 0 ? std::min(kWaitedForNs, pause) : pause);
  }
}

void NcclCommunicator::look() {
  if (initializing_) {
    control_->notify_self();  // it looks at NCCL itself
    return;
  }
  Flight oldest;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    retire();
    if (flights_.empty() || broken_) return;
    oldest = flights_.front();
  }
  if (const Failure* failure = control_->failure()) {
    fail(failure->kind, failure->text, false);
    return;
  }
  NcclResult state = NcclResult::success;
  if (const NcclComm comm = comm_) {
    NcclResult result = nccl_->comm_get_async_error(comm, &state);
    if (result == NcclResult::success) result = state;
    try {
      nccl_->check(result, comm, "ncclCommGetAsyncError");
    } catch (const Error& error) {
      report_failed(error.kind(), title(oldest) + " failed: " + error.what());
      return;
    }
  }
  look_at_limits(oldest);
}

// With mutex_. What has finished is over, and its event free.
void NcclCommunicator::retire() {
  while (!flights_.empty() && flights_.front().event != nullptr) {
    Flight& oldest = flights_.front();
    const CudaResult result = driver_->event_query(oldest.event);
    if (result == CudaResult::not_ready) return;
    driver_->check(result, ("after " + title(oldest) + ", cuEventQuery").c_str());
    // After an abort the garbage may be there before anybody knows of the abort.
    if (broken_) return;
    if (oldest.number != 0) board_->publish(kFinished, oldest.number);
    finished_ = oldest.ticket;
    free_events_.push_back(oldest.event);
    flights_.pop_front();
    if (waiters_ > 0) control_->notify_self();
  }
}

void NcclCommunicator::look_at_limits(const Flight& oldest) {
  const uint64_t now = now_ns();
  if (oldest_ticket_ != oldest.ticket) {
    oldest_ticket_ = oldest.ticket;
    oldest_since_ns_ = now;
    next_warning_ns_ = now + settings_.stall_warning_ns;
  }
  for (size_t member = 0; oldest.number != 0 && member < members_.size(); ++member) {
    const int peer = members_[member];
    // Looked at first: what it launched before it went is on the board then.
    const bool left = control_->has_left(peer);
    const bool gone = left || board_->read(member, kState) == kClosed;
    if (!gone || peer == control_->rank() || board_->read(member, kLaunched) >= oldest.number) {
      continue;
    }
    fail(ErrorKind::rank_failed,
         "rank " + std::to_string(peer) + " has " +
             (left ? "left the job" : "closed its part of the communicator") +
             " and never launched " + title(oldest) +
             "; all ranks have to take part in the same steps",
         true);
    return;
  }
  const uint64_t waited = now - oldest_since_ns_;
  if (settings_.timeout_ns != 0 && waited >= settings_.timeout_ns) {
    fail(ErrorKind::timeout,
         "rank " + std::to_string(control_->rank()) + " gave up after the timeout of " +
             in_seconds(settings_.timeout_ns) + " on " + title(oldest) + ", " + whereabouts(oldest),
         true);
  } else if (settings_.stall_warning_ns != 0 && now >= next_warning_ns_) {
    next_warning_ns_ = now + settings_.stall_warning_ns;
    print_line(control_->rank(), "has been waiting for " + in_seconds(waited) + " for " +
                                     title(oldest) + ", " + whereabouts(oldest));
  }
}

// NCCL tells of another rank's end before the control plane can say which one it is, and how it
// ended.
void NcclCommunicator::report_failed(ErrorKind kind, const std::string& text) {
  if (kind == ErrorKind::rank_failed) {
    const uint64_t began = now_ns();
    while (now_ns() - began < kCulpritNs) {
      if (const Failure* failure = control_->failure()) {
        return fail(failure->kind, failure->text, false);
      }
      nap(1'000'000u);
    }
  }
  fail(kind, text, true);
}

// The first failure stands. The abort is the watchdog's.
void NcclCommunicator::fail(ErrorKind kind, const std::string& text, bool tell) {
  std::deque<std::pair<Flight, Operation>> dropped;  // without the lock: they own things
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return;
    broken_ = std::make_unique<Broken>(Broken{kind, text});
    tell_ = tell;
    if (!flights_.empty()) weights_valid_ = false;
    dropped.swap(queue_);
    is_broken_ = true;
    watched_.notify_all();
  }
  control_->notify_self();
}

void NcclCommunicator::abort() {
  if (tell_) {
    // For the others it is this rank that failed, whatever it was here.
    const ErrorKind kind =
        broken_->kind == ErrorKind::error ? ErrorKind::rank_failed : broken_->kind;
    control_->post_failure(kind, "rank " + std::to_string(control_->rank()) + ": " + broken_->text);
  }
  abort_nccl();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Flight& flight : flights_) {
    if (flight.event != nullptr) free_events_.push_back(flight.event);
  }
  flights_.clear();
  aborted_ = true;
}

void NcclCommunicator::abort_nccl() {
  // NCCL takes one call at a time. One that does not return is what an abort is for.
  std::unique_lock<std::mutex> lock(nccl_mutex_, std::try_to_lock);
  for (const uint64_t began = now_ns(); !lock.owns_lock() && now_ns() - began < kAbortAfterNs;) {
    nap(1'000'000u);
    (void)lock.try_lock();
  }
  const NcclComm comm = comm_.exchange(nullptr);
  if (comm != nullptr) static_cast<void>(nccl_->comm_abort(comm));
}

// ---- The end ----

void NcclCommunicator::close() {
  if (!usable()) {
    // The threads run in the parent; the destructors of what they wait for would wait for them.
    (void)launcher_.release();
    (void)watchdog_.release();
    new (&queued_) std::condition_variable();
    new (&watched_) std::condition_variable();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  const uint64_t deadline = now_ns() + settings_.close_timeout_ns;
  if (const Failure* failure = control_->failure()) fail(failure->kind, failure->text, false);
  const Waiter waiter(waiters_);
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (broken_ ? aborted_.load() : finished_ == tickets_) break;
    }
    if (now_ns() >= deadline) {
      fail(ErrorKind::error,
           "the NCCL communicator \"" + settings_.name + "\" was closed in the middle of its work",
           true);
    }
    nap(kWaitedForNs);
  }
  end_threads();
  if (!is_broken_) finalize();
  release();
}

// Leaves the others in good order. NCCL wants all of them for that; who is kept waiting aborts,
// which does no harm, as nothing runs any more.
void NcclCommunicator::finalize() {
  const uint64_t deadline = now_ns() + kPartingNs;
  board_->publish(kState, kClosed);
  const NcclComm comm = comm_;
  NcclResult state = nccl_->comm_finalize(comm);
  while (state == NcclResult::in_progress && now_ns() < deadline) {
    if (control_->failure() != nullptr ||
        nccl_->comm_get_async_error(comm, &state) != NcclResult::success) {
      break;
    }
    if (state == NcclResult::in_progress) nap(kSettleNs);
  }
  if (state != NcclResult::success) return;  // release() aborts it
  comm_ = nullptr;
  static_cast<void>(nccl_->comm_destroy(comm));
}

void NcclCommunicator::end_threads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    queued_.notify_all();
    watched_.notify_all();
  }
  if (launcher_) launcher_->join();
  if (watchdog_) watchdog_->join();
  launcher_.reset();
  watchdog_.reset();
}

void NcclCommunicator::release() {
  uncount_on_device();
  // The context may be gone at exit, and all that was in it.
  if (driver_->context_push(context_) != CudaResult::success) return;
  abort_nccl();
  for (const CudaEvent event : free_events_) static_cast<void>(driver_->event_destroy(event));
  free_events_.clear();
  if (stream_ != nullptr) static_cast<void>(driver_->stream_destroy(stream_));
  stream_ = nullptr;
  CudaContext before = nullptr;
  static_cast<void>(driver_->context_pop(&before));
}

}  // namespace hvd
