// Times of the parts of a GPU stream's work. An event is recorded where one part ends and the next begins. Nothing
// waits until take(); events are made once and used again.
#pragma once
#include <kvlab/stream.hpp>

#include <memory>
#include <vector>

#include "base/part_timer.hpp"

namespace kvlab {

// Events one after the other, each with the part of the work between the event before and it. The first only begins,
// and so does the first behind a cut.
class PartMarks {
 public:
  PartMarks() = default;
  ~PartMarks();
  PartMarks(const PartMarks&) = delete;
  PartMarks& operator=(const PartMarks&) = delete;

  // record(event): puts the mark behind the work so far.
  template <class Record>
  void add(Part part, const Record& record) {
    record(next());
    marks_.push_back({part, cut_});
    cut_ = false;
  }
  void cut() { cut_ = true; }
  bool begins() const { return cut_; }  // the next mark only begins
  // Waits for the marked work and adds the seconds of each part.
  void add_to(PartSeconds& out) const;
  void clear() { marks_.clear(), cut_ = true; }

 private:
  struct Mark {
    Part part;
    bool begins;
  };
  void* next();

  std::vector<void*> events_;  // every event made so far; events_[i] belongs to marks_[i]
  std::vector<Mark> marks_;
  bool cut_ = true;
};

class PartEvents {
 public:
  explicit PartEvents(Stream s) : stream_(s) {}  // a GPU's stream, which outlives this object
  PartEvents(const PartEvents&) = delete;
  PartEvents& operator=(const PartEvents&) = delete;

  // Counts the stream's work since the previous mark as `part`; the first mark only begins.
  void mark(Part part);
  // Marks where work begins, unless a mark lies there.
  void begin(Part part) {
    if (captured_ ? captured_->begins() : marks_.begins()) mark(part);
  }
  // The graph that holds these marks was launched. Of two launches until the next take the last one counts.
  void launched(std::shared_ptr<const PartMarks> of_graph);
  // Waits for the marked work. Returns the seconds of each part from the first to the last mark since the last take,
  // with those of graphs.
  PartSeconds take();
  void clear() { marks_.clear(), launched_.clear(); }

 private:
  friend class MarksInGraph;

  Stream stream_;
  PartMarks marks_;
  PartMarks* captured_ = nullptr;
  std::vector<std::shared_ptr<const PartMarks>> launched_;
};

// While it lives, the stream is captured, and marks lie in the graph. `of_graph` is empty before.
class MarksInGraph {
 public:
  MarksInGraph(PartEvents& events, PartMarks& of_graph) : events_(events) { events_.captured_ = &of_graph; }
  ~MarksInGraph() { events_.captured_ = nullptr; }
  MarksInGraph(const MarksInGraph&) = delete;
  MarksInGraph& operator=(const MarksInGraph&) = delete;

 private:
  PartEvents& events_;
};

}  // namespace kvlab
