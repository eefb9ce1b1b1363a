// What both devices and the references of kvlab/chunks.hpp share.
#pragma once
#include <kvlab/chunks.hpp>

#include <cmath>
#include <cstdint>

#include "base/on_both.hpp"
#include "ops/select/clusters.hpp"

namespace kvlab::ops {

// Chunks of a head of so many tokens.
KVLAB_ON_BOTH constexpr std::int64_t chunks_of(std::int64_t tokens, int size, int local, std::int64_t room) {
  const std::int64_t count = tokens / size - local;
  return count < 0 ? 0 : count > room ? room : count;
}

KVLAB_ON_BOTH inline float cosine_of(double ab, double aa, double bb) {
  return aa > 0 && bb > 0 ? static_cast<float>(ab / (sqrt(aa) * sqrt(bb))) : 0.f;
}

void chunk_keys_reference(const PagedKv& kv, int local, int outliers, const KeyChunks& chunks);
void chunk_scores_reference(const PagedKv& kv, View<const float, 3> queries, float scale, GroupRule rule,
                            const KeyChunks& chunks, Scores out);
void chunk_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                            const KeyChunks& chunks, TokenList list);

}  // namespace kvlab::ops
