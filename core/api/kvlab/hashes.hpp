// Hashes of keys as an index of a policy's own: ops that make them, and that sample tokens by them. All of it stays on
// the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/random.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// Signs of random projections (Charikar 2002). One bit of two vectors is the same with the probability 1 - angle / pi.
// A table's code is `bits` of them.
struct HashRule {
  int bits = 10, tables = 150;  // 1 to 15 bits, at least one table
  std::uint64_t seed = 0;
};

// The hashes of a layer's keys, in state memory. A head has those of the places [first, end), less their mean. Without
// the mean all keys point in one direction, and their codes are much the same.
struct KeyHashes {
  View<std::int16_t, 4> code;   // [slot, kv_head, place, table]: the bit of plane b is bit b
  View<float, 3> mean;          // [slot, kv_head, head_dim] of the hashed keys
  View<std::int32_t, 3> bound;  // [slot, kv_head, 2] first, end
  View<const float, 4> planes;  // [kv_head, head_dim, bit, table] Gaussian numbers
};

// The planes of a group of layers: [kv_head, head_dim, bit, table]. The uniform numbers of KV head h are those of
// Random(seed, group * kv_heads + h). Box and Muller's transform makes two neighbours of two of them, rounded to f32.
inline std::vector<float> hash_planes(const HashRule& rule, std::int64_t group, std::int64_t kv_heads,
                                      std::int64_t head_dim) {
  const std::int64_t count = head_dim * rule.bits * rule.tables;
  std::vector<float> planes;
  for (std::int64_t h = 0; h < kv_heads; ++h) {
    Random random(rule.seed, static_cast<std::uint64_t>(group * kv_heads + h));
    for (std::int64_t i = 0; i < count; i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - random.unit())),
                   turn = 2 * 3.14159265358979323846 * random.unit();
      planes.push_back(static_cast<float>(radius * std::cos(turn)));
      if (i + 1 < count) planes.push_back(static_cast<float>(radius * std::sin(turn)));
    }
  }
  return planes;
}

// Takes empty hashes in attach, of these layers alone. Core saves, restores and clears them with the sequence.
class KeptHashes {
 public:
  static constexpr int layers_of_planes = 16;  // that share the planes of each KV head

  KeptHashes() = default;
  KeptHashes(const char* tag, const Shape& s, const HashRule& rule, const std::vector<int>& of_layers, Workspace& w) {
    static_assert(sizeof(float) == 4 && sizeof(std::int32_t) == 4);
    if (rule.bits < 1 || rule.bits > 15 || rule.tables < 1)
      throw Error(Errc::config, "got hashes of " + std::to_string(rule.bits) + " bits in " +
                                    std::to_string(rule.tables) +
                                    " tables, wanted 1 to 15 bits and at least one table");
    // A token's codes begin at a multiple of 16 bytes.
    const std::int64_t tokens = s.max_tokens, heads = s.kv_heads, dim = s.head_dim, row = (rule.tables + 7) / 8 * 8,
                       before = (dim + 2 + 3) / 4 * 4, head = before + tokens * row / 2, layer = heads * head,
                       slot = layer * static_cast<std::int64_t>(of_layers.size());
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    layers_.resize(static_cast<std::size_t>(s.layers));
    const float* planes = nullptr;
    int group = -1;
    for (const int l : of_layers) {
      if (l / layers_of_planes != group) {
        group = l / layers_of_planes;
        const std::vector<float> made = hash_planes(rule, group, heads, dim);
        planes = static_cast<const float*>(
            w.constant(("hash planes " + std::to_string(group)).c_str(), made.data(), made.size() * sizeof(float)));
      }
      KeyHashes& x = layers_[static_cast<std::size_t>(l)];
      x.mean = {data, {s.max_slots, heads, dim}, {slot, head, 1}};
      x.bound = {reinterpret_cast<std::int32_t*>(data + dim), {s.max_slots, heads, 2}, {slot, head, 1}};
      x.code = {reinterpret_cast<std::int16_t*>(data + before),
                {s.max_slots, heads, tokens, rule.tables},
                {2 * slot, 2 * head, row, 1}};
      x.planes = View<const float, 4>::dense(planes, {heads, dim, rule.bits, rule.tables});
      data += layer;
    }
  }
  const KeyHashes& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyHashes> layers_;
};

// A query samples a token if their codes are equal in at least `least` tables. That has a probability, which follows
// from the angle between the query and the centred key. A sampled token counts as 1 / (probability + floor) tokens. So
// a sum over sampled tokens is about that over all tokens.
struct Collisions {
  int least = 2;
  float floor = 1e-4f;
};

namespace ops {

// Hashes the keys at places [from, to) of every row's heads; they replace what a head has. With to <= from none is
// hashed. Their mean is added up in f64, in the order of places, and rounded to f32, as the centred keys are.
// Projections are added up in f64, in the order of elements: both devices find the same bits. A bit is 1 where the
// projection is above 0. Keys must be stored as rotated: RopeRegime::cache_relative is Errc::unsupported. Bytes: the
// range's keys twice, and the codes; head_dim multiplications for each bit of each table and token.
void hash_keys(const PagedKv& kv, int from, int to, const KeyHashes& hashes, Stream s);

// out[row, query head, token] = what the token counts as for the query. 0 = it is not sampled. 1 = it is not hashed,
// and counts in any case. Queries are hashed as they are: their length does not matter. queries: [row, query head,
// head_dim], contiguous along head_dim. All is computed in f64. The bits of two vectors are the same with the
// probability p = 1 - acos(cosine) / pi, and codes with q = p^bits. A token is sampled if `least` or more
// tables succeed, each with probability q. The cosine with a vector of zeros is 0.
// ops::logarithm(out, 0) makes a bias for Edits::bias_logits of this. Scratch: a code for each query head and table.
// Bytes: the codes once, out, and the keys that a query head of the group samples.
void collision_weights(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule, const KeyHashes& hashes,
                       Scores out, Workspace& w, Stream s);

}  // namespace ops
}  // namespace kvlab
