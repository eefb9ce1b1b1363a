// The fewest candidates whose weights make up a share, of all query heads of a group together.
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/select/top_p.hpp"

namespace kvlab::ops {
namespace {

// Weights of one head's candidates.
void weigh(const float* logits, int count, float temperature, std::vector<float>& weights) {
  float most = -INFINITY;
  for (int i = 0; i < count; ++i) most = std::fmax(most, logits[i]);
  weights.assign(static_cast<std::size_t>(count), 0.f);
  for (int i = 0; most > -INFINITY && i < count; ++i)
    if (logits[i] > -INFINITY)  // and no NaN
      weights[static_cast<std::size_t>(i)] = logits[i] == most ? 1.f : std::exp((logits[i] - most) / temperature);
}

}  // namespace

void top_p_entries(const PagedKv& kv, View<const float, 3> logits, const IndexList& entries, int unit,
                   float temperature, float p, int newest, TokenList list, Stream s) {
  const char* op = "top_p_candidates";
  check_kv(kv, op, s);
  check_list(kv, entries, op);
  run_put_off();  // it may write the list
  check_list(kv, list, op);
  if (!logits || logits.extent[0] < kv.rows || logits.extent[1] % kv.kv_heads || logits.stride[2] != 1)
    fail(Errc::internal, op, "got logits of another shape, wanted [row, head, candidate]");
  if (!(p > 0 && p <= 1))
    fail(Errc::internal, op, "got a share of " + std::to_string(p) + ", wanted more than 0 and at most 1");
  if (!(temperature > 0))
    fail(Errc::internal, op, "got a temperature of " + std::to_string(temperature) + ", wanted more than 0");
  if (newest < 0) fail(Errc::internal, op, "got " + std::to_string(newest) + " newest tokens, wanted 0 or more");
  if (s.device() == Device::cuda)
    return on_cuda<top_p_entries>(kv, logits, entries, unit, temperature, p, newest, list, s);
  const int group = static_cast<int>(logits.extent[1]) / kv.kv_heads;
  int wanted = 0;  // entries of the longest list or row that has no room; a thread must not throw
#pragma omp parallel for collapse(2) schedule(dynamic) \
    reduction(max                                      \
              : wanted) if (worth_threads(kv.rows * logits.extent[1] * logits.extent[2]))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local std::vector<char> taken;
      thread_local std::vector<float> weights;
      const int n = kv.tokens(r, h), candidates = entries.count(entries.at(r), h) * unit,
                first = n - std::min(n, newest);
      if (candidates > logits.extent[2]) {
        wanted = std::max(wanted, candidates);
        continue;
      }
      taken.assign(static_cast<std::size_t>(candidates), 0);
      for (int q = h * group; q < (h + 1) * group && candidates > 0; ++q) {
        weigh(&logits(r, q, 0), candidates, temperature, weights);
        take_top_p(weights.data(), candidates, double{p}, taken.data());
      }
      int count = 0;
      const auto put = [&](int t) {
        if (count < list.index.extent[2]) list.index(list.at(r), h, count) = t;
        ++count;
      };
      for (int i = 0; i < candidates; ++i) {
        const int t = entries.index(entries.at(r), h, i / unit) * unit + i % unit;
        if (taken[static_cast<std::size_t>(i)] && t < first) put(t);
      }
      for (int t = first; t < n; ++t) put(t);
      if (count > list.index.extent[2]) wanted = std::max(wanted, count);
      list.count(list.at(r), h) = count;
    }
  if (wanted > 0)
    fail(Errc::internal, op,
         "got room for " + std::to_string(logits.extent[2]) + " candidates and " +
             std::to_string(list.index.extent[2]) + " tokens, wanted " + std::to_string(wanted));
}

void top_p_candidates(const PagedKv& kv, View<const float, 3> logits, const PageList& pages, float temperature, float p,
                      int newest, TokenList list, Stream s) {
  top_p_entries(kv, logits, pages, kv.page_size, temperature, p, newest, list, s);
}

void top_p_candidates(const PagedKv& kv, View<const float, 3> logits, const TokenList& tokens, float temperature,
                      float p, int newest, TokenList list, Stream s) {
  top_p_entries(kv, logits, tokens, 1, temperature, p, newest, list, s);
}

}  // namespace kvlab::ops
