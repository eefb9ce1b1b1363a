// Copies of host views in device memory, for tests only. The device then has a fixture's cache in the same state.
#pragma once
#include <kvlab/kv.hpp>

#include <memory>
#include <string>
#include <vector>

#include "base/backend.hpp"
#include "base/stream_memory.hpp"

namespace kvlab::test {

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : memory_(require_cuda("test").runtime.allocate(bytes ? bytes : 1)) {
    if (!memory_) throw NoRoom(cuda_backend()->runtime.free_bytes(), bytes);
  }
  ~DeviceMemory() { cuda_backend()->runtime.free(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* get() const { return memory_; }

 private:
  void* memory_;
};

// A stream, and all memory that a test puts on the device.
class OnDevice {
 public:
  OnDevice() : stream_(require_cuda("test").runtime.new_stream()) {}
  ~OnDevice() { cuda_backend()->runtime.delete_stream(stream_); }

  Stream stream() const { return Stream::cuda(stream_); }
  void synchronize() const { cuda_backend()->runtime.synchronize(stream_); }

  template <class T>
  std::remove_const_t<T>* put(T* from, std::size_t count) {
    memory_.push_back(std::make_unique<DeviceMemory>(count * sizeof(T)));
    cuda_backend()->runtime.copy(memory_.back()->get(), from, count * sizeof(T), stream_);
    synchronize();
    return static_cast<std::remove_const_t<T>*>(memory_.back()->get());
  }
  // Copies a whole dense view. The copy has the same extents.
  template <class T, int Rank>
  View<T, Rank> put(View<T, Rank> dense) {
    if (!dense) return {};
    return View<T, Rank>::dense(put(dense.data, count(dense)), dense.extent);
  }
  template <class T, int Rank>
  std::vector<std::remove_const_t<T>> get(View<T, Rank> dense) const {
    std::vector<std::remove_const_t<T>> out(count(dense));
    cuda_backend()->runtime.copy(out.data(), dense.data, out.size() * sizeof(T), stream_);
    synchronize();
    return out;
  }
  // Copies the cache with its frames (`arena_bytes` from kv.base on), tables and slots.
  PagedKv put(PagedKv kv, std::size_t arena_bytes) {
    kv.base = put(kv.base, arena_bytes);
    kv.table = put(kv.table);
    kv.length = put(kv.length);
    kv.slots = put(kv.slots, static_cast<std::size_t>(kv.rows));
    if (kv.rope_table.inv_freq)
      kv.rope_table.inv_freq = put(kv.rope_table.inv_freq, static_cast<std::size_t>(kv.head_dim / 2));
    return kv;
  }
  template <class List>
  List put(List list) {
    list.index = put(list.index);
    list.count = put(list.count);
    return list;
  }

 private:
  template <class T, int Rank>
  static std::size_t count(const View<T, Rank>& v) {
    std::size_t n = 1;
    for (const auto e : v.extent) n *= static_cast<std::size_t>(e);
    return n;
  }
  void* stream_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

}  // namespace kvlab::test
