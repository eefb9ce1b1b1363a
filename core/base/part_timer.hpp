// Where a step's time goes. A PartClock that is installed on the thread gets every second between install and read,
// each under the part of the innermost open PartTimer (exclusive times, so the parts add up to the whole).
#pragma once
#include <array>
#include <chrono>
#include <cstdint>

namespace kvlab {

enum class Part : std::uint8_t { gemm, attend, append, score, select, recall, compact, other };
inline constexpr int part_count = 8;
constexpr const char* name_of(Part p) {
  constexpr const char* names[part_count] = {"gemm",   "attend", "append",  "score",
                                             "select", "recall", "compact", "other"};
  return names[static_cast<int>(p)];
}

class PartClock {
 public:
  PartClock() : previous_(current()) { current() = this; }
  ~PartClock() { current() = previous_; }
  PartClock(const PartClock&) = delete;
  PartClock& operator=(const PartClock&) = delete;

  // Seconds per part since the last take(); starts anew.
  std::array<double, part_count> take() {
    lap();
    auto out = seconds_;
    seconds_ = {};
    return out;
  }

 private:
  friend class PartTimer;
  using Clock = std::chrono::steady_clock;

  static PartClock*& current() {
    thread_local PartClock* clock = nullptr;
    return clock;
  }
  void lap() {
    const auto now = Clock::now();
    seconds_[static_cast<std::size_t>(part_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
  }

  PartClock* previous_;
  Clock::time_point since_ = Clock::now();
  Part part_ = Part::other;
  std::array<double, part_count> seconds_{};
};

class PartTimer {
 public:
  explicit PartTimer(Part part) : clock_(PartClock::current()) {
    if (!clock_) return;
    clock_->lap();
    outer_ = clock_->part_;
    clock_->part_ = part;
  }
  ~PartTimer() {
    if (!clock_) return;
    clock_->lap();
    clock_->part_ = outer_;
  }
  PartTimer(const PartTimer&) = delete;
  PartTimer& operator=(const PartTimer&) = delete;

 private:
  PartClock* clock_;
  Part outer_ = Part::other;
};

}  // namespace kvlab
