// Where and in which order work runs. Work given to one stream runs in order; on the CPU backend it has finished when
// the call returns. There is no default stream: every op takes one as its last argument.
#pragma once
#include "kvlab/dtype.hpp"

namespace kvlab {

class Stream {
 public:
  static Stream cpu() { return Stream(Device::cpu, nullptr); }
  static Stream cuda(void* handle) { return Stream(Device::cuda, handle); }  // handle: a cudaStream_t, borrowed

  Device device() const { return device_; }
  void* handle() const { return handle_; }

 private:
  Stream(Device device, void* handle) : device_(device), handle_(handle) {}
  Device device_;
  void* handle_;
};

}  // namespace kvlab
