#include "base/dtype.h"

#include <cstring>

namespace hvd {
namespace {

struct DTypeRow {
  const char* name;
  size_t size;
};

// In the order of the enumeration.
constexpr DTypeRow kRows[] = {
    {"float32", 4}, {"float64", 8}, {"float16", 2}, {"bfloat16", 2}, {"int8", 1},
    {"int16", 2},   {"int32", 4},   {"int64", 8},   {"uint8", 1},    {"bool", 1},
};
constexpr size_t kRowCount = sizeof(kRows) / sizeof(kRows[0]);
static_assert(kRowCount == static_cast<size_t>(DType::boolean) + 1, "one row per element type");

}  // namespace

size_t size_of(DType dtype) { return kRows[static_cast<size_t>(dtype)].size; }

const char* name_of(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

bool parse_dtype(const char* name, DType* dtype) {
  for (size_t row = 0; row < kRowCount; ++row) {
    if (std::strcmp(name, kRows[row].name) == 0) {
      *dtype = static_cast<DType>(row);
      return true;
    }
  }
  return false;
}

bool is_floating(DType dtype) { return dtype <= DType::bf16; }

}  // namespace hvd
