// A device made of memory that only ops can reach. On its stream a policy works as on a GPU's. When the policy's own
// code reads or writes the memory, call() turns the SIGSEGV into an Error.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <kvlab/error.hpp>
#include <kvlab/workspace.hpp>

#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "base/backend.hpp"
#include "base/put_off.hpp"
#include "plugin/callback.hpp"
#include "store/workspace.hpp"

namespace kvlab::test {

class GuardedDevice final : public Workspace {
 public:
  GuardedDevice() {
    memory_ = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    current() = this;
    fill_table();
    replace_cuda_backend(&table_);
    struct sigaction action = {};
    action.sa_handler = [](int) { siglongjmp(current()->back_, 1); };
    sigaction(SIGSEGV, &action, &before_);
  }
  ~GuardedDevice() override {
    sigaction(SIGSEGV, &before_, nullptr);
    replace_cuda_backend(nullptr);
    current() = nullptr;
    munmap(memory_, size);
  }
  GuardedDevice(const GuardedDevice&) = delete;
  GuardedDevice& operator=(const GuardedDevice&) = delete;

  Stream stream() const { return Stream::cuda(memory_); }

  // Runs the host's side of a callback. A callback that touches the device leaks its objects.
  template <class Work>
  void call(const Work& work) {
    const Recorded outside(nullptr, nullptr);  // takes the callback off the record after a jump out of it
    if (sigsetjmp(back_, 1)) throw Error(Errc::plugin, "got device memory read or written by the host, wanted an op");
    work();
    run_put_off();  // the caller reads lists without an op
  }

  // The host may reach the memory while an Open lives. They nest.
  struct Open {
    Open() {
      if (current()->open_++ == 0) current()->protect(PROT_READ | PROT_WRITE);
    }
    ~Open() {
      if (--current()->open_ == 0) current()->protect(PROT_NONE);
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
  };

  void* scratch(const char*, std::size_t bytes) override {
    void* p = static_cast<std::byte*>(memory_) + used_;
    used_ += (bytes + 127) / 64 * 64;  // never 0 bytes
    if (used_ + states_ > size) throw std::bad_alloc();
    return p;
  }
  void* state(const char*, std::size_t bytes_per_slot, int slots) override {
    states_ += (bytes_per_slot * static_cast<std::size_t>(slots) + 63) / 64 * 64;
    return static_cast<std::byte*>(memory_) + size - states_;
  }
  const void* upload(const char* tag, const void* from, std::size_t bytes) override {
    if (in_graph) StoreWorkspace::refuse_upload(tag);
    void* to = scratch(tag, bytes);
    const Open open;
    if (bytes) std::memcpy(to, from, bytes);
    return to;
  }
  const void* constant(const char* tag, const void* from, std::size_t bytes) override {
    void* to = state(tag, bytes, 1);
    const Open open;
    std::memcpy(to, from, bytes);
    return to;
  }
  void reset() { used_ = 0; }  // scratch is free again
  bool in_graph = false;       // a GPU would hold the callback in a graph

  // A dense copy of a view with any strides.
  template <class T, int Rank>
  View<T, Rank> put(View<T, Rank> v) {
    if (!v) return {};
    std::size_t count = 1;
    for (const auto e : v.extent) count *= static_cast<std::size_t>(e);
    auto* to = static_cast<std::remove_const_t<T>*>(scratch("", count * sizeof(T)));
    const Open open;
    const auto dense = View<T, Rank>::dense(to, v.extent);
    if (v.stride == dense.stride) {
      std::memcpy(to, v.data, count * sizeof(T));
      return dense;
    }
    std::array<std::int64_t, Rank> at{};
    for (std::size_t i = 0; i < count; ++i) {
      std::int64_t offset = 0;
      for (int d = 0; d < Rank; ++d) offset += at[static_cast<std::size_t>(d)] * v.stride[static_cast<std::size_t>(d)];
      to[i] = v.data[offset];
      for (int d = Rank; d-- > 0 && ++at[static_cast<std::size_t>(d)] == v.extent[static_cast<std::size_t>(d)];)
        at[static_cast<std::size_t>(d)] = 0;
    }
    return dense;
  }

 private:
  static constexpr std::size_t size = std::size_t{1} << 26;

  static GuardedDevice*& current() {
    static GuardedDevice* device = nullptr;
    return device;
  }
  void protect(int how) { mprotect(memory_, size, how); }

  // Every op is the CPU's.
  void fill_table() {
    CudaRuntime& r = table_.runtime;
    r.allocate = [](std::size_t bytes) { return current()->state("", bytes, 1); };
    r.free = [](void*) {};
    r.copy = [](void* to, const void* from, std::size_t bytes, void*) {
      const Open open;
      std::memcpy(to, from, bytes);
    };
    r.fill = [](void* to, int byte, std::size_t bytes, void*) {
      const Open open;
      std::memset(to, byte, bytes);
    };
    r.synchronize = [](void*) {};
    table_.reach_from_host = [](bool on) { current()->protect(on ? PROT_READ | PROT_WRITE : PROT_NONE); };
  }

  void* memory_ = nullptr;
  std::size_t used_ = 0, states_ = 0;
  int open_ = 0;  // how many Open live
  CudaBackend table_;
  struct sigaction before_ = {};
  sigjmp_buf back_;
};

}  // namespace kvlab::test
