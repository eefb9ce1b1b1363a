#include "ops/score/query_shares.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/query_logits.hpp"

namespace kvlab::ops {
namespace {

constexpr int block = 32;  // queries whose logits exist at once
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Scratch : QueryLogits {
  std::vector<float> mean;  // [token]
  std::vector<int> seen;    // [token] places that a query sees
};

// A KV head's part of the call.
struct OfHead {
  const QueryShares& how;
  int row, head, group, window;
  float* out;
};

// Turns the logits of a query into shares of the tokens that it sees. The others get 0.
void share(const OfHead& a, int member, int query, Scratch& x, float* s, int tokens, float scale) {
  const RowKernels& kernels = row_kernels();
  const float factor = 1 / (a.how.temperature ? a.how.temperature[a.row] : 1.f);
  kernels.scale(s, tokens, scale * (a.how.noise ? 1 : factor));
  if (a.how.noise) {
    const std::uint64_t start = split_mix(a.how.noise[(a.row * a.group + member) * a.window + query], a.head);
    for (const int t : x.seen)
      s[t] =
          (s[t] - std::log(-std::log(draw_at(start, x.position[static_cast<std::size_t>(t)]) + least_draw))) * factor;
  }
  int next = 0;
  for (const int t : x.seen) {
    std::fill(s + next, s + t, -infinity);
    next = t + 1;
  }
  std::fill(s + next, s + tokens, -infinity);
  if (x.seen.empty())
    std::fill_n(s, tokens, 0.f);
  else
    kernels.scale(s, tokens, 1 / kernels.exp_sum(s, tokens, kernels.max(s, tokens)));
}

// Adds a query to its head's numbers.
void add_query(const OfHead& a, int query, int of_block, int queries, Scratch& x, int tokens, float scale) {
  const RowKernels& kernels = row_kernels();
  const int newest =
      a.how.seen ? a.how.seen[a.row] - 1 - (a.how.alike ? 0 : a.window - 1 - query) : std::numeric_limits<int>::max();
  x.seen.clear();
  for (int t = 0; t < tokens; ++t)
    if (x.position[static_cast<std::size_t>(t)] <= newest) x.seen.push_back(t);
  const float least = 1 / static_cast<float>(x.seen.size());
  const bool mean = a.how.rule == ShareRule::below_mean;
  if (mean) x.mean.assign(static_cast<std::size_t>(tokens), 0);
  const auto count = [&](const float* shares) {
    for (const int t : x.seen) a.out[t] += shares[t] < least ? 1 : 0;
  };
  for (int g = 0; g < a.group; ++g) {
    float* s = x.of(g, of_block, queries);
    share(a, g, query, x, s, tokens, scale);
    if (a.how.rule == ShareRule::sum) kernels.add_scaled(s, tokens, 1, a.out);
    if (a.how.rule == ShareRule::below_each) count(s);
    if (mean) kernels.add_scaled(s, tokens, 1, x.mean.data());
    for (int t = 0; a.how.rule == ShareRule::max && t < tokens; ++t) a.out[t] = std::max(a.out[t], s[t]);
  }
  if (!mean) return;
  kernels.scale(x.mean.data(), tokens, 1 / static_cast<float>(a.group));
  count(x.mean.data());
}

}  // namespace

void query_shares(const Tensor<4>& tensor, const PagedKv& kv, const QueryShares& how, Scores out, Stream s) {
  const char* op = "query_shares";
  check_kv(kv, op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (tensor.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(tensor.dtype) + ", wanted f32");
  const View<const float, 4> queries = tensor.f32();
  if ((!how.of_slots && queries.extent[0] < kv.rows) || queries.extent[1] < 1 || queries.extent[1] % kv.kv_heads != 0 ||
      queries.extent[3] != kv.head_dim)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, query, head_dim]");
  if (queries.stride[3] != 1) fail(Errc::unsupported, op, "got strided queries, wanted head_dim contiguous");
  if (s.device() == Device::cuda) return on_cuda<query_shares>(tensor, kv, how, out, s);
  for (int r = 0; r < kv.rows; ++r) {
    if (how.of_slots && kv.slots[r] >= queries.extent[0])
      fail(Errc::internal, op,
           "got queries of " + std::to_string(queries.extent[0]) + " slots, wanted those of slot " +
               std::to_string(kv.slots[r]));
    for (int h = 0; h < kv.kv_heads; ++h) check_resident(kv, r, h, op);
  }
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads, window = static_cast<int>(queries.extent[2]);
  const float scale = 1 / std::sqrt(static_cast<float>(kv.head_dim));
  thread_local HeadRanks ranks_of_thread;
  HeadRanks& ranks = ranks_of_thread;
  ranks.fill(kv);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local Scratch x;
      const int tokens = kv.tokens(r, h);
      const OfHead a{how, r, h, group, window, &out(r, h, 0)};
      std::fill_n(a.out, tokens, 0.f);
      if (tokens == 0) continue;
      for (int first = 0; first < window; first += block) {
        const int count = std::min(block, window - first);
        const View<const float, 3> part{&queries(how.of_slots ? kv.slots[r] : r, h * group, first, 0),
                                        {group, count, kv.head_dim},
                                        {queries.stride[1], queries.stride[2], queries.stride[3]}};
        x.fill(kv, r, h, part, ranks);
        for (int i = 0; i < count; ++i) add_query(a, first + i, i, count, x, tokens, scale);
      }
    }
}

}  // namespace kvlab::ops
