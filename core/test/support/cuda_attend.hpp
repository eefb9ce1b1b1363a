// Compares attend on the device with the reference, on random content and with poisoned outputs.
#pragma once
#include <catch2/catch.hpp>
#include <limits>

#include "base/half.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/attend/attend.hpp"
#include "support/relative_error.hpp"

namespace kvlab::test {

using namespace cases;

struct CudaAttendCase {
  PagedOptions options;
  int group = 1;
  std::vector<int> lengths;  // [row, kv_head], cycled
  bool listed = false;
  double tokens = -1;  // share of a head's tokens in its list; -1 = no list of tokens
  int window = 0;
  float attention_scale = 1;  // the RoPE table's, for keys that are turned on reading
  bool half = false;          // the device's cache is f16 with the same values; the reference reads bf16
  bool ordered = true;        // false: the newer half of a head's tokens lies in front of the older, as after evictions
};

inline std::vector<float> normals(int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = normal(rng);
  return x;
}

inline void compare_with_reference(const CudaAttendCase& c, unsigned seed, int repeats = 1) {
  const PagedOptions& o = c.options;
  PagedFixture cache(o);
  std::mt19937 rng(seed);
  int tokens = 0;
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h) {
      const int n = c.lengths[static_cast<std::size_t>(r * o.kv_heads + h) % c.lengths.size()];
      if (c.ordered)
        cache.fill_random(r, h, n, rng);
      else
        for (int t = 0; t < n; ++t)
          cache.append(r, h, normals(o.head_dim, rng), normals(o.head_dim, rng), 3 * (t < n / 2 ? n + t : t));
      tokens = std::max(tokens, n);
    }
  const int heads = o.kv_heads * c.group;
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(o.rows * heads * o.head_dim));
  for (float& x : q) x = static_cast<float>(bf16(2 * normal(rng)));
  std::vector<std::int32_t> last(static_cast<std::size_t>(o.rows));
  for (int r = 0; r < o.rows; ++r)
    last[static_cast<std::size_t>(r)] =
        std::max(0, c.lengths[static_cast<std::size_t>(r * o.kv_heads) % c.lengths.size()] - 1);
  ListMemory list;
  PageList pages;
  if (c.listed) pages = {list.choose_pages(cache, o, [&] { return rng() % 3; })};
  TokenList listed;
  if (c.tokens >= 0) listed = {list.choose_tokens(cache, o, tokens, c.tokens, rng)};
  Guarded<3> out({o.rows, heads, o.head_dim}), mass({o.rows, heads, tokens + 5});
  Guarded<2> lse({o.rows, heads});
  ops::AttendArgs a;
  a.kv = cache.view();
  a.kv.rope_table.attention_scale = c.attention_scale;
  a.queries = View<const float, 3>::dense(q.data(), {o.rows, heads, o.head_dim});
  a.pages = c.listed ? &pages : nullptr;
  a.tokens = c.tokens >= 0 ? &listed : nullptr;
  a.window = c.window;
  a.last = last.data();
  a.out = out.view();
  a.lse = lse.view();
  a.mass = mass.view();
  ops::attend_reference(a);

  if (c.half) cache.to_half();
  OnDevice device;
  ops::AttendArgs b = a;
  b.kv = device.put(cache.view(), cache.arena_bytes());
  b.kv.rope_table.attention_scale = c.attention_scale;
  b.queries = device.put(a.queries);
  PageList device_pages;
  if (c.listed) b.pages = &(device_pages = device.put(pages));
  TokenList device_tokens;
  if (c.tokens >= 0) b.tokens = &(device_tokens = device.put(listed));
  b.last = device.put(last.data(), last.size());
  const std::vector<float> expected = out.values(), expected_lse = lse.values(), expected_mass = mass.values();
  const auto poison = [](std::size_t n) { return std::vector<float>(n, std::numeric_limits<float>::quiet_NaN()); };
  const auto nan_out = poison(expected.size()), nan_lse = poison(expected_lse.size()),
             nan_mass = poison(expected_mass.size());
  const std::vector<std::uint16_t> not_written(expected.size(), 0xffff);
  HeapWorkspace unused;
  for (const bool with_mass : {false, true}) {
    CAPTURE(with_mass);
    b.out = device.put(View<float, 3>::dense(const_cast<float*>(nan_out.data()), {o.rows, heads, o.head_dim}));
    b.lse = device.put(View<float, 2>::dense(const_cast<float*>(nan_lse.data()), {o.rows, heads}));
    b.mass = with_mass
                 ? device.put(View<float, 3>::dense(const_cast<float*>(nan_mass.data()), {o.rows, heads, tokens + 5}))
                 : View<float, 3>{};
    if (o.dtype == DType::bf16) b.rounded = device.put(not_written.data(), not_written.size());
    ops::attend(b, unused, device.stream());
    const std::vector<float> got = device.get(b.out), got_lse = device.get(b.lse);
    CHECK(relative(got, expected) < 6e-3);
    if (b.rounded) {
      std::vector<std::uint16_t> wanted;
      for (const float x : got) wanted.push_back(c.half ? float_to_half(x) : bf16(x).bits);
      CHECK(device.get(View<std::uint16_t, 1>::dense(static_cast<std::uint16_t*>(b.rounded),
                                                     {static_cast<std::int64_t>(wanted.size())})) == wanted);
    }
    double worst = 0;
    for (std::size_t i = 0; i < expected_lse.size(); ++i)
      if (got_lse[i] != expected_lse[i]) {
        const double difference = std::abs(double{got_lse[i]} - expected_lse[i]);
        worst = std::isfinite(difference) ? std::max(worst, difference) : 1e30;
      }
    // The device rounds turned keys once more than the reference does.
    CHECK(worst < (o.rope == RopeRegime::cache_relative ? 8e-3 : 2e-3));
    if (with_mass) CHECK(relative(device.get(b.mass), expected_mass) < 6e-3);
    for (int i = 0; i < repeats; ++i) {  // scratch is as the run before left it
      ops::attend(b, unused, device.stream());
      CHECK(device.get(b.out) == got);
      CHECK(device.get(b.lse) == got_lse);
    }
  }
}

}  // namespace kvlab::test
