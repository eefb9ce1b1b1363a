// How an op reaches its CUDA version, which lies in libkvlab_cuda.so (base/backend.hpp):
//   x.hpp   void top_pages(const PagedKv& kv, PageList out, Stream s);     declares the op.
//   x.cpp   if (s.device() == Device::cuda) return on_cuda<top_pages>(kv, out, s);
//   x.cu    KVLAB_ON_CUDA(top_pages, top_pages_cuda);                      announces a function of the same type.
// The key of a function is the mangled name of its declaration, which includes the types of its arguments.
#pragma once
#include <kvlab/stream.hpp>

#include <typeinfo>
#include <utility>

#include "base/part_timer.hpp"
#include "base/put_off.hpp"

namespace kvlab {

template <auto Op>
struct CudaOpKey {};

using AnyFunction = void (*)();

// A link in a library's list of announced functions.
struct CudaOpEntry {
  const char* key = nullptr;
  AnyFunction function = nullptr;
  const CudaOpEntry* next = nullptr;
};

// The list of libkvlab_cuda.so; defined there alone (base/device_op.cu).
extern const CudaOpEntry* announced_cuda_ops;

// Announces `function_` as the CUDA version of Op, for as long as the object lives. null hides the op. A test passes a
// list of its own.
template <auto Op>
struct OnCuda : CudaOpEntry {
  OnCuda(decltype(Op) function_, const CudaOpEntry*& list)
      : CudaOpEntry{typeid(CudaOpKey<Op>).name(), reinterpret_cast<AnyFunction>(function_), list} {
    list = this;
  }
  OnCuda(const OnCuda&) = delete;
  OnCuda& operator=(const OnCuda&) = delete;
};
#define KVLAB_ON_CUDA(op, function_) \
  static const ::kvlab::OnCuda<op> op##_announced(function_, ::kvlab::announced_cuda_ops)

// Returns the function that the backend in use announced under the key. Errc::device with the op's name and the reason
// if there is none.
AnyFunction find_cuda_op(const char* key);
bool cuda_backend_replaced();
// CudaBackend::reach_from_host of the backend in use.
void (*cuda_reach_from_host())(bool);

// Calls a function that has no CPU version: libkvlab.so declares it, libkvlab_cuda.so defines it. It looks the
// library's function up once.
template <auto Function, class... Arguments>
decltype(auto) only_on_cuda(Arguments&&... arguments) {
  run_put_off();
  PartClock::work();
  const auto find = [] {
    return reinterpret_cast<decltype(Function)>(find_cuda_op(typeid(CudaOpKey<Function>).name()));
  };
  if (cuda_backend_replaced()) return find()(std::forward<Arguments>(arguments)...);
  static const auto function = find();
  return function(std::forward<Arguments>(arguments)...);
}

namespace detail {

class HostReaches {
 public:
  explicit HostReaches(void (*reach)(bool)) : reach_(reach) { reach_(true); }
  ~HostReaches() { reach_(false); }
  HostReaches(const HostReaches&) = delete;
  HostReaches& operator=(const HostReaches&) = delete;

 private:
  void (*reach_)(bool);
};
inline Stream for_cpu(Stream) { return Stream::cpu(); }
template <class T>
T&& for_cpu(T&& x) {
  return std::forward<T>(x);
}

}  // namespace detail

// Calls the CUDA version of an op. A test's backend whose memory the host may reach takes the op's CPU version instead.
template <auto Op, class... Arguments>
decltype(auto) on_cuda(Arguments&&... arguments) {
  if (const auto reach = cuda_reach_from_host()) {
    const detail::HostReaches open(reach);
    return Op(detail::for_cpu(std::forward<Arguments>(arguments))...);
  }
  return only_on_cuda<Op>(std::forward<Arguments>(arguments)...);
}

}  // namespace kvlab
