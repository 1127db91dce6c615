// How an NCCL communicator comes about.

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "base/clock.h"
#include "comm/nccl_communicator.h"

namespace hvd {
namespace {

// Communicators of this process by device.
std::mutex counts_mutex;
std::map<int, int>& counts() {
  static auto* const made = new std::map<int, int>;
  return *made;
}

bool one_hardware_queue() {
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return text != nullptr && std::atoi(text) == 1;
}

}  // namespace

std::vector<std::string> NcclCommunicator::exchange(const std::string& record,
                                                    const std::string& what,
                                                    const std::function<void()>* interrupt) {
  const auto late = [this] {
    std::vector<int> ranks;
    for (const int member : channel_->missing()) {
      ranks.push_back(members_[static_cast<size_t>(member)]);
    }
    return ranks;
  };
  Wait wait;
  wait.timeout_ns = settings_.init_timeout_ns;
  wait.first = true;
  wait.interrupt = interrupt;
  wait.describe = [&] { return what + " on " + list_ranks(late()); };
  wait.channel = channel_->key();
  wait.operation = ++exchanges_;
  wait.missing = late;
  channel_->begin(record);
  control_->wait([&] { return channel_->poll() ? Step::done : Step::blocked; }, wait, members_);
  return channel_->records();
}

// Throws where some rank has told a problem (its record begins with '!').
void NcclCommunicator::check_records(const std::vector<std::string>& records) const {
  std::string text;
  for (size_t member = 0; member < records.size(); ++member) {
    if (records[member].empty() || records[member][0] != '!') continue;
    text += "; rank " + std::to_string(members_[member]) + ": " + records[member].substr(1);
  }
  if (text.empty()) return;
  const bool own =
      !records[static_cast<size_t>(rank_)].empty() && records[static_cast<size_t>(rank_)][0] == '!';
  throw Error(own ? ErrorKind::error : ErrorKind::rank_failed,
              "the NCCL communicator \"" + settings_.name + "\" did not come about on rank " +
                  std::to_string(control_->rank()) + text);
}

NcclUniqueId NcclCommunicator::exchange_id(const std::function<void()>* interrupt) {
  NcclUniqueId id{};
  std::string record;
  // What goes wrong here is told to the others, who would wait for this rank.
  try {
    const CudaContextScope scope(*driver_, context_);
    int least = 0;
    int greatest = 0;
    driver_->check(driver_->context_get_device(&device_), "cuCtxGetDevice");
    count_on_device();
    driver_->check(driver_->context_get_stream_priority_range(&least, &greatest),
                   "cuCtxGetStreamPriorityRange");
    driver_->check(driver_->stream_create(&stream_, kCudaStreamNonBlocking, greatest),
                   "cuStreamCreateWithPriority");
    record = std::to_string(nccl_->version());
    if (rank_ == 0) {
      nccl_->check(nccl_->get_unique_id(&id), nullptr, "ncclGetUniqueId");
      record += ":" + std::string(id.internal, sizeof id.internal);
    }
  } catch (const Error& error) {
    record = std::string("!") + error.what();
  }
  const std::vector<std::string> records =
      exchange(record, "the start of the NCCL communicator \"" + settings_.name + "\"", interrupt);
  check_records(records);
  const auto version = [](const std::string& text) { return text.substr(0, text.find(':')); };
  for (size_t member = 0; member < records.size(); ++member) {
    if (version(records[member]) == version(records[0])) continue;
    throw Error(ErrorKind::mismatch, "ranks have different versions of NCCL: rank " +
                                         std::to_string(members_[0]) + " " +
                                         nccl_version_text(std::atoi(records[0].c_str())) +
                                         ", rank " + std::to_string(members_[member]) + " " +
                                         nccl_version_text(std::atoi(records[member].c_str())) +
                                         "; install the same on all of them");
  }
  std::memcpy(id.internal, records[0].data() + records[0].find(':') + 1, sizeof id.internal);
  return id;
}

void NcclCommunicator::count_on_device() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  if (counts()[device_] > 0 && one_hardware_queue()) {
    throw Error(ErrorKind::bad_argument,
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, so all streams of a GPU share one queue, in "
                "which the kernels of two NCCL communicators can wait for each other for ever; "
                "unset it, or set it to 8");
  }
  ++counts()[device_];
  counted_ = true;
}

void NcclCommunicator::uncount_on_device() {
  if (!std::exchange(counted_, false)) return;
  const std::lock_guard<std::mutex> lock(counts_mutex);
  --counts()[device_];
}

void NcclCommunicator::initialize(const NcclUniqueId& id, const std::function<void()>* interrupt) {
  std::string problem;
  const auto note = [&](NcclResult result) {
    try {
      nccl_->check(result, comm_, "ncclCommInitRankConfig");
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  board_->publish(kState, kBegun);
  {
    const CudaContextScope scope(*driver_, context_);
    const std::lock_guard<std::mutex> lock(nccl_mutex_);
    NcclConfig config;
    config.comm_name = settings_.name.c_str();
    if (settings_.max_ctas > 0) {
      config.min_ctas = 1;
      config.max_ctas = settings_.max_ctas;
    }
    NcclComm comm = nullptr;
    const NcclResult result =
        nccl_->comm_init_rank_config(&comm, static_cast<int>(members_.size()), id, rank_, &config);
    comm_ = comm;
    note(result);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    initializing_ = true;
    watched_.notify_all();
  }
  const auto with_state = [this](uint64_t first, uint64_t last) {
    std::vector<int> ranks;
    for (size_t member = 0; member < members_.size(); ++member) {
      const uint64_t state = board_->read(member, kState);
      if (state >= first && state <= last) ranks.push_back(members_[member]);
    }
    return ranks;
  };
  Wait wait;
  wait.timeout_ns = settings_.init_timeout_ns;
  wait.first = true;
  wait.interrupt = interrupt;
  wait.describe = [&] {
    const std::vector<int> away = with_state(kAway, kAway);
    const std::vector<int> begun = with_state(kBegun, kBegun);
    std::string text = "ncclCommInitRankConfig of \"" + settings_.name + "\"";
    if (!away.empty()) text += ", not called yet by " + list_ranks(away);
    if (!begun.empty()) text += ", called and not done on " + list_ranks(begun);
    return text;
  };
  wait.channel = channel_->key();
  wait.operation = ++exchanges_;
  wait.missing = [&] { return with_state(kAway, kAway); };
  bool others_failed = false;
  // The watchdog rings while initializing_ is set.
  control_->wait(
      [&] {
        if (!problem.empty()) return Step::done;
        others_failed = !with_state(kFailed, kFailed).empty();
        if (others_failed) return Step::done;
        NcclResult state = NcclResult::in_progress;
        note(nccl_->comm_get_async_error(comm_, &state));
        if (problem.empty() && state == NcclResult::in_progress) return Step::blocked;
        note(state);
        return Step::done;
      },
      wait, members_);
  initializing_ = false;
  const bool good = problem.empty() && !others_failed;
  board_->publish(kState, good ? kReady : kFailed);
  control_->notify();
  check_records(exchange(problem.empty() ? std::string() : "!" + problem,
                         "the NCCL communicator \"" + settings_.name + "\" to come about",
                         interrupt));
}

}  // namespace hvd
