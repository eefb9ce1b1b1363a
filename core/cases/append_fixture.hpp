// Queries, keys and values of new tokens and the cache of one layer that ops::rope_append extends by them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "cases/place.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/rope_append.hpp"

namespace kvlab::cases {

struct AppendOptions {
  int rows = 3, heads = 4, kv_heads = 2, dim = 64, page_size = 8, max_pages = 4, state_columns = 2;
  DType dtype = DType::bf16;
  CodecSpec codec;
  bool norm = false;
  std::vector<int> lengths = {0};  // [row, kv_head], cycled
  int frames = 64;                 // of the pool, besides those in use
  int in_order = 0;  // of every so many rows one's position is the length of its first head, which has lost no token
  bool append = true;
  int mark_step = 1;
  std::optional<DType> rounded;  // type of the queries' 16-bit copy
  Summary summary = Summary::none;
  int summary_bits = 16;
  bool bounds_hold = true;  // false: the fixture's summaries are not those of its pages

  std::int64_t summary_bytes() const { return kvlab::summary_bytes(summary, summary_bits, dtype, dim); }
};

// The inputs on the host. A test may change them before it puts them to a place.
struct AppendFixture {
  AppendOptions s;
  PageLayout layout;
  std::vector<float> qkv, cosine, sine, query_norm, key_norm;  // qkv [row, stride()], NaN between rows
  std::vector<std::int32_t> position, slots, free, length;     // free: the pool's frames
  std::vector<std::byte> arena, summaries;                     // summaries [slot, kv_head, page]
  std::vector<PageEntry> table;

  static constexpr int angles = 300;
  std::int64_t stride() const { return std::int64_t{s.heads + 2 * s.kv_heads} * s.dim + 8; }
  std::size_t head_of(int row, int head) const {
    return static_cast<std::size_t>(slots[static_cast<std::size_t>(row)] * s.kv_heads + head);
  }

  AppendFixture(const AppendOptions& options, unsigned seed)
      : s(options), layout(ops::make_layout(s.dtype, s.codec, s.page_size, s.dim, s.state_columns)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    qkv.assign(static_cast<std::size_t>(s.rows * stride()), std::numeric_limits<float>::quiet_NaN());
    for (int r = 0; r < s.rows; ++r)
      for (std::int64_t i = 0; i < stride() - 8; ++i) qkv[static_cast<std::size_t>(r * stride() + i)] = normal(rng);
    // Values that codes may mistake: -0, and of every third row numbers too small for a scale.
    for (int r = 0; r < s.rows; ++r)
      for (int i = 0; i < s.kv_heads * s.dim; ++i) {
        float& x = qkv[static_cast<std::size_t>(r * stride() + (s.heads + s.kv_heads) * s.dim + i)];
        if (r % 3 == 1) x *= 1e-9f;
        if (i % 7 == 2) x = -0.f;
      }
    for (int i = 0; i < s.dim; ++i) query_norm.push_back(normal(rng)), key_norm.push_back(normal(rng));
    for (int p = 0; p < angles; ++p)
      for (int i = 0; i < s.dim / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * i / s.dim);
        cosine.push_back(static_cast<float>(std::cos(angle)));
        sine.push_back(static_cast<float>(std::sin(angle)));
      }
    for (int r = 0; r < s.rows; ++r) {
      position.push_back(static_cast<std::int32_t>(rng() % angles));
      slots.push_back(s.rows - 1 - r);
    }
    const int used = s.rows * s.kv_heads * s.max_pages, total = used + s.frames;
    arena.assign(static_cast<std::size_t>(total * layout.bytes), std::byte{0xA5});
    std::vector<std::int32_t> numbers;
    for (int f = 0; f < total; ++f) numbers.push_back(static_cast<std::int32_t>(f * layout.bytes / granule_bytes));
    std::shuffle(numbers.begin(), numbers.end(), rng);
    table.assign(static_cast<std::size_t>(used), PageEntry{});
    length.assign(static_cast<std::size_t>(s.rows * s.kv_heads), 0);
    for (int r = 0; r < s.rows; ++r)
      for (int h = 0; h < s.kv_heads; ++h) {
        const int n = s.lengths[static_cast<std::size_t>(r * s.kv_heads + h) % s.lengths.size()];
        length[head_of(r, h)] = n;
        for (int p = 0; p * s.page_size < n; ++p) {
          PageEntry& e = table[head_of(r, h) * static_cast<std::size_t>(s.max_pages) + static_cast<std::size_t>(p)];
          e.frame = numbers.back();
          numbers.pop_back();
          e.tokens = static_cast<std::uint16_t>(std::min(s.page_size, n - p * s.page_size));
        }
      }
    for (int r = 0; s.in_order > 0 && r < s.rows; r += s.in_order)
      position[static_cast<std::size_t>(r)] = length[head_of(r, 0)];
    numbers.resize(static_cast<std::size_t>(s.frames));
    free = numbers;
    summaries.assign(table.size() * static_cast<std::size_t>(s.summary_bytes()), std::byte{0xA5});
    std::vector<float> k(static_cast<std::size_t>(s.dim)), v(k.size());
    for (std::size_t page = 0; page < table.size(); ++page) {
      const PageEntry& e = table[page];
      if (e.frame < 0) continue;
      std::byte* frame = arena.data() + std::int64_t{e.frame} * granule_bytes;
      for (int t = 0; t < e.tokens; ++t) {
        for (auto* side : {&k, &v})
          for (float& x : *side) x = normal(rng);
        ops::write_token(frame, layout, t, k.data(), v.data(), t);
      }
      if (s.bounds_hold) summarize(page, frame, e.tokens, summaries);
    }
  }
  // Writes the summary of a page, an index of `table`, to `to`.
  void summarize(std::size_t page, const std::byte* frame, int tokens, std::vector<std::byte>& to) const {
    ops::summarize_page(frame, layout, tokens, s.summary, s.dtype,
                        to.data() + page * static_cast<std::size_t>(s.summary_bytes()), s.summary_bits);
  }
  AppendFixture(const AppendFixture&) = delete;  // arguments point to the layout

  // Puts the inputs to a place.
  ops::RopeAppendArgs put(Place& place) const {
    ops::RopeAppendArgs a;
    a.rows = s.rows, a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.dim;
    a.qkv = place.put(qkv), a.qkv_stride = stride();
    if (s.norm) a.query_norm = place.put(query_norm), a.key_norm = place.put(key_norm), a.eps = 1e-6f;
    a.cosine = place.put(cosine), a.sine = place.put(sine), a.angles = angles;
    a.position = place.put(position);
    if (s.rounded) {
      a.rounded = place.put(std::vector<std::uint16_t>(static_cast<std::size_t>(s.rows * s.heads * s.dim), 0xffff));
      a.rounded_dtype = *s.rounded;
    }
    a.nonfinite = place.put(std::vector<std::int32_t>(static_cast<std::size_t>(s.rows), 0));
    a.nonfinite_step = s.mark_step;
    a.append = s.append;
    a.base = place.put(arena);
    a.layouts = &layout;
    a.table = View<PageEntry, 3>::dense(place.put(table), {s.rows, s.kv_heads, s.max_pages});
    a.length = View<std::int32_t, 2>::dense(place.put(length), {s.rows, s.kv_heads});
    a.slots = place.put(slots);
    // The list starts at its last place.
    const auto frames = static_cast<std::int32_t>(free.size()), taken = std::max(0, frames - 1);
    a.error = place.put(std::vector<std::int32_t>{0, taken, taken + frames});
    a.pool = {place.put(free), a.error + 1, a.error + 2, frames};
    a.summary = s.summary;
    a.summary_bits = s.summary_bits;
    a.bounds_hold = s.bounds_hold;
    if (s.summary != Summary::none) {
      a.summaries =
          View<std::byte, 4>::dense(place.put(summaries), {s.rows, s.kv_heads, s.max_pages, s.summary_bytes()});
      a.pages = place.put(std::vector<std::int32_t>{0});
    }
    return a;
  }
};

// What a call wrote.
struct Appended {
  std::vector<float> qkv;
  std::vector<std::uint16_t> rounded;
  std::vector<std::byte> arena, summaries;
  std::vector<PageEntry> table;
  std::vector<std::int32_t> length, marks;  // marks [row]: nonzero = not finite
  int error = 0, left = 0, pages = 0;       // left: frames in the pool; pages: new ones, counted with summaries

  Appended(const Place& place, const AppendFixture& f, const ops::RopeAppendArgs& a) {
    const auto get = [&](const auto* from, std::size_t count) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
      return place.get(View<const T, 1>::dense(from, {static_cast<std::int64_t>(count)}));
    };
    qkv = get(a.qkv, f.qkv.size());
    if (a.rounded)
      rounded =
          get(static_cast<const std::uint16_t*>(a.rounded), static_cast<std::size_t>(f.s.rows * f.s.heads * f.s.dim));
    arena = get(a.base, f.arena.size());
    table = get(a.table.data, f.table.size());
    length = get(a.length.data, f.length.size());
    marks = get(a.nonfinite, static_cast<std::size_t>(f.s.rows));
    const auto counts = get(a.error, 3);
    error = counts[0], left = counts[2] - counts[1];
    if (a.pages) {
      summaries = get(a.summaries.data, f.summaries.size());
      pages = get(a.pages, 1)[0];
    }
  }

  // True if the cache is as it was.
  bool cache_unchanged(const AppendFixture& f) const {
    return length == f.length && arena == f.arena && summaries == f.summaries && pages == 0 &&
           left == static_cast<int>(f.free.size()) &&
           std::memcmp(f.table.data(), table.data(), table.size() * sizeof(PageEntry)) == 0;
  }
};

}  // namespace kvlab::cases
