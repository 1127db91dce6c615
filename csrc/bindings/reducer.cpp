// Bindings of the reducer.

#include "reducer/reducer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/hook_state.h"

namespace nb = nanobind;

namespace hvd {
namespace {

class PyReducer {
 public:
  PyReducer(std::shared_ptr<Session> session, const std::vector<int>& ranks, double bucket_mb,
            bool by_products, double timeout, bool sum_in_f64)
      : state_(std::make_shared<HookState>()), timeout_(timeout) {
    ReducerSettings settings;
    settings.bucket_bytes = static_cast<uint64_t>(bucket_mb * 1048576.0);
    settings.want_by_products = by_products;
    settings.sum_in_f64 = sum_in_f64;
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
                     uint32_t group, nb::object torch_dtype, size_t nbytes, nb::object strides,
                     bool exact) {
    const DType type = type_of(name, dtype);
    state_->reducer->add_parameters({{name, count, type, group, exact}});
    state_->expected.push_back(expectation(type, std::move(torch_dtype), nbytes, strides));
    state_->hooks.push_back({nb::dict(), 0});
    state_->dirty.push_back(false);
    state_->held.push_back(false);
  }

  void redefine_parameter(uint32_t index, const std::string& name, uint64_t count,
                          const std::string& dtype, uint32_t group, nb::object torch_dtype,
                          size_t nbytes, nb::object strides, bool exact) {
    const DType type = type_of(name, dtype);
    state_->expected.at(index) = expectation(type, std::move(torch_dtype), nbytes, strides);
    state_->reducer->redefine_parameter(index, {name, count, type, group, exact});
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
    if (gradient.is_none()) return;
    state_->take(index, parameter, std::move(gradient), false, HookState::Taking::attach);
  }

  // The core may not go without this one: the others count on it.
  void provide(uint32_t index, nb::handle parameter, nb::object gradient) {
    if (!state_->take(index, parameter, std::move(gradient), true, HookState::Taking::detach)) {
      throw Error(ErrorKind::error, "a gradient that other ranks need was not in the right form");
    }
  }

  // Takes what fired in this backward and was left where it is. Returns whether anything had no
  // bucket yet, and the parameters of these that somebody has written to since they fired; then
  // nothing is taken.
  nb::tuple take_fired() {
    bool arrived = false;
    std::vector<uint32_t> written;
    if (!state_->noted.empty()) written = state_->take_noted(&arrived);
    if (written.empty()) state_->take_all_pending();
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
  // An empty name: gradients travel as they are.
  void set_wire(const std::string& dtype) {
    std::optional<DType> wire;
    if (!dtype.empty()) wire = type_of("(wire)", dtype);
    state_->reducer->set_wire(wire);
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
    state_->take(index, parameter, std::move(delta), provided, HookState::Taking::detach);
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
    state_->drop();
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
      state_->drop();
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
      .def(
          nb::init<std::shared_ptr<Session>, const std::vector<int>&, double, bool, double, bool>(),
          nb::arg("session"), nb::arg("ranks"), nb::arg("bucket_cap_mb"), nb::arg("by_products"),
          nb::arg("timeout"), nb::arg("sum_in_f64") = false)
      .def("set_callbacks", &PyReducer::set_callbacks, nb::arg("on_first"),
           nb::arg("on_mismatched"), nb::arg("on_intruder"), nb::arg("on_nothing"),
           nb::arg("storage_users"), nb::arg("version_of"), nb::arg("tensor_class"))
      .def("add_parameter", &PyReducer::add_parameter, nb::arg("name"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("group"), nb::arg("torch_dtype").none(), nb::arg("nbytes"),
           nb::arg("strides").none(), nb::arg("exact") = false)
      .def("redefine_parameter", &PyReducer::redefine_parameter, nb::arg("index"), nb::arg("name"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("group"), nb::arg("torch_dtype").none(),
           nb::arg("nbytes"), nb::arg("strides").none(), nb::arg("exact") = false)
      .def("hook", &PyReducer::hook, nb::arg("index"))
      .def("set_last_of", &PyReducer::set_last_of, nb::arg("index"), nb::arg("hooks"))
      .def("take", &PyReducer::take, nb::arg("index"), nb::arg("parameter"))
      .def("provide", &PyReducer::provide, nb::arg("index"), nb::arg("parameter").none(),
           nb::arg("gradient"))
      .def("take_fired", &PyReducer::take_fired)
      .def("absent", &PyReducer::absent)
      .def("dirty", &PyReducer::dirty)
      .def("set_dirty", &PyReducer::set_dirty, nb::arg("index"), nb::arg("value"))
      .def("exchange", &PyReducer::exchange, nb::arg("step"), nb::arg("flags") = 0,
           nb::arg("step_digest") = 0, nb::arg("optimizer") = 0)
      .def_prop_ro("announced", &PyReducer::announced)
      .def("set_contribution", &PyReducer::set_contribution, nb::arg("pre"), nb::arg("weight"),
           nb::arg("scale"), nb::arg("unscale"))
      .def("set_wire", &PyReducer::set_wire, nb::arg("dtype"))
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
