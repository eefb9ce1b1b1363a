// ops::sketch_surplus in plain loops, as the paper's update of a stream has it.
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"
#include "ops/select/sketch.hpp"
#include "ops/select/surplus.hpp"

namespace kvlab::ops {
namespace {

// Number i of the SplitMix64 sequence that starts at x.
std::uint64_t number(std::uint64_t x, int i) {
  std::uint64_t z = 0;
  for (int k = 0; k <= i; ++k) z = x += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

double fraction(std::uint64_t start, int i) { return std::ldexp(static_cast<double>(number(start, i) >> 32), -32); }

}  // namespace

void sketch_surplus_reference(const PagedKv& kv, const Surplus& surplus, const SketchRule& rule,
                              const std::uint64_t* keys, const KvSketch& to) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  for (int row = 0; row < kv.rows; ++row) {
    const int slot = kv.slots[row];
    if (keys) to.key(slot) = keys[row];
    for (int head = 0; head < kv.kv_heads; ++head) {
      const std::vector<int> leaving = surplus_reference(kv, surplus, row, head);
      if (leaving.empty()) continue;
      std::vector<std::int32_t> position(static_cast<std::size_t>(kv.tokens(row, head)));
      token_positions_reference(kv, row, head, kv.tokens(row, head), position.data());
      for (const int t : leaving) {
        std::vector<float> key(dim), value(dim);
        const PageEntry& e = kv.entry(row, head, t / kv.page_size);
        read_row_reference(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, key.data());
        read_row_reference(kv.frame(e), kv.layout(e), KvSide::value, t % kv.page_size, value.data());
        const std::uint64_t draws = number(number(to.key(slot), head), position[static_cast<std::size_t>(t)]);
        int nearest = 0, made = to.count(slot, head, 0);
        double least = INFINITY;
        for (int c = 0; c < made; ++c) {
          double sum = 0;
          for (std::size_t d = 0; d < dim; ++d) sum += std::pow(double{key[d]} - to.centre(slot, head, c, d), 2);
          if (std::sqrt(sum) < least) nearest = c, least = std::sqrt(sum);
        }
        if (made == 0 || (least > rule.radius && made < rule.clusters)) {
          nearest = made++;
          to.count(slot, head, 0) = made;
          to.count(slot, head, 1 + nearest) = 0;
          for (std::size_t d = 0; d < dim; ++d) to.centre(slot, head, nearest, d) = key[d];
        }
        const double n = ++to.count(slot, head, 1 + nearest);
        for (int i = 0; i < rule.samples; ++i)
          for (std::size_t d = 0; fraction(draws, i) < 1 / n && d < dim; ++d)
            to.tokens.keys(slot, head, nearest * rule.samples + i, d) = key[d];
        double square = 0;
        for (const float v : value) square += double{v} * double{v};
        to.squares(slot, head, 0) += square;
        for (int j = 0; j < rule.values; ++j) {
          if (!(fraction(draws, rule.samples + j) * to.squares(slot, head, 0) < square)) continue;
          for (std::size_t d = 0; d < dim; ++d) {
            to.tokens.keys(slot, head, rule.clusters * rule.samples + j, d) = key[d];
            to.tokens.values(slot, head, rule.clusters * rule.samples + j, d) = std::ldexp(value[d], 30);
          }
          to.squares(slot, head, 1 + j) = square;
        }
      }
      for (int c = 0; c < to.count(slot, head, 0); ++c)
        for (int i = 0; i < rule.samples; ++i)
          to.tokens.weights(slot, head, c * rule.samples + i) =
              static_cast<float>(double(to.count(slot, head, 1 + c)) / rule.samples);
      for (int j = 0; j < rule.values; ++j)
        if (const double square = to.squares(slot, head, 1 + j); square > 0)
          to.tokens.weights(slot, head, rule.clusters * rule.samples + j) =
              static_cast<float>(std::ldexp(to.squares(slot, head, 0) / rule.values / square, -30));
    }
  }
}

}  // namespace kvlab::ops
