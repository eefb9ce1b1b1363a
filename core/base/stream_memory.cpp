#include "base/stream_memory.hpp"

#include <cstring>
#include <kvlab/error.hpp>
#include <new>
#include <string>

#include "base/backend.hpp"
#include "base/part_timer.hpp"
#include "base/put_off.hpp"

namespace kvlab {
namespace {

constexpr std::align_val_t line{64};

const CudaRuntime& runtime() { return require_cuda("device memory").runtime; }

}  // namespace

OwnedStream::OwnedStream(Device device, bool background)
    : stream_(device == Device::cuda ? Stream::cuda(runtime().new_stream(background)) : Stream::cpu()) {}

OwnedStream::~OwnedStream() {
  if (stream_.device() == Device::cuda) runtime().delete_stream(stream_.handle());
}

StreamMemory::StreamMemory(Stream s, std::size_t bytes) : bytes_(bytes), device_(s.device()) {
  if (bytes == 0) return;
  data_ = device_ == Device::cuda ? runtime().allocate(bytes) : ::operator new(bytes, line);
  if (!data_) throw NoRoom(runtime().free_bytes(), bytes);
}

StreamMemory::~StreamMemory() {
  if (!data_) return;
  if (device_ == Device::cuda)
    runtime().free(data_);
  else
    ::operator delete(data_, line);
}

static void before_work() {
  run_put_off();
  PartClock::work();
}

void copy_memory(void* to, const void* from, std::size_t bytes, Stream s) {
  if (bytes == 0) return;
  if (s.device() == Device::cuda)
    before_work(), runtime().copy(to, from, bytes, s.handle());
  else
    std::memcpy(to, from, bytes);
}

void zero_memory(void* to, std::size_t bytes, Stream s) {
  if (bytes == 0) return;
  if (s.device() == Device::cuda)
    before_work(), runtime().fill(to, 0, bytes, s.handle());
  else
    std::memset(to, 0, bytes);
}

void synchronize(Stream s) {
  if (s.device() == Device::cuda) run_put_off(), runtime().synchronize(s.handle());
}

}  // namespace kvlab
