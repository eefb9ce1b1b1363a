// The oracle of eviction, as Belady's rule for caches: what stays is what the rest of the answer will attend to most.
// Core first runs the full cache on the same prompt and notes the attention of each decode step. This scorer ranks
// tokens by the sum of those steps that are still to come, for each KV head.
//
// What it bounds. An eviction at the prompt's end alone (`every: 0`) keeps more of the recorded mass than any other set
// of as many tokens in each KV head. Evictions in decode steps are greedy: the token leaves to which the steps to come
// give least. Another order may keep a little more, so this is a reference and no strict bound. Mass is no score: a
// method may answer better, or lie nearer in KL, with less mass. So may a split that gives heads other numbers. Later
// layers of a compressed cache also ask other queries than those that were recorded.
//
// The recorded future is that of the full cache's answer. Once this sequence writes other tokens, it keeps what the
// other text would have needed. Tokens to which nothing more is given leave oldest first. Forced texts and the second
// pass of fidelity have the recorded text.
#include <kvlab/plugin.hpp>

namespace {

class OracleEvict final : public kvlab::Scorer {
 public:
  explicit OracleEvict(const kvlab::Params& p)
      : pins_{.first = p.get<int>("sinks"), .last = p.get<int>("recent")}, every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.future_mass(true); }
  kvlab::Pins pins(int tokens) const override {
    const int last = std::min(pins_.last, std::max(0, tokens - pins_.first));
    return {.first = pins_.first, .last = last};
  }
  int every() const override { return every_; }

  // Age decides between tokens without a future. It is too small to decide between others.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::recency(kv.pages, out, s);
    kvlab::ops::scale(out, 1e-15f, s);
    kvlab::ops::add(out, kv.future_mass(), 1.f, s);
  }

 private:
  kvlab::Pins pins_;
  int every_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<OracleEvict>("oracle_evict",
                                        "keeps what the full cache's answer will attend to: a reference, never timed")
                 .param("sinks", 0, 0, 1024, "first tokens that are always kept, part of the budget")
                 .param("recent", 0, 0, kvlab::any,
                        "newest tokens that stay, as many as the budget holds beside the sinks")
                 .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only"))
