// A background stream of the GPU for work beside a main stream. The main stream forks work off and joins it later. Both
// may lie in a graph that is captured from the main stream.
#pragma once
#include <array>

#include "base/stream_memory.hpp"

namespace kvlab {

class SideStream {
 public:
  static constexpr int lanes = 4;

  explicit SideStream(Stream main);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // Returns the next lane. The main stream's later work runs after the work that lane got before, so that it may write
  // what that work read.
  int next();
  // Returns the side stream. What it gets until end() runs after the main stream's work so far. A lane of no_lane
  // has nothing that the main stream writes again before the join.
  static constexpr int no_lane = lanes;
  Stream begin();
  void end(int lane);
  Stream stream() const { return side_.get(); }
  // The main stream's later work runs after all work of the side stream.
  void join();
  void forget();                            // as after a join, where a capture of the work failed
  bool busy() const { return last_ >= 0; }  // there was work since the last join

 private:
  Stream main_;
  OwnedStream side_;
  void* fork_;
  std::array<void*, lanes + 1> done_{};
  std::array<bool, lanes + 1> used_{};  // since the last join
  int next_ = 0, last_ = -1;
};

}  // namespace kvlab
