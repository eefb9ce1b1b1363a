#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/page/row_products.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

using Row = std::vector<double>;

std::vector<float> rows_of(const PagedKv& kv, int row, int head, KvSide side) {
  std::vector<float> out(std::size_t(kv.tokens(row, head)) * kv.head_dim);
  gather_rows_reference(kv, row, head, side, kv.tokens(row, head), out.data());
  return out;
}

std::vector<std::int32_t> positions_of(const PagedKv& kv, int row, int head) {
  std::vector<std::int32_t> out(kv.tokens(row, head));
  token_positions_reference(kv, row, head, kv.tokens(row, head), out.data());
  return out;
}

Row softmax(Row x) {
  double most = -infinity, total = 0;
  for (const double y : x) most = std::max(most, y);
  for (double& y : x) total += y = most > -infinity ? std::exp(y - most) : 0;
  for (double& y : x) y = total > 0 ? y / total : 0;
  return x;
}

// in has one row per query head of the group.
Row reduced(std::vector<Row> in, GroupRule rule, double scale) {
  Row out(in[0].size(), rule == GroupRule::max ? -infinity : 0);
  for (Row& x : in) {
    if (rule == GroupRule::softmax_mean) {
      for (double& y : x) y *= scale;
      x = softmax(x);
    }
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = rule == GroupRule::max ? std::max(out[i], x[i]) : out[i] + x[i];
  }
  if (rule == GroupRule::mean || rule == GroupRule::softmax_mean)
    for (double& y : out) y /= static_cast<double>(in.size());
  return out;
}

// Returns the group's rows of `in`, cut to the head's tokens.
std::vector<Row> group_rows(const View<const float, 3>& in, const PagedKv& kv, int row, int head) {
  const int group = static_cast<int>(in.extent[1]) / kv.kv_heads;
  std::vector<Row> out(group, Row(kv.tokens(row, head)));
  for (int g = 0; g < group; ++g)
    for (std::size_t t = 0; t < out[g].size(); ++t) out[g][t] = in(row, head * group + g, t);
  return out;
}

float* state_of(const StateColumn& column, int row, int head, int token) {
  const PagedKv& kv = *column.kv;
  const PageEntry& e = kv.entry(row, head, token / kv.page_size);
  return reinterpret_cast<float*>(kv.frame(e) + kv.layout(e).state) + std::int64_t{column.column} * kv.page_size +
         token % kv.page_size;
}

double summary_element(const Summaries& s, const std::byte* summary, int d, int head_dim) {
  if (s.bits == 8) {
    float shared[2];
    std::memcpy(shared, summary + summary_vectors(s.kind) * head_dim, sizeof shared);
    return static_cast<float>(std::to_integer<int>(summary[d])) * shared[0] + shared[1];
  }
  if (s.dtype == DType::f32) return reinterpret_cast<const float*>(summary)[d];
  return static_cast<double>(static_cast<float>(reinterpret_cast<const bf16*>(summary)[d]));
}

template <class F>
void for_heads(const PagedKv& kv, F f, const Heads& heads = {}) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      if (heads.on(kv.slots[r], h)) f(r, h);
}

}  // namespace

void row_norm_reference(const KvRows& rows, Scores out, const Heads& heads) {
  PagedKv kv = *rows.kv;
  kv.rope = RopeRegime::original;  // row_norm reads rows as stored
  const auto norms = [&](int r, int h) {
    const auto x = rows_of(kv, r, h, rows.side);
    for (int t = 0; t < kv.tokens(r, h); ++t) {
      double sum = 0;
      for (int d = 0; d < kv.head_dim; ++d) sum += std::pow(double{x[std::size_t(t) * kv.head_dim + d]}, 2);
      out(r, h, t) = static_cast<float>(std::sqrt(sum));
    }
  };
  for_heads(kv, norms, heads);
}

void scale_reference(Scores out, float factor) {
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t t = 0; t < out.extent[2]; ++t) out(r, h, t) *= factor;
}

void above_reference(Scores x, float threshold) {
  for (std::int64_t r = 0; r < x.extent[0]; ++r)
    for (std::int64_t h = 0; h < x.extent[1]; ++h)
      for (std::int64_t t = 0; t < x.extent[2]; ++t)
        if (x(r, h, t) > threshold)
          x(r, h, t) = 1;
        else
          x(r, h, t) = 0;
}

void logarithm_reference(Scores x, float add) {
  for (std::int64_t r = 0; r < x.extent[0]; ++r)
    for (std::int64_t h = 0; h < x.extent[1]; ++h)
      for (std::int64_t t = 0; t < x.extent[2]; ++t) {
        const float sum = x(r, h, t) + add;
        x(r, h, t) = static_cast<float>(std::log(double{sum}));
      }
}

void recency_reference(const PagedKv& kv, Scores out) {
  for_heads(kv, [&](int r, int h) {
    const auto position = positions_of(kv, r, h);
    for (int t = 0; t < kv.tokens(r, h); ++t) out(r, h, t) = static_cast<float>(position[t]);
  });
}

void query_counts_reference(const PagedKv& kv, const std::int32_t* seen, int window, Scores out) {
  for_heads(kv, [&](int r, int h) {
    const auto position = positions_of(kv, r, h);
    for (int t = 0; t < kv.tokens(r, h); ++t) {
      int count = 0;
      for (int query = seen[r] - window; query < seen[r]; ++query) count += query >= position[t];
      out(r, h, t) = static_cast<float>(count);
    }
  });
}

void window_votes_reference(const View<const float, 4>& q, const std::int32_t* seen, const PagedKv& kv, Scores votes,
                            const Heads& heads, int newest) {
  const int group = static_cast<int>(q.extent[1]) / kv.kv_heads, window = static_cast<int>(q.extent[2]);
  const auto vote = [&](int r, int h) {
    const RowProducts keys(rows_of(kv, r, h, KvSide::key), kv.head_dim);
    const auto position = positions_of(kv, r, h);
    const auto shares_of = [&](int head, int i) {
      Row s = keys.with([&](std::size_t d) { return double{q(r, head, i, static_cast<std::int64_t>(d))}; });
      for (std::size_t t = 0; t < s.size(); ++t)
        s[t] = !seen || position[t] <= seen[r] - window + i ? s[t] / std::sqrt(double(kv.head_dim)) : -infinity;
      Row shares = softmax(s);
      for (std::size_t t = 0; newest > 0 && t < s.size(); ++t)
        if (position[t] <= seen[r] - window + i - newest) shares[t] = 0;
      return shares;
    };
    const int each = static_cast<int>(votes.extent[1]) == kv.kv_heads ? group : 1;  // query heads of one vote
    for (int first = h * group; first < (h + 1) * group; first += each) {
      Row sum(position.size());
      for (int i = 0; i < window; ++i) {
        Row greatest = shares_of(first, i);
        for (int head = first + 1; head < first + each; ++head) {
          const Row s = shares_of(head, i);
          for (std::size_t t = 0; t < s.size(); ++t) greatest[t] = std::max(greatest[t], s[t]);
        }
        for (std::size_t t = 0; t < sum.size(); ++t) sum[t] += greatest[t];
      }
      for (std::size_t t = 0; t < sum.size(); ++t) votes(r, first / each, t) = static_cast<float>(sum[t]);
    }
  };
  for_heads(kv, vote, heads);
}

void pooled_logits_reference(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out) {
  for_heads(kv, [&](int r, int h) {
    const int n = kv.tokens(r, h), group = static_cast<int>(logits.out.extent[3]);
    const float* of = logits.of(r, kv.slots[r], h, n);
    if (!of) return;
    const int half = pooling.kind == Pooling::none ? 0 : pooling.kernel / 2;
    std::vector<Row> pooled;
    for (int g = 0; g < group; ++g) {
      Row x(n);
      for (int t = 0; t < n; ++t) x[t] = of[std::int64_t{t} * group + g] * std::numbers::ln2;
      x = softmax(x);
      Row y(n);
      for (int t = 0; t < n; ++t) {
        double sum = 0, most = -infinity;
        for (int i = std::max(0, t - half); i <= std::min(n - 1, t + half); ++i)
          sum += x[i], most = std::max(most, x[i]);
        y[t] = pooling.kind == Pooling::max ? most : sum / (2 * half + 1);
      }
      pooled.push_back(y);
    }
    const Row all = reduced(pooled, pooling.rule, 1);
    for (int t = 0; t < n; ++t) out(r, h, t) = static_cast<float>(all[t]);
  });
}

void pool_reference(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, const Heads& which) {
  const int heads = static_cast<int>(scores.extent[1]);
  if (kind == Pooling::none) return;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int kv_head = h / (heads / kv.kv_heads), n = kv.tokens(r, kv_head) - excluded;
      if (!which.on(kv.slots[r], kv_head)) continue;
      Row in(std::max(n, 0));
      for (int t = 0; t < n; ++t) in[t] = scores(r, h, t);
      for (int t = 0; t < n; ++t) {
        double sum = 0, most = -infinity;
        for (int i = std::max(0, t - kernel / 2); i <= std::min(n - 1, t + kernel / 2); ++i) {
          sum += in[i];
          most = std::max(most, in[i]);
        }
        scores(r, h, t) = static_cast<float>(kind == Pooling::max ? most : sum / kernel);
      }
    }
}

void group_reduce_reference(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out,
                            const Heads& heads) {
  const std::int64_t parts = out.extent[1] / kv.kv_heads, group = in.extent[1] / out.extent[1];
  const auto reduce = [&](int r, int h) {
    const std::vector<Row> rows = group_rows(in, kv, r, h);
    for (std::int64_t part = 0; part < parts; ++part) {
      const Row x = reduced({rows.begin() + part * group, rows.begin() + (part + 1) * group}, rule, 1);
      for (std::size_t t = 0; t < x.size(); ++t) out(r, h * parts + part, t) = static_cast<float>(x[t]);
    }
  };
  for_heads(kv, reduce, heads);
}

void layer_reduce_reference(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out) {
  const int group = static_cast<int>(in.extent[1]) / kv.kv_heads;
  for_heads(kv, [&](int r, int h) {
    std::vector<std::vector<std::int32_t>> positions;
    for (int other = 0; other < kv.kv_heads; ++other) positions.push_back(positions_of(kv, r, other));
    const auto& own = positions[static_cast<std::size_t>(h)];
    for (std::size_t t = 0; t < own.size(); ++t) {
      Row held;
      for (int other = 0; other < kv.kv_heads; ++other) {
        const auto& position = positions[static_cast<std::size_t>(other)];
        for (std::size_t place = 0; place < position.size(); ++place)
          for (int q = other * group; position[place] == own[t] && q < (other + 1) * group; ++q)
            held.push_back(in(r, q, place));
      }
      double sum = 0;
      for (const double x : held) sum += x;
      const double most = *std::max_element(held.begin(), held.end());
      if (rule == GroupRule::mean) sum /= static_cast<double>(held.size());
      out(r, h, t) = static_cast<float>(rule == GroupRule::max ? most : sum);
    }
  });
}

void page_sum_reference(const PagedKv& kv, View<const float, 3> in, Scores out) {
  const int heads = static_cast<int>(in.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      Row sum(kv.pages(r, h / group));
      for (int t = 0; t < kv.tokens(r, h / group); ++t) sum[t / kv.page_size] += in(r, h, t);
      for (std::size_t p = 0; p < sum.size(); ++p) out(r, h, p) = static_cast<float>(sum[p]);
    }
}

void blend_state_reference(const StateColumn& column, float keep, View<const float, 3> in, float factor,
                           const Heads& heads) {
  const auto blend = [&](int r, int h) {
    for (int t = 0; t < column.kv->tokens(r, h); ++t) {
      float* state = state_of(column, r, h, t);
      const double old = keep == 0 ? 0 : double{keep} * *state;
      *state = static_cast<float>(old + double{factor} * (in ? in(r, h, t) : 1.f));
    }
  };
  for_heads(*column.kv, blend, heads);
}

void add_mass_reference(View<const float, 3> mass, GroupRule rule, const StateColumn& column, const Heads& heads) {
  const auto add = [&](int r, int h) {
    const Row x = reduced(group_rows(mass, *column.kv, r, h), rule, 1);
    for (std::size_t t = 0; t < x.size(); ++t) {
      float* state = state_of(column, r, h, static_cast<int>(t));
      *state = static_cast<float>(*state + x[t]);
    }
  };
  for_heads(*column.kv, add, heads);
}

void read_state_reference(const StateColumn& column, Scores out, const Heads& heads) {
  const auto read = [&](int r, int h) {
    for (int t = 0; t < column.kv->tokens(r, h); ++t) out(r, h, t) = *state_of(column, r, h, t);
  };
  for_heads(*column.kv, read, heads);
}

void page_score_reference(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries,
                          GroupRule rule, float scale, Scores out) {
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  for_heads(kv, [&](int r, int h) {
    std::vector<Row> score(group, Row(kv.pages(r, h)));
    for (int g = 0; g < group; ++g)
      for (int p = 0; p < kv.pages(r, h); ++p)
        for (int d = 0; d < kv.head_dim; ++d) {
          const double q = queries(r, h * group + g, d);
          const std::byte* summary = summaries.at(kv.slots[r], h, p);
          const double first = q * summary_element(summaries, summary, d, kv.head_dim);
          score[g][p] += summaries.kind == Summary::mean
                             ? first
                             : std::max(first, q * summary_element(summaries, summary, kv.head_dim + d, kv.head_dim));
        }
    const Row x = reduced(score, rule, scale);
    for (std::size_t p = 0; p < x.size(); ++p) out(r, h, p) = static_cast<float>(x[p]);
  });
}

std::vector<double> query_cosines_reference(const View<const float, 3>& queries, const PagedKv& kv,
                                            const View<const float, 3>& last) {
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  std::vector<double> out;
  for_heads(kv, [&](int r, int h) {
    double sum = 0;
    for (int g = h * group; g < (h + 1) * group; ++g) {
      double dot = 0, a = 0, b = 0;
      for (int d = 0; d < kv.head_dim; ++d) {
        const double x = queries(r, g, d), y = last(kv.slots[r], g, d);
        dot += x * y, a += x * x, b += y * y;
      }
      sum += dot / (std::sqrt(a) * std::sqrt(b) + 1e-12);
    }
    out.push_back(sum / group);
  });
  return out;
}

}  // namespace kvlab::ops
