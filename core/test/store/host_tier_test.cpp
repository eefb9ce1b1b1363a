// How much memory the pages on the host may take, and what is refused before any of it is taken.
#include "store/host_tier.hpp"

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>
#include <string>

#include "base/host_memory.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using test::StoreFixture;

namespace {

// Frames of 64 KiB and more, for `bytes` bytes of pages.
StoreOptions large(std::int64_t bytes) {
  StoreFixture f;
  StoreOptions o = f.options;
  o.rope_table = {};
  o.host_pages = true;
  o.shape.layers = o.shape.kv_heads = o.shape.query_heads = o.shape.max_slots = 1;
  o.shape.head_dim = 256;
  o.shape.page_size = 32;
  const std::int64_t frame = frame_layout(o, o.host_codec).bytes;
  o.shape.max_tokens = static_cast<int>((bytes / frame + 1) * o.shape.page_size);
  return o;
}

}  // namespace

TEST_CASE("host tier: a host_memory below one page is refused with both numbers, on each device") {
  StoreFixture f;
  const std::int64_t frame = frame_layout(f.options, f.options.host_codec).bytes;
  for (const Device device : {Device::cpu, Device::cuda})
    for (const auto way : {&StoreOptions::host_pages, &StoreOptions::archive, &StoreOptions::offloads}) {
      CAPTURE(device == Device::cuda, way == &StoreOptions::archive, way == &StoreOptions::offloads);
      StoreOptions o = f.options;
      o.*way = true;
      o.host_limit = frame - 1;
      CHECK_THROWS_WITH(check_store(o, device),
                        Catch::Contains("got host_memory of " + std::to_string(frame - 1) +
                                        " bytes for pages on the host, wanted at least " + std::to_string(frame) +
                                        ", a page of 4 tokens of one KV head"));
      if (device == Device::cpu) CHECK_THROWS_WITH(make_store(o, Stream::cpu()), Catch::Contains("got host_memory of"));
      o.host_limit = frame;
      CHECK_NOTHROW(check_store(o, device));
      o.*way = false;  // nothing takes the tier
      o.host_limit = 0;
      CHECK_NOTHROW(check_store(o, device));
    }
}

TEST_CASE("host tier: a host_memory beyond the free memory is refused with both numbers if its pages would need it") {
  StoreFixture f;
  StoreOptions o = f.options;
  o.host_pages = true;
  const std::int64_t frame = frame_layout(o, o.host_codec).bytes;
  const Shape& s = o.shape;
  const std::int64_t all = std::int64_t{s.layers} * s.max_slots * s.kv_heads * s.max_pages();
  o.host_limit = 1'000'000'000'000;
  CHECK_NOTHROW(check_host_tier(o, all * frame));  // no more pages than these
  CHECK_THROWS_WITH(check_host_tier(o, all * frame - 1),
                    Catch::Contains("got host_memory for " + std::to_string(all * frame) +
                                    " bytes of pages, wanted at most " + std::to_string(all * frame - 1)));
  o.host_limit = 5 * frame + 1;
  CHECK_NOTHROW(check_host_tier(o, 5 * frame));
  CHECK_THROWS_WITH(check_host_tier(o, 5 * frame - 1),
                    Catch::Contains("for " + std::to_string(5 * frame) + " bytes of pages"));
  o.host_limit = -1;  // the default fits
  CHECK_NOTHROW(check_host_tier(o, 1));
}

TEST_CASE("host tier: a CPU refuses what this machine does not have, and its default fits the machine") {
  const std::int64_t free = free_host_bytes();
  StoreOptions o = large(free * 3 / 2);
  o.host_limit = free * 5 / 4;
  CHECK_THROWS_WITH(check_store(o, Device::cpu), Catch::Contains("the free memory of this machine"));
  CHECK_THROWS_WITH(make_store(o, Stream::cpu()), Catch::Contains("the free memory of this machine"));
  if (free > std::int64_t{100} << 30) return;  // an arena has at most 256 GiB
  o.host_limit = -1;
  const auto store = make_store(o, Stream::cpu());
  const std::int64_t room = store->host_room() * frame_layout(o, o.host_codec).bytes;
  CHECK(room <= free * 9 / 10);  // 80 % of what was free a moment later
  CHECK(room >= free / 2);
}
