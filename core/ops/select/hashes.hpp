// What both devices and the references of kvlab/hashes.hpp share.
#pragma once
#include <kvlab/hashes.hpp>

#include "base/on_both.hpp"

namespace kvlab::ops {

// The probability that at least `least` of the tables have the same code for two vectors of this cosine.
KVLAB_ON_BOTH inline double collision_probability(double cosine, int bits, int tables, int least) {
  constexpr double pi = 3.14159265358979323846;
  const double clamped = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine, same_bit = 1 - acos(clamped) / pi;
  const double same = pow(same_bit, bits);
  if (same >= 1) return 1;
  double fewer = 0, exactly = pow(1 - same, tables);  // i tables do
  for (int i = 0; i < least; ++i) {
    fewer += exactly;
    exactly *= same / (1 - same) * (tables - i) / (i + 1);
  }
  return fewer < 1 ? 1 - fewer : 0;
}

KVLAB_ON_BOTH inline double cosine_of_pair(double dot, double squares_a, double squares_b) {
  const double lengths = sqrt(squares_a) * sqrt(squares_b);
  return lengths > 0 ? dot / lengths : 0;
}

void hash_keys_reference(const PagedKv& kv, int from, int to, const KeyHashes& hashes);
void collision_weights_reference(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule,
                                 const KeyHashes& hashes, Scores out);

}  // namespace kvlab::ops
