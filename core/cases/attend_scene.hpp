// The inputs of one attend call, in the host's memory and at a place.
#pragma once
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/attend/attend.hpp"

namespace kvlab::cases {

struct AttendShape {
  PagedOptions options;
  int group = 1;
  std::vector<int> lengths;  // [row, kv_head], cycled
  bool listed = false, all_listed = false;
  int chosen = 0;      // pages in the list of each head, if all heads have the same length; 0 = any
  double tokens = -1;  // share of a head's tokens in its list; -1 = no list of tokens
  int window = 0, most_distance = 0;
  float attention_scale = 1;  // the RoPE table's, for keys that are turned on reading
  bool half = false;          // the op reads f16 with the same values; the reference reads bf16
  bool ordered = true;        // false: the newer half of a head's tokens lies in front of the older, as after evictions
  bool growing = false;       // values grow from token to token, by 2^14 in all
  std::vector<PromptMask> masks;   // [kv_head], cycled; empty = none
  std::optional<CodecSpec> lower;  // codec of the first pages of heads: of none, half, three quarters or all
};

struct AttendOutputs {
  Guarded<3> out, mass;
  Guarded<2> lse;
  AttendOutputs(int rows, int heads, int dim, int tokens)
      : out({rows, heads, dim}), mass({rows, heads, tokens}), lse({rows, heads}) {}
  bool same(const AttendOutputs& o) const {
    const auto bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return bits(out.values(), o.out.values()) && bits(mass.values(), o.mass.values()) &&
           bits(lse.values(), o.lse.values());
  }
};

// The arguments for one row of a call.
struct AttendRow {
  ops::AttendArgs args;
  PageList pages;
  TokenList tokens;

  AttendRow(const ops::AttendArgs& a, int r) : args(a) {
    const auto cut = [r](auto& view) {
      if (!view) return;
      view.data += r * view.stride[0];
      view.extent[0] = 1;
    };
    args.kv.rows = 1;
    args.kv.slots += r;
    cut(args.queries), cut(args.out), cut(args.lse), cut(args.mass), cut(args.logits.out), cut(args.bias);
    if (a.last) args.last += r;
    if (a.pages) args.pages = &(pages = *a.pages), cut(pages.index), cut(pages.count);
    if (a.tokens) args.tokens = &(tokens = *a.tokens), cut(tokens.index), cut(tokens.count);
  }
  AttendRow(const AttendRow&) = delete;
};

// attend_reference, with the rows side by side.
inline void attend_reference_of_rows(const ops::AttendArgs& a) {
#pragma omp parallel for schedule(dynamic)
  for (int r = 0; r < a.kv.rows; ++r) ops::attend_reference(AttendRow(a, r).args);
}

struct AttendScene {
  AttendShape shape;
  PagedFixture cache;
  std::vector<float> q;  // rounded to bf16
  std::vector<std::int32_t> last;
  std::vector<PromptMask> masks;  // [kv_head]
  ListMemory list;
  PageList pages, pages_there;
  TokenList listed, listed_there;
  int room = 0;  // token places of mass, more than there are tokens
  HeapWorkspace workspace;

  AttendScene(const AttendShape& s, unsigned seed) : shape(s), cache(with_frames(s)) {
    const PagedOptions& o = cache.options();
    std::mt19937 rng(seed);
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        const int n = length(r, h);
        cache.fill_pooled(r, h, n, [&](int t) { return s.ordered ? t : 3 * (t < n / 2 ? n + t : t); });
        room = std::max(room, n + 5);
        if (!s.growing) continue;
        for (int t = 0; t < n; ++t)
          cache.change(r, h, t, [&](auto&, auto& v) {
            for (float& x : v) x *= std::exp2(14.f * static_cast<float>(t) / static_cast<float>(n) - 14);
          });
      }
    for (int pair = 0; s.lower && pair < o.rows * o.kv_heads; ++pair) {
      const int row = pair / o.kv_heads, head = pair % o.kv_heads, full = length(row, head) / o.page_size;
      const int lower[] = {full / 2, 0, full, full * 3 / 4};
      for (int page = 0; page < lower[pair % 4]; ++page) cache.re_encode(row, head, *s.lower);
    }
    q = normals(std::int64_t{o.rows} * heads() * o.head_dim, seed);
    for (float& x : q) x = static_cast<float>(bf16(2 * x));
    for (int h = 0; h < o.kv_heads && !s.masks.empty(); ++h)
      masks.push_back(s.masks[static_cast<std::size_t>(h) % s.masks.size()]);
    for (int r = 0; r < o.rows; ++r) last.push_back(std::max(0, length(r, 0) - 1));
    int left = 0, wanted = 0;  // of the pages of a head with `chosen` ones
    const auto choose = [&] {
      if (left == 0) left = (length(0, 0) + o.page_size - 1) / o.page_size, wanted = s.chosen;
      const bool take = static_cast<int>(rng() % static_cast<unsigned>(left--)) < wanted;
      wanted -= take;
      return take;
    };
    if (s.chosen)
      pages = {list.choose(
          o, s.chosen, [&](int r, int h) { return cache.view().pages(r, h); }, choose)};
    else if (s.listed || s.all_listed)
      pages = {list.choose_pages(cache, o, [&] { return s.all_listed || rng() % 2; })};
    if (s.tokens >= 0) listed = {list.choose_tokens(cache, o, room - 5, s.tokens, rng)};
  }
  AttendScene(const AttendScene&) = delete;

  int heads() const { return shape.options.kv_heads * shape.group; }
  int length(int row, int head) const {
    return shape.lengths[static_cast<std::size_t>(row * shape.options.kv_heads + head) % shape.lengths.size()];
  }

  // The arguments without outputs.
  ops::AttendArgs inputs() {
    const PagedOptions& o = shape.options;
    ops::AttendArgs a;
    a.kv = cache.view();
    a.kv.rope_table.attention_scale = shape.attention_scale;
    a.queries = View<const float, 3>::dense(q.data(), {o.rows, heads(), o.head_dim});
    a.pages = pages.index ? &pages : nullptr;
    a.tokens = listed.index ? &listed : nullptr;
    a.window = shape.window;
    a.most_distance = shape.most_distance;
    a.last = last.data();
    a.masks = masks.empty() ? nullptr : masks.data();
    return a;
  }
  ops::AttendArgs put(Place& place) {
    ops::AttendArgs a = inputs();
    a.kv = place.put(a.kv, cache.arena_bytes());
    a.queries = place.put(a.queries);
    if (a.pages) a.pages = &(pages_there = place.put(pages));
    if (a.tokens) a.tokens = &(listed_there = place.put(listed));
    a.last = place.put(last);
    if (a.masks) a.masks = place.put(masks);
    return a;
  }

  AttendOutputs outputs() const { return {shape.options.rows, heads(), shape.options.head_dim, room}; }
  ops::AttendArgs args(const AttendOutputs& o) {
    ops::AttendArgs a = inputs();
    a.out = o.out.view();
    a.lse = o.lse.view();
    a.mass = o.mass.view();
    return a;
  }
  AttendOutputs run() {
    AttendOutputs o = outputs();
    ops::attend(args(o), workspace, Stream::cpu());
    return o;
  }
  AttendOutputs reference() {
    AttendOutputs o = outputs();
    attend_reference_of_rows(args(o));
    return o;
  }

 private:
  static PagedOptions with_frames(const AttendShape& s) {
    PagedOptions o = s.options;
    o.frames = s.lower ? 1 : 0;
    for (int i = 0; i < o.rows * o.kv_heads; ++i) {
      const int pages = (s.lengths[static_cast<std::size_t>(i) % s.lengths.size()] + o.page_size - 1) / o.page_size;
      o.frames += pages;
      o.max_pages = std::max(o.max_pages, pages);
    }
    o.frames = std::max(o.frames, 1);
    return o;
  }
};

}  // namespace kvlab::cases
