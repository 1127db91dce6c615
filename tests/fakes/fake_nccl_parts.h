// What the parts of the fake NCCL share; fake_nccl.cpp says what it is.
#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "faults.h"
#include "gpu/nccl_functions.h"

namespace hvd::fakes {

// NCCL's version code of this build; the one thing that differs between builds.
extern const int kVersion;

// ---- The piece of shared memory

constexpr int kMaxRanks = 16;
constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kMailBytes = 16 << 10;
constexpr int kMaxChildren = 64;

enum class Kind : int { all_reduce, broadcast, all_gather, reduce_scatter, send, receive };

// What a rank is about to do; has to be the same on all of them.
struct Header {
  Kind kind;
  NcclDataType type;
  NcclRedOp op;
  int root;
  uint64_t count;
  bool operator==(const Header& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root &&
           count == other.count;
  }
};

enum class Stage : int { away, joined, finalized, gone, aborted };

struct Member {
  std::atomic<int> ranks;  // how large this rank thinks the communicator is
  std::atomic<int> pid;
  std::atomic<Stage> stage;
  char place[160];  // host and device
  // Rounds of data: this rank has put its part into its slot, and has read all slots.
  std::atomic<uint64_t> posted;
  std::atomic<uint64_t> consumed;
  Header header;
  // For ncclCommSplit.
  std::atomic<uint64_t> split_round;
  std::atomic<int> color;
  std::atomic<int> key;
};

struct Mailbox {
  std::atomic<uint64_t> written;  // bytes so far
  std::atomic<uint64_t> read;
  char data[kMailBytes];
};

// Where the next communicator of some of the ranks meets: a descriptor of the rank that made it.
struct Meeting {
  std::atomic<int> pid;
  int descriptor;
};

struct Region {
  std::atomic<uint32_t> bell;  // changes whenever something in here has
  std::atomic<int> failure;    // an NcclResult for everybody; its text is there before it
  std::atomic<bool> failing;
  char failure_text[256];
  Member members[kMaxRanks];
  Meeting children[kMaxChildren][kMaxRanks];
  Mailbox mail[kMaxRanks][kMaxRanks];  // [to][from]
  char slots[kMaxRanks][kChunkBytes];
};

// The bytes of an id: who holds the memory, under which descriptor.
struct IdContent {
  char magic[8];
  int pid;
  int descriptor;
};
constexpr char kIdMagic[8] = "hvdfake";

// A new piece of memory, and the one that an id leads to (null: it is no longer there).
bool make_id(NcclUniqueId* id);
std::shared_ptr<Region> open_region(const NcclUniqueId& id);

// ---- The fake driver

struct Cuda {
  hvd::DriverFunctions functions = {};
  bool there = false;
};
Cuda& cuda();

// ---- Communicators

struct Operation {
  Header header;
  const void* send = nullptr;
  void* receive = nullptr;
  int peer = -1;
  Fault fault;
  CudaStream stream = nullptr;
};

struct Comm {
  std::shared_ptr<Region> region;
  int rank = 0;
  int ranks = 1;
  bool blocking = true;
  CudaContext context = nullptr;
  int next_child = 0;
  uint64_t split_rounds = 0;
  bool launched_before = false;
  bool revoked = false;
  bool finalized = false;

  std::atomic<bool> stop{false};  // aborted or revoked: what runs ends
  std::atomic<NcclResult> state{NcclResult::success};

  // Operations of one communicator run in the order of the calls, on whatever streams they are.
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t launched = 0;
  uint64_t finished = 0;
  uint64_t rounds = 0;  // of data, by whoever's turn it is
};
using CommRef = std::shared_ptr<Comm>;

struct Library {
  std::mutex mutex;
  std::map<Comm*, CommRef> comms;
  std::set<void*> registrations;
  Faults faults;
};
Library& library();

// What ncclGetLastError says.
extern thread_local std::string last_error;
NcclResult fail(NcclResult result, const std::string& text);

// The communicator of a handle; null if there is none.
CommRef find(NcclComm handle);
NcclComm keep(const CommRef& comm);
void forget(const CommRef& comm);

// Wakes whoever waits for something in the shared memory.
void ring(Comm& comm);
// Waits until the condition holds. False: this rank's communicator was aborted, or all have failed.
bool wait_until(Comm& comm, const std::function<bool()>& holds);
void fail_all(Comm& comm, NcclResult result, const std::string& text);
bool peers_have_left(const Comm& comm);

// ---- Data

bool element_of(NcclDataType type, size_t* bytes);
void run_collective(Comm& comm, const Operation& operation);
// Sends and receives of one group make progress together.
void run_messages(Comm& comm, const std::vector<Operation>& operations);

// ---- Launching

struct Group {
  int depth = 0;
  NcclResult error = NcclResult::success;
  std::vector<std::pair<CommRef, std::vector<Operation>>> work;
};
extern thread_local Group group;

// The first launch of a nonblocking communicator connects the ranks, and does that behind the
// caller's back.
NcclResult launch_or_start(const CommRef& comm, std::vector<Operation> operations);
NcclResult check_usable(const CommRef& comm);
NcclResult start_operation(const char* function, NcclComm handle, Operation operation);
void wait_for_launched(Comm& comm);

// ---- Life

// What NCCL makes of a caller's configuration: as many bytes as both know, and of those the fields
// that the version in it had.
NcclResult read_config(const NcclConfig* given, bool* blocking);
NcclResult config_or_parents(const NcclConfig* config, const Comm& parent, bool* blocking);
NcclResult create(const char* function, NcclComm* handle, int ranks, const NcclUniqueId& id,
                  int rank, bool blocking);
// The lowest rank of some ranks of a communicator makes the place where they meet anew, the others
// find it through the old one.
bool meet(Comm& parent, int leader, NcclUniqueId* id);

}  // namespace hvd::fakes
