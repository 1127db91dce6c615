#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd {

// The element types of the data plane. Complex tensors travel as twice as many floats.
enum class DType : uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, boolean };

// Bytes per element.
size_t size_of(DType dtype);

// PyTorch's name of the type: "float32", "bfloat16", "bool", ...
const char* name_of(DType dtype);

// Looks up a PyTorch name. Returns false, and leaves *dtype alone, for a name that is not known.
bool parse_dtype(const char* name, DType* dtype);

bool is_floating(DType dtype);

}  // namespace hvd
