#include "base/side_stream.hpp"

#include "base/backend.hpp"

namespace kvlab {
namespace {

const CudaRuntime& runtime() { return require_cuda("work beside a stream").runtime; }

}  // namespace

SideStream::SideStream(Stream main) : main_(main), side_(Device::cuda, true), fork_(runtime().new_event()) {
  for (void*& event : done_) event = runtime().new_event();
}

SideStream::~SideStream() {
  for (void* event : done_) runtime().delete_event(event);
  runtime().delete_event(fork_);
}

int SideStream::next() {
  const int lane = next_;
  next_ = (next_ + 1) % lanes;
  if (used_[static_cast<std::size_t>(lane)]) runtime().wait(done_[static_cast<std::size_t>(lane)], main_.handle());
  return lane;
}

Stream SideStream::begin() {
  runtime().record(fork_, main_.handle());
  runtime().wait(fork_, side_.get().handle());
  return side_.get();
}

void SideStream::end(int lane) {
  runtime().record(done_[static_cast<std::size_t>(lane)], side_.get().handle());
  used_[static_cast<std::size_t>(lane)] = true;
  last_ = lane;
}

void SideStream::join() {
  if (busy()) runtime().wait(done_[static_cast<std::size_t>(last_)], main_.handle());
  forget();
}

void SideStream::forget() {
  used_.fill(false);
  last_ = -1;
}

}  // namespace kvlab
