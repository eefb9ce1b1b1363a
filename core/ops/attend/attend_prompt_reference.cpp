#include <cmath>
#include <limits>
#include <vector>

#include "ops/attend/attend_prompt_forms.hpp"
#include "ops/page/check.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::ops {
namespace {

// All keys, values and positions that one KV head's queries may see: those before the chunk, then the chunk's.
struct Seen {
  int past = 0, keys = 0;
  std::vector<float> key, value;
  std::vector<std::int32_t> position;
};

Seen collect(const PromptArgs& a, int head) {
  const int dim = a.kv.head_dim, chunk = static_cast<int>(a.queries.extent[0]);
  Seen s;
  s.past = a.kv.tokens(0, head);
  s.keys = s.past + chunk;
  s.key.resize(std::size_t(s.keys) * dim);
  s.value.resize(s.key.size());
  s.position.resize(s.keys);
  gather_rows_reference(a.kv, 0, head, KvSide::key, s.past, s.key.data());
  gather_rows_reference(a.kv, 0, head, KvSide::value, s.past, s.value.data());
  token_positions_reference(a.kv, 0, head, s.past, s.position.data());
  for (int t = 0; t < chunk; ++t) {
    s.position[s.past + t] = a.first + t;
    for (int d = 0; d < dim; ++d) {
      s.key[std::size_t(s.past + t) * dim + d] = a.keys(t, head, d);
      s.value[std::size_t(s.past + t) * dim + d] = a.values(t, head, d);
    }
  }
  return s;
}

void attend_query(const PromptArgs& a, const Seen& s, int token, int query_head, std::vector<double>& mass) {
  const int dim = a.kv.head_dim, limit = s.past + token + 1;
  const int group = static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads;
  std::vector<double> weight(limit), out(dim);
  double largest = -std::numeric_limits<double>::infinity(), total = 0;
  for (int j = 0; j < limit; ++j) {
    for (int d = 0; d < dim; ++d)
      weight[j] += double{a.queries(token, query_head, d)} * double{s.key[std::size_t(j) * dim + d]};
    weight[j] *= prompt_scale(a);
    if ((a.window > 0 && s.position[j] <= a.first + token - a.window) ||
        (a.masks && a.masks[query_head / group].hides(s.position[j], a.first + token)))
      weight[j] = -std::numeric_limits<double>::infinity();
    largest = std::max(largest, weight[j]);
  }
  for (double& w : weight) total += w = std::exp(w - largest);
  for (int j = 0; j < limit; ++j) {
    mass[j] += weight[j] / total;
    for (int d = 0; d < dim; ++d) out[d] += weight[j] / total * s.value[std::size_t(j) * dim + d];
  }
  for (int d = 0; d < dim; ++d) a.out(token, query_head, d) = static_cast<float>(out[d]);
}

}  // namespace

void attend_prompt_reference(const PromptArgs& a) {
  check_prompt(a, "attend_prompt_reference");
  const int chunk = static_cast<int>(a.queries.extent[0]), heads = static_cast<int>(a.queries.extent[1]);
  const int group = heads / a.kv.kv_heads;
  for (int head = 0; head < a.kv.kv_heads; ++head) {
    const Seen s = collect(a, head);
    for (int q = head * group; q < (head + 1) * group; ++q) {
      std::vector<double> mass(s.keys);
      for (int t = 0; t < chunk; ++t) attend_query(a, s, t, q, mass);
      if (a.sums)
        for (int j = 0; j < s.keys; ++j) a.sums(q, j) = static_cast<float>(mass[j]);
    }
  }
}

}  // namespace kvlab::ops
