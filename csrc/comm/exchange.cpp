#include "comm/exchange.h"

namespace hvd {

std::vector<std::string> exchange(Communicator& communicator, const std::string& record,
                                  const Wait& settings) {
  const auto size = static_cast<size_t>(communicator.size());
  const auto gather = [&](const void* send, void* receive, std::vector<uint64_t> sizes,
                          const char* name) {
    auto work = std::make_shared<Work>();
    work->kind = WorkKind::allgather;
    work->send = send;
    work->receive = receive;
    work->sizes = std::move(sizes);
    work->name = name;
    communicator.run(work, settings);
  };
  const uint64_t own = record.size();
  std::vector<uint64_t> sizes(size);
  gather(&own, sizes.data(), std::vector<uint64_t>(size, sizeof own), "an exchange of records");
  uint64_t total = 0;
  for (uint64_t bytes : sizes) total += bytes;
  std::string all(total, '\0');
  gather(record.data(), all.data(), sizes, "an exchange of records (contents)");
  std::vector<std::string> records;
  size_t place = 0;
  for (uint64_t bytes : sizes) {
    records.push_back(all.substr(place, bytes));
    place += bytes;
  }
  return records;
}

}  // namespace hvd
