// Rules of heads of several classes.
#include <fmt/format.h>
#include <kvlab/kinds.hpp>

#include <cmath>
#include <limits>

#include "cases/on_caches.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Texts of ids 0 to 9, some shorter than the cache, and kinds of the first seven.
struct Texts {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> kinds = {0, 1, 2, 0, 2, 0, 1};
  std::int64_t slots, length;

  explicit Texts(OnCache& x) : slots(x.c.rows()), length(x.n % 3 ? 3 * x.c.room() : x.c.room()) {
    for (std::int64_t i = 0; i < slots * length; ++i) ids.push_back(static_cast<std::int32_t>(x.c.rng() % 10));
  }
  TextTokens view() const {
    return {View<const std::int32_t, 2>::dense(ids.data(), {slots, length}),
            View<const std::uint8_t, 1>::dense(kinds.data(), {static_cast<std::int64_t>(kinds.size())})};
  }
};

std::vector<KeepRule> random_rules(OnCache& x, std::int64_t count) {
  std::vector<KeepRule> rules;
  for (std::int64_t i = 0; i < count; ++i) {
    KeepRule rule{.kinds = static_cast<std::uint32_t>(x.c.pick({0, 1, 2, 4, 6, 7})), .first = x.c.pick({0, 0, 1, 9})};
    rule.best = x.c.pick({0, 1, 3, 20, 1000, KeepRule::all});
    rule.from = x.c.pick({0, 30, 100, KeepRule::never, KeepRule::never});
    rules.push_back(rule);
  }
  return rules;
}

// A fifth of the scores are NaN, infinite or equal to others.
void check_rules(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads();
  const Texts texts(x);
  const TextTokens text = texts.view(), text_there{x.place.put(text.ids), x.place.put(text.kinds)};
  Numbers<3> scores(x, {rows, heads, x.c.room()}), numbers(x, {rows, heads, 3});
  const float special[] = {NAN, infinity, -infinity, 1, 1, 0, -0.f};
  for (std::int64_t i = 0; i < rows * heads * x.c.room(); ++i)
    if (x.c.rng() % 5 == 0) scores.own().data[i] = special[x.c.rng() % 7];
  if (x.n % 4 == 0) numbers.own()(0, 0, 1) = NAN;
  const auto scores_there = scores.put();
  const ClassNumbers classes{numbers.view(), .25f}, classes_there{numbers.put(), .25f};
  for (const bool one_class : {false, true}) {
    const std::int64_t count = one_class ? 1 : 4;
    const std::vector<KeepRule> rules = random_rules(x, rows * count);
    const auto here = View<const KeepRule, 2>::dense(rules.data(), {rows, count}), there = x.place.put(here);
    std::vector<std::int32_t> wanted(static_cast<std::size_t>(rows * heads), -7);
    const auto counts_there = x.place.put(View<std::int32_t, 2>::dense(wanted.data(), {rows, heads}));
    x.same<3>(
        one_class ? "keep_by_class of one class" : "keep_by_class", Guarded<3>({rows, heads, x.c.room()}).view(), 0,
        [&](Scores out) {
          ops::keep_by_class(x.there, text_there, scores_there, one_class ? ClassNumbers{} : classes_there, there, out,
                             counts_there, x.stream());
        },
        [&](Scores out) {
          ops::keep_by_class_reference(x.kv, text, scores.view(), one_class ? ClassNumbers{} : classes, here, out,
                                       View<std::int32_t, 2>::dense(wanted.data(), {rows, heads}));
        });
    x.check.equal("numbers kept", x.place.get(counts_there), wanted);
  }
}

std::vector<Case> list() { return {on_caches("kinds", "rules of classes", 36, check_rules)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
