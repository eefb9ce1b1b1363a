// The work of ops::top_tokens after its checks.
#pragma once
#include <kvlab/ops.hpp>

#include <vector>

namespace kvlab::ops {

void chosen_tokens(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& choice, TokenList list, Stream s);

// A call on CUDA that waits for those of other layers (base/joined_calls.hpp): it follows calls whose scores it reads.
struct ChosenTokens {
  PagedKv kv;
  View<const float, 3> scores;
  TokenChoice choice;
  TokenList list;
  Stream stream = Stream::cpu();

  const void* output() const { return list.index.data; }
  static void run(const std::vector<ChosenTokens>& calls);
};
// CUDA only. Calls that differ in nothing but memory share launches.
void chosen_tokens_in_layers(const std::vector<ChosenTokens>& calls);

}  // namespace kvlab::ops
