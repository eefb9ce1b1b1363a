// Rows as a codebook would store them.
#include <fmt/format.h>
#include <kvlab/codebooks.hpp>

#include <algorithm>

#include "cases/on_caches.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::cases {
namespace {

// A coding for the op and one for the reference. Earlier rows of some heads stay.
struct Both {
  Coding own, there;

  Both(OnCache& x, int entries) : centres_(x.c.normal(entries)), levels_(x.c.normal(entries)) {
    std::sort(centres_.begin(), centres_.end());
    own.book = {of(centres_), of(levels_)};
    there.book = {x.place.put(own.book.centres), x.place.put(own.book.levels)};
    for (int i = 0; i < x.c.rows() * x.c.kv_heads(); ++i)
      from_.push_back(x.c.rng() % 2 ? 0 : static_cast<std::int32_t>(x.c.rng() % 40));
    own.range.from = View<const std::int32_t, 2>::dense(from_.data(), {x.c.rows(), x.c.kv_heads()});
    there.range.from = x.place.put(own.range.from);
    own.range.least = there.range.least = x.c.pick({0, 0, 5});
  }
  Both(const Both&) = delete;

 private:
  static View<const float, 1> of(const std::vector<float>& x) {
    return View<const float, 1>::dense(x.data(), {static_cast<std::int64_t>(x.size())});
  }
  std::vector<float> centres_, levels_;
  std::vector<std::int32_t> from_;
};

void check(OnCache& x) {
  Numbers<4> rows(x, {x.c.rows(), x.c.kv_heads(), x.c.room(), x.kv.head_dim});
  for (std::int64_t d = 0; d + 1 < x.kv.head_dim; d += 2) rows.own()(0, 0, 0, d) = rows.own()(0, 0, 0, d + 1);
  std::fill_n(&rows.own()(0, 0, 1, 0), x.kv.head_dim, 2.f);  // a token whose numbers are all alike, if it has one head
  Numbers<2> lower(x, {x.c.kv_heads(), x.kv.head_dim}), upper(x, {x.c.kv_heads(), x.kv.head_dim});
  for (std::int64_t h = 0; h < x.c.kv_heads(); ++h)
    for (std::int64_t d = 0; d < x.kv.head_dim; ++d) {
      float &a = lower.own()(h, d), &b = upper.own()(h, d);
      if (a > b) std::swap(a, b);
      if (x.c.rng() % 16 == 0) b = a;
    }
  const auto lower_there = lower.put(), upper_there = upper.put();
  for (const int entries : {1, 4, 16, 256}) {
    Both how(x, entries);
    for (const bool exact : {true, false}) {
      how.own.exact_outliers = how.there.exact_outliers = exact;
      const std::string text = fmt::format("{} entries, outliers {}", entries, exact ? "stay" : "are coded");
      x.same<4>(
          "code_channels, " + text, rows.own(), 1e-7,
          [&](View<float, 4> out) {
            ops::code_channels(x.there, lower_there, upper_there, how.there, out, x.stream());
          },
          [&](View<float, 4> out) { ops::code_channels_reference(x.kv, lower.view(), upper.view(), how.own, out); });
      for (const double outliers : {0., .01, .25})
        x.same<4>(
            fmt::format("code_tokens of {}, {}", outliers, text), rows.own(), 1e-7,
            [&](View<float, 4> out) { ops::code_tokens(x.there, outliers, how.there, out, x.stream()); },
            [&](View<float, 4> out) { ops::code_tokens_reference(x.kv, outliers, how.own, out); });
    }
  }
}

std::vector<Case> list() { return {on_caches("codebooks", "channels and tokens", 36, check)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
