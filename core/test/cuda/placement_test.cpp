#include "ops/select/placement.hpp"

#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/page/reference.hpp"
#include "ops/select/allot.hpp"
#include "ops/select/reference.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// A page list on both sides, with poison where nothing was written.
struct Lists {
  Ints index, count;
  PageList host, device;
  Lists(OnDevice& on, int rows, int heads, int room)
      : index(static_cast<std::size_t>(rows * heads * room), -7), count(static_cast<std::size_t>(rows * heads), -7) {
    host.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, room});
    host.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
    device = on.put(host);
  }
  Lists(const Lists&) = delete;
  bool same(OnDevice& on) const { return on.get(device.index) == index && on.get(device.count) == count; }
};

// Tables of two tiers. A page has no frame with probability `absent` / 4 in the upper one, 1/2 in the lower one.
struct Tiers {
  int rows, heads, page_size, most;
  Ints length, slots;
  std::vector<PageEntry> table[2];
  std::vector<std::byte> frame = std::vector<std::byte>(granule_bytes);
  PageLayout layout;
  PagedKv kv[2];

  Tiers(int rows_, int heads_, int page_size_, int most_, unsigned absent, std::mt19937& rng)
      : rows(rows_), heads(heads_), page_size(page_size_), most(most_) {
    for (int i = 0; i < rows * heads; ++i)
      length.push_back(static_cast<int>(rng() % static_cast<unsigned>(most * page_size + 1)));
    length[0] = most * page_size;
    if (length.size() > 1) length[1] = 0;
    for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
    for (int t = 0; t < 2; ++t) {
      table[t].resize(static_cast<std::size_t>(rows * heads * most));
      for (PageEntry& e : table[t]) e.frame = rng() % 4 < (t ? 2 : absent) ? null_frame : 0;
      kv[t].base = frame.data();
      kv[t].layouts = &layout;
      kv[t].table = View<const PageEntry, 3>::dense(table[t].data(), {rows, heads, most});
      kv[t].length = View<const std::int32_t, 2>::dense(length.data(), {rows, heads});
      kv[t].slots = slots.data();
      kv[t].rows = rows, kv[t].kv_heads = heads, kv[t].head_dim = 64, kv[t].page_size = page_size;
    }
  }
  Tiers(const Tiers&) = delete;
};

}  // namespace

TEST_CASE("cuda place_pages equals its reference") {
  struct Case {
    int rows, heads, page_size, most;
  };
  std::mt19937 rng(1);
  for (const Case& c : {Case{3, 2, 16, 5}, Case{2, 3, 8, 33}, Case{1, 2, 16, 640}, Case{1, 1, 16, 9000}})
    for (unsigned n = 0; n < 12; ++n) {
      CAPTURE(c.most, n);
      const Tiers t(c.rows, c.heads, c.page_size, c.most, n % 5, rng);
      OnDevice on;
      Lists read(on, c.rows, c.heads, c.most);
      for (int r = 0; r < c.rows; ++r)
        for (int h = 0; h < c.heads; ++h) {
          read.host.count(r, h) = 0;
          for (int page = 0; page < t.kv[0].pages(r, h); ++page)
            if (rng() % 4 == 0) read.host.index(r, h, read.host.count(r, h)++) = page;
        }
      read.device = on.put(read.host);
      ops::PlacementArgs a, b;
      a.device = t.kv[0], a.host = t.kv[1];
      b.device = on.put(t.kv[0], t.frame.size()), b.host = on.put(t.kv[1], t.frame.size());
      a.attended = n % 4 ? &read.host : nullptr;
      b.attended = n % 4 ? &read.device : nullptr;
      const auto most = static_cast<unsigned>(c.most * c.page_size);
      a.pins = {static_cast<int>(rng() % 40), static_cast<int>(rng() % (n % 3 ? 40 : most)), n % 2 == 0};
      a.resident_tokens = static_cast<int>(rng() % (most + 20));
      if (n % 4 == 1) a.pins = {}, a.resident_tokens = 0;  // the page being filled stays even so
      b.pins = a.pins, b.resident_tokens = a.resident_tokens;
      Lists recall(on, c.rows, c.heads, c.most), offload(on, c.rows, c.heads, c.most),
          drop(on, c.rows, c.heads, c.most);
      a.recall = recall.host, a.offload = offload.host, a.drop = drop.host;
      b.recall = recall.device, b.offload = offload.device, b.drop = drop.device;
      ops::place_pages_reference(a);
      ops::place_pages(b, on.stream());
      CHECK(recall.same(on));
      CHECK(offload.same(on));
      CHECK(drop.same(on));
    }
}

TEST_CASE("cuda lengths, older_pages and round_allotment equal their references") {
  std::mt19937 rng(2);
  for (unsigned n = 0; n < 30; ++n) {
    CAPTURE(n);
    const int rows = 1 + static_cast<int>(rng() % 5), heads = 1 + static_cast<int>(rng() % 9),
              most = n % 7 ? 1 + static_cast<int>(rng() % 20) : 700;
    const Tiers t(rows, heads, 16, most, 1, rng);
    OnDevice on;
    Ints length(t.length.size(), -7);
    const auto view = [&](Ints& x) { return View<std::int32_t, 2>::dense(x.data(), {rows, heads}); };
    const auto of = view(length), device_of = on.put(of);
    ops::lengths_reference(t.kv[0], of);
    ops::lengths(on.put(t.kv[0], t.frame.size()), device_of, on.stream());
    CHECK(on.get(device_of) == length);

    std::vector<std::uint8_t> mask(static_cast<std::size_t>(rows));
    for (auto& m : mask) m = rng() % 2;
    const std::uint8_t* device_mask = on.put(mask.data(), mask.size());
    const int newest = static_cast<int>(rng() % 5);
    Lists older(on, rows, heads, most);
    ops::older_pages_reference(of, n % 3 ? mask.data() : nullptr, 16, newest, older.host);
    ops::older_pages(device_of, n % 3 ? device_mask : nullptr, 16, newest, older.device, on.stream());
    CHECK(older.same(on));

    Ints keep;
    for (const int x : length) keep.push_back(x ? static_cast<int>(rng() % static_cast<unsigned>(x + 1)) : 0);
    const auto kept = view(keep), device_kept = on.put(kept);
    const int page_size = n % 2 ? 16 : 1;
    ops::round_allotment_reference(of, mask.data(), page_size, kept);
    ops::round_allotment(device_of, device_mask, page_size, device_kept, on.stream());
    CHECK(on.get(device_kept) == keep);
  }
}

TEST_CASE("cuda lengths of nothing but a number: fill_heads") {
  Ints out(60, -7), wanted(60, -7);
  for (int r = 0; r < 20; ++r)
    wanted[static_cast<std::size_t>(3 * r)] = wanted[static_cast<std::size_t>(3 * r + 1)] = 5;
  OnDevice on;
  auto view = View<std::int32_t, 2>{on.put(out.data(), out.size()), {20, 2}, {3, 1}};
  ops::fill_heads(view, 5, on.stream());
  CHECK(on.get(View<std::int32_t, 2>::dense(view.data, {20, 3})) == wanted);
}

TEST_CASE("cuda lists without room are cut off") {
  const Ints tokens = {100};
  OnDevice on;
  Lists few(on, 1, 1, 3);
  const auto of = View<const std::int32_t, 2>::dense(tokens.data(), {1, 1});
  ops::older_pages(on.put(of), nullptr, 4, 1, few.device, on.stream());
  CHECK(on.get(few.device.index) == Ints{0, 1, 2});
  CHECK(on.get(few.device.count) == Ints{3});
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
