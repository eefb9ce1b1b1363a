// MorphKV: the newest tokens stay, and of the older ones those that the newest queries attend to most. Each step
// decides anew, so the cache has a constant size. Ghadia et al., ICML 2025.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>

namespace {

enum class Fusion : std::uint8_t { max, sum };

}  // namespace

namespace kvlab {

template <>
struct Choices<Fusion> {
  static constexpr std::pair<Fusion, const char*> all[] = {{Fusion::max, "max"}, {Fusion::sum, "sum"}};
};

}  // namespace kvlab

namespace {

class MorphKv final : public kvlab::Scorer {
 public:
  explicit MorphKv(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        every_(p.get<int>("every")),
        fusion_(p.get<Fusion>("fusion") == Fusion::max ? kvlab::GroupRule::max : kvlab::GroupRule::sum) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(window_).scratch_numbers(window_ + 4); }
  kvlab::Pins pins(int) const override { return {.last = window_}; }
  int every() const override { return every_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    budget.require(window_ + 1, "the newest tokens of `window`, and one more");
    layer_ = std::int64_t{shape.kv_heads} * window_ * shape.head_dim;
    const auto bytes = static_cast<std::size_t>(layer_ * shape.layers) * sizeof(float);
    queries_ = static_cast<float*>(w.state("newest queries", bytes, shape.max_slots));
  }

  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (kv.queries) {
      const kvlab::View<const float, 3> q = kv.queries.f32();
      for (int row = 0; row < kv.rows(); ++row)
        note(kv, row, {q.data + row * q.stride[0], {q.extent[1], 1, q.extent[2]}, {q.stride[1], 0, 1}},
             kv.position[row] - 1, 1, s);
    } else if (kv.window_queries) {
      const kvlab::View<const float, 4> q = kv.window_queries.f32();
      const int n = static_cast<int>(q.extent[2]);
      note(kv, 0, q[0], kv.position[0] - n, n, s);
    }
  }

  // Each query's softmax over the older tokens alone, then one number of all queries. A text that is longer than its
  // budget has `window` queries.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    const kvlab::Scores shares = kv.scratch<float>("shares", {1, kv.kv_heads() * window_, kv.max_length});
    kvlab::PagedKv one = kv.pages;
    one.rows = 1;
    const std::int64_t dim = one.head_dim, queries = std::int64_t{one.kv_heads} * window_;
    for (int row = 0; row < kv.rows(); ++row, ++one.slots) {
      const kvlab::Scores to{out.data + row * out.stride[0], {1, out.extent[1], out.extent[2]}, out.stride};
      kvlab::ops::row_dot({&one, kvlab::KvSide::key},
                          kvlab::View<const float, 3>::dense(newest(kv, row), {1, queries, dim}), shares, s);
      kvlab::ops::scale(shares, 1 / std::sqrt(static_cast<float>(dim)), s);
      kvlab::ops::set_pinned(one, {.last = window_}, -INFINITY, shares, s);
      kvlab::ops::softmax(one, shares, 1, s);
      kvlab::ops::group_reduce(one, shares, fusion_, to, s);
    }
  }

 private:
  // The row's last queries, those of a group added up: [KV head, text position % window, head_dim].
  float* newest(const kvlab::LayerKv& kv, int row) const {
    return queries_ + (std::int64_t{kv.slots[row]} * kv.shape->layers + kv.layer) * layer_;
  }

  // Takes n queries of text positions from `from` on: [query head, i, head_dim]. Logits of a group add up, and so do
  // its queries.
  void note(const kvlab::LayerKv& kv, int row, kvlab::View<const float, 3> queries, int from, int n,
            kvlab::Stream s) const {
    const std::int64_t dim = kv.pages.head_dim, group = kv.shape->group();
    for (int done = 0, count = 0; done < n; done += count) {
      const int at = (from + done) % window_;
      count = std::min(n - done, window_ - at);
      const kvlab::Scores to{newest(kv, row) + at * dim, {kv.kv_heads(), count, dim}, {window_ * dim, dim, 1}};
      kvlab::View<const float, 3> head{queries.data + done * queries.stride[1],
                                       {kv.kv_heads(), count, dim},
                                       {group * queries.stride[0], queries.stride[1], 1}};
      kvlab::ops::copy(to, head, s);
      for (int g = 1; g < group; ++g) {
        head.data += queries.stride[0];
        kvlab::ops::add(to, head, 1, s);
      }
    }
  }

  int window_, every_;
  kvlab::GroupRule fusion_;
  std::int64_t layer_ = 0;  // numbers of a layer's queries
  float* queries_ = nullptr;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<MorphKv>("morphkv",
                                    "keeps the newest tokens and what their queries attend to, in a cache of "
                                    "constant size (Ghadia et al. 2025)")
                 .param("window", 200, 1, 4096, "newest tokens, which stay and whose queries decide what else stays")
                 .param("fusion", Fusion::max, "of a token's shares of these queries: the greatest, or their sum")
                 .param("every", 1, 1, kvlab::any,
                        "decode steps between evictions. Between them a sequence holds up to so many more tokens"))
