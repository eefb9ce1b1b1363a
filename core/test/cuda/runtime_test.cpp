#include <catch2/catch.hpp>
#include <numeric>
#include <string_view>

#include "base/cuda_graph.hpp"
#include "base/half.hpp"
#include "base/side_stream.hpp"
#include "base/stream_memory.hpp"
#include "cases/place.hpp"
#include "ops/linear/argmax.hpp"
#include "ops/linear/linear.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("cuda runtime: a graph's copies read host memory when they are captured") {
  OnDevice device;
  const std::vector<int> nothing(4, -1);
  int* to = device.put(nothing.data(), nothing.size());
  CudaGraph graph;
  {
    std::vector<int> from = {1, 2, 3, 4};
    graph = CudaGraph(device.stream(), [&] {
      cuda_backend()->runtime.copy(to, from.data(), from.size() * sizeof(int), device.stream().handle());
    });
    from.assign(4, 7);
  }
  for (int i = 0; i < 2; ++i) {
    cuda_backend()->runtime.fill(to, 0, 4 * sizeof(int), device.stream().handle());
    graph.launch(device.stream());
    CHECK(device.get(View<int, 1>::dense(to, {4})) == std::vector<int>{1, 2, 3, 4});
  }
}

// Two sliced products and an argmax keep megabytes of scratch for their stream.
TEST_CASE("cuda runtime: a stream that is deleted gives back what kernels kept for it") {
  constexpr std::int64_t n = 64, k = 8192;
  const CudaBackend& cuda = *cuda_backend();
  const std::vector<std::uint16_t> half(static_cast<std::size_t>(n * k), bf16(0.5f).bits);
  const std::vector<float> unset(n, -1);
  OnDevice memory;
  ops::LinearArgs a;
  a.weight = a.x = memory.put(half.data(), half.size());
  a.x_dtype = DType::bf16;
  a.m = 1, a.n = n, a.k = a.x_stride = k, a.y_stride = n;
  a.y = memory.put(unset.data(), unset.size());
  ops::ArgmaxArgs likeliest;
  const std::vector<std::int32_t> none = {-1};
  likeliest.x = a.y, likeliest.rows = 1, likeliest.n = likeliest.x_stride = n;
  likeliest.index = memory.put(none.data(), none.size());
  const auto in_new_stream = [&] {
    const OwnedStream owned(Device::cuda);
    void* stream = owned.get().handle();
    cuda.runtime.copy(a.y, unset.data(), n * sizeof(float), stream);
    for (int i = 0; i < 2; ++i) ops::linear(a, owned.get());
    ops::argmax(likeliest, owned.get());
    cuda.runtime.synchronize(stream);
    const std::size_t left = cuda.runtime.free_bytes();
    CHECK(memory.get(View<float, 1>::dense(a.y, {n})) == std::vector<float>(n, k / 4.f));
    CHECK(memory.get(View<std::int32_t, 1>::dense(likeliest.index, {1})) == std::vector<std::int32_t>{0});
    return left;
  };
  in_new_stream();                                                          // the driver loads its modules
  const bool alone = std::string_view(cuda.device_name) == "emulated GPU";  // others may use a real one
  const std::size_t before = cuda.runtime.free_bytes();
  for (int i = 0; i < 3; ++i) {
    const std::size_t left = in_new_stream();
    if (!alone) continue;
    CHECK(left + (std::size_t{4} << 20) <= before);
    CHECK(cuda.runtime.free_bytes() == before);
  }
}

// The emulator runs side work as late as the waits allow.
TEST_CASE("cuda runtime: a side stream's lane waits for its work before, a join for all work") {
  const CudaRuntime& r = cuda_backend()->runtime;
  const OwnedStream owned(Device::cuda);
  const Stream main = owned.get();
  constexpr int turns = 3 * SideStream::lanes;
  OnDevice memory;
  const std::vector<int> unset(turns, -1);
  int* from = memory.put(unset.data(), SideStream::lanes);
  int* to = memory.put(unset.data(), turns);
  std::vector<int> numbers(turns);
  std::iota(numbers.begin(), numbers.end(), 0);
  const int* source = memory.put(numbers.data(), numbers.size());
  SideStream side(main);
  CHECK_FALSE(side.busy());
  for (int i = 0; i < turns; ++i) {
    const int lane = side.next();
    r.copy(from + lane, source + i, sizeof(int), main.handle());
    r.copy(to + i, from + lane, sizeof(int), side.begin().handle());
    side.end(lane);
  }
  CHECK(side.busy());
  side.join();
  CHECK_FALSE(side.busy());
  std::vector<int> got(turns);
  r.copy(got.data(), to, got.size() * sizeof(int), main.handle());
  r.synchronize(main.handle());
  CHECK(got == numbers);
}
