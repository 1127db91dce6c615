#include "session/session.h"

#include <algorithm>

namespace hvd {
namespace {

template <class Known>
void keep(const std::shared_ptr<Known>& made, std::vector<std::weak_ptr<Known>>* all) {
  all->erase(
      std::remove_if(all->begin(), all->end(), [](const auto& known) { return known.expired(); }),
      all->end());
  all->push_back(made);
}

}  // namespace

Session::Session(int rank, const Listener* listener, const std::vector<std::string>& names,
                 const Token& token, const SessionSettings& settings, const Interrupt* interrupt)
    : rank_(rank), size_(static_cast<int>(names.size())) {
  if (size_ < 1 || rank < 0 || rank >= size_ || (size_ > 1 && listener == nullptr)) {
    throw Error(ErrorKind::bad_argument,
                "a session takes a rank from 0 to size - 1 and a listener; got rank " +
                    std::to_string(rank) + " of " + std::to_string(size_));
  }
  Mesh mesh = connect_mesh(rank, listener, names, token, settings.connect_timeout_ns, interrupt);
  control_ = std::make_shared<HostControlPlane>(rank, size_, std::move(mesh), settings.control,
                                                settings.connect_timeout_ns, interrupt);
}

Session::~Session() { close(); }

// Members of a group make their communicators in the same order, but other groups of the same
// ranks may interleave differently on each rank: the number counts per group.
uint64_t Session::next_id(const std::vector<int>& members) {
  uint64_t hash = 14695981039346656037u;
  for (int member : members) hash = (hash ^ static_cast<uint64_t>(member)) * 1099511628211u;
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t number = ++ids_by_group_[members];
  return ((hash << 24) ^ number) & ((uint64_t{1} << 60) - 1);
}

void Session::check_members(const std::vector<int>& members) const {
  const bool ascending = std::is_sorted(members.begin(), members.end()) &&
                         std::adjacent_find(members.begin(), members.end()) == members.end();
  if (closed()) throw Error(ErrorKind::error, "this session has been closed");
  if (members.empty() || !ascending || members.front() < 0 || members.back() >= size_ ||
      std::find(members.begin(), members.end(), rank_) == members.end()) {
    throw Error(ErrorKind::bad_argument,
                "a communicator takes different ranks from 0 to " + std::to_string(size_ - 1) +
                    " in ascending order, rank " + std::to_string(rank_) + " among them");
  }
}

std::shared_ptr<Communicator> Session::open_communicator(const std::vector<int>& members,
                                                         const StagingSettings& settings,
                                                         uint64_t timeout_ns,
                                                         const Interrupt* interrupt) {
  check_members(members);
  std::shared_ptr<Communicator> communicator = std::make_shared<SharedMemoryCommunicator>(
      control_, members, next_id(members), settings, timeout_ns, interrupt);
  std::lock_guard<std::mutex> lock(mutex_);
  keep(communicator, &communicators_);
  return communicator;
}

std::shared_ptr<NcclCommunicator> Session::open_nccl_communicator(const std::vector<int>& members,
                                                                  std::shared_ptr<DriverApi> driver,
                                                                  std::shared_ptr<NcclApi> nccl,
                                                                  CudaContext context,
                                                                  const NcclSettings& settings,
                                                                  const Interrupt* interrupt) {
  check_members(members);
  auto communicator =
      std::make_shared<NcclCommunicator>(control_, members, next_id(members), std::move(driver),
                                         std::move(nccl), context, settings, interrupt);
  std::lock_guard<std::mutex> lock(mutex_);
  keep(communicator, &nccl_communicators_);
  return communicator;
}

std::unique_ptr<RecordChannel> Session::open_channel(const Communicator& communicator,
                                                     uint64_t timeout_ns,
                                                     const Interrupt* interrupt) {
  const std::vector<int>& members = communicator.members();
  return control_->open_channel(members, next_id(members), timeout_ns, interrupt);
}

void Session::close() {
  if (closed_.exchange(true)) return;
  // In a forked child any lock may be held by a thread that stayed with the parent.
  if (!control_->usable()) return;
  // First the goodbye: ranks that wait for this one learn at once that it will not come.
  control_->leave();
  std::vector<std::weak_ptr<Communicator>> communicators;
  std::vector<std::weak_ptr<NcclCommunicator>> nccl_communicators;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    communicators.swap(communicators_);
    nccl_communicators.swap(nccl_communicators_);
  }
  for (const auto& known : nccl_communicators) {
    if (const auto communicator = known.lock()) communicator->close();
  }
  for (const auto& known : communicators) {
    if (const auto communicator = known.lock()) communicator->close();
  }
}

}  // namespace hvd
