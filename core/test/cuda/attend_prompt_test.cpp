#include <catch2/catch.hpp>
#include <cstdio>
#include <limits>
#include <numeric>

#include "base/half.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/attend.hpp"
#include "ops/attend/attend_prompt.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

struct Case {
  PagedOptions options;  // one row
  int group = 1, tokens = 1;
  std::vector<int> past;  // [kv_head], cycled
  ops::PromptKernel kernel = ops::PromptKernel::own;
  bool half = false;  // the device's cache is f16 with the same values; the reference reads bf16
};

std::vector<float> widened(const std::vector<std::uint16_t>& from, bool half) {
  std::vector<float> out;
  for (const std::uint16_t x : from) {
    bf16 b;
    b.bits = x;
    out.push_back(half ? half_to_float(x) : static_cast<float>(b));
  }
  return out;
}

// Builds a chunk as the executor does: all rows share one slot's pages, and each has its own length.
void compare(const Case& c, unsigned seed) {
  const PagedOptions& o = c.options;
  PagedFixture cache(o);
  std::mt19937 rng(seed);
  std::vector<std::int32_t> lengths, rows(static_cast<std::size_t>(c.tokens)), zeros(rows.size(), 0);
  std::iota(rows.begin(), rows.end(), 0);
  int longest = 0;
  for (int h = 0; h < o.kv_heads; ++h) {
    const int n = c.past[static_cast<std::size_t>(h) % c.past.size()] + c.tokens;
    cache.fill_random(0, h, n, rng);
    longest = std::max(longest, n);
  }
  for (int t = 0; t < c.tokens; ++t)
    for (int h = 0; h < o.kv_heads; ++h) lengths.push_back(c.past[static_cast<std::size_t>(h) % c.past.size()] + t + 1);
  const auto chunk = [&](PagedKv kv, const std::int32_t* length, const std::int32_t* slots) {
    kv.table.extent[0] = c.tokens, kv.table.stride[0] = 0;
    kv.length = View<const std::int32_t, 2>::dense(length, {c.tokens, o.kv_heads});
    kv.slots = slots;
    kv.rows = c.tokens;
    return kv;
  };
  const int heads = o.kv_heads * c.group;
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(c.tokens * heads * o.head_dim));
  for (float& x : q) x = static_cast<float>(bf16(2 * normal(rng)));
  Guarded<3> out({c.tokens, heads, o.head_dim}), mass({c.tokens, heads, longest});
  ops::AttendArgs a;
  a.kv = chunk(cache.view(), lengths.data(), rows.data());
  a.queries = View<const float, 3>::dense(q.data(), {c.tokens, heads, o.head_dim});
  a.out = out.view();
  a.mass = mass.view();
  ops::attend_reference(a);
  std::vector<double> sums(static_cast<std::size_t>(heads * longest));
  const std::vector<float> expected = out.values(), each = mass.values();
  for (std::size_t i = 0; i < each.size(); ++i) sums[i % sums.size()] += each[i];
  const std::vector<float> expected_sums(sums.begin(), sums.end());

  if (c.half) cache.to_half();
  OnDevice device;
  const std::vector<float> nan_out(expected.size(), std::numeric_limits<float>::quiet_NaN());
  std::vector<float> zero_sums(sums.size());
  HeapWorkspace w;
  ops::PromptArgs b;
  b.kv = chunk(device.put(cache.view(), cache.arena_bytes()), device.put(lengths.data(), lengths.size()),
               device.put(rows.data(), rows.size()));
  b.queries = device.put(a.queries);
  b.longest = longest;
  b.kernel = c.kernel;
  for (const bool with_sums : {false, true}) {
    CAPTURE(with_sums);
    b.out = device.put(View<float, 3>::dense(const_cast<float*>(nan_out.data()), {c.tokens, heads, o.head_dim}));
    b.sums = with_sums ? device.put(View<float, 2>::dense(zero_sums.data(), {heads, longest})) : View<float, 2>{};
    REQUIRE(ops::attend_prompt(b, w, device.stream()));
    CHECK(relative(device.get(b.out), expected) < 6e-3);
    const std::vector<std::uint16_t> room(static_cast<std::size_t>(ops::prompt_room(c.tokens) * heads * o.head_dim));
    auto* rounded = device.put(room.data(), room.size());
    b.rounded = rounded;
    REQUIRE(ops::attend_prompt(b, w, device.stream()));
    CHECK(relative(widened(device.get(View<std::uint16_t, 1>::dense(rounded, {a.out.extent[0] * heads * o.head_dim})),
                           c.half),
                   expected) < 9e-3);
    b.rounded = nullptr;
    if (!with_sums) {
      if (c.kernel != ops::PromptKernel::cudnn) continue;
      // The kernel must take the rounded queries in place of the f32 ones, which are NaN.
      const std::vector<float> together = device.get(b.out), nan_queries(q.size(), nan_out[0]);
      ops::PromptArgs d = b;
      std::vector<std::uint16_t> narrow(room.size(), 0xffff);
      for (std::size_t i = 0; i < q.size(); ++i) narrow[i] = c.half ? float_to_half(q[i]) : bf16(q[i]).bits;
      d.rounded_queries = device.put(narrow.data(), narrow.size());
      d.queries = device.put(View<const float, 3>::dense(nan_queries.data(), a.queries.extent));
      d.out = device.put(View<float, 3>::dense(const_cast<float*>(nan_out.data()), {c.tokens, heads, o.head_dim}));
      REQUIRE(ops::attend_prompt(d, w, device.stream()));
      CHECK(device.get(d.out) == together);
      continue;
    }
    const std::vector<float> got = device.get(b.sums);
    CHECK(relative(got, expected_sums) < 6e-3);
    REQUIRE(ops::attend_prompt(b, w, device.stream()));
    CHECK(device.get(b.sums) == got);  // the same bits, run after run
  }
}

}  // namespace

TEST_CASE("cuda attend_prompt equals the reference for every head size, page size and group") {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int page : {8, 16, 32, 64}) {
      if (dim == 96 && page == 8) continue;
      const int group = std::array{1, 3, 4, 7}[seed % 4];
      CAPTURE(dim, page, group);
      Case c;
      c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = page;
      c.options.dtype = DType::bf16;
      c.options.max_pages = 300 / page + 1;
      c.group = group;
      c.past = {0}, c.tokens = 45;
      compare(c, seed++);
      c.past = {70, 3}, c.tokens = 37;
      compare(c, seed++);
    }
}

TEST_CASE("cuda attend_prompt: chunks of one token, of whole tiles, with a long past") {
  Case c;
  c.options.kv_heads = 1, c.options.head_dim = 64, c.options.page_size = 16, c.options.dtype = DType::bf16;
  c.options.max_pages = 80;
  c.group = 2;
  unsigned seed = 100;
  for (const auto& [past, tokens] :
       std::vector<std::pair<int, int>>{{0, 1}, {15, 1}, {16, 1}, {0, 32}, {0, 64}, {64, 64}, {1000, 40}, {1, 300}}) {
    CAPTURE(past, tokens);
    c.past = {past}, c.tokens = tokens;
    compare(c, seed++);
  }
}

TEST_CASE("cuda attend_prompt leaves what it cannot do to attend") {
  PagedOptions o;
  o.head_dim = 80, o.page_size = 16, o.dtype = DType::bf16;
  PagedFixture cache(o);
  std::mt19937 rng(1);
  cache.fill_random(0, 0, 3, rng);
  ops::PromptArgs a;
  a.kv = cache.view();
  HeapWorkspace w;
  CHECK_FALSE(ops::attend_prompt(a, w, Stream::cuda(nullptr)));
}

TEST_CASE("cuda cudnn: attention of prompts equals the reference") {
  if (!ops::cudnn_state().there) {
    std::printf("skipped: cuDNN is %s\n", ops::cudnn_state().text.c_str());
    return;
  }
  unsigned seed = 200;
  for (const bool half : {false, true})
    for (const int dim : {64, 96, 128})
      for (const int group : {1, 4})
        for (const auto& [tokens, past] :
             std::vector<std::pair<int, std::vector<int>>>{{128, {0}}, {45, {0}}, {45, {70, 3}}, {200, {0, 131}}}) {
          CAPTURE(half, dim, group, tokens, past);
          Case c;
          c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = 16, c.options.dtype = DType::bf16;
          c.half = half;
          c.options.max_pages = 24;
          c.group = group;
          c.tokens = tokens, c.past = past;
          c.kernel = ops::PromptKernel::cudnn;
          compare(c, seed++);
        }
}

TEST_CASE("cuda cudnn: what it does of a long prompt is counted, and that it is missing is said") {
  Case c;
  c.options.kv_heads = 1, c.options.head_dim = 64, c.options.page_size = 64, c.options.dtype = DType::bf16;
  c.options.max_pages = 9;
  c.group = 1;
  c.past = {0};
  c.kernel = ops::PromptKernel::best;
  const auto chunks_of = [&](int tokens) {
    const std::int64_t before = ops::cudnn_chunks();
    c.tokens = tokens;
    compare(c, 300);
    return ops::cudnn_chunks() - before;
  };
  CHECK(chunks_of(ops::prompt_cudnn_rows - 1) == 0);
  const LibraryState& cudnn = ops::cudnn_state();
  for (const char* time : {"first", "second"}) {  // every cell without cuDNN warns, not only the first
    CAPTURE(time);
    const log::Collected said;
    CHECK((chunks_of(ops::prompt_cudnn_rows) > 0) == cudnn.there);
    const std::string warnings = join(said.warnings());
    CHECK((warnings.find("without cuDNN (" + cudnn.text) != std::string::npos) == (!cudnn.there && !cudnn.off));
  }
}
