// Where a step's time goes. While a PartClock is installed on the thread, it counts every second for the part of the
// innermost open PartTimer. A second counts for one part only, so the parts add up to the whole. For work of a GPU's
// stream, a clock with PartEvents records an event between the work of two parts and does not read the host's clock.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>

namespace kvlab {

class PartEvents;

enum class Part : std::uint8_t { gemm, attend, append, score, select, recall, compact, other };
inline constexpr int part_count = 8;
constexpr const char* name_of(Part p) {
  constexpr const char* names[part_count] = {"gemm",   "attend", "append",  "score",
                                             "select", "recall", "compact", "other"};
  return names[static_cast<int>(p)];
}
using PartSeconds = std::array<double, part_count>;

class PartClock {
 public:
  // events: of the stream that runs the work, borrowed; null = the host's clock. Their earlier marks are dropped.
  explicit PartClock(PartEvents* events = nullptr);
  ~PartClock() { current() = previous_; }
  PartClock(const PartClock&) = delete;
  PartClock& operator=(const PartClock&) = delete;

  struct Step {
    double seconds = 0;  // on the host's clock
    PartSeconds parts{};
  };
  // The times since the last take(). On the host's clock the parts add up to `seconds`. With events, which it waits
  // for, they add up to the stream's time from the first work under a PartTimer to the last one's end, without the gaps
  // before and behind a graph.
  Step take();

  // The thread is about to give a GPU work.
  static void work() {
    if (PartClock* clock = current(); clock && clock->events_) clock->note_work();
  }

  // The events of the thread's clock; null = it has none.
  static PartEvents* thread_events() { return current() ? current()->events_ : nullptr; }

 private:
  friend class PartTimer;
  using Clock = std::chrono::steady_clock;

  static PartClock*& current() {
    thread_local PartClock* clock = nullptr;
    return clock;
  }
  void lap();
  void note_work();
  void enter(Part part);
  void leave(Part outer) noexcept;

  PartEvents* events_;
  PartClock* previous_;
  Clock::time_point begin_ = Clock::now(), since_ = begin_;
  Part part_ = Part::other;
  int open_ = 0;        // PartTimers
  bool works_ = false;  // the stream got work since the last event
  PartSeconds seconds_{};
};

class PartTimer {
 public:
  explicit PartTimer(Part part) : clock_(PartClock::current()) {
    if (!clock_) return;
    outer_ = clock_->part_;
    clock_->enter(part);
  }
  ~PartTimer() {
    if (clock_) clock_->leave(outer_);
  }
  PartTimer(const PartTimer&) = delete;
  PartTimer& operator=(const PartTimer&) = delete;

 private:
  PartClock* clock_;
  Part outer_ = Part::other;
};

}  // namespace kvlab
