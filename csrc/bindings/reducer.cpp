// Bindings of the reducer, and the hook that autograd calls for every gradient of every step: the
// one place where nanoseconds of Python count. The hook asks the gradient for what a raw pointer
// does not tell (device, type, size, contiguity) because a silent mistake there would corrupt
// memory; each question costs 20 to 40 ns.

#include "reducer/reducer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <thread>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/tensor_view.h"
#include "session/session.h"

namespace nb = nanobind;

namespace hvd {
namespace {

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

nb::object get(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

nb::object call(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_CallMethodObjArgs(object.ptr(), name.ptr(), nullptr);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

void set_grad(nb::handle parameter, const Names& names, nb::handle value) {
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

dlpack::DataType dlpack_type(DType dtype) {
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

  struct Taken {
    uint32_t index;
    nb::object parameter;
    nb::object gradient;
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

  // Takes the gradient away from the parameter (p.grad = None meanwhile): if the parameter fires
  // again, autograd cannot add to memory that is being reduced. False when the front reduces it.
  // A parameter of None: nobody will see the result.
  bool take(uint32_t index, nb::handle parameter, nb::object gradient, bool provided) {
    const Expected& want = expected[index];
    bool usable = false;
    void* memory = usable_memory(gradient, want, &usable);
    if (!usable) {
      gradient = on_mismatched(index, parameter, gradient);
      if (gradient.is_none()) return false;
      memory = memory_of(gradient);
    }
    if (shares_memory(gradient)) {
      gradient = gradient.attr("clone")();
      memory = memory_of(gradient);
    }
    if (!parameter.is_none()) set_grad(parameter, names, nb::none());
    taken.push_back({index, nb::borrow(parameter), std::move(gradient)});
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
    nb::object gradient = get(parameter, names.grad);
    if (gradient.is_none()) {
      on_nothing(index, parameter);
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
    if (!held[index]) {
      if (!reducer->planned(index) || !is_last_hook(index) ||
          !take(index, parameter, std::move(gradient), false)) {
        note(index, parameter);
      }
      return;
    }
    if (!reducer->taken(index)) return;  // noted: autograd has added to the gradient
    set_grad(parameter, names, nb::none());
    if (reducer->in_flight(index)) {
      again.push_back({index, nb::borrow(parameter), std::move(gradient)});
      return;
    }
    for (const Taken& first : taken) {
      if (first.index == index) first.gradient.attr("add_")(gradient);
    }
  }

  // Gives every taken gradient back to its parameter.
  void restore() {
    for (Taken& entry : taken) {
      if (!entry.parameter.is_none()) set_grad(entry.parameter, names, entry.gradient);
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
      *arrived |= take(entry.index, entry.parameter, std::move(gradient), false);
    }
    noted.clear();
    return written;
  }

  // The round has failed: its gradients are dropped, as those that were taken are.
  void drop_noted() {
    for (const Noted& entry : noted) {
      set_grad(entry.parameter, names, nb::none());
      dirty[entry.index] = false;
    }
  }

  void forget() {
    for (const Taken& entry : taken) held[entry.index] = false;
    for (const Noted& entry : noted) held[entry.index] = false;
    taken.clear();
    noted.clear();
    begun = false;
    intruded = false;
  }
};

class PyReducer {
 public:
  PyReducer(std::shared_ptr<Session> session, const std::vector<int>& ranks, double bucket_mb,
            bool by_products, double timeout)
      : state_(std::make_shared<HookState>()), timeout_(timeout) {
    ReducerSettings settings;
    settings.bucket_bytes = static_cast<uint64_t>(bucket_mb * 1048576.0);
    settings.want_by_products = by_products;
    settings.timeout_ns = nanoseconds(timeout);
    nb::gil_scoped_release release;
    auto communicator = session->open_communicator(ranks, StagingSettings{}, settings.timeout_ns,
                                                   &python_interrupt());
    auto channel = session->open_channel(*communicator, settings.timeout_ns, &python_interrupt());
    state_->reducer =
        std::make_unique<Reducer>(std::move(communicator), std::move(channel), settings);
    state_->keep_session = std::move(session);
  }

  ~PyReducer() { close(); }

  void set_callbacks(nb::object on_first, nb::object on_mismatched, nb::object on_intruder,
                     nb::object on_nothing, nb::object storage_users, nb::object version_of,
                     nb::object tensor_class) {
    state_->describer = std::make_unique<TensorDescriber>(tensor_class);
    state_->tensor_class = std::move(tensor_class);
    state_->on_first = std::move(on_first);
    state_->on_mismatched = std::move(on_mismatched);
    state_->on_intruder = std::move(on_intruder);
    state_->on_nothing = std::move(on_nothing);
    state_->storage_users = std::move(storage_users);
    state_->version_of = std::move(version_of);
  }

  void add_parameter(const std::string& name, uint64_t count, const std::string& dtype,
                     uint32_t group, nb::object torch_dtype, size_t nbytes, nb::object strides) {
    const DType type = type_of(name, dtype);
    state_->reducer->add_parameters({{name, count, type, group}});
    state_->expected.push_back(expectation(type, std::move(torch_dtype), nbytes, strides));
    state_->hooks.push_back({nb::dict(), 0});
    state_->dirty.push_back(false);
    state_->held.push_back(false);
  }

  void redefine_parameter(uint32_t index, const std::string& name, uint64_t count,
                          const std::string& dtype, uint32_t group, nb::object torch_dtype,
                          size_t nbytes, nb::object strides) {
    const DType type = type_of(name, dtype);
    state_->expected.at(index) = expectation(type, std::move(torch_dtype), nbytes, strides);
    state_->reducer->redefine_parameter(index, {name, count, type, group});
  }

  nb::object hook(uint32_t index) {
    if (index >= state_->expected.size()) throw nb::index_error("no such parameter");
    return nb::cpp_function(
        [state = state_, index](nb::handle parameter) { state->on_gradient(index, parameter); });
  }

  // Ours is the last of these hooks. All of a parameter's are kept in one dictionary.
  void set_last_of(uint32_t index, nb::dict hooks) {
    const Py_ssize_t count = PyDict_Size(hooks.ptr());
    state_->hooks.at(index) = {std::move(hooks), count};
  }

  // Takes the gradient of a parameter whose hook did not fire in this backward, before exchange.
  void take(uint32_t index, nb::handle parameter) {
    nb::object gradient = get(parameter, state_->names.grad);
    if (!gradient.is_none()) state_->take(index, parameter, std::move(gradient), false);
  }

  // The core may not go without this one: the others count on it.
  void provide(uint32_t index, nb::handle parameter, nb::object gradient) {
    if (!state_->take(index, parameter, std::move(gradient), true)) {
      throw Error(ErrorKind::error, "a gradient that other ranks need was not in the right form");
    }
  }

  // Takes what fired in this backward and has no bucket yet. Returns whether there was any, and
  // the parameters that somebody has written to since they fired; then nothing is taken.
  nb::tuple take_noted() {
    bool arrived = false;
    std::vector<uint32_t> written;
    if (!state_->noted.empty()) written = state_->take_noted(&arrived);
    return nb::make_tuple(arrived, written);
  }

  // Parameters with a bucket whose hook did not fire in this backward.
  std::vector<uint32_t> absent() const {
    std::vector<uint32_t> indices;
    for (uint32_t i = 0; i < state_->held.size(); ++i) {
      if (!state_->held[i] && state_->reducer->planned(i)) indices.push_back(i);
    }
    return indices;
  }

  std::vector<uint32_t> dirty() const {
    std::vector<uint32_t> indices;
    for (uint32_t i = 0; i < state_->dirty.size(); ++i) {
      if (state_->dirty[i] && !state_->held[i]) indices.push_back(i);
    }
    return indices;
  }
  void set_dirty(uint32_t index, bool value) { state_->dirty.at(index) = value; }

  std::vector<uint32_t> exchange(uint64_t step, uint32_t flags, uint64_t step_digest,
                                 uint32_t optimizer) {
    if (!state_->again.empty()) flags |= FlushRecord::kMore;
    return guarded([&](const Wait& wait) {
      return state_->reducer->exchange({step, flags, step_digest, optimizer}, wait);
    });
  }
  uint32_t announced() const { return state_->reducer->announced(); }

  void set_contribution(double pre, double weight, double scale, bool unscale) {
    state_->reducer->set_contribution({pre, weight, scale, unscale});
  }
  double total_weight() const { return state_->reducer->total_weight(); }
  double agreed_scale() const { return state_->reducer->agreed_scale(); }
  bool scales_differ() const { return state_->reducer->scales_differ(); }
  void set_notes(uint64_t first, uint64_t second) { state_->reducer->set_notes({first, second}); }
  nb::list notes() const {
    nb::list told;
    for (const Notes& notes : state_->reducer->notes()) {
      told.append(nb::make_tuple(notes[0], notes[1]));
    }
    return told;
  }
  void set_mark(nb::object mark) { state_->mark = std::move(mark); }
  uint64_t rounds() const { return state_->reducer->rounds(); }
  nb::list known_products(nb::list pairs) const {
    nb::list known;
    for (nb::handle pair : pairs) {
      known.append(state_->known_products(nb::cast<uint32_t>(pair[0]), pair[1]));
    }
    return known;
  }

  // Reduces and gives the gradients back. True when an extra round has to follow.
  bool complete() {
    const bool more = state_->reducer->extra_round_needed();
    guarded([&](const Wait& wait) {
      state_->reducer->complete(wait);
      return 0;
    });
    state_->restore();
    return more;
  }

  // Hands over what fired a second time: pairs (index, parameter) whose p.grad holds the delta.
  nb::list begin_extra_round() {
    nb::list pairs;
    std::vector<HookState::Taken> again;
    again.swap(state_->again);
    for (HookState::Taken& entry : again) {
      pairs.append(nb::make_tuple(entry.index, entry.parameter, entry.gradient));
    }
    return pairs;
  }
  // In an extra round: takes a delta, which does not go through p.grad.
  void take_delta(uint32_t index, nb::handle parameter, nb::object delta, bool provided) {
    const nb::object before = get(parameter, state_->names.grad);
    state_->take(index, parameter, std::move(delta), provided);
    set_grad(parameter, state_->names, before);
  }
  // Ends an extra round: adds what it reduced to the gradients.
  void complete_extra() {
    guarded([&](const Wait& wait) {
      state_->reducer->complete(wait);
      return 0;
    });
    for (HookState::Taken& entry : state_->taken) {
      get(entry.parameter, state_->names.grad).attr("add_")(entry.gradient);
    }
    state_->forget();
  }

  void fail(const std::string& text) {
    state_->again.clear();
    state_->drop_noted();
    if (!state_->closed) state_->reducer->fail(text);
  }
  bool must_recover() const { return state_->reducer->must_recover(); }
  void recover() {
    guarded([&](const Wait& wait) {
      state_->reducer->recover(wait);
      return 0;
    });
    state_->forget();
  }

  bool local() const { return state_->local; }
  void set_local(bool value) { state_->local = value; }
  bool begun() const { return state_->begun; }
  void set_begun(bool value) { state_->begun = value; }
  // A backward has begun, and another thread runs it.
  bool begun_elsewhere() const {
    return state_->begun && state_->thread != std::this_thread::get_id();
  }
  bool intruded() const { return state_->intruded; }

  nb::dict statistics() const {
    const Reducer& reducer = *state_->reducer;
    nb::dict result;
    result["backwards"] = reducer.rounds();
    result["communication_seconds"] = static_cast<double>(reducer.busy_ns()) * 1e-9;
    result["exposed_seconds"] = static_cast<double>(reducer.blocked_ns()) * 1e-9;
    return result;
  }

  std::vector<std::vector<uint32_t>> buckets() const { return state_->reducer->buckets(); }

  nb::object by_products(uint32_t index) const {
    const ByProducts* found = state_->reducer->by_products(index);
    if (found == nullptr) return nb::none();
    return nb::make_tuple(found->sum_of_squares, found->finite);
  }

  void record_events(size_t capacity) { state_->reducer->events().enable(capacity); }

  nb::list events() const {
    static const char* const kinds[] = {"fired", "posted",      "started",
                                        "done",  "flush_begin", "flush_end"};
    nb::list result;
    for (const Event& event : state_->reducer->events().read()) {
      result.append(nb::make_tuple(kinds[static_cast<size_t>(event.kind)], event.object, event.step,
                                   static_cast<double>(event.time_ns) * 1e-9));
    }
    return result;
  }

  void close() {
    if (state_->closed) return;
    state_->closed = true;
    {
      nb::gil_scoped_release release;
      state_->reducer->close();
    }
    state_->forget();
    state_->again.clear();
    state_->hooks.clear();
    state_->on_first = nb::object();
    state_->on_mismatched = nb::object();
    state_->on_intruder = nb::object();
    state_->on_nothing = nb::object();
    state_->mark = nb::none();
  }

 private:
  static DType type_of(const std::string& name, const std::string& dtype) {
    DType type{};
    if (!parse_dtype(dtype.c_str(), &type)) {
      throw Error(ErrorKind::bad_argument,
                  "parameter '" + name + "' has dtype " + dtype + ", which cannot be reduced");
    }
    return type;
  }

  static Expected expectation(DType type, nb::object torch_dtype, size_t nbytes,
                              const nb::object& strides) {
    Expected want{std::move(torch_dtype), dlpack_type(type), nbytes, strides, {}};
    if (!strides.is_none()) want.stride_values = nb::cast<std::vector<int64_t>>(strides);
    return want;
  }

  // Runs a waiting call without the GIL. When it throws, the round is over and nothing of the
  // core touches the gradients any more: they are dropped.
  template <class Call>
  auto guarded(Call&& body) -> decltype(body(Wait{})) {
    const Wait wait = python_wait(timeout_, state_->reducer->rounds() == 0);
    try {
      nb::gil_scoped_release release;
      return body(wait);
    } catch (...) {
      state_->forget();
      state_->again.clear();
      throw;
    }
  }

  std::shared_ptr<HookState> state_;
  double timeout_;
};

}  // namespace

void bind_reducer(nb::module_& module) {
  module.attr("FLUSH_EXTRA") = static_cast<uint32_t>(FlushRecord::kExtra);
  module.attr("FLUSH_AT_GATE") = static_cast<uint32_t>(FlushRecord::kAtGate);
  module.attr("FLUSH_ADOPTS") = static_cast<uint32_t>(FlushRecord::kAdopts);
  module.attr("FLUSH_SPARSE") = static_cast<uint32_t>(FlushRecord::kSparse);
  module.attr("FLUSH_CHANGED") = static_cast<uint32_t>(FlushRecord::kChanged);
  nb::class_<PyReducer>(module, "Reducer", "Core of hvd_strategy.engine.GradientReducer.")
      .def(nb::init<std::shared_ptr<Session>, const std::vector<int>&, double, bool, double>(),
           nb::arg("session"), nb::arg("ranks"), nb::arg("bucket_cap_mb"), nb::arg("by_products"),
           nb::arg("timeout"))
      .def("set_callbacks", &PyReducer::set_callbacks, nb::arg("on_first"),
           nb::arg("on_mismatched"), nb::arg("on_intruder"), nb::arg("on_nothing"),
           nb::arg("storage_users"), nb::arg("version_of"), nb::arg("tensor_class"))
      .def("add_parameter", &PyReducer::add_parameter, nb::arg("name"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("group"), nb::arg("torch_dtype").none(), nb::arg("nbytes"),
           nb::arg("strides").none())
      .def("redefine_parameter", &PyReducer::redefine_parameter, nb::arg("index"), nb::arg("name"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("group"), nb::arg("torch_dtype").none(),
           nb::arg("nbytes"), nb::arg("strides").none())
      .def("hook", &PyReducer::hook, nb::arg("index"))
      .def("set_last_of", &PyReducer::set_last_of, nb::arg("index"), nb::arg("hooks"))
      .def("take", &PyReducer::take, nb::arg("index"), nb::arg("parameter"))
      .def("provide", &PyReducer::provide, nb::arg("index"), nb::arg("parameter").none(),
           nb::arg("gradient"))
      .def("take_noted", &PyReducer::take_noted)
      .def("absent", &PyReducer::absent)
      .def("dirty", &PyReducer::dirty)
      .def("set_dirty", &PyReducer::set_dirty, nb::arg("index"), nb::arg("value"))
      .def("exchange", &PyReducer::exchange, nb::arg("step"), nb::arg("flags") = 0,
           nb::arg("step_digest") = 0, nb::arg("optimizer") = 0)
      .def_prop_ro("announced", &PyReducer::announced)
      .def("set_contribution", &PyReducer::set_contribution, nb::arg("pre"), nb::arg("weight"),
           nb::arg("scale"), nb::arg("unscale"))
      .def_prop_ro("total_weight", &PyReducer::total_weight)
      .def_prop_ro("agreed_scale", &PyReducer::agreed_scale)
      .def_prop_ro("scales_differ", &PyReducer::scales_differ)
      .def("set_notes", &PyReducer::set_notes, nb::arg("first"), nb::arg("second"))
      .def_prop_ro("notes", &PyReducer::notes)
      .def("set_mark", &PyReducer::set_mark, nb::arg("mark").none())
      .def_prop_ro("rounds", &PyReducer::rounds)
      .def("known_products", &PyReducer::known_products, nb::arg("pairs"))
      .def("complete", &PyReducer::complete)
      .def("begin_extra_round", &PyReducer::begin_extra_round)
      .def("take_delta", &PyReducer::take_delta, nb::arg("index"), nb::arg("parameter"),
           nb::arg("delta"), nb::arg("provided"))
      .def("complete_extra", &PyReducer::complete_extra)
      .def("fail", &PyReducer::fail, nb::arg("text"))
      .def_prop_ro("must_recover", &PyReducer::must_recover)
      .def("recover", &PyReducer::recover)
      .def_prop_rw("local", &PyReducer::local, &PyReducer::set_local)
      .def_prop_rw("begun", &PyReducer::begun, &PyReducer::set_begun)
      .def_prop_ro("begun_elsewhere", &PyReducer::begun_elsewhere)
      .def_prop_ro("intruded", &PyReducer::intruded)
      .def("statistics", &PyReducer::statistics)
      .def("buckets", &PyReducer::buckets)
      .def("by_products", &PyReducer::by_products, nb::arg("index"))
      .def("record_events", &PyReducer::record_events, nb::arg("capacity"))
      .def("events", &PyReducer::events)
      .def("close", &PyReducer::close);
}

}  // namespace hvd
