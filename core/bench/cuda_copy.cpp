#include "base/stream_memory.hpp"
#include "bench/cuda_timing.hpp"

namespace kvlab::bench {

double cuda_seconds(Stream s, const std::function<void()>& work) {
  return 1e-3 * static_cast<double>(cuda_backend()->runtime.time(
                    s.handle(), [](void* f) { (*static_cast<const std::function<void()>*>(f))(); },
                    const_cast<std::function<void()>*>(&work)));
}

double cuda_copy_rate(Stream s, bool to_device) {
  constexpr std::size_t bytes = std::size_t{256} << 20;
  const CudaRuntime& r = cuda_backend()->runtime;
  const DeviceBuffer device(bytes);
  void* host = r.allocate_pinned(bytes);
  if (!host) throw NoRoom("got no pinned memory for a bench");
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double t = cuda_seconds(s, [&] {
      r.copy(to_device ? device.as<void>() : host, to_device ? host : device.as<void>(), bytes, s.handle());
    });
    best = i == 0 ? t : std::min(best, t);
  }
  r.free_pinned(host);
  return bytes / best;
}

double cuda_inner_copy_rate(Stream s) {
  constexpr std::size_t bytes = std::size_t{1} << 30;
  const DeviceBuffer from(bytes), to(bytes);
  const CudaRuntime& r = cuda_backend()->runtime;
  r.fill(from.as<void>(), 1, bytes, s.handle());
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double t = cuda_seconds(s, [&] { r.copy(to.as<void>(), from.as<void>(), bytes, s.handle()); });
    best = i == 0 ? t : std::min(best, t);
  }
  return 2. * bytes / best;
}

}  // namespace kvlab::bench
