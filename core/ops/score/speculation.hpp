// What both devices share of kvlab/speculation.hpp, and the references.
#pragma once
#include <kvlab/speculation.hpp>

#include "base/on_both.hpp"

namespace kvlab::ops {

// total: the counts of all KV heads, which hold `tokens` tokens each.
KVLAB_ON_BOTH inline std::int32_t near_number(const NearGreatest& rule, long long total, int heads, int tokens) {
  const int newest = rule.newest < tokens ? rule.newest : tokens, others = tokens - newest;
  int mean = static_cast<int>(total / heads);
  const int share = static_cast<int>(rule.most_share * static_cast<float>(others));
  mean = mean < rule.most ? mean : rule.most;
  mean = mean < share ? mean : share;
  if (mean < 1 && others > 0) mean = 1;
  return newest + mean;
}

// Checks what add_magnitudes and add_channel_magnitudes take; Errc::internal or unsupported. Returns the queries.
View<const float, 4> queries_and_sums(const PagedKv& kv, const Tensor<4>& of_queries, const View<float, 3>& sums,
                                      const char* op);
void add_magnitudes_reference(const PagedKv& kv, View<const float, 4> queries, View<float, 3> sums);
void near_greatest_reference(const PagedKv& kv, View<const float, 3> scores, const NearGreatest& rule,
                             View<std::int32_t, 2> out);

}  // namespace kvlab::ops
