#pragma once

#include <atomic>
#include <cstdint>

namespace hvd {

// Ends a run after the same point on every rank, whoever asks for it and whenever, without a
// round trip and without anybody waiting.
//
// A run has points that all ranks pass in the same order (the start of each batch, say), each rank
// at its own time. One word of shared memory holds the furthest point that any rank has passed,
// and whether the run is to end. As long as it is open, whoever gets further moves the word on.
// Closing it freezes the furthest point: the ranks that are behind run up to there, because the
// one in front needs them; nobody passes the next. Both are changes of the same word, so either
// the point counted or the run was closed before, on all ranks alike.
//
// For where a run ends the word is all there is to agree on, and a single atomic has one order of
// changes that all see: no stronger order than relaxed is needed. Only closing releases what was
// written before (when it was asked for), to those who see it closed.
class StopLine {
 public:
  explicit StopLine(std::atomic<uint64_t>* word) : word_(word) {}

  // A new run: what was asked for in the one before is over. All ranks begin the same runs.
  void begin_run() {
    run_.fetch_add(1, std::memory_order_relaxed);
    point_ = 0;
  }

  // Asks for the end of this run. Any thread, and signal handlers.
  void close() {
    const uint64_t run = run_.load(std::memory_order_relaxed);
    uint64_t seen = word_->load(std::memory_order_relaxed);
    for (;;) {
      if (run_of(seen) > run || (run_of(seen) == run && is_closed(seen))) return;
      const uint64_t closed = make(run, run_of(seen) == run ? point_of(seen) : 0) | kClosed;
      if (word_->compare_exchange_weak(seen, closed, std::memory_order_release,
                                       std::memory_order_relaxed)) {
        return;
      }
    }
  }

  // Whether the run is to end.
  bool closed() const {
    const uint64_t seen = word_->load(std::memory_order_acquire);
    return run_of(seen) == run_.load(std::memory_order_relaxed) && is_closed(seen);
  }

  // Comes to the next point. False: the run ends before it, on all ranks. One thread.
  bool pass() {
    const uint64_t run = run_.load(std::memory_order_relaxed);
    const uint64_t point = ++point_;
    uint64_t seen = word_->load(std::memory_order_relaxed);
    for (;;) {
      if (run_of(seen) > run) return true;  // the others have completed this one
      if (run_of(seen) == run) {
        if (point <= point_of(seen)) return true;
        if (is_closed(seen)) return false;
      }
      if (word_->compare_exchange_weak(seen, make(run, point), std::memory_order_relaxed)) {
        return true;
      }
    }
  }

 private:
  static constexpr int kPointBits = 40;
  static constexpr uint64_t kClosed = uint64_t{1} << kPointBits;
  static uint64_t make(uint64_t run, uint64_t point) { return run << (kPointBits + 1) | point; }
  static uint64_t run_of(uint64_t word) { return word >> (kPointBits + 1); }
  static uint64_t point_of(uint64_t word) { return word & (kClosed - 1); }
  static bool is_closed(uint64_t word) { return (word & kClosed) != 0; }

  std::atomic<uint64_t>* word_;
  std::atomic<uint64_t> run_{0};
  uint64_t point_ = 0;  // points this rank has come to in this run
};

}  // namespace hvd
