#include "base/part_events.hpp"

#include <algorithm>
#include <utility>

#include "base/backend.hpp"

namespace kvlab {
namespace {

const CudaRuntime& runtime() { return require_cuda("the parts of a step on CUDA").runtime; }

}  // namespace

PartMarks::~PartMarks() {
  for (void* event : events_) runtime().delete_event(event);
}

void* PartMarks::next() {
  if (marks_.size() == events_.size()) events_.push_back(runtime().new_event());
  return events_[marks_.size()];
}

void PartMarks::add_to(PartSeconds& out) const {
  // After a wait for the last event the others are done, so the loop waits for none.
  if (marks_.size() > 1) runtime().elapsed(events_[0], events_[marks_.size() - 1]);
  for (std::size_t i = 1; i < marks_.size(); ++i)
    if (!marks_[i].begins)
      out[static_cast<std::size_t>(marks_[i].part)] +=
          static_cast<double>(runtime().elapsed(events_[i - 1], events_[i])) / 1000;
}

void PartEvents::mark(Part part) {
  void* stream = stream_.handle();
  if (captured_)
    captured_->add(part, [&](void* event) { runtime().record_at_launch(event, stream); });
  else
    marks_.add(part, [&](void* event) { runtime().record(event, stream); });
}

void PartEvents::launched(std::shared_ptr<const PartMarks> of_graph) {
  marks_.cut();  // the graph's own marks tell its time
  if (std::ranges::find(launched_, of_graph) == launched_.end()) launched_.push_back(std::move(of_graph));
}

PartSeconds PartEvents::take() {
  PartSeconds out{};
  marks_.add_to(out);
  for (const auto& m : launched_) m->add_to(out);
  clear();
  return out;
}

}  // namespace kvlab
