// MorphKV: the newest tokens stay, and of the older ones those that the newest queries attend to most. Each step
// decides anew, so the cache has a constant size. Ghadia et al., ICML 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/query_shares.hpp>
#include <kvlab/rings.hpp>
#include <kvlab/step_numbers.hpp>

#include <algorithm>

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

class MorphKv final : public kvlab::Scorer, public kvlab::PreparesSteps {
 public:
  explicit MorphKv(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        every_(p.get<int>("every")),
        fusion_(p.get<Fusion>("fusion") == Fusion::max ? kvlab::ShareRule::max : kvlab::ShareRule::sum) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(window_).capturable(true); }
  kvlab::Pins pins(int) const override { return {.last = window_}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    budget.require(window_ + 1, "the newest tokens of `window`, and one more");
    layer_ = std::int64_t{shape.kv_heads} * window_ * shape.head_dim;
    const auto bytes = static_cast<std::size_t>(layer_ * shape.layers) * sizeof(float);
    queries_ = static_cast<float*>(w.state("newest queries", bytes, shape.max_slots));
    place_ = {"places", shape.max_slots, w};
    older_ = {"older", shape.max_slots, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    std::vector<std::int32_t>&place = place_.fresh(), &older = older_.fresh();
    for (int row = 0; row < c.rows; ++row) {
      place.push_back((c.position[row] - 1) % window_);
      older.push_back(c.position[row] - window_);
    }
    place_.put(c), older_.put(c);
  }

  // Logits of a group add up, and so do its queries: for all rows at once, then each row's go to their place.
  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (kv.queries) {
      const kvlab::View<const float, 3> q = kv.queries.f32();
      const kvlab::Scores sum = kv.scratch<float>("sums of groups", {kv.rows(), kv.kv_heads(), q.extent[2]});
      add_up(kv, {q.data, sum.extent, {q.stride[0], kv.shape->group() * q.stride[1], 1}}, q.stride[1], sum, s);
      kvlab::ops::put_in_rings(kv.pages, sum, place_.data(), rings(kv), s);
    } else if (kv.window_queries) {
      const kvlab::View<const float, 4> q = kv.window_queries.f32();
      const int n = static_cast<int>(q.extent[2]), from = kv.position[0] - n;
      for (int done = 0, count = 0; done < n; done += count) {
        count = std::min(n - done, window_ - (from + done) % window_);
        add_up(
            kv,
            {&q(0, 0, done, 0), {kv.kv_heads(), count, q.extent[3]}, {kv.shape->group() * q.stride[1], q.stride[2], 1}},
            q.stride[1], places(kv, 0, from + done, count), s);
      }
    }
  }

  // Each query's softmax over the older tokens alone, then one number of all queries. A text that is longer than its
  // budget has `window` queries.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::QueryShares how;
    how.rule = fusion_;
    how.seen = older_.data(), how.alike = true;
    if (!kv.queries) {
      std::vector<std::int32_t> older;
      for (int row = 0; row < kv.rows(); ++row) older.push_back(kv.position[row] - window_);
      how.seen = kv.upload("older", older.data());
    }
    how.of_slots = true;
    const kvlab::View<const float, 4> queries = rings(kv);
    kvlab::ops::query_shares(queries, kv.pages, how, out, s);
  }

 private:
  kvlab::View<float, 4> rings(const kvlab::LayerKv& kv) const {
    const std::int64_t dim = kv.pages.head_dim;
    return {queries_ + kv.layer * layer_,
            {kv.shape->max_slots, kv.kv_heads(), window_, dim},
            {kv.shape->layers * layer_, window_ * dim, dim, 1}};
  }

  // The memory for sums of a row's queries at `count` text positions from `from` on: [KV head, i, head_dim].
  kvlab::Scores places(const kvlab::LayerKv& kv, int row, int from, int count) const {
    const std::int64_t dim = kv.pages.head_dim,
                       of_row = (std::int64_t{kv.slots[row]} * kv.shape->layers + kv.layer) * layer_;
    return {queries_ + of_row + from % window_ * dim, {kv.kv_heads(), count, dim}, {window_ * dim, dim, 1}};
  }

  // out = the sum over a group's members, of which `first` views the first ones.
  static void add_up(const kvlab::LayerKv& kv, kvlab::View<const float, 3> first, std::int64_t to_next,
                     const kvlab::Scores& out, kvlab::Stream s) {
    kvlab::ops::copy(out, first, s);
    for (int g = 1; g < kv.shape->group(); ++g) {
      first.data += to_next;
      kvlab::ops::add(out, first, 1, s);
    }
  }

  int window_, every_;
  kvlab::ShareRule fusion_;
  std::int64_t layer_ = 0;    // numbers of a layer's queries
  float* queries_ = nullptr;  // [slot, layer, KV head, text position % window, head_dim] the last queries of each text
  kvlab::StepNumbers<std::int32_t> place_, older_;  // [row]
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<MorphKv>("morphkv",
                                    "keeps the newest tokens and what their queries attend to, in a cache of "
                                    "constant size (Ghadia et al. 2025)")
                 .param("window", 200, 1, 4096, "newest tokens, which stay and whose queries decide what else stays")
                 .param("fusion", Fusion::max, "of a token's shares of these queries: the greatest, or their sum")
                 .param("every", 1, 1, kvlab::any,
                        "decode steps between evictions. Between them a sequence holds up to so many more tokens"))
