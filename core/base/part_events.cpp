#include "base/part_events.hpp"

#include "base/backend.hpp"

namespace kvlab {
namespace {

const CudaRuntime& runtime() { return require_cuda("the parts of a step on CUDA").runtime; }

}  // namespace

PartEvents::~PartEvents() {
  for (void* event : events_) runtime().delete_event(event);
}

void PartEvents::mark(Part part) {
  if (marks_.size() == events_.size()) events_.push_back(runtime().new_event());
  runtime().record(events_[marks_.size()], stream_.handle());
  marks_.push_back(part);
}

PartSeconds PartEvents::take() {
  PartSeconds out{};
  // After a wait for the last event the others are done, so the loop waits for none.
  if (marks_.size() > 1) runtime().elapsed(events_[0], events_[marks_.size() - 1]);
  for (std::size_t i = 1; i < marks_.size(); ++i)
    out[static_cast<std::size_t>(marks_[i])] +=
        static_cast<double>(runtime().elapsed(events_[i - 1], events_[i])) / 1000;
  clear();
  return out;
}

}  // namespace kvlab
