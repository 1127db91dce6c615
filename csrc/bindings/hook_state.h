// The hook that autograd calls for every gradient of every step: the one place where nanoseconds of
// Python count. The hook only counts; once a bucket's gradients are complete, each is asked for
// what a raw pointer does not tell (device, type, size, contiguity) because a silent mistake there
// would corrupt memory; each question costs 20 to 40 ns.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/tensor_view.h"
#include "reducer/reducer.h"
#include "session/session.h"

namespace hvd {

namespace nb = nanobind;

// Names and objects that the hook needs, looked up once.
struct Names {
  nb::object grad = nb::steal(PyUnicode_InternFromString("grad"));
  nb::object data_ptr = nb::steal(PyUnicode_InternFromString("data_ptr"));
  nb::object dtype = nb::steal(PyUnicode_InternFromString("dtype"));
  nb::object nbytes = nb::steal(PyUnicode_InternFromString("nbytes"));
  nb::object is_cpu = nb::steal(PyUnicode_InternFromString("is_cpu"));
  nb::object is_contiguous = nb::steal(PyUnicode_InternFromString("is_contiguous"));
  nb::object stride = nb::steal(PyUnicode_InternFromString("stride"));
  nb::object untyped_storage = nb::steal(PyUnicode_InternFromString("untyped_storage"));
  nb::object cdata = nb::steal(PyUnicode_InternFromString("_cdata"));
  nb::object version = nb::steal(PyUnicode_InternFromString("_version"));
};

inline nb::object get(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

inline nb::object call(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_CallMethodObjArgs(object.ptr(), name.ptr(), nullptr);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

inline void set_grad(nb::handle parameter, const Names& names, nb::handle value) {
  if (PyObject_SetAttr(parameter.ptr(), names.grad.ptr(), value.ptr()) != 0) {
    throw nb::python_error();
  }
}

// What a gradient has to be for the core to take it as it is.
struct Expected {
  nb::object dtype;  // None: `on_mismatched` has to look at each gradient
  dlpack::DataType type{};
  size_t nbytes = 0;
  nb::object strides;                  // None: contiguous
  std::vector<int64_t> stride_values;  // the same
};

inline dlpack::DataType dlpack_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  return {dtype == DType::bf16 ? dlpack::kBfloat : dlpack::kFloat, bits, 1};
}

// The reducer as the hooks see it. Hooks hold it by shared_ptr, because a hook may outlive the
// Python object that registered it; it holds no Parameter, or both would keep each other alive,
// except between take and the end of the round.
struct HookState {
  std::unique_ptr<Reducer> reducer;
  std::shared_ptr<Session> keep_session;
  Names names;
  std::vector<Expected> expected;
  // By parameter: the dictionary of its post-accumulate hooks, and how many those were when ours
  // was put behind all others. A user's hook that came since wants to see the gradient, too.
  struct Hooks {
    nb::object all;
    Py_ssize_t count = 0;
  };
  std::vector<Hooks> hooks;
  nb::object on_first;  // called at the first gradient of a backward
  // Called with (index, parameter, gradient) for a gradient that the core cannot take as it is;
  // returns one that it can, or None when the front reduces it itself, or raises.
  nb::object on_mismatched;
  // Called with the index when a gradient comes in another thread; raises if that is a user's.
  nb::object on_intruder;
  // Called with (index, parameter) when another hook has taken the gradient away; may raise.
  nb::object on_nothing;
  bool local = false;  // no_sync: gradients stay where they are
  bool closed = false;
  bool begun = false;       // on_first was called in this backward
  std::thread::id thread;   // that runs the backward which has begun
  bool intruded = false;    // another thread's backward came into it
  std::vector<bool> dirty;  // has a gradient that was not reduced
  std::vector<bool> held;   // taken or noted in this round

  struct Noted {
    uint32_t index;
    nb::object parameter;
    nb::object version;  // of the parameter, when it fired
  };
  // Fired, but without a bucket taking the gradient early would gain nothing: it stays where it is
  // until the flush, so that hooks which users registered after ours see and edit it. So do
  // gradients that the front reduces itself.
  std::vector<Noted> noted;

  // Fired, in a bucket of which other gradients have not come yet. They, too, stay in p.grad until
  // it is complete: what is done for each of them is done for all of a bucket in one go, and costs
  // half of what it does between two pieces of autograd's work, which leave the caches cold.
  struct Pending {
    uint32_t index;
    nb::object parameter;
  };
  std::vector<std::vector<Pending>> pending;  // by bucket
  size_t complete_buckets = 0;                // all of whose gradients have fired

  struct Taken {
    uint32_t index;
    nb::object parameter;
    nb::object gradient;
    bool attached = false;  // still in p.grad
  };
  // Called with the gradients of a round and a number: makes it their version, by which it shows
  // whether anybody has written to them since. None: nobody will ask.
  nb::object mark = nb::none();
  uint64_t marked_as = 0;
  std::vector<void*> marked_memory;  // by parameter; null: not reduced in the last round
  std::vector<Taken> taken;
  std::vector<Taken> again;  // fired a second time after its bucket had left
  nb::object storage_users;  // called with a storage's address: how many objects refer to it
  nb::object version_of;     // called with a tensor: grows whenever it is written to
  nb::object tensor_class;   // torch.Tensor
  std::unique_ptr<TensorDescriber> describer;

  // Autograd may leave a view in p.grad: in `h + bias.view(...)` the gradient of bias is a view of
  // the gradient of h, which autograd has yet to read, or of another parameter's.
  bool shares_memory(const nb::object& gradient) const {
    const nb::object storage = call(gradient, names.untyped_storage);
    const nb::object users = storage_users(get(storage, names.cdata));
    return PyLong_AsSize_t(users.ptr()) > 2;  // the gradient and our `storage`
  }

  // The address of the gradient's memory, or null when the core cannot take it as it is.
  void* usable_memory(const nb::object& gradient, const Expected& want, bool* usable) const {
    *usable = false;
    if (want.dtype.is_none()) return nullptr;
    if (describer != nullptr && describer->available() &&
        reinterpret_cast<PyObject*>(Py_TYPE(gradient.ptr())) == tensor_class.ptr()) {
      dlpack::Tensor view{};
      if (!describer->describe(gradient, &view)) return nullptr;
      *usable = view.device_type == dlpack::kCpu && view.dtype.code == want.type.code &&
                view.dtype.bits == want.type.bits && has_expected_shape(view, want);
      return static_cast<char*>(view.data) + view.byte_offset;
    }
    if (get(gradient, names.dtype).ptr() != want.dtype.ptr()) return nullptr;
    if (get(gradient, names.is_cpu).ptr() != Py_True) return nullptr;
    if (want.strides.is_none()) {
      if (call(gradient, names.is_contiguous).ptr() != Py_True) return nullptr;
    } else if (!call(gradient, names.stride).equal(want.strides)) {
      return nullptr;
    }
    *usable = PyLong_AsSize_t(get(gradient, names.nbytes).ptr()) == want.nbytes;
    return memory_of(gradient);
  }

  static bool has_expected_shape(const dlpack::Tensor& view, const Expected& want) {
    const bool contiguous = want.stride_values.empty();
    if (!contiguous && static_cast<size_t>(view.ndim) != want.stride_values.size()) return false;
    int64_t dense = 1;
    for (int32_t dim = view.ndim; dim-- > 0;) {
      const int64_t stride = contiguous ? dense : want.stride_values[static_cast<size_t>(dim)];
      if (view.shape[dim] > 1 && view.strides[dim] != stride) return false;
      dense *= view.shape[dim];
    }
    return static_cast<size_t>(dense) * want.type.bits / 8 == want.nbytes;
  }

  enum class Taking {
    detach,  // p.grad = None meanwhile: if the parameter fires again, autograd cannot add to memory
             // that is being reduced
    attach,  // it stays in p.grad: backward is over
  };

  // Gives the gradient to the core. False when the front reduces it.
  // A parameter of None: nobody will see the result.
  bool take(uint32_t index, nb::handle parameter, nb::object gradient, bool provided,
            Taking taking) {
    const Expected& want = expected[index];
    bool usable = false;
    void* memory = usable_memory(gradient, want, &usable);
    if (!usable) {
      gradient = on_mismatched(index, parameter, gradient);
      if (gradient.is_none()) return false;
      memory = memory_of(gradient);
    }
    bool attached = taking == Taking::attach && usable;
    if (shares_memory(gradient)) {
      gradient = gradient.attr("clone")();
      memory = memory_of(gradient);
      attached = false;
    }
    if (!attached && !parameter.is_none()) set_grad(parameter, names, nb::none());
    taken.push_back({index, nb::borrow(parameter), std::move(gradient), attached});
    held[index] = true;
    if (provided) {
      reducer->provide(index, memory);
    } else {
      reducer->take(index, memory);
    }
    return true;
  }

  bool is_last_hook(uint32_t index) const {
    return PyDict_Size(hooks[index].all.ptr()) == hooks[index].count;
  }

  void note(uint32_t index, nb::handle parameter) {
    held[index] = true;
    noted.push_back({index, nb::borrow(parameter), version_of(parameter)});
  }

  void* memory_of(const nb::object& gradient) const {
    return PyLong_AsVoidPtr(call(gradient, names.data_ptr).ptr());
  }

  void on_gradient(uint32_t index, nb::handle parameter) {
    if (closed) return;
    if (local) {
      dirty[index] = true;
      return;
    }
    if (!begun) {
      on_first();
      begun = true;
      thread = std::this_thread::get_id();
    } else if (thread != std::this_thread::get_id()) {
      const bool before = std::exchange(intruded, true);
      on_intruder(index);
      intruded = before;  // it was autograd's own: the innermost of deeply nested backwards
    }
    reducer->fired(index);
    if (!held[index]) {
      if (reducer->planned(index) && is_last_hook(index)) {
        held[index] = true;
        add_pending(index, parameter);
      } else if (get(parameter, names.grad).is_none()) {
        on_nothing(index, parameter);
      } else {
        note(index, parameter);
      }
      return;
    }
    if (!reducer->taken(index)) return;  // noted or pending: autograd has added to the gradient
    nb::object gradient = get(parameter, names.grad);
    if (gradient.is_none()) {
      on_nothing(index, parameter);
      return;
    }
    set_grad(parameter, names, nb::none());
    if (reducer->in_flight(index)) {
      again.push_back({index, nb::borrow(parameter), std::move(gradient)});
      return;
    }
    for (const Taken& first : taken) {
      if (first.index == index) first.gradient.attr("add_")(gradient);
    }
  }

  void add_pending(uint32_t index, nb::handle parameter) {
    const uint32_t bucket = reducer->bucket_of(index);
    if (pending.size() <= bucket) pending.resize(bucket + 1);
    std::vector<Pending>& waiting = pending[bucket];
    waiting.push_back({index, nb::borrow(parameter)});
    if (waiting.size() < reducer->bucket_size(bucket)) return;
    // Nothing is left that the last bucket's reduction could overlap with: the flush takes it.
    if (++complete_buckets < reducer->bucket_count()) take_pending(bucket, Taking::detach);
  }

  void take_pending(size_t bucket, Taking taking) {
    for (Pending& entry : pending[bucket]) {
      nb::object gradient = get(entry.parameter, names.grad);
      if (gradient.is_none()) {
        held[entry.index] = false;
        on_nothing(entry.index, entry.parameter);
      } else if (!take(entry.index, entry.parameter, std::move(gradient), false, taking)) {
        note(entry.index, entry.parameter);
      }
    }
    pending[bucket].clear();
  }

  void take_all_pending() {
    for (size_t bucket = 0; bucket < pending.size(); ++bucket) {
      if (!pending[bucket].empty()) take_pending(bucket, Taking::attach);
    }
  }

  // Gives every taken gradient back to its parameter.
  void restore() {
    for (Taken& entry : taken) {
      if (!entry.attached && !entry.parameter.is_none()) {
        set_grad(entry.parameter, names, entry.gradient);
      }
      dirty[entry.index] = false;
    }
    if (!mark.is_none()) mark_taken();
    forget();
  }

  void mark_taken() {
    nb::list gradients;
    marked_memory.assign(expected.size(), nullptr);
    for (const Taken& entry : taken) {
      gradients.append(entry.gradient);
      marked_memory[entry.index] = memory_of(entry.gradient);
    }
    // No tensor that somebody made or wrote to comes to such a version by itself.
    marked_as = (uint64_t{1} << 30) + reducer->rounds();
    mark(gradients, marked_as);
  }

  // Sum of squares and finite flag of p.grad if it is what the last round has left there.
  nb::object known_products(uint32_t index, nb::handle parameter) const {
    const ByProducts* found = reducer->by_products(index);
    if (found == nullptr || index >= marked_memory.size()) return nb::none();
    const nb::object gradient = get(parameter, names.grad);
    if (gradient.is_none() || memory_of(gradient) != marked_memory[index]) return nb::none();
    const nb::object version = get(gradient, names.version);
    if (PyLong_AsUnsignedLongLong(version.ptr()) != marked_as) return nb::none();
    return nb::make_tuple(found->sum_of_squares, found->finite);
  }

  // Returns the parameters that were written to since they fired.
  std::vector<uint32_t> take_noted(bool* arrived) {
    std::vector<uint32_t> written;
    for (const Noted& entry : noted) {
      held[entry.index] = false;
      if (!version_of(entry.parameter).equal(entry.version)) written.push_back(entry.index);
    }
    if (!written.empty()) return written;
    for (const Noted& entry : noted) {
      nb::object gradient = get(entry.parameter, names.grad);
      if (gradient.is_none()) continue;
      *arrived |= take(entry.index, entry.parameter, std::move(gradient), false, Taking::attach);
    }
    noted.clear();
    return written;
  }

  // The round has failed: its gradients are dropped, as those that were taken away are.
  void drop() {
    for (const Taken& entry : taken) {
      if (entry.attached) set_grad(entry.parameter, names, nb::none());
    }
    const auto drop_one = [this](uint32_t index, const nb::object& parameter) {
      set_grad(parameter, names, nb::none());
      dirty[index] = false;
    };
    for (const Noted& entry : noted) drop_one(entry.index, entry.parameter);
    for (const auto& bucket : pending) {
      for (const Pending& entry : bucket) drop_one(entry.index, entry.parameter);
    }
  }

  void forget() {
    for (const Taken& entry : taken) held[entry.index] = false;
    for (const Noted& entry : noted) held[entry.index] = false;
    for (auto& bucket : pending) {
      for (const Pending& entry : bucket) held[entry.index] = false;
      bucket.clear();
    }
    taken.clear();
    noted.clear();
    complete_buckets = 0;
    begun = false;
    intruded = false;
  }
};

}  // namespace hvd
