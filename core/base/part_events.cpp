#include "base/part_events.hpp"

#include "base/backend.hpp"

namespace kvlab {
namespace {

const CudaRuntime& runtime() { return require_cuda("the parts of a step on CUDA").runtime; }

}  // namespace

PartMarks::~PartMarks() {
  for (void* event : events_) runtime().delete_event(event);
}

void* PartMarks::next() {
  if (parts_.size() == events_.size()) events_.push_back(runtime().new_event());
  return events_[parts_.size()];
}

void PartMarks::add_to(PartSeconds& out) const {
  // After a wait for the last event the others are done, so the loop waits for none.
  if (parts_.size() > 1) runtime().elapsed(events_[0], events_[parts_.size() - 1]);
  for (std::size_t i = 1; i < parts_.size(); ++i)
    out[static_cast<std::size_t>(parts_[i])] +=
        static_cast<double>(runtime().elapsed(events_[i - 1], events_[i])) / 1000;
}

void PartEvents::mark(Part part) {
  void* stream = stream_.handle();
  if (captured_)
    captured_->add(part, [&](void* event) { runtime().record_at_launch(event, stream); });
  else
    marks_.add(part, [&](void* event) { runtime().record(event, stream); });
}

PartSeconds PartEvents::take() {
  PartSeconds out{};
  marks_.add_to(out);
  for (const PartMarks* m : launched_) m->add_to(out);
  clear();
  return out;
}

}  // namespace kvlab
