// Sketches of tokens that left the cache (SubGen, Zandieh et al. 2024): few keys and values estimate the sums of a
// softmax over many tokens. Made-up tokens carry them into attention. ops.hpp says what holds for every op.
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/edits.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// A key joins the cluster of the nearest centre if that is no farther than `radius`, or if there are `clusters`
// clusters. Other keys become centres of new clusters. `samples` keys stand for each cluster, and `values` tokens for
// the sum of values.
struct SketchRule {
  float radius = 1;
  int clusters = 1, samples = 1, values = 1;  // at least 1

  constexpr std::int64_t tokens() const { return std::int64_t{clusters} * samples + values; }
};

// The sketches of a layer, in state memory.
struct KvSketch {
  // [slot, kv_head, tokens()]. Sample i of cluster c is token c * samples + i. It has a value of zeros and the weight
  // count / samples, so it adds to the denominator of a softmax alone. The sampled values follow. Their tokens have the
  // value times 2^30 and the weight mu / (values * ||v||^2) * 2^-30, where mu is the sum of ||v||^2 over all tokens. So
  // they add to the numerator; what they add to the denominator is smaller by 2^-30. f32 cannot tell it, unless a
  // sampled value's logit is 4 or more above all others. At 16 above it is a hundredth.
  MadeUpTokens tokens;
  View<float, 4> centre;        // [slot, kv_head, cluster, head_dim]
  View<std::int32_t, 3> count;  // [slot, kv_head, 1 + clusters] number of clusters, then the keys of each
  View<double, 3> squares;      // [slot, kv_head, 1 + values] sum ||v||^2 of all tokens, then ||v||^2 of each sample
  View<std::uint64_t, 1> key;   // [slot] of the draws
};

// Takes empty sketches in attach. Core saves, restores and clears them with the sequence.
class KeptSketch {
 public:
  KeptSketch() = default;
  KeptSketch(const char* tag, const Shape& s, const SketchRule& rule, Workspace& w) {
    static_assert(sizeof(double) == 8 && sizeof(float) == 4);
    const std::int64_t layers = s.layers, heads = s.kv_heads, all = layers * heads, dim = s.head_dim,
                       tokens = rule.tokens(), squares = 1 + rule.values, counts = 1 + rule.clusters,
                       centres = rule.clusters * dim, wide = all * squares + layers,
                       narrow = all * (counts + centres + tokens * (2 * dim + 1)), slot = wide + (narrow + 1) / 2;
    auto* data = static_cast<double*>(w.state(tag, static_cast<std::size_t>(slot) * 8, s.max_slots));
    auto* floats = reinterpret_cast<float*>(data + wide);
    // Numbers of all heads lie together, of one kind after the other.
    const auto numbers = [&](std::int64_t count) {
      const View<float, 3> of_first{floats, {s.max_slots, heads, count}, {2 * slot, count, 1}};
      floats += all * count;
      return of_first;
    };
    const auto vectors = [&](std::int64_t count) {
      const View<float, 3> rows = numbers(count * dim);
      return View<float, 4>{rows.data, {s.max_slots, heads, count, dim}, {rows.stride[0], rows.stride[1], dim, 1}};
    };
    const View<float, 3> count = numbers(counts), weights = numbers(tokens);
    const View<float, 4> centre = vectors(rule.clusters), keys = vectors(tokens), values = vectors(tokens);
    for (std::int64_t l = 0; l < layers; ++l) {
      const auto at = [&](auto view) {
        view.data += l * heads * view.stride[1];
        return view;
      };
      KvSketch k;
      k.tokens = {at(keys), at(values), at(weights)};
      k.centre = at(centre);
      const View<float, 3> counted = at(count);
      k.count = {reinterpret_cast<std::int32_t*>(counted.data), counted.extent, counted.stride};
      k.squares = {data + l * heads * squares, {s.max_slots, heads, squares}, {slot, squares, 1}};
      k.key = {reinterpret_cast<std::uint64_t*>(data + all * squares + l), {s.max_slots}, {slot}};
      layers_.push_back(k);
    }
  }
  const KvSketch& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KvSketch> layers_;
};

namespace ops {

// The tokens that Edits::evict_surplus(surplus) would evict join the sketches of their heads, one after the other in
// the order of their places. A key joins or makes a cluster, as SketchRule says; the first of the nearest centres
// counts. The n-th key of a cluster replaces each of its samples with probability 1 / n. A token replaces each sampled
// value with probability ||v||^2 / mu, where mu is the sum up to this token. Distances, sizes and mu are in f64.
// Weights follow from the counts and mu behind the last token. Keys and values are as the cache decodes them.
// keys: [row] memory of the stream's device; the slots of the rows keep them. null = the slots' own. Number h
// of the SplitMix64 sequence that starts at the key starts that of KV head h. Its number p starts that of text position
// p. There number i is the draw of sample i of the key's cluster, and number samples + j that of sampled value j. A
// draw is the number's top 32 bits, as a fraction, and replaces where it is below the probability.
// Errc::unsupported: a regime but RopeRegime::original, and head_dim above 256 on a GPU. Bytes: what finds the surplus,
// its keys and values, the centres for each token, and the weights.
void sketch_surplus(const PagedKv& kv, const Surplus& surplus, const SketchRule& rule, const std::uint64_t* keys,
                    const KvSketch& to, Stream s);

}  // namespace ops
}  // namespace kvlab
