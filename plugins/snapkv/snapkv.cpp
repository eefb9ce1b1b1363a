// SnapKV: the prompt's last queries vote for the positions that the answer will use. Li et al., NeurIPS 2024.
#include <kvlab/plugin.hpp>

namespace {

class SnapKv final : public kvlab::Scorer {
 public:
  explicit SnapKv(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        kernel_(p.get<int>("kernel")),
        pooling_(p.get<bool>("clustering") ? p.get<kvlab::Pooling>("pooling") : kvlab::Pooling::none),
        group_(p.get<kvlab::GroupRule>("group")),
        group_first_(p.get<bool>("group_first")) {
    if (kernel_ % 2 == 0)
      throw kvlab::Error(kvlab::Errc::config, "got kernel " + std::to_string(kernel_) + ", wanted an odd number");
  }

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(window_).capturable(true); }
  kvlab::Pins pins(int) const override { return {.last = window_}; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::Scores votes = kv.query_head_scores("snapkv votes");
    kvlab::ops::window_votes(kv.window_queries, kv.upload("seen", kv.position), kv.pages, votes, s);
    if (!group_first_) kvlab::ops::pool(kv.pages, votes, pooling_, kernel_, window_, *kv.workspace, s);
    kvlab::ops::group_reduce(kv.pages, votes, group_, out, s);
    if (group_first_) kvlab::ops::pool(kv.pages, out, pooling_, kernel_, window_, *kv.workspace, s);
  }

 private:
  int window_, kernel_;
  kvlab::Pooling pooling_;
  kvlab::GroupRule group_;
  bool group_first_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<SnapKv>("snapkv", "keeps what the prompt's last queries attend to (Li et al. 2024)")
                 .param("window", 32, 1, 4096, "prompt's last queries that vote; always kept, part of the budget")
                 .param("kernel", 7, 1, 255, "width of the pooling, odd")
                 .param("pooling", kvlab::Pooling::max, "how votes of neighbours are joined")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's votes become one")
                 .param("group_first", false, "reduce the group before pooling instead of after it")
                 .component("clustering", "pooling of the votes; off = every token for itself"))
