// New tokens: their rotation, their way into pages, and pages that a prompt's attention reads.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "cases/append_fixture.hpp"
#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"
#include "ops/page/prompt_pages.hpp"
#include "ops/page/reference.hpp"
#include "ops/page/rope_rank.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

// x [2 half] turned by these angles.
void turn(const float* cosine, const float* sine, std::vector<double>& x) {
  const std::size_t half = x.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double low = x[i], high = x[half + i];
    x[i] = low * cosine[i] - high * sine[i];
    x[half + i] = high * cosine[i] + low * sine[i];
  }
}

// A head of a row after norm and rotation.
std::vector<double> rotated(const AppendFixture& f, int row, int head) {
  const AppendOptions& s = f.s;
  const float* x = f.qkv.data() + row * f.stride() + head * s.dim;
  const float* weight = head < s.heads ? f.query_norm.data() : f.key_norm.data();
  std::vector<double> y(x, x + s.dim);
  if (s.norm) {
    double sum = 0;
    for (const double v : y) sum += v * v;
    for (int i = 0; i < s.dim; ++i) y[static_cast<std::size_t>(i)] *= weight[i] / std::sqrt(sum / s.dim + 1e-6);
  }
  const std::int64_t at = std::int64_t{f.position[static_cast<std::size_t>(row)]} * s.dim / 2;
  turn(f.cosine.data() + at, f.sine.data() + at, y);
  return y;
}

// Compares queries and keys with the reference. Values and the gaps between rows must be unchanged.
void check_heads(Check& check, const AppendFixture& f, const Appended& got) {
  const AppendOptions& s = f.s;
  const int turned = (s.heads + s.kv_heads) * s.dim;
  double worst = 0;
  bool same = true, rounded = true;
  for (int r = 0; r < s.rows; ++r) {
    const float *y = got.qkv.data() + r * f.stride(), *x = f.qkv.data() + r * f.stride();
    for (int head = 0; head < s.heads + s.kv_heads; ++head) {
      const auto wanted = rotated(f, r, head);
      for (int d = 0; d < s.dim; ++d) {
        const double w = wanted[static_cast<std::size_t>(d)], e = std::abs(y[head * s.dim + d] - w) / (1 + std::abs(w));
        worst = e <= worst ? worst : std::isnan(e) ? INFINITY : e;
      }
    }
    same = same && std::memcmp(y + turned, x + turned, static_cast<std::size_t>(f.stride() - turned) * 4) == 0;
    if (s.rounded)
      for (int i = 0; i < s.heads * s.dim; ++i)
        rounded = rounded && got.rounded[static_cast<std::size_t>(r * s.heads * s.dim + i)] == to_16(y[i], *s.rounded);
  }
  check.within("queries and keys", worst, 16e-6);  // a norm and two products in f32
  check.that("values and the gaps between rows are as they were", same);
  check.that("the 16-bit queries are the f32 ones, rounded", rounded);
}

// Tables, lengths and frames must equal, byte for byte, the result of write_token for the same keys and values.
// Summaries must equal those that summarize_page then gives.
void check_cache(Check& check, const AppendFixture& f, const Appended& got) {
  const AppendOptions& s = f.s;
  std::set<std::int32_t> pool(f.free.begin(), f.free.end());
  std::vector<std::byte> arena = f.arena, summaries = f.summaries;
  std::vector<PageEntry> table = f.table;
  Ints length = f.length;
  int taken = 0;
  for (int r = 0; r < s.rows; ++r)
    for (int h = 0; h < s.kv_heads; ++h) {
      const auto scope = check.in(fmt::format("row {}, head {}", r, h));
      const int n = length[f.head_of(r, h)]++, page = n / s.page_size, offset = n % s.page_size;
      const std::size_t at = f.head_of(r, h) * static_cast<std::size_t>(s.max_pages) + static_cast<std::size_t>(page);
      const PageEntry& e = got.table[at];
      const bool fresh = offset == 0;
      taken += fresh;
      const bool right = fresh ? pool.erase(e.frame) == 1 : e.frame == table[at].frame;
      check.that(fresh ? "the frame comes from the pool, once" : "the page stays in its frame", right);
      if (!right) return;
      check.that("the page counts its tokens and has codec 0", e.tokens == offset + 1 && e.codec == 0);
      table[at] = e;
      const float* k = got.qkv.data() + r * f.stride() + (s.heads + h) * s.dim;
      std::byte* frame = arena.data() + std::int64_t{e.frame} * granule_bytes;
      ops::write_token(frame, f.layout, offset, k, k + s.kv_heads * s.dim, f.position[static_cast<std::size_t>(r)]);
      f.summarize(at, frame, offset + 1, summaries);
    }
  check.equal("lengths", got.length, length);
  check.that("the pool lacks the frames that were taken", got.left == s.frames - taken);
  check.that("no other page changes",
             std::memcmp(table.data(), got.table.data(), table.size() * sizeof(PageEntry)) == 0);
  const auto differs = std::mismatch(arena.begin(), arena.end(), got.arena.begin());
  const std::int64_t in_frame = (differs.first - arena.begin()) % f.layout.bytes;
  check.that(fmt::format("frames hold what write_token writes; the first other byte is at {} of a frame with k {} v {} "
                         "k_meta {} v_meta {} positions {} state {}",
                         in_frame, f.layout.k, f.layout.v, f.layout.k_meta, f.layout.v_meta, f.layout.positions,
                         f.layout.state),
             differs.first == arena.end());
  check.that("the summaries of the longer pages are what summarize_page gives; no other changes",
             got.summaries == summaries);
  if (s.summary != Summary::none) check.that("the new pages are counted", got.pages == taken);
}

class AppendScene final : public Scene {
 public:
  AppendScene(Place& place, const AppendOptions& of, int copies, unsigned seed) : place_(place), fixture_(of, seed) {
    for (int c = 0; c < copies; ++c) args_.push_back(fixture_.put(place));
  }
  void run(int copy) override { ops::rope_append(args_[static_cast<std::size_t>(copy)], place_.stream()); }
  void check(Check& check) override {
    run(0);
    const Appended got(place_, fixture_, args_[0]);
    check.that("no error", got.error == 0);
    check_heads(check, fixture_, got);
    if (fixture_.s.append)
      check_cache(check, fixture_, got);
    else
      check.that("the cache is as it was", got.cache_unchanged(fixture_));
  }

 private:
  Place& place_;
  AppendFixture fixture_;
  std::vector<ops::RopeAppendArgs> args_;
};

void check_one(Place& place, Check& check, const AppendOptions& s, unsigned seed) {
  const auto scope =
      check.in(fmt::format("{} rows, {} + {} heads of {}, pages of {}, {} and {}{}, summary {} of {} bits{}, seed {}",
                           s.rows, s.heads, s.kv_heads, s.dim, s.page_size, format_of(s.codec.k, name_of(s.dtype)),
                           format_of(s.codec.v, name_of(s.dtype)), s.norm ? ", norm" : "", static_cast<int>(s.summary),
                           s.summary_bits, s.bounds_hold ? "" : " that does not hold", seed));
  Place here(place.stream().device());
  AppendScene(here, s, 1, seed).check(check);
}

// Storages: f32, bf16 and f16, then codes.
constexpr int storages = 10;
void store_as(AppendOptions& s, int storage) {
  s.dtype = storage == 0 ? DType::f32 : storage == 4 ? DType::f16 : DType::bf16;
  constexpr CodecSpec codecs[] = {{},         {},         {{8}, {8}}, {{8}, {}},  {},
                                  {{8}, {4}}, {{4}, {2}}, {fp8, fp8}, {{2}, fp8}, {{4}, {}}};
  s.codec = fitting(codecs[storage], s.dim);
  if (storage == 8) s.dtype = DType::f32;
  if (storage == 9) s.dtype = DType::f16;
}

void check_appends(Place& place, Check& check) {
  unsigned seed = 1;
  for (const int dim : {8, 64, 80, 96, 128, 256})
    for (const int page : {1, 8, 16})
      for (const bool norm : {false, true})
        for (int storage = 0; storage < storages; ++storage) {
          AppendOptions s;
          s.dim = dim, s.page_size = page, s.norm = norm;
          s.max_pages = 1 + 40 / page;
          store_as(s, storage);
          s.heads = 3 + static_cast<int>(seed % 4), s.kv_heads = seed % 3 ? 2 : 1;
          s.lengths = {0, 1, page - 1, page, 2 * page + 1, 17};
          s.rows = 4, s.in_order = 2;
          if (seed % 4 == 0) s.rounded = seed % 8 ? DType::bf16 : DType::f16;
          check_one(place, check, s, seed++);
        }
  AppendOptions many;
  many.rows = 40, many.heads = 32, many.kv_heads = 8, many.dim = 128, many.page_size = 16, many.max_pages = 3;
  many.lengths = {16, 0, 32, 7};
  many.frames = 320;
  check_one(place, check, many, seed);
}

void check_summaries(Place& place, Check& check) {
  unsigned seed = 500;
  for (const int dim : {8, 64, 80, 128, 256})
    for (const int page : {1, 8, 16, 40})
      for (int storage = 0; storage < storages; ++storage)
        for (const int mode : {0, 1, 2, 3, 4}) {
          AppendOptions s;
          s.summary_bits = mode == 4 ? 8 : 16;
          const int kind = mode == 4 ? 1 + static_cast<int>(seed % 3) : mode;
          s.summary = kind == 3 ? Summary::centre_radius : kind == 2 ? Summary::mean : Summary::min_max;
          s.bounds_hold = mode == 0;
          s.dim = dim, s.page_size = page;
          s.max_pages = 2 + 40 / page;
          store_as(s, storage);
          s.norm = seed % 2;
          s.rows = 4, s.in_order = 2;
          s.heads = 6, s.kv_heads = 1 + static_cast<int>(seed % 3);
          s.lengths = {0, 1, page - 1, page, 2 * page + 1, 2 * page - 1, 17, 38};
          check_one(place, check, s, seed++);
        }
}

void check_turns(Place& place, Check& check) {
  unsigned seed = 1000;
  for (const int dim : {8, 64, 80, 96, 128, 256})
    for (const auto& [heads, kv_heads] : {std::pair{4, 2}, {7, 1}, {2, 2}, {9, 3}, {5, 0}})
      for (const bool norm : {false, true}) {
        AppendOptions s;
        s.dim = dim, s.heads = heads, s.kv_heads = kv_heads, s.norm = norm;
        s.rows = 37;
        s.append = false;
        if (seed % 3) s.rounded = seed % 3 == 1 ? DType::bf16 : DType::f16;
        check_one(place, check, s, seed++);
      }
}

// Angles of the positions [0, count) of a cache, [position, head_dim / 2].
struct Angles {
  std::vector<float> cosine, sine;
  Angles(const RopeTable& rope, int count) {
    const int half = rope.head_dim / 2;
    cosine.resize(static_cast<std::size_t>(count * half)), sine.resize(cosine.size());
    for (int p = 0; p < count; ++p) ops::rope_angles(rope, p, cosine.data() + p * half, sine.data() + p * half);
  }
};

// Heads of new tokens turned by their rank, for a decode step (each row has a slot, whose length counts the token or
// not) and for a chunk (its rows follow each other in one slot). Ranks behind the table have its last angle.
void check_ranks(Place& place, Check& check) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  constexpr int angles = 60;
  for (const int dim : {8, 64, 80, 128})
    for (const auto& [heads, kv_heads, values] : {std::array{4, 2, 2}, {7, 1, 0}, {3, 3, 3}})
      for (const auto& [ahead, step] : {std::pair{-1, 0}, {0, 0}, {0, 1}}) {
        const int rows = 9, each = heads + kv_heads + values, half = dim / 2;
        std::vector<float> inv_freq;
        for (int i = 0; i < half; ++i) inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / dim)));
        const Angles of({inv_freq.data(), dim, 1.f}, angles);
        const std::int64_t x_stride = each * dim + 4, out_stride = each * dim + 8;
        std::vector<float> x(static_cast<std::size_t>(rows * x_stride));
        for (float& v : x) v = normal(rng);
        Ints length, slots;
        for (int i = 0; i < rows * kv_heads; ++i) length.push_back(static_cast<int>(rng() % (angles + 5)));
        for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
        std::vector<float> wanted(static_cast<std::size_t>(rows * out_stride), NAN);
        for (int r = 0; r < rows; ++r)
          for (int h = 0; h < each; ++h) {
            const float* from = x.data() + r * x_stride + h * dim;
            std::vector<double> y(from, from + dim);
            if (h < heads + kv_heads) {
              const int kv_head = h < heads ? h / (heads / kv_heads) : h - heads;
              const int tokens = length[static_cast<std::size_t>(
                  (step ? 0 : slots[static_cast<std::size_t>(r)]) * kv_heads + kv_head)];
              const int rank = std::clamp(tokens + ahead + r * step, 0, angles - 1);
              turn(of.cosine.data() + rank * half, of.sine.data() + rank * half, y);
            }
            for (int d = 0; d < dim; ++d)
              wanted[static_cast<std::size_t>(r * out_stride + h * dim + d)] =
                  static_cast<float>(y[static_cast<std::size_t>(d)]);
          }
        ops::RopeRankArgs a;
        a.rows = rows, a.heads = heads, a.kv_heads = kv_heads, a.head_dim = dim, a.values = values;
        a.x = place.put(x), a.x_stride = x_stride;
        a.out = place.put(std::vector<float>(wanted.size(), NAN)), a.out_stride = out_stride;
        a.cosine = place.put(of.cosine), a.sine = place.put(of.sine), a.angles = angles;
        a.length = View<const std::int32_t, 2>::dense(place.put(length), {rows, kv_heads});
        if (!step) a.slots = place.put(slots);
        a.ahead = ahead, a.step = step;
        ops::rope_rank(a, place.stream());
        check.equal(
            fmt::format("{} + {} + {} heads of {}, ahead {}, step {}", heads, kv_heads, values, dim, ahead, step),
            get_as(place, a.out, DType::f32, static_cast<std::int64_t>(wanted.size())), wanted, 2e-6);
      }
}

// Pages for a prompt's attention: old tokens decoded and turned by rank where the regime wants that, the chunk's tokens
// from f32.
void check_prompt_pages(Place& place, Check& check) {
  for (unsigned n = 0; n < 60; n += quick() ? 5 : 1) {
    RandomCache c(n);
    PagedOptions o = c.cache.options();
    o.rows = 1;
    const int chunk = 1 + static_cast<int>(c.rng() % 20), old = static_cast<int>(c.rng() % 40), total = old + chunk;
    if (total > o.page_size * o.max_pages) continue;
    PagedFixture cache(o);
    std::vector<float> keys, values;  // [token, kv_head, head_dim] of the chunk
    for (int t = 0; t < total; ++t)
      for (int h = 0; h < o.kv_heads; ++h) {
        const auto k = c.normal(o.head_dim), v = c.normal(o.head_dim);
        cache.append(0, h, k, v, 2 * t);
        if (t < old) continue;
        keys.insert(keys.end(), k.begin(), k.end()), values.insert(values.end(), v.begin(), v.end());
      }
    const auto scope = check.in(fmt::format("cache {}, {} tokens before a chunk of {}", n, old, chunk));
    const PagedKv kv = cache.view();
    const Angles angles(kv.rope_table, total);
    const DType dtype = n % 2 ? DType::f16 : DType::bf16;
    const PageLayout layout = ops::make_layout(dtype, {}, o.page_size, o.head_dim, 0);
    const int pages = (total + o.page_size - 1) / o.page_size;

    ops::PromptPagesArgs a;
    a.kv = place.put(kv, cache.arena_bytes());
    a.tokens = chunk;
    a.keys = place.put(keys), a.values = place.put(values);
    a.key_stride = a.value_stride = std::int64_t{o.kv_heads} * o.head_dim;
    a.cosine = place.put(angles.cosine), a.sine = place.put(angles.sine), a.angles = total;
    a.layout = layout, a.pages = pages;
    const auto frames = View<std::byte, 1>::dense(
        place.put(std::vector<std::byte>(static_cast<std::size_t>(o.kv_heads * pages * layout.bytes), std::byte{0xA5})),
        {o.kv_heads * pages * layout.bytes});
    const auto table = View<PageEntry, 1>::dense(
        place.put(std::vector<PageEntry>(static_cast<std::size_t>(o.kv_heads * pages))), {o.kv_heads * pages});
    a.frames = frames.data, a.table = table.data;
    ops::prompt_pages(a, place.stream());

    PagedKv got = kv;  // the copy, read with the ops of a cache
    auto bytes = place.get(frames);
    const auto entries = place.get(table);
    const Ints length(static_cast<std::size_t>(o.kv_heads), total);
    const std::int32_t slot = 0;
    got.base = bytes.data(), got.layouts = &layout;
    got.table = View<const PageEntry, 3>::dense(entries.data(), {1, o.kv_heads, pages});
    got.length = View<const std::int32_t, 2>::dense(length.data(), {1, o.kv_heads});
    got.slots = &slot, got.rope = RopeRegime::original;
    const double rounding = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    for (int h = 0; h < o.kv_heads; ++h) {
      bool whole = true;
      for (int p = 0; p < pages; ++p)
        whole = whole && entries[static_cast<std::size_t>(h * pages + p)].tokens ==
                             std::min(o.page_size, total - p * o.page_size);
      check.that("pages count their tokens", whole);
      if (!whole) return;
      Ints here(static_cast<std::size_t>(total)), there(here.size());
      ops::token_positions_reference(got, 0, h, total, here.data());
      ops::token_positions_reference(kv, 0, h, total, there.data());
      check.equal("positions", here, there);
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        std::vector<float> x(static_cast<std::size_t>(total * o.head_dim)), wanted(x.size());
        ops::gather_rows_reference(got, 0, h, side, total, x.data());
        ops::gather_rows_reference(kv, 0, h, side, total, wanted.data());
        for (int t = old; t < total; ++t)
          std::copy_n((side == KvSide::key ? keys : values).data() + ((t - old) * o.kv_heads + h) * o.head_dim,
                      o.head_dim, wanted.data() + t * o.head_dim);
        check.equal(side == KvSide::key ? "keys" : "values", x, wanted, rounding + 2e-6);
      }
    }
  }
}

// A frame of its own.
struct Page {
  PageLayout layout;
  std::vector<std::byte> frame;
  Page(DType dtype, CodecSpec codec, int page_size, int dim, int columns)
      : layout(ops::make_layout(dtype, codec, page_size, dim, columns)),
        frame(static_cast<std::size_t>(layout.bytes), std::byte{0xEE}) {}
};

// write_token, read_row, copy_token and what reads or turns whole heads, on the CPU.
void check_tokens(Place&, Check& check) {
  for (unsigned n = 0; n < 24; ++n) {
    RandomCache c(n);
    const auto scope = check.in(fmt::format("cache {}", n));
    const auto& o = c.cache.options();
    const int dim = o.head_dim, p = o.page_size;
    const CodecSpec codec = n % 3 == 0 ? o.codec : fitting(codecs_with_codes[n % std::size(codecs_with_codes)], dim);
    Page one(o.dtype, codec, p, dim, 2), two(o.dtype, codec, p, dim, 2);
    std::vector<float> row(static_cast<std::size_t>(dim)), wanted_row(row.size());
    for (int t = 0; t < 3 * p; ++t) {
      auto k = c.normal(dim), v = c.normal(dim);
      if (t % 5 == 4) std::fill(v.begin(), v.end(), v[0]);
      if (t % 7 == 6) k[1] = NAN, v[0] = -HUGE_VALF, v[2] = HUGE_VALF;
      ops::write_token(one.frame.data(), one.layout, t % p, k.data(), v.data(), 7 * t);
      ops::write_token_reference(two.frame.data(), two.layout, t % p, k.data(), v.data(), 7 * t);
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        ops::read_row(one.frame.data(), one.layout, side, t % p, row.data());
        ops::read_row_reference(one.frame.data(), one.layout, side, t % p, wanted_row.data());
        check.that("NaN stays where it is",
                   std::equal(row.begin(), row.end(), wanted_row.begin(),
                              [](float a, float b) { return std::isnan(a) == std::isnan(b); }));
        const auto is_nan = [](float x) { return std::isnan(x); };
        std::replace_if(row.begin(), row.end(), is_nan, 0.f);
        std::replace_if(wanted_row.begin(), wanted_row.end(), is_nan, 0.f);
        check.equal("read_row", row, wanted_row, 1e-6);
      }
    }
    check.that("write_token", one.frame == two.frame);
    for (const CodecSpec& to : {codec, CodecSpec{}, CodecSpec{{8}, {4}}, CodecSpec{{4}, fp8}, CodecSpec{fp8, {8}}}) {
      Page got(o.dtype, to, 2 * p, dim, 2), wanted(o.dtype, to, 2 * p, dim, 2);
      for (int t = 0; t < p; ++t) {
        ops::copy_token(one.frame.data(), one.layout, t, got.frame.data(), got.layout, 2 * p - 1 - t);
        ops::copy_token_reference(one.frame.data(), one.layout, t, wanted.frame.data(), wanted.layout, 2 * p - 1 - t);
      }
      const auto side = [](CodecSide s) { return format_of(s, "plain"); };
      // A NaN of e4m3 is some NaN where it is decoded.
      bool equal = got.frame == wanted.frame;
      if (!equal && (codec.k == fp8 || codec.v == fp8)) {
        equal = true;
        for (int t = p; t < 2 * p; ++t)
          for (const KvSide of : {KvSide::key, KvSide::value}) {
            ops::read_row(got.frame.data(), got.layout, of, t, row.data());
            ops::read_row(wanted.frame.data(), wanted.layout, of, t, wanted_row.data());
            equal = equal && std::equal(row.begin(), row.end(), wanted_row.begin(),
                                        [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); });
          }
      }
      check.that(
          fmt::format("copy_token of {} and {} to {} and {}", side(codec.k), side(codec.v), side(to.k), side(to.v)),
          equal);
    }

    PagedKv kv = c.cache.view();
    kv.rope_table.attention_scale = 1.25f;
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        const int tokens = kv.tokens(r, h);
        Ints got(static_cast<std::size_t>(tokens)), wanted(got.size());
        ops::token_positions(kv, r, h, tokens, got.data());
        ops::token_positions_reference(kv, r, h, tokens, wanted.data());
        check.equal("token_positions", got, wanted);
        ops::token_ranks(kv, r, h, tokens, got.data());
        ops::token_ranks_reference(kv, r, h, tokens, wanted.data());
        check.equal("token_ranks", got, wanted);
        std::vector<float> x(static_cast<std::size_t>(tokens * dim)), y(x.size());
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          ops::gather_rows(kv, r, h, side, tokens, x.data());
          ops::gather_rows_reference(kv, r, h, side, tokens, y.data());
          check.equal("gather_rows", x, y, 1e-6);
        }
      }
    for (const double position : {0., 3., -17., 100000.}) {
      auto x = c.normal(dim), y = x;
      ops::rotate(x.data(), kv.rope_table, position);
      ops::rotate_reference(y.data(), kv.rope_table, position);
      check.equal("rotate", x, y, 1e-6);
    }
    if (o.rope == RopeRegime::cache_relative) continue;
    RandomCache other(n);
    const PagedKv same = other.cache.view();
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        const int tokens = kv.tokens(r, h);
        Ints delta(static_cast<std::size_t>(tokens));
        for (auto& d : delta) d = -static_cast<std::int32_t>(c.rng() % 40);
        ops::re_rotate(kv, r, h, tokens, delta.data());
        ops::re_rotate_reference(same, r, h, tokens, delta.data());
        std::vector<float> x(static_cast<std::size_t>(tokens * dim)), y(x.size());
        ops::gather_rows(kv, r, h, KvSide::key, tokens, x.data());
        ops::gather_rows(same, r, h, KvSide::key, tokens, y.data());
        // f32 rounding may lead to the next step of the storage.
        const double step =
            o.codec.k.kind == CodeKind::e4m3 ? 0.6 : 13. / ops::most_code(std::max<int>(1, o.codec.k.bits));
        check.equal("re_rotate", x, y, o.codec.k.bits ? step : o.dtype == DType::bf16 ? 0x1p-7 : 1e-6);
      }
    check.that("nothing is written between frames", c.cache.guards_intact() && other.cache.guards_intact());
  }
}

// A chunk's keys and values on their way into pages of bf16, on the CPU.
class WriteScene final : public Scene {
 public:
  static constexpr int tokens = 4096, dim = 64, page_size = 16;
  WriteScene(Place& place, int copies)
      : layout_(ops::make_layout(DType::bf16, {}, page_size, dim, 0)), rows_(randoms(2 * tokens * dim)) {
    for (int c = 0; c < copies; ++c) {
      from_.push_back(place.put(rows_));
      frames_.push_back(place.take<std::byte>(bytes_of_frames()));
      std::memset(frames_.back(), 0, bytes_of_frames());
    }
  }
  void run(int copy) override {
    const float* k = from_[static_cast<std::size_t>(copy)];
    std::byte* to = frames_[static_cast<std::size_t>(copy)];
    for (int t = 0; t < tokens; ++t)
      ops::write_token(to + t / page_size * layout_.bytes, layout_, t % page_size, k + t * dim, k + (tokens + t) * dim,
                       t);
  }
  void check(Check& check) override {
    run(0);
    std::vector<std::byte> wanted(bytes_of_frames());
    for (int t = 0; t < tokens; ++t)
      ops::write_token_reference(wanted.data() + t / page_size * layout_.bytes, layout_, t % page_size,
                                 rows_.data() + t * dim, rows_.data() + (tokens + t) * dim, t);
    check.that("frames", std::memcmp(wanted.data(), frames_[0], wanted.size()) == 0);
  }
  static double bytes() { return 2. * tokens * dim * (4 + 2) + 4. * tokens; }

 private:
  std::size_t bytes_of_frames() const { return static_cast<std::size_t>(tokens / page_size * layout_.bytes); }
  PageLayout layout_;
  std::vector<float> rows_;
  std::vector<const float*> from_;
  std::vector<std::byte*> frames_;
};

// Queries and keys are read and written, values read, and keys and values stored. Bounds are read and written. For
// means and centres, half of a page's keys are read on average.
Case timed(const char* shape, const AppendOptions& s) {
  Case c{"append", fmt::format("{}, {} row{}, {} + {} heads of {}", shape, s.rows, s.rows == 1 ? "" : "s", s.heads,
                               s.kv_heads, s.dim)};
  c.make = [s](Place& place, int copies) { return std::make_unique<AppendScene>(place, s, copies, 1); };
  c.timed_cuda = true;
  const auto bytes = [&](CodecSide side) {  // of a stored number, with its share of scale and zero
    return (static_cast<double>(ops::row_bytes(side, s.dtype, s.dim)) + (side.bits ? 4 : 0)) / s.dim;
  };
  const double turned = s.heads + s.kv_heads,
               stored_twice = s.append ? s.kv_heads * (4 + bytes(s.codec.k) + bytes(s.codec.v)) : 0;
  const double vectors = summary_vectors(s.summary);
  const double summaries = s.summary == Summary::none ? 0
                           : s.summary == Summary::min_max && s.summary_bits == 16
                               ? s.kv_heads * vectors * (2 + 2)
                               : s.kv_heads * (s.page_size / 2. * 2 + vectors * s.summary_bits / 8);
  c.work.bytes = s.rows * double{1. * s.dim} * (turned * (4 + 4) + s.heads * 2 + stored_twice + summaries);
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  const auto only_cuda = [&](const char* shape, void (*f)(Place&, Check&)) {
    v.push_back(checked("append", shape, f));
    v.back().cpu = false;
  };
  only_cuda("rope_append: a decode step's tokens, in caches of every kind", check_appends);
  only_cuda("rope_append with page summaries: a decode step's tokens, in caches of every kind", check_summaries);
  only_cuda("rope_append without appending: a prompt's queries and keys", check_turns);
  only_cuda("rope_rank", check_ranks);
  only_cuda("prompt_pages", check_prompt_pages);
  v.push_back(checked("append", "stored tokens, copies and rotations, in caches of every kind", check_tokens));
  v.back().cuda = false;

  v.push_back({"append", fmt::format("write_token, {} tokens of {}", WriteScene::tokens, WriteScene::dim)});
  v.back().make = [](Place& place, int copies) { return std::make_unique<WriteScene>(place, copies); };
  v.back().timed_cpu = true;
  v.back().work.bytes = WriteScene::bytes();
  v.back().copies = copies_beyond(WriteScene::bytes(), 160e6, 1 << 20);

  AppendOptions s;
  s.heads = 32, s.kv_heads = 8, s.dim = 128, s.state_columns = 0;
  s.rounded = DType::bf16;
  // Every run appends a token. There is room for 128.
  s.page_size = 16, s.max_pages = 8;
  for (const int rows : {1, 40})
    for (const auto& [summary, bits, shape] : {std::tuple{Summary::none, 16, "rope_append"},
                                               {Summary::min_max, 16, "rope_append, min_max summaries"},
                                               {Summary::min_max, 8, "rope_append, min_max summaries in codes"},
                                               {Summary::mean, 16, "rope_append, mean summaries"},
                                               {Summary::centre_radius, 16, "rope_append, centre_radius summaries"}}) {
      s.rows = rows, s.frames = s.rows * s.kv_heads * s.max_pages;
      s.summary = summary, s.summary_bits = bits;
      v.push_back(timed(shape, s));
    }
  s.summary = Summary::none, s.summary_bits = 16;
  for (const auto& [name, codec] : {std::pair{"bf16", CodecSpec{}},
                                    {"k8v8", CodecSpec{{8}, {8}}},
                                    {"k8v4", CodecSpec{{8}, {4}}},
                                    {"k4v4", CodecSpec{{4}, {4}}},
                                    {"k4v2", CodecSpec{{4}, {2}}},
                                    {"fp8", CodecSpec{fp8, fp8}}}) {
    s.rows = 128, s.frames = s.rows * s.kv_heads * s.max_pages;
    s.codec = codec;
    v.push_back(timed(fmt::format("one token a sequence, {}", name).c_str(), s));
    v.back().op = "encode";
    v.back().work.copy = Work::Copy::in_memory;
  }
  s.codec = {};
  // The case does not use its pages, so they are small.
  s.rows = 2048, s.page_size = 1, s.max_pages = 1, s.frames = 1, s.append = false;
  v.push_back(timed("rope_append without appending", s));
  v.back().copies = copies_beyond(v.back().work.bytes, 300e6, 1 << 20);
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
