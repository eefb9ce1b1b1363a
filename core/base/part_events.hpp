// Times of the parts of work that is given to a GPU's stream, by events that are recorded where one part ends and the
// next begins. Nothing waits until they are read; events are made once and used again.
#pragma once
#include <kvlab/stream.hpp>

#include <vector>

#include "base/part_timer.hpp"

namespace kvlab {

class PartEvents {
 public:
  explicit PartEvents(Stream s) : stream_(s) {}  // a GPU's, which lives longer
  ~PartEvents();
  PartEvents(const PartEvents&) = delete;
  PartEvents& operator=(const PartEvents&) = delete;

  // What the stream does between the mark before and this one is `part`; the first one only begins. Not while the
  // stream is captured.
  void mark(Part part);
  // Seconds of the parts between the first and the last mark since the last take, for whose work this waits.
  PartSeconds take();
  void clear() { marks_.clear(); }

 private:
  Stream stream_;
  std::vector<void*> events_;  // all there are; the first ones are those of marks_
  std::vector<Part> marks_;
};

}  // namespace kvlab
