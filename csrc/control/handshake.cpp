#include "control/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace hvd {
namespace {

// A stranger who connects and says nothing is shown the door after this time.
constexpr uint64_t kGuestPatienceNs = 5'000'000'000u;
constexpr uint64_t kProbeIntervalNs = 300'000'000u;
constexpr uint64_t kFarewellNs = 100'000'000u;
// The rank below that has not answered at the deadline is about to say whom it misses.
constexpr uint64_t kAnswerPatienceNs = 2'000'000'000u;

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // The leading zero byte makes it abstract: no file, gone with the socket.
  const size_t count = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), count);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + count);
  return address;
}

int remaining_ms(uint64_t deadline_ns) {
  const uint64_t now = now_ns();
  if (now >= deadline_ns) return 0;
  return static_cast<int>(std::min<uint64_t>((deadline_ns - now) / 1'000'000u + 1, 1'000'000));
}

bool same_user(int fd, pid_t* pid) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  *pid = credentials.pid;
  return credentials.uid == geteuid();
}

// Whether anybody still listens under the name. The listener sees a guest who leaves at once.
bool has_listener(const std::string& name) {
  const Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  return !fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
         errno != ECONNREFUSED;
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

// The ranks of a job find together: each connects to those below it, says who it is, and waits
// for those above it; when all are there it answers them, and waits for the answers from below,
// which prove that it reached the ranks it meant. Who gives up tells everybody it has reached
// because of whom, so that all blame the same rank.
class Handshake {
 public:
  Handshake(int rank, const Listener* listener, const std::vector<std::string>& names,
            const Token& token, uint64_t timeout_ns, const Interrupt* interrupt)
      : rank_(rank),
        size_(static_cast<int>(names.size())),
        listener_(listener),
        names_(names),
        token_(token),
        timeout_ns_(timeout_ns),
        deadline_(now_ns() + timeout_ns),
        interrupt_(interrupt),
        missing_above_(size_ - 1 - rank),
        missing_answers_(rank),
        answered_(names.size()) {
    mesh_.sockets.resize(names.size());
    mesh_.pids.assign(names.size(), 0);
    mesh_.pids[static_cast<size_t>(rank)] = getpid();
  }

  Mesh run() {
    // Connecting first cannot deadlock: a listening socket takes connections into its backlog
    // before its owner accepts them.
    for (int peer = 0; peer < rank_; ++peer) connect_to(peer);
    if (missing_above_ == 0) answer();
    uint64_t next_probe = now_ns() + kProbeIntervalNs;
    while (missing_above_ > 0 || missing_answers_ > 0) {
      look_around();
      if (interrupt_ != nullptr && *interrupt_) (*interrupt_)();
      const uint64_t now = now_ns();
      if (now >= next_probe) {
        next_probe = now + kProbeIntervalNs;
        probe();
      }
      check_deadline(now);
    }
    return std::move(mesh_);
  }

 private:
  // Somebody who has connected and not said yet who he is.
  struct Guest {
    Descriptor socket;
    pid_t pid;
    uint64_t limit;
    size_t received = 0;
    Hello hello{};
  };

  Descriptor& socket_of(int peer) { return mesh_.sockets[static_cast<size_t>(peer)]; }

  [[noreturn]] void give_up(ErrorKind kind, int culprit, const std::string& text) {
    const Hello notice{kHelloProtocol, -1 - culprit, token_};
    const auto tell = [&](int fd) {
      (void)!send(fd, &notice, sizeof notice, MSG_NOSIGNAL | MSG_DONTWAIT);
    };
    for (const Descriptor& socket : mesh_.sockets) {
      if (socket) tell(socket.get());
    }
    // Ranks at the door are told as well; the token is for those only who have shown that they
    // know it.
    while (listener_ != nullptr && accept_guest(0)) {
    }
    const uint64_t patience = now_ns() + kFarewellNs;
    for (Guest& guest : guests_) {
      // A rank says who it is right after it has connected.
      if (wait_readable(guest.socket.get(), patience) && hear(guest) == Heard::rank) {
        tell(guest.socket.get());
      }
    }
    throw Error(kind, "rank " + std::to_string(rank_) + " cannot join the others: " + text);
  }

  void greet(int peer) {
    const Hello hello{kHelloProtocol, rank_, token_};
    if (send(socket_of(peer).get(), &hello, sizeof hello, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(sizeof hello)) {
      look_at(peer);  // it may have said why
      give_up_on(peer);
    }
  }

  [[noreturn]] void give_up_on(int peer) {
    give_up(ErrorKind::rank_failed, peer,
            "rank " + std::to_string(peer) +
                " ended while the ranks connected; look at what it printed last");
  }

  void connect_to(int peer) {
    Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    socklen_t length = 0;
    const sockaddr_un address = abstract_address(names_[static_cast<size_t>(peer)], &length);
    while (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      // The backlog of a rank that is slow may be full for a while.
      if (fd && (errno == EAGAIN || errno == EINTR) && now_ns() < deadline_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        if (interrupt_ != nullptr && *interrupt_) (*interrupt_)();
        continue;
      }
      if (errno == ECONNREFUSED) {
        give_up(ErrorKind::rank_failed, peer,
                "nobody listens for rank " + std::to_string(peer) +
                    " on this host: it ended, or runs on another host; look at what it printed");
      }
      give_up(ErrorKind::rank_failed, peer,
              "rank " + std::to_string(peer) + " cannot be reached: " + strerror(errno));
    }
    fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
    pid_t pid = 0;
    if (!same_user(fd.get(), &pid)) {
      give_up(ErrorKind::rank_failed, peer,
              "the process behind rank " + std::to_string(peer) +
                  " runs as another user; all ranks of a job must run as the same one");
    }
    mesh_.pids[static_cast<size_t>(peer)] = pid;
    socket_of(peer) = std::move(fd);
    greet(peer);
  }

  void answer() {
    for (int peer = rank_ + 1; peer < size_; ++peer) greet(peer);
  }

  void look_around() {
    std::vector<pollfd> set{{missing_above_ > 0 ? listener_->descriptor() : -1, POLLIN, 0}};
    for (int peer = 0; peer < size_; ++peer) {
      // Once a rank is answered, and has answered, the connection is not ours any more: what comes
      // through it (descriptors of shared memory) is for others to read. Even its end is, because
      // a rank that has all it needs from the others may close its session.
      const bool finished =
          peer < rank_ ? answered_[static_cast<size_t>(peer)] : missing_above_ == 0;
      set.push_back({socket_of(peer) && !finished ? socket_of(peer).get() : -1, POLLIN, 0});
    }
    for (const Guest& guest : guests_) set.push_back({guest.socket.get(), POLLIN, 0});
    if (::poll(set.data(), set.size(), 100) < 0 && errno != EINTR) {
      throw Error(ErrorKind::error, std::string("poll on sockets of peers: ") + strerror(errno));
    }
    const size_t first_guest = 1 + static_cast<size_t>(size_);
    const uint64_t now = now_ns();
    std::vector<Guest> guests;
    guests.swap(guests_);
    for (size_t i = 0; i < guests.size(); ++i) {
      const bool stays =
          set[first_guest + i].revents == 0 ? now < guests[i].limit : listen_to(guests[i]);
      if (stays) guests_.push_back(std::move(guests[i]));
    }
    if (set[0].revents != 0) accept_guest(now);
    for (int peer = 0; peer < size_; ++peer) {
      if (set[1 + static_cast<size_t>(peer)].revents != 0) look_at(peer);
    }
  }

  // False: nobody was at the door.
  bool accept_guest(uint64_t now) {
    Descriptor fd(accept4(listener_->descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) return false;
    pid_t pid = 0;
    // Whoever does not prove to be of this job is turned away, and the wait goes on.
    if (same_user(fd.get(), &pid)) guests_.push_back({std::move(fd), pid, now + kGuestPatienceNs});
    return true;
  }

  enum class Heard { part, rank, stranger };

  Heard hear(Guest& guest) {
    char* bytes = reinterpret_cast<char*>(&guest.hello) + guest.received;
    const ssize_t count =
        recv(guest.socket.get(), bytes, sizeof(Hello) - guest.received, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Heard::part;
    if (count <= 0) return Heard::stranger;
    guest.received += static_cast<size_t>(count);
    if (guest.received < sizeof(Hello)) return Heard::part;
    const int peer = guest.hello.rank;
    const bool fits = is_ours(guest.hello) && peer > rank_ && peer < size_ && !socket_of(peer);
    return fits ? Heard::rank : Heard::stranger;
  }

  // False: he is not a guest any more, but a rank, or turned away.
  bool listen_to(Guest& guest) {
    const Heard heard = hear(guest);
    if (heard != Heard::rank) return heard == Heard::part;
    const auto peer = static_cast<size_t>(guest.hello.rank);
    mesh_.pids[peer] = guest.pid;
    mesh_.sockets[peer] = std::move(guest.socket);
    if (--missing_above_ == 0) answer();
    return false;
  }

  bool is_ours(const Hello& hello) const {
    return hello.protocol == kHelloProtocol && hello.token == token_;
  }

  // Something has come from a connected rank, or its connection has ended.
  void look_at(int peer) {
    Hello hello{};
    const ssize_t count = recv(socket_of(peer).get(), &hello, sizeof hello, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count != static_cast<ssize_t>(sizeof hello) || !is_ours(hello)) give_up_on(peer);
    if (hello.rank == peer && peer < rank_) {
      answered_[static_cast<size_t>(peer)] = true;
      --missing_answers_;
      return;
    }
    if (hello.rank >= 0) give_up_on(peer);
    const int culprit = -1 - hello.rank;
    if (culprit == rank_) {
      give_up(ErrorKind::rank_failed, rank_,
              "rank " + std::to_string(peer) + " gave up waiting for this rank");
    }
    give_up(ErrorKind::rank_failed, culprit,
            "rank " + std::to_string(culprit) + " is missing, says rank " + std::to_string(peer) +
                "; look at what rank " + std::to_string(culprit) + " printed last");
  }

  void probe() {
    for (int peer = rank_ + 1; peer < size_; ++peer) {
      if (socket_of(peer) || has_listener(names_[static_cast<size_t>(peer)])) continue;
      // It may have connected and ended since.
      give_up_on(peer);
    }
  }

  void check_deadline(uint64_t now) {
    const auto seconds = std::to_string(timeout_ns_ / 1'000'000'000u) + " s";
    if (missing_above_ > 0 && now >= deadline_) {
      std::vector<int> missing;
      for (int peer = rank_ + 1; peer < size_; ++peer) {
        if (!socket_of(peer)) missing.push_back(peer);
      }
      give_up(ErrorKind::timeout, missing.front(),
              "rank " + list(missing) + " did not connect within " + seconds +
                  "; look at what they printed: they hang, or were stopped");
    }
    if (missing_above_ == 0 && now >= deadline_ + kAnswerPatienceNs) {
      std::vector<int> missing;
      for (int peer = 0; peer < rank_; ++peer) {
        if (!answered_[static_cast<size_t>(peer)]) missing.push_back(peer);
      }
      give_up(ErrorKind::timeout, missing.front(),
              "rank " + list(missing) + " did not answer within " + seconds +
                  "; look at what they printed: they hang, or were stopped");
    }
  }

  int rank_;
  int size_;
  const Listener* listener_;
  const std::vector<std::string>& names_;
  const Token& token_;
  uint64_t timeout_ns_;
  uint64_t deadline_;
  const Interrupt* interrupt_;
  Mesh mesh_;
  std::vector<Guest> guests_;
  int missing_above_;    // ranks above that have not connected
  int missing_answers_;  // ranks below that have not answered
  std::vector<bool> answered_;
};

}  // namespace

bool wait_readable(int socket, uint64_t deadline_ns) {
  for (;;) {
    pollfd entry{socket, POLLIN, 0};
    const int ready = ::poll(&entry, 1, remaining_ms(deadline_ns));
    if (ready > 0) return true;
    if (ready == 0 && now_ns() >= deadline_ns) return false;
    if (ready < 0 && errno != EINTR) {
      throw Error(ErrorKind::error, std::string("poll on a peer's socket: ") + strerror(errno));
    }
  }
}

Listener::Listener() : descriptor_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  // A random name: no two jobs meet, whatever else runs on this host.
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) {
    throw Error(ErrorKind::error, std::string("getrandom: ") + strerror(errno));
  }
  name_ = "hvd-";
  for (uint8_t byte : random) {
    name_ += "0123456789abcdef"[byte >> 4];
    name_ += "0123456789abcdef"[byte & 15];
  }
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name_, &length);
  if (!descriptor_ ||
      bind(descriptor_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(descriptor_.get(), 1024) != 0) {
    throw Error(ErrorKind::error,
                std::string("cannot listen on an abstract unix socket: ") + strerror(errno));
  }
}

Mesh connect_mesh(int rank, const Listener* listener, const std::vector<std::string>& names,
                  const Token& token, uint64_t timeout_ns, const Interrupt* interrupt) {
  return Handshake(rank, listener, names, token, timeout_ns, interrupt).run();
}

bool send_memory(int socket, uint64_t key, const SharedMemory& memory) {
  iovec part{&key, sizeof key};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = memory.descriptor();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) return false;
    throw Error(ErrorKind::error,
                std::string("cannot hand shared memory to a peer: ") + strerror(errno));
  }
  return true;
}

std::optional<ReceivedMemory> receive_memory(int socket, bool* ended) {
  ReceivedMemory received;
  iovec part{&received.key, sizeof received.key};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  // A descriptor keeps its label from being mixed with the bytes before and behind it.
  const ssize_t count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  *ended = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  if (count <= 0) return std::nullopt;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    received.descriptor = Descriptor(fd);
  }
  if (count != static_cast<ssize_t>(sizeof received.key) || !received.descriptor) {
    *ended = true;
    return std::nullopt;
  }
  return received;
}

}  // namespace hvd
