#include <catch2/catch.hpp>

#include "base/cuda_graph.hpp"
#include "support/device_cache.hpp"

using namespace kvlab;
using namespace kvlab::test;

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
