#include "base/part_timer.hpp"

#include <exception>

#include "base/part_events.hpp"

namespace kvlab {

PartClock::PartClock(PartEvents* events) : events_(events), previous_(current()) {
  if (events_) events_->clear();
  current() = this;
}

void PartClock::note_work() {
  works_ = true;
  if (open_ > 0) events_->begin(part_);
}

void PartClock::lap() {
  if (events_) {
    if (works_) events_->mark(part_);
    works_ = false;
    return;
  }
  const auto now = Clock::now();
  seconds_[static_cast<std::size_t>(part_)] += std::chrono::duration<double>(now - since_).count();
  since_ = now;
}

void PartClock::enter(Part part) {
  ++open_;
  if (part != part_) lap();
  part_ = part;
}

void PartClock::leave(Part outer) noexcept {
  try {
    if (--open_ == 0 || outer != part_) lap();
  } catch (const std::exception&) {  // the device's next call throws the error
  }
  part_ = outer;
}

PartClock::Step PartClock::take() {
  Step out;
  if (!events_) lap();
  const auto end = events_ ? Clock::now() : since_;
  out.seconds = std::chrono::duration<double>(end - begin_).count();
  out.parts = events_ ? events_->take() : seconds_;
  seconds_ = {}, works_ = false;
  begin_ = since_ = events_ ? Clock::now() : since_;  // no step pays for reading the events
  return out;
}

}  // namespace kvlab
