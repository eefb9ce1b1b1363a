// CAKE: the prompt's last queries rank tokens by the mean of their attention and by how much it changes from query to
// query. Qin et al., ICLR 2025. plugins/cake_layers divides a budget over the layers as it does.
#include <kvlab/plugin.hpp>

namespace {

class Cake final : public kvlab::Scorer {
 public:
  explicit Cake(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        kernel_(p.get<int>("kernel")),
        every_(p.get<int>("every")),
        gamma_(p.get<bool>("variance") ? p.get<float>("gamma") : 0),
        pooling_(p.get<bool>("clustering") ? p.get<kvlab::Pooling>("pooling") : kvlab::Pooling::none),
        group_(p.get<kvlab::GroupRule>("group")) {
    if (kernel_ % 2 == 0)
      throw kvlab::Error(kvlab::Errc::config, "got kernel " + std::to_string(kernel_) + ", wanted an odd number");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .window_queries(window_)
        .mass(every_ > 0 ? kvlab::Mass::decode : kvlab::Mass::none)
        .scratch_numbers(8)
        .capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.last = window_}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    if (!kv.window_queries) return kvlab::ops::group_reduce(kv.pages, kv.mass, group_, out, s);
    const int queries = static_cast<int>(kv.window_queries.extent[2]);
    const kvlab::Scores mean = kv.query_head_scores("mean"), share = kv.query_head_scores("share");
    const std::int32_t* seen = kv.upload("seen", kv.position);
    kvlab::ops::window_votes(kv.window_queries, seen, kv.pages, mean, s);
    kvlab::ops::scale(mean, 1.f / static_cast<float>(queries), s);
    if (gamma_ > 0 && queries > 1) {
      const kvlab::Scores variance = kv.query_head_scores("variance");
      const std::vector<std::int32_t> until = ends(kv, queries);
      const std::int32_t* seen_by = kvlab::upload(*kv.workspace, "seen by", until.data(), {queries}).data;
      for (int i = 0; i < queries; ++i) {
        kvlab::ops::window_votes(query(kv, i), seen_by + i, kv.pages, share, s);
        kvlab::ops::add(share, mean, -1, s);
        kvlab::ops::multiply(share, share, s);
        if (i == 0)
          kvlab::ops::copy(variance, share, s);
        else
          kvlab::ops::add(variance, share, 1, s);
      }
      kvlab::ops::add(mean, variance, gamma_ / static_cast<float>(queries - 1), s);
    }
    kvlab::ops::pool(kv.pages, mean, pooling_, kernel_, window_, *kv.workspace, s);
    kvlab::ops::group_reduce(kv.pages, mean, group_, out, s);
  }

 private:
  // Query i of the window, and the text tokens that each of them sees. A prompt has one row.
  static kvlab::Tensor<4> query(const kvlab::LayerKv& kv, int i) {
    kvlab::View<const float, 4> one = kv.window_queries.f32();
    one.data += i * one.stride[2];
    one.extent[2] = 1;
    return one;
  }
  static std::vector<std::int32_t> ends(const kvlab::LayerKv& kv, int queries) {
    std::vector<std::int32_t> seen;
    for (int i = 1; i <= queries; ++i) seen.push_back(kv.position[0] - queries + i);
    return seen;
  }

  int window_, kernel_, every_;
  float gamma_;
  kvlab::Pooling pooling_;
  kvlab::GroupRule group_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Cake>("cake",
                                 "keeps what the prompt's last queries attend to, and what they attend to "
                                 "now and then (Qin et al. 2025)")
                 .param("window", 32, 2, 4096, "prompt's last queries that vote; always kept, part of the budget")
                 .param("gamma", 200., 0, kvlab::any,
                        "weight of the variance: attention that comes and goes counts beside its mean")
                 .param("kernel", 5, 1, 255, "width of the pooling, odd")
                 .param("pooling", kvlab::Pooling::average, "how scores of neighbours are joined, at the prompt's end")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's scores become one")
                 .param("every", 1, 0, kvlab::any,
                        "decode steps between evictions, 0 = the prompt only. They rank by the step's attention alone")
                 .component("variance", "off = the mean alone, as SnapKV ranks")
                 .component("clustering", "pooling of the scores; off = every token for itself"))
