#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/select/allot.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("cuda lists without room are cut off") {
  using Ints = std::vector<std::int32_t>;
  const Ints tokens = {100};
  OnDevice on;
  ListMemory memory;
  const PageList few{on.put(memory.empty({1, 1, 3}))};
  const auto of = View<const std::int32_t, 2>::dense(tokens.data(), {1, 1});
  ops::older_pages(on.put(of), nullptr, 4, 1, few, on.stream());
  CHECK(on.get(few.index) == Ints{0, 1, 2});
  CHECK(on.get(few.count) == Ints{3});
}

// A table of functions has only pointers as members, and none may be null.
TEST_CASE("cuda table: every entry is there") {
  const auto check = [](const auto& part, const char* name) {
    const auto* entry = reinterpret_cast<void* const*>(&part);
    for (std::size_t i = 0; i < sizeof part / sizeof *entry; ++i) {
      INFO(name << " " << i);
      CHECK(entry[i] != nullptr);
    }
  };
  const CudaBackend& b = require_cuda("test");
  check(b.runtime, "runtime");
  CHECK(b.device_name[0] != '\0');
}

TEST_CASE("cuda table: an entry that a library lacks is an error that names the op") {
  CudaBackend table = require_cuda("test");
  const OnCuda<ops::scale> no_scale(nullptr, table.announced);
  const OnCuda<ops::round_allotment> no_rounding(nullptr, table.announced);
  replace_cuda_backend(&table);
  const auto message = [](auto call) {
    try {
      call();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("nothing thrown");
  };
  const Stream s = Stream::cuda(nullptr);
  const std::string scale = message([&] { ops::scale({}, 2, s); }),
                    round = message([&] { ops::round_allotment({}, nullptr, 1, {}, s); });
  replace_cuda_backend(nullptr);
  CHECK_THAT(scale, Catch::Contains("op scale") && Catch::Contains("no CUDA version"));
  CHECK_THAT(round, Catch::Contains("op round_allotment") && Catch::Contains("no CUDA version"));
}
