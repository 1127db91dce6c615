// The Python module `_core`: thin wrappers, no logic. Every call that may wait gives up the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/hash.h"
#include "kernels/reduce.h"
#include "kernels/rescale.h"

namespace nb = nanobind;

namespace hvd {

const std::function<void()>& python_interrupt() {
  static const std::function<void()> look = [] {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  return look;
}

uint64_t nanoseconds(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds > 1e9 ? uint64_t{1'000'000'000'000'000'000u}
                       : static_cast<uint64_t>(seconds * 1e9);
}

Wait python_wait(double timeout, bool first) {
  Wait wait;
  wait.timeout_ns = nanoseconds(timeout);
  wait.first = first;
  wait.interrupt = &python_interrupt();
  return wait;
}

namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::timeout:
      return "HvdTimeoutError";
    case ErrorKind::rank_failed:
      return "RankFailedError";
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::stall:
      return "StallError";
    default:
      return "HvdError";
  }
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    // A name that was cut to fit its place may end inside a UTF-8 sequence.
    const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
        error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "replace"));
    if (error.kind() == ErrorKind::bad_argument) {
      PyErr_SetObject(PyExc_ValueError, text.ptr());
      return;
    }
    const nb::object type =
        nb::module_::import_("hvd_strategy.errors").attr(class_name(error.kind()));
    PyErr_SetObject(type.ptr(), text.ptr());
  }
}

}  // namespace
}  // namespace hvd

NB_MODULE(_core, module) {
  module.doc() = "C++ core of hvd-strategy: sessions, communicators and the gradient reducer.";
  // The session of the process lives until its end, on purpose.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(hvd::translate);
  module.def(
      "instruction_set", [] { return hvd::name_of(hvd::best_isa()); },
      "Name of the vector instructions that the kernels use on this machine.");
  module.def(
      "hash_memory",
      [](const std::vector<std::pair<uintptr_t, size_t>>& pieces) {
        std::vector<uint64_t> hashes;
        hashes.reserve(pieces.size());
        nb::gil_scoped_release release;
        for (const auto& [address, bytes] : pieces) {
          hashes.push_back(hvd::hash_memory(reinterpret_cast<const void*>(address), bytes));
        }
        return hashes;
      },
      nb::arg("pieces"),
      "Hashes of pieces of memory, given as pairs of address and bytes: 64 bits each, the same on "
      "every machine of one byte order.");
  module.def(
      "rescale",
      [](const std::vector<std::tuple<uintptr_t, size_t, std::string>>& pieces, double factor) {
        std::vector<std::pair<double, bool>> results;
        results.reserve(pieces.size());
        nb::gil_scoped_release release;
        for (const auto& [address, count, name] : pieces) {
          hvd::DType dtype{};
          if (!hvd::parse_dtype(name.c_str(), &dtype)) {
            throw hvd::Error(hvd::ErrorKind::bad_argument, "there is no dtype " + name);
          }
          const hvd::ByProducts found =
              hvd::rescale(reinterpret_cast<void*>(address), dtype, count, factor);
          results.emplace_back(found.sum_of_squares, found.finite);
        }
        return results;
      },
      nb::arg("pieces"), nb::arg("factor"),
      "Multiplies pieces of memory, given as (address, elements, dtype), in one pass; with a "
      "factor "
      "of 1 they are only read. Returns (sum of squares, all finite) of each result.");
  hvd::bind_session(module);
  hvd::bind_reducer(module);
}
