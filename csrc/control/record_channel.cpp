#include "control/record_channel.h"

#include <algorithm>
#include <cstring>

namespace hvd {
namespace {

constexpr size_t kFragmentBytes = 4096 - 64;

struct alignas(64) Fragment {
  std::atomic<uint64_t> sequence{0};  // 1 + number of the fragment that lies here
  uint64_t record_bytes = 0;          // of the whole record
  char padding[48] = {};
  char bytes[kFragmentBytes] = {};
};
static_assert(sizeof(Fragment) == 4096, "a fragment fills a page");

class PageChannel final : public RecordChannel {
 public:
  PageChannel(HostControlPlane& control, std::vector<int> members, uint64_t key,
              std::unique_ptr<SharedMemory> memory)
      : control_(control), members_(std::move(members)), key_(key), memory_(std::move(memory)) {
    own_ = static_cast<size_t>(std::find(members_.begin(), members_.end(), control_.rank()) -
                               members_.begin());
    records_.resize(members_.size());
  }

  uint64_t key() const override { return key_; }

  void begin(std::string record) override {
    control_.check_usable();
    if (running_) throw Error(ErrorKind::error, "a round of records began inside another one");
    running_ = true;
    record_ = std::move(record);
    position_ = 0;
    for (auto& other : records_) other.clear();
    publish();
  }

  bool poll() override {
    if (!running_) return true;
    for (;;) {
      for (size_t member = 0; member < members_.size(); ++member) {
        if (fragment(member).sequence.load(std::memory_order_acquire) != next_ + 1) return false;
      }
      bool more = false;
      for (size_t member = 0; member < members_.size(); ++member) {
        const Fragment& part = fragment(member);
        std::string& target = records_[member];
        const size_t count = std::min<size_t>(part.record_bytes - target.size(), kFragmentBytes);
        target.append(part.bytes, count);
        more |= target.size() < part.record_bytes;
      }
      ++next_;
      if (!more) {
        running_ = false;
        return true;
      }
      publish();
    }
  }

  const std::vector<std::string>& records() const override { return records_; }

  std::vector<int> missing() const override {
    std::vector<int> indices;
    for (size_t member = 0; running_ && member < members_.size(); ++member) {
      if (fragment(member).sequence.load(std::memory_order_acquire) != next_ + 1) {
        indices.push_back(static_cast<int>(member));
      }
    }
    return indices;
  }

 private:
  Fragment& fragment(size_t member) const {
    auto* fragments = reinterpret_cast<Fragment*>(memory_->data());
    return fragments[2 * member + next_ % 2];
  }

  void publish() {
    Fragment& part = fragment(own_);
    const size_t count = std::min(record_.size() - position_, kFragmentBytes);
    part.record_bytes = record_.size();
    std::memcpy(part.bytes, record_.data() + position_, count);
    position_ += count;
    // Release: who reads the number with acquire sees the bytes.
    part.sequence.store(next_ + 1, std::memory_order_release);
    control_.notify();
  }

  HostControlPlane& control_;
  std::vector<int> members_;
  uint64_t key_;
  std::unique_ptr<SharedMemory> memory_;
  size_t own_ = 0;
  uint64_t next_ = 0;  // number of the fragment that is being exchanged
  bool running_ = false;
  std::string record_;
  size_t position_ = 0;
  std::vector<std::string> records_;
};

}  // namespace

std::unique_ptr<RecordChannel> open_page_channel(HostControlPlane& control,
                                                 const std::vector<int>& members, uint64_t id,
                                                 uint64_t timeout_ns, const Interrupt* interrupt) {
  // The top bit keeps the keys of channels apart from those of communicators.
  const uint64_t key = id | (uint64_t{1} << 63);
  auto memory =
      control.share(members, key, sizeof(Fragment) * 2 * members.size(), timeout_ns, interrupt);
  return std::make_unique<PageChannel>(control, members, key, std::move(memory));
}

}  // namespace hvd
