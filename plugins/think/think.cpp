// ThinK: of a prompt's keys, the channels whose product with the last queries is small become zeros. Xu et al., ICLR
// 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/rewrite.hpp>

namespace {

class Think final : public kvlab::Policy {
 public:
  explicit Think(const kvlab::Params& p)
      : ratio_(p.get<double>("ratio")), window_(p.get<int>("window")), recent_(p.get<int>("recent")) {
    if (ratio_ >= 1)
      throw kvlab::Error(kvlab::Errc::config, "got ratio 1, wanted less: a key that loses all channels says nothing");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.window_queries(window_).own_amount(true).functional(true).capturable(true);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    const int channels = static_cast<int>(kv.pages.head_dim * ratio_);
    if (!kv.last[0] || channels == 0) return;
    const auto keys = kv.scratch<float>("keys", {kv.rows(), kv.kv_heads(), kv.max_length, kv.pages.head_dim});
    const auto energy = kv.kv_head_vectors("channel energy");
    kvlab::ops::read_rows(kv.keys, keys, s);
    kvlab::ops::channel_energy(kv.window_queries, kv.pages, keys, energy, s);
    kvlab::ops::zero_channels(kv.pages, energy, channels, recent_, keys, s);
    edits.rewrite(kvlab::KvSide::key, keys);
  }

 private:
  double ratio_;
  int window_, recent_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<Think>("think",
                                  "channels of a prompt's keys become zeros, those with the least product with its "
                                  "last queries (Xu et al. 2024). Functional: it saves no bytes")
                 .param("ratio", 0.4, 0, 1, "share of the channels of each KV head that become zeros, below 1")
                 .param("window", 32, 1, 4096, "the prompt's last queries that choose channels")
                 .param("recent", 32, 0, kvlab::any, "newest keys of a prompt that keep all channels"))
