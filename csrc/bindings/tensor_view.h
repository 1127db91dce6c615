// What a tensor is and where its memory lies, asked of torch in one call.
//
// Torch from 2.10 on offers DLPack's C exchange interface (a table of functions in a capsule,
// `torch.Tensor.__dlpack_c_exchange_api__`), which fills a struct in about 20 ns without creating
// an object. Asking for data_ptr, dtype, device, size and contiguity through Python takes 270 ns;
// that is the form for older versions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace hvd {

// The part of DLPack that is used here, laid out as in the specification (version 1).
namespace dlpack {

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48, "DLTensor of the specification");

struct ExchangeTable {
  Version version;
  ExchangeTable* previous;  // the table of an older major version, or null
  void* allocate;
  void* export_owning;
  void* import_owning;
  int (*describe)(void* object, Tensor* out);  // 0, or -1 with a Python exception
  void* current_stream;
};

}  // namespace dlpack

// The torch that is loaded, as far as it can describe tensors quickly.
class TensorDescriber {
 public:
  // Looks for the interface in the class `torch.Tensor`; without it `available` is false.
  explicit TensorDescriber(nanobind::handle tensor_class) {
    PyObject* capsule = PyObject_GetAttrString(tensor_class.ptr(), "__dlpack_c_exchange_api__");
    if (capsule == nullptr) {
      PyErr_Clear();
      return;
    }
    auto* table =
        static_cast<dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);  // the table lives as long as torch
    if (table == nullptr) PyErr_Clear();
    while (table != nullptr && table->version.major != dlpack::kMajor) table = table->previous;
    if (table != nullptr) describe_ = table->describe;
  }

  bool available() const { return describe_ != nullptr; }

  // False when torch cannot describe the tensor this way (sparse, say).
  bool describe(nanobind::handle tensor, dlpack::Tensor* out) const {
    if (describe_(tensor.ptr(), out) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
};

}  // namespace hvd
