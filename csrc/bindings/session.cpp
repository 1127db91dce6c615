#include "session/session.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bindings.h"
#include "comm/exchange.h"

namespace nb = nanobind;

namespace hvd {
namespace {

Token parse_token(const nb::bytes& bytes) {
  Token token{};
  if (bytes.size() != token.size()) {
    throw Error(ErrorKind::bad_argument,
                "a token has 16 bytes, got " + std::to_string(bytes.size()));
  }
  std::memcpy(token.data(), bytes.c_str(), token.size());
  return token;
}

DType parse_type(const std::string& name) {
  DType dtype{};
  if (!parse_dtype(name.c_str(), &dtype)) {
    throw Error(ErrorKind::bad_argument,
                "dtype '" + name +
                    "' is not one of float32, float64, float16, bfloat16, int8, int16, int32, "
                    "int64, uint8, bool");
  }
  return dtype;
}

ReduceOp parse_op(const std::string& name) {
  if (name == "sum") return ReduceOp::sum;
  if (name == "min") return ReduceOp::min;
  if (name == "max") return ReduceOp::max;
  throw Error(ErrorKind::bad_argument, "op '" + name + "' is not one of sum, min, max");
}

void* address(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

int check_root(const Communicator& communicator, int root) {
  if (root < 0 || root >= communicator.size()) {
    throw Error(ErrorKind::bad_argument, "root " + std::to_string(root) +
                                             " is not a rank from 0 to " +
                                             std::to_string(communicator.size() - 1));
  }
  return root;
}

// What a collective is for, where the caller says so, comes first in reports and errors.
std::string named(const std::string& purpose, const std::string& what) {
  return purpose.empty() ? what : purpose + ": " + what;
}

void run(Communicator& communicator, const std::shared_ptr<Work>& work, double timeout) {
  nb::gil_scoped_release release;
  communicator.run(work, python_wait(timeout));
}

void allreduce(Communicator& communicator, uintptr_t pointer, uint64_t count,
               const std::string& dtype, const std::string& op, double pre, double post,
               double timeout, const std::string& purpose) {
  auto work = std::make_shared<Work>();
  work->layout = std::make_shared<Layout>(parse_type(dtype), std::vector<uint64_t>{count});
  work->pointers = {address(pointer)};
  work->op = parse_op(op);
  work->pre = pre;
  work->post = post;
  work->name = named(purpose, "allreduce (" + op + ") of " + std::to_string(count) + " x " + dtype);
  run(communicator, work, timeout);
}

void broadcast_many(Communicator& communicator, const std::vector<uintptr_t>& pointers,
                    const std::vector<uint64_t>& bytes, int root, double timeout) {
  if (pointers.size() != bytes.size()) {
    throw Error(ErrorKind::bad_argument, "broadcast takes as many sizes as pointers");
  }
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::broadcast;
  work->layout = std::make_shared<Layout>(DType::u8, bytes);
  for (const uintptr_t pointer : pointers) work->pointers.push_back(address(pointer));
  work->root = check_root(communicator, root);
  work->name = "broadcast of " + std::to_string(work->layout->total) + " bytes in " +
               std::to_string(bytes.size()) + " tensors from rank " + std::to_string(root);
  run(communicator, work, timeout);
}

void allgather(Communicator& communicator, uintptr_t send, uint64_t send_bytes, uintptr_t receive,
               const std::vector<uint64_t>& sizes, double timeout, const std::string& purpose) {
  if (sizes.size() != static_cast<size_t>(communicator.size()) ||
      sizes[static_cast<size_t>(communicator.rank())] != send_bytes) {
    throw Error(ErrorKind::bad_argument,
                "allgather takes one size per rank, and this rank's has to be its own");
  }
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::allgather;
  work->send = address(send);
  work->receive = address(receive);
  work->sizes = sizes;
  work->name = named(purpose, "allgather, " + std::to_string(send_bytes) + " bytes from this rank");
  run(communicator, work, timeout);
}

void barrier(Communicator& communicator, double timeout) {
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::barrier;
  work->name = "barrier";
  run(communicator, work, timeout);
}

nb::list exchange_records(Communicator& communicator, const nb::bytes& record, double timeout) {
  const std::string own(record.c_str(), record.size());
  std::vector<std::string> records;
  {
    nb::gil_scoped_release release;
    records = exchange(communicator, own, python_wait(timeout));
  }
  nb::list result;
  for (const std::string& other : records) result.append(nb::bytes(other.data(), other.size()));
  return result;
}

Session* open_session(int rank, int size, Listener* listener,
                      const std::vector<std::string>& peer_names, const nb::bytes& token,
                      double connect_timeout, double stall_warning, double first_stall_warning,
                      double stall_abort, double abort_grace) {
  SessionSettings settings;
  settings.connect_timeout_ns = nanoseconds(connect_timeout);
  settings.control.stall_warning_ns = nanoseconds(stall_warning);
  settings.control.first_stall_warning_ns = nanoseconds(first_stall_warning);
  settings.control.stall_abort_ns = nanoseconds(stall_abort);
  settings.control.abort_grace_ns = nanoseconds(abort_grace);
  const Token secret = parse_token(token);
  std::vector<std::string> names = peer_names;
  if (size == 1) names.resize(1);
  if (names.size() != static_cast<size_t>(size)) {
    throw Error(ErrorKind::bad_argument, "a session takes one listener name per rank");
  }
  nb::gil_scoped_release release;
  return new Session(rank, listener, names, secret, settings, &python_interrupt());
}

}  // namespace

void bind_session(nb::module_& module) {
  nb::class_<Listener>(module, "Listener", "The socket on which a rank meets the ranks above it.")
      .def(nb::init<>())
      .def_prop_ro("name", &Listener::name, "Name of the abstract unix socket.")
      .def("close", &Listener::close);

  nb::class_<Communicator>(module, "Communicator",
                           "A group of ranks. All of them have to call the same collectives in "
                           "the same order. Pointers are addresses of contiguous CPU memory; "
                           "times are seconds.")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("members", &Communicator::members)
      .def(
          "allreduce", &allreduce, nb::arg("pointer"), nb::arg("count"), nb::arg("dtype"),
          nb::arg("op") = "sum", nb::arg("pre") = 1.0, nb::arg("post") = 1.0,
          nb::arg("timeout") = 1800.0, nb::arg("purpose") = "",
          "In place: post * sum over ranks of pre * x; min and max ignore the factors. The purpose "
          "is named in reports and errors.")
      .def(
          "broadcast",
          [](Communicator& communicator, uintptr_t pointer, uint64_t bytes, int root,
             double timeout) { broadcast_many(communicator, {pointer}, {bytes}, root, timeout); },
          nb::arg("pointer"), nb::arg("nbytes"), nb::arg("root") = 0, nb::arg("timeout") = 1800.0)
      .def("broadcast_many", &broadcast_many, nb::arg("pointers"), nb::arg("nbytes"),
           nb::arg("root") = 0, nb::arg("timeout") = 1800.0)
      .def("allgather", &allgather, nb::arg("send"), nb::arg("send_bytes"), nb::arg("receive"),
           nb::arg("sizes"), nb::arg("timeout") = 1800.0, nb::arg("purpose") = "",
           "Rank r's bytes go behind those of the ranks below r.")
      .def("barrier", &barrier, nb::arg("timeout") = 1800.0)
      .def("exchange", &exchange_records, nb::arg("record"), nb::arg("timeout") = 1800.0,
           "Gives a record of any length, returns those of all ranks.")
      .def("close", &Communicator::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Session>(module, "Session", "Connections of one rank to all others of its host.")
      .def(nb::new_(&open_session), nb::arg("rank"), nb::arg("size"), nb::arg("listener").none(),
           nb::arg("peer_names"), nb::arg("token"), nb::kw_only(), nb::arg("connect_timeout"),
           nb::arg("stall_warning"), nb::arg("first_stall_warning"), nb::arg("stall_abort"),
           nb::arg("abort_grace"))
      .def_prop_ro("rank", &Session::rank)
      .def_prop_ro("size", &Session::size)
      .def_prop_ro("closed", &Session::closed)
      .def_prop_ro(
          "peer_pids",
          [](Session& session) {
            const auto& pids = session.control().pids();
            return std::vector<int>(pids.begin(), pids.end());
          },
          "By rank; 0 where the process is not visible from here.")
      .def(
          "communicator",
          [](Session& session, const std::vector<int>& ranks, uint64_t slot_bytes, uint32_t slots,
             double timeout) {
            StagingSettings settings;
            if (slot_bytes != 0) settings.slot_bytes = slot_bytes;
            if (slots != 0) settings.slots = slots;
            nb::gil_scoped_release release;
            return session.open_communicator(ranks, settings, nanoseconds(timeout),
                                             &python_interrupt());
          },
          nb::arg("ranks"), nb::arg("slot_bytes") = 0, nb::arg("slots") = 0,
          nb::arg("timeout") = 1800.0, "Collective over the ranks. 0 = default size.")
      .def(
          "post_error",
          [](Session& session, const std::string& text) {
            session.control().post_failure(ErrorKind::rank_failed, text);
          },
          nb::arg("text"), "Makes every waiting call of every rank raise RankFailedError.")
      .def(
          "await_culprit", [](Session& session) { session.control().await_culprit(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Gives the watch the time to tell of another rank's end, where there are signs of it.")
      .def("failure",
           [](Session& session) -> std::optional<std::string> {
             const Failure* failure = session.control().failure();
             if (failure == nullptr) return std::nullopt;
             return failure->text;
           })
      .def(
          "begin_run", [](Session& session) { session.control().begin_run(); },
          "Begins a run, on all ranks: what was requested in the one before is over.")
      .def(
          "request_stop", [](Session& session) { session.control().request_stop(); },
          "Asks for the end of this run, after the same point on all ranks.")
      .def(
          "pass_point", [](Session& session) { return session.control().pass_point(); },
          "Comes to the next point of the run; False: it ends here, on all ranks. Never waits.")
      .def(
          "set_activity",
          [](Session& session, const std::string& text) { session.control().set_activity(text); },
          nb::arg("text"), "What this rank is about, for the stall reports of the others.")
      .def(
          "first_to_say",
          [](Session& session, uint64_t digest) { return session.control().first_to_say(digest); },
          nb::arg("digest"),
          "True for the first of all ranks that comes with this digest; never waits.")
      .def_prop_ro(
          "waited_seconds",
          [](Session& session) {
            return static_cast<double>(session.control().waited_ns()) * 1e-9;
          },
          "Time that this rank's calls spent waiting for other ranks.")
      .def("close", &Session::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hvd
