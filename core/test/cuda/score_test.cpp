#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/reference.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// Empty if every entry is close and every poisoned entry untouched, else the worst entry.
std::string difference(const std::vector<float>& got, const std::vector<float>& wanted, std::int64_t width,
                       double margin) {
  std::size_t at = 0;
  double worst = -1;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    double d = std::abs(double{got[i]} - wanted[i]) / std::max(1.0, std::abs(double{wanted[i]}));
    if (got[i] == wanted[i]) d = 0;
    if (!(d <= 1e30)) d = 1e30;
    if (d > worst) worst = d, at = i;
  }
  if (worst <= margin) return "";
  const auto w = static_cast<std::size_t>(width);
  return "row " + std::to_string(at / w) + ", entry " + std::to_string(at % w) + ": got " + std::to_string(got[at]) +
         ", wanted " + std::to_string(wanted[at]);
}

// Both forms of an op must leave the same values in poisoned outputs.
template <class Cuda, class Plain>
void compare(OnDevice& device, const std::array<std::int64_t, 3>& extent, double margin, Cuda cuda, Plain plain) {
  Guarded<3> wanted(extent);
  const auto got = device.put(wanted.view());
  plain(wanted.view());
  cuda(got);
  CHECK(difference(device.get(got), Guarded<3>::copy(wanted.view()), extent[2], margin) == "");
}

struct PageCase {
  int rows = 3, kv_heads = 2, dim = 128, group = 4, page_size = 16;
  std::vector<int> pages;  // [row, kv_head], cycled
  Summary kind = Summary::min_max;
  DType dtype = DType::bf16;
  GroupRule rule = GroupRule::max;
  bool newest = false;
  unsigned seed = 1;
  int budget = -1;      // pages per head; negative: any number
  int summary_gap = 0;  // bytes after each summary
  int query_gap = 0;    // elements after each query
  bool ties = false;    // few scores are distinct
};

void compare_pages(const PageCase& c) {
  CAPTURE(c.rows, c.kv_heads, c.dim, c.group, static_cast<int>(c.kind), static_cast<int>(c.dtype),
          static_cast<int>(c.rule), c.newest, c.pages, c.budget, c.summary_gap, c.query_gap, c.ties);
  std::mt19937 rng(c.seed);
  std::normal_distribution<float> normal;
  const int most = *std::max_element(c.pages.begin(), c.pages.end()) + 1, heads = c.kv_heads * c.group;
  std::vector<std::int32_t> length, slots, budget;
  for (int r = 0; r < c.rows; ++r) slots.push_back(c.rows - 1 - r);
  for (int i = 0; i < c.rows * c.kv_heads; ++i) {
    const int n = c.pages[static_cast<std::size_t>(i) % c.pages.size()];
    length.push_back(n ? n * c.page_size - static_cast<int>(rng() % static_cast<unsigned>(c.page_size)) : 0);
    budget.push_back(c.budget < 0 ? static_cast<int>(rng() % static_cast<unsigned>(most / 2 + 3)) : c.budget);
  }
  std::vector<PageEntry> table(static_cast<std::size_t>(c.rows * c.kv_heads * most));
  std::vector<std::byte> frame(granule_bytes);
  const PageLayout layout;
  PagedKv kv;
  kv.base = frame.data();
  kv.layouts = &layout;
  kv.table = View<const PageEntry, 3>::dense(table.data(), {c.rows, c.kv_heads, most});
  kv.length = View<const std::int32_t, 2>::dense(length.data(), {c.rows, c.kv_heads});
  kv.slots = slots.data();
  kv.rows = c.rows, kv.kv_heads = c.kv_heads, kv.head_dim = c.dim, kv.page_size = c.page_size;

  // Summaries in f32, as the reference reads them, and as they are stored.
  const std::int64_t width = c.kind == Summary::min_max ? 2 * c.dim : c.dim;
  const std::int64_t count = std::int64_t{c.rows} * c.kv_heads * most * width, size = size_of(c.dtype);
  std::vector<float> wide(static_cast<std::size_t>(count));
  const std::int64_t page_bytes = width * size + c.summary_gap;
  std::vector<std::byte> stored(static_cast<std::size_t>(count / width * page_bytes), std::byte{0xff});
  for (std::int64_t i = 0; i < count; ++i) {
    float x = normal(rng);
    if (c.ties) x = i % width ? 0 : std::round(x);
    if (c.kind == Summary::min_max) x = i % width < c.dim ? -std::abs(x) : std::abs(x);
    std::byte* to = stored.data() + i / width * page_bytes + i % width * size;
    if (c.dtype == DType::bf16) {
      const bf16 y(x);
      std::memcpy(to, &y, 2);
      x = static_cast<float>(y);
    } else if (c.dtype == DType::f16) {
      const std::uint16_t y = float_to_half(x);
      std::memcpy(to, &y, 2);
      x = half_to_float(y);
    } else {
      std::memcpy(to, &x, 4);
    }
    wide[static_cast<std::size_t>(i)] = x;
  }
  const auto summaries = [&](DType dtype, const std::byte* data, std::int64_t page) {
    return Summaries{c.kind, dtype, data, c.kv_heads * most * page, most * page, page};
  };
  std::vector<float> q(static_cast<std::size_t>(c.rows * heads * (c.dim + c.query_gap)));
  for (float& x : q) x = normal(rng);
  const auto wide_queries = View<const float, 3>::dense(q.data(), {c.rows, heads, c.dim + c.query_gap});
  const auto narrow = [&](View<const float, 3> all) {
    all.extent[2] = c.dim;
    return all;
  };
  const auto queries = narrow(wide_queries);
  Guarded<3> wanted({c.rows, c.kv_heads, most + 3});
  ops::page_score_reference(queries, kv,
                            summaries(DType::f32, reinterpret_cast<const std::byte*>(wide.data()), width * 4), c.rule,
                            0.125f, wanted.view());

  OnDevice device;
  const PagedKv device_kv = device.put(kv, frame.size());
  const auto device_queries = narrow(device.put(wide_queries));
  const Summaries on_device = summaries(c.dtype, device.put(stored.data(), stored.size()), page_bytes);
  const auto budgets = View<const std::int32_t, 2>::dense(budget.data(), {c.rows, c.kv_heads});
  const auto device_budgets = device.put(budgets);
  const Guarded<3> fresh({c.rows, c.kv_heads, most + 3});
  const Pins pins{0, 0, c.newest};
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.rows * c.kv_heads * most), -7),
      counts(static_cast<std::size_t>(c.rows * c.kv_heads), -7);
  PageList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {c.rows, c.kv_heads, most});
  list.count = View<std::int32_t, 2>::dense(counts.data(), {c.rows, c.kv_heads});

  const auto alone = device.put(fresh.view());
  ops::page_score(device_queries, device_kv, on_device, c.rule, 0.125f, alone, device.stream());
  const std::vector<float> scores = device.get(alone);
  {
    INFO("page_score");
    // The kernel splits a query into its rounded value and a rounded rest: a product errs by up to 2^-17 of its size.
    const double margin = c.rule == GroupRule::sum ? 1e-3 : 3e-4;
    CHECK(difference(scores, Guarded<3>::copy(wanted.view()), most + 3, margin) == "");
  }
  // The selection must be exact for the GPU's own scores.
  std::vector<float> own = scores;
  ops::top_pages_reference(kv, View<float, 3>::dense(own.data(), {c.rows, c.kv_heads, most + 3}), budgets, pins, list);
  const std::vector<std::int32_t> expected_index = index, expected_counts = counts;
  std::fill(index.begin(), index.end(), -7);
  for (const char* run : {"score_pages", "score_pages again, with the counters that the first run left"}) {
    INFO(run);
    const auto fused = device.put(fresh.view());
    const PageList out = device.put(list);
    ops::score_pages(device_queries, device_kv, on_device, c.rule, 0.125f, device_budgets, pins, fused, out,
                     device.stream());
    CHECK(difference(device.get(fused), scores, most + 3, 0) == "");
    CHECK(device.get(out.count) == expected_counts);
    const auto got = device.get(out.index);
    std::size_t first = 0;
    while (first < got.size() && got[first] == expected_index[first]) ++first;
    INFO("first difference in list " << first / static_cast<std::size_t>(most) << " at "
                                     << first % static_cast<std::size_t>(most));
    CHECK(first == got.size());
  }
}

}  // namespace

TEST_CASE("cuda score_pages: every head size, group, summary and rule on ragged rows") {
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 300};
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {1, 3, 4, 5, 8, 16})
      for (const Summary kind : {Summary::min_max, Summary::mean})
        for (const GroupRule rule : {GroupRule::max, GroupRule::mean, GroupRule::sum, GroupRule::softmax_mean}) {
          c.dim = dim, c.group = group, c.kind = kind, c.rule = rule;
          c.dtype = (group + dim / 32) % 3 ? DType::bf16 : DType::f16;
          c.newest = ++c.seed % 2;
          compare_pages(c);
        }
}

TEST_CASE("cuda score_pages of other shapes: the plain form") {
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 40};
  for (const auto& [dim, group, dtype] : {std::tuple{128, 4, DType::f32},
                                          {80, 4, DType::bf16},
                                          {8, 1, DType::f16},
                                          {64, 17, DType::bf16},
                                          {104, 32, DType::f32}})
    for (const GroupRule rule : {GroupRule::max, GroupRule::mean, GroupRule::softmax_mean}) {
      c.dim = dim, c.group = group, c.dtype = dtype, c.rule = rule;
      ++c.seed;
      compare_pages(c);
    }
}

TEST_CASE("cuda score_pages: heads shared by many blocks, blocks shared by many heads, too long for one launch") {
  PageCase c;
  c.rows = 1, c.kv_heads = 2;
  c.pages = {9000, 8999};
  compare_pages(c);
  c.rule = GroupRule::softmax_mean;
  compare_pages(c);
  c.rule = GroupRule::max;
  c.dim = 64, c.kind = Summary::mean;
  c.pages = {14335, 3};
  compare_pages(c);
  c.pages = {16001, 14337};
  compare_pages(c);
  c.rows = 700, c.kv_heads = 4;  // more pairs of row and KV head than one launch takes
  c.pages = {3, 0, 20, 1, 16, 33, 0};
  compare_pages(c);
  c.rows = 12, c.kv_heads = 8, c.dim = 128, c.kind = Summary::min_max;
  c.pages = {640, 600, 17, 639};
  compare_pages(c);
}

TEST_CASE("cuda score_pages: cuts at every place of a head, and in heads of a page") {
  PageCase c;
  c.rows = 1, c.kv_heads = 5;
  for (int tiles = 1; tiles <= 40; tiles += tiles < 20 ? 1 : 5) {  // the cuts move through the heads behind
    c.pages = {16 * tiles, 321, 0, 150, 16};
    c.rule = tiles % 4 ? GroupRule::max : GroupRule::softmax_mean;
    c.newest = ++c.seed % 2;
    compare_pages(c);
  }
  c.rows = 60, c.kv_heads = 4, c.rule = GroupRule::max;
  for (const auto& pages : {std::vector{1}, {0, 0, 1, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 700}, {1, 15, 16, 0, 17}, {0}}) {
    c.pages = pages, c.newest = ++c.seed % 2;
    compare_pages(c);
  }
}

TEST_CASE("cuda score_pages: budgets of none, of one and of more than there is, ties") {
  PageCase c;
  c.rows = 1, c.kv_heads = 4;
  for (const auto& pages : {std::vector{1, 3, 40, 16}, {1023, 1024, 1025, 2048}, {2049, 4096, 4097, 700}})
    for (const int budget : {0, 1, 130, 5000})
      for (const bool ties : {false, true}) {
        c.pages = pages, c.budget = budget, c.ties = ties, c.newest = ++c.seed % 2;
        compare_pages(c);
      }
}

TEST_CASE("cuda score_pages: summaries and queries with gaps, heads of 64, groups of 8") {
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 150};
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {4, 8})
      for (const int gap : {16, 128, 640}) {
        c.dim = dim, c.group = group, c.summary_gap = gap;
        c.query_gap = static_cast<int>(++c.seed % 3) * 2;
        c.kind = c.seed % 4 ? Summary::min_max : Summary::mean;
        c.dtype = c.seed % 2 ? DType::bf16 : DType::f16;
        compare_pages(c);
      }
}

TEST_CASE("cuda scores of tokens equal their references on caches of every kind") {
  for (unsigned n = 0; n < 36; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    const PagedKv kv = c.cache.view();
    OnDevice device;
    const PagedKv on_device = device.put(kv, c.cache.arena_bytes());
    const std::array<std::int64_t, 3> own{c.rows(), c.kv_heads(), c.room()};
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      INFO("row_norm");
      compare(
          device, own, 1e-5,
          [&](Scores out) {
            ops::row_norm({&on_device, side}, out, device.stream());
          },
          [&](Scores out) {
            ops::row_norm_reference({&kv, side}, out);
          });
    }
    {
      INFO("recency");
      compare(
          device, own, 0, [&](Scores out) { ops::recency(on_device, out, device.stream()); },
          [&](Scores out) { ops::recency_reference(kv, out); });
    }
    {
      INFO("scale");
      compare(
          device, own, 0, [&](Scores out) { ops::scale(out, -3.f, device.stream()); },
          [&](Scores out) { ops::scale_reference(out, -3.f); });
    }
    auto in = c.normal(std::int64_t{c.rows()} * c.heads() * c.room());
    const auto scores = View<float, 3>::dense(in.data(), {c.rows(), c.heads(), c.room()});
    const auto device_scores = device.put(scores);
    for (const auto& [rule, word] : Choices<GroupRule>::all) {
      CAPTURE(word);
      const GroupRule by = rule;
      {
        INFO("group_reduce");
        compare(
            device, own, 1e-5,
            [&](Scores out) { ops::group_reduce(on_device, device_scores, by, out, device.stream()); },
            [&](Scores out) { ops::group_reduce_reference(kv, scores, by, out); });
      }
      INFO("add_mass three times, read_state");
      compare(
          device, own, 1e-4,
          [&](Scores out) {
            for (int i = 0; i < 3; ++i) ops::add_mass(device_scores, by, {&on_device, 1}, device.stream());
            ops::read_state({&on_device, 1}, out, device.stream());
          },
          [&](Scores out) {
            for (int i = 0; i < 3; ++i) ops::add_mass_reference(scores, by, {&kv, 1});
            ops::read_state_reference({&kv, 1}, out);
          });
    }
    {
      INFO("the other state column");
      compare(
          device, own, 0,
          [&](Scores out) {
            ops::read_state({&on_device, 0}, out, device.stream());
          },
          [&](Scores out) {
            ops::read_state_reference({&kv, 0}, out);
          });
    }
    for (const Pooling kind : {Pooling::none, Pooling::average, Pooling::max})
      for (const int kernel : {1, 3, 7}) {
        CAPTURE(static_cast<int>(kind), kernel);
        std::vector<float> expected = in;
        ops::pool_reference(kv, View<float, 3>::dense(expected.data(), scores.extent), kind, kernel, 5);
        const auto pooled = device.put(scores);
        HeapWorkspace unused;
        ops::pool(on_device, pooled, kind, kernel, 5, unused, device.stream());
        CHECK(difference(device.get(pooled), expected, c.room(), 1e-5) == "");
      }
  }
}

TEST_CASE("cuda window_votes equals its reference on caches of every kind") {
  for (unsigned n = 0; n < 36; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    const int window = 1 + static_cast<int>(n % 9), dim = c.cache.options().head_dim;
    const auto q = c.normal(std::int64_t{c.rows()} * c.heads() * window * dim);
    const auto queries = View<const float, 4>::dense(q.data(), {c.rows(), c.heads(), window, dim});
    std::vector<std::int32_t> seen;
    for (int r = 0; r < c.rows(); ++r) seen.push_back(3 * c.cache.view().tokens(r, 0) + 1);
    OnDevice device;
    const PagedKv on_device = device.put(c.cache.view(), c.cache.arena_bytes());
    const auto device_queries = device.put(queries);
    const std::int32_t* device_seen = device.put(seen.data(), seen.size());
    compare(
        device, {c.rows(), c.heads(), c.room()}, 2e-4,
        [&](Scores out) { ops::window_votes(device_queries, device_seen, on_device, out, device.stream()); },
        [&](Scores out) { ops::window_votes_reference(queries, seen.data(), c.cache.view(), out); });
  }
}

TEST_CASE("cuda window_votes on the tensor cores: head sizes, windows, groups, ragged heads") {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int window : {1, 8, 32, 33, 100}) {
      CAPTURE(dim, window);
      const int group = window == 32 ? 4 : 2;
      PagedOptions o;
      o.rows = 2, o.kv_heads = 2, o.head_dim = dim, o.page_size = window % 2 ? 8 : 16, o.dtype = DType::bf16;
      o.max_pages = 400 / o.page_size + 1;
      PagedFixture cache(o);
      std::mt19937 rng(seed++);
      const int lengths[] = {400, 130, 0, 1};
      for (int i = 0; i < 4; ++i) cache.fill_random(i / 2, i % 2, lengths[i], rng);
      std::normal_distribution<float> normal;
      const int heads = o.kv_heads * group;
      std::vector<float> q(static_cast<std::size_t>(o.rows * heads * window * dim));
      for (float& x : q) x = normal(rng);
      const auto queries = View<const float, 4>::dense(q.data(), {o.rows, heads, window, dim});
      const std::vector<std::int32_t> seen = {400, 1};
      OnDevice device;
      const PagedKv on_device = device.put(cache.view(), cache.arena_bytes());
      const auto device_queries = device.put(queries);
      const std::int32_t* device_seen = device.put(seen.data(), seen.size());
      compare(
          device, {o.rows, heads, 405}, 2e-4,
          [&](Scores out) { ops::window_votes(device_queries, device_seen, on_device, out, device.stream()); },
          [&](Scores out) { ops::window_votes_reference(queries, seen.data(), cache.view(), out); });
    }
}
