// TOVA: drops the token that the newest query attends to least, over all heads of a layer. Oren et al., EMNLP 2024.
#include <kvlab/plugin.hpp>

namespace {

class Tova final : public kvlab::Scorer {
 public:
  explicit Tova(const kvlab::Params& p) : keep_last_(p.get<bool>("keep_last")), every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .window_queries(1)
        .mass(every_ > 0 ? kvlab::Mass::decode : kvlab::Mass::none)
        .uniform_heads(true)
        .capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.last = keep_last_ ? 1 : 0}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::View<const float, 3> attention = kv.mass;
    if (kv.window_queries) {
      const kvlab::Scores votes = kv.query_head_scores("last query's attention");
      kvlab::ops::window_votes(kv.window_queries, kv.upload("seen", kv.position), kv.pages, votes, s);
      attention = votes;
    }
    kvlab::ops::layer_reduce(kv.pages, attention, kvlab::GroupRule::mean, out, s);
  }

 private:
  bool keep_last_;
  int every_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Tova>("tova", "drops what the newest query attends to least (Oren et al. 2024)")
                 .param("keep_last", false, "the newest token always stays; the authors' code may drop it")
                 .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only"))
