// Rules of what a KV head keeps, and an op for policies that give each head the rule of its class. ops.hpp says what
// holds for every op.
#pragma once
#include <cstdint>
#include <limits>

#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

constexpr std::uint32_t kind_bit(TokenKind kind) { return 1u << static_cast<unsigned>(kind); }

// A head keeps the tokens of these kinds, and those at text positions before `first` and from `from` on. Of the tokens
// of other kinds that do not lie before `first` it keeps the `best` highest scores. Those from `from` on compete too.
struct KeepRule {
  static constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max(), all = never;

  std::uint32_t kinds = 0;  // kind_bit of each
  std::int32_t first = 0, from = never, best = 0;
};

// Numbers that decide a head's class: of its first numbers, how many in a row are below `wanted`. NaN is below.
struct ClassNumbers {
  View<const float, 3> of;  // [slot, kv_head, i], as in KeptSeries; empty = every head is of class 0
  float wanted = 0;

  constexpr std::int64_t classes() const { return of.data ? of.extent[2] + 1 : 1; }
  constexpr int class_of(std::int64_t slot, std::int64_t head) const {
    int n = 0;
    while (n + 1 < classes() && !(of.data[slot * of.stride[0] + head * of.stride[1] + n * of.stride[2]] >= wanted)) ++n;
    return n;
  }
};

namespace ops {

// kept[row, kv_head, token] = 1 for the tokens that the rule of the head's class keeps, else 0. counts[row, kv_head] =
// their number. rules: [row, class], memory of the stream's device. evict_surplus with `counts` and the scores `kept`
// leaves these tokens. The op serves policies that know a head's class on the device alone. By other ops each class
// would take lists and launches of its own. Bytes: scores and positions, and kept. A GPU reads the scores up to 8 times
// where a rule has a `best`.
void keep_by_class(const PagedKv& kv, const TextTokens& text, View<const float, 3> scores, const ClassNumbers& classes,
                   View<const KeepRule, 2> rules, Scores kept, View<std::int32_t, 2> counts, Stream s);

}  // namespace ops
}  // namespace kvlab
