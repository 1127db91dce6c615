#include "reducer/flush_record.h"

#include <cstring>

#include "base/error.h"

namespace hvd {
namespace {

struct Header {
  uint32_t version;
  uint32_t flags;
  uint64_t round;
  uint64_t step;
  uint64_t step_digest;
  double weight;
  double scale;
  Notes notes;
  uint32_t optimizer;
  uint32_t parameters;
  uint32_t present_bits;
  uint32_t posted_bits;
  uint32_t arrivals;
  uint32_t text_bytes;
};
static_assert(sizeof(Header) == 88, "no padding: the bytes travel as they are");
constexpr uint32_t kVersion = 0x48465234;

void append_bits(std::string* bytes, const std::vector<bool>& bits) {
  const size_t start = bytes->size();
  bytes->resize(start + (bits.size() + 7) / 8);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) (*bytes)[start + i / 8] |= static_cast<char>(1 << (i % 8));
  }
}

[[noreturn]] void malformed() {
  throw Error(ErrorKind::mismatch,
              "a rank sent something that is not a flush record; all ranks must run the same "
              "version of hvd-strategy");
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  const char* take(size_t count) {
    if (bytes_.size() - place_ < count) malformed();
    const char* start = bytes_.data() + place_;
    place_ += count;
    return start;
  }
  std::vector<bool> take_bits(size_t count) {
    const char* start = take((count + 7) / 8);
    std::vector<bool> bits(count);
    for (size_t i = 0; i < count; ++i) bits[i] = (start[i / 8] >> (i % 8)) & 1;
    return bits;
  }

 private:
  const std::string& bytes_;
  size_t place_ = 0;
};

}  // namespace

std::string FlushRecord::encode() const {
  const Header header{kVersion,
                      flags,
                      round,
                      step,
                      step_digest,
                      weight,
                      scale,
                      notes,
                      optimizer,
                      parameters,
                      static_cast<uint32_t>(present.size()),
                      static_cast<uint32_t>(posted.size()),
                      static_cast<uint32_t>(arrivals.size()),
                      static_cast<uint32_t>(text.size())};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  append_bits(&bytes, present);
  append_bits(&bytes, posted);
  bytes.append(reinterpret_cast<const char*>(arrivals.data()), arrivals.size() * sizeof(uint32_t));
  bytes += text;
  return bytes;
}

FlushRecord FlushRecord::decode(const std::string& bytes) {
  Reader reader(bytes);
  Header header{};
  std::memcpy(&header, reader.take(sizeof header), sizeof header);
  if (header.version != kVersion) malformed();
  FlushRecord record;
  record.flags = header.flags;
  record.round = header.round;
  record.step = header.step;
  record.step_digest = header.step_digest;
  record.weight = header.weight;
  record.scale = header.scale;
  record.notes = header.notes;
  record.optimizer = header.optimizer;
  record.parameters = header.parameters;
  record.present = reader.take_bits(header.present_bits);
  record.posted = reader.take_bits(header.posted_bits);
  // Taken before memory is asked for: the number may be anything.
  const char* arrivals = reader.take(header.arrivals * sizeof(uint32_t));
  record.arrivals.resize(header.arrivals);
  if (header.arrivals != 0) {
    std::memcpy(record.arrivals.data(), arrivals, header.arrivals * sizeof(uint32_t));
  }
  record.text.assign(reader.take(header.text_bytes), header.text_bytes);
  return record;
}

}  // namespace hvd
