// The numbers of ops::random_scores, drawn one after the other.
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

// Sebastiano Vigna's form of SplitMix64.
struct SplitMix {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

}  // namespace

void random_scores_reference(const PagedKv& kv, const std::uint64_t* keys, Scores out) {
  for (int r = 0; r < kv.rows; ++r) {
    SplitMix heads{keys[r]};
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::uint64_t start = heads.next();
      std::vector<std::int32_t> position(static_cast<std::size_t>(kv.tokens(r, h)));
      token_positions_reference(kv, r, h, kv.tokens(r, h), position.data());
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        SplitMix draws{start};
        std::uint64_t number = draws.next();
        for (int p = position[static_cast<std::size_t>(t)]; p > 0; --p) number = draws.next();
        out(r, h, t) = static_cast<float>(static_cast<double>(number >> 40) / 16777216.0);
      }
    }
  }
}

}  // namespace kvlab::ops
