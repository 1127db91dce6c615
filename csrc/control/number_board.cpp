#include "control/number_board.h"

#include <algorithm>
#include <atomic>

namespace hvd {
namespace {

// A cache line for each number: writers do not slow each other down.
struct alignas(64) Place {
  std::atomic<uint64_t> number{0};
};

class PageBoard final : public NumberBoard {
 public:
  PageBoard(const HostControlPlane& control, const std::vector<int>& members, uint32_t places,
            std::unique_ptr<SharedMemory> memory)
      : control_(control), places_(places), memory_(std::move(memory)) {
    own_ = static_cast<size_t>(std::find(members.begin(), members.end(), control.rank()) -
                               members.begin());
  }

  void publish(uint32_t place, uint64_t number) override {
    if (!control_.usable()) return;  // a forked child does not have the memory
    at(own_, place).number.store(number, std::memory_order_release);
  }

  uint64_t read(size_t member, uint32_t place) const override {
    return control_.usable() ? at(member, place).number.load(std::memory_order_acquire) : 0;
  }

 private:
  Place& at(size_t member, uint32_t place) const {
    return reinterpret_cast<Place*>(memory_->data())[member * places_ + place];
  }

  const HostControlPlane& control_;
  uint32_t places_;
  std::unique_ptr<SharedMemory> memory_;
  size_t own_ = 0;
};

}  // namespace

std::unique_ptr<NumberBoard> open_page_board(HostControlPlane& control,
                                             const std::vector<int>& members, uint64_t id,
                                             uint32_t places, uint64_t timeout_ns,
                                             const Interrupt* interrupt) {
  // This bit keeps the keys of boards apart from those of communicators and channels.
  const uint64_t key = id | (uint64_t{1} << 62);
  auto memory =
      control.share(members, key, sizeof(Place) * places * members.size(), timeout_ns, interrupt);
  return std::make_unique<PageBoard>(control, members, places, std::move(memory));
}

}  // namespace hvd
