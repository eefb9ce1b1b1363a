// Times of the parts of a GPU stream's work. An event is recorded where one part ends and the next begins. Nothing
// waits until take(); events are made once and used again.
#pragma once
#include <kvlab/stream.hpp>

#include <vector>

#include "base/part_timer.hpp"

namespace kvlab {

class PartEvents {
 public:
  explicit PartEvents(Stream s) : stream_(s) {}  // a GPU's stream, which outlives this object
  ~PartEvents();
  PartEvents(const PartEvents&) = delete;
  PartEvents& operator=(const PartEvents&) = delete;

  // Counts the stream's work since the previous mark as `part`; the first mark only begins. Not while the stream is
  // captured.
  void mark(Part part);
  // Waits for the marked work. Returns the seconds of each part from the first to the last mark since the last take.
  PartSeconds take();
  void clear() { marks_.clear(); }

 private:
  Stream stream_;
  std::vector<void*> events_;  // every event made so far; events_[i] belongs to marks_[i]
  std::vector<Part> marks_;
};

}  // namespace kvlab
