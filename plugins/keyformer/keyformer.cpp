// Keyformer: attention accumulates as in H2O, with Gumbel noise on the logits. The temperature grows from step to step,
// because tokens that left took their share of attention with them. Adnan et al., MLSys 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/query_shares.hpp>
#include <kvlab/random.hpp>

#include <algorithm>

namespace {

class Keyformer final : public kvlab::Scorer {
 public:
  explicit Keyformer(const kvlab::Params& p)
      : recent_(p.get<int>("recent")),
        every_(p.get<int>("every")),
        steps_(p.get<int>("steps")),
        tau_init_(p.get<double>("tau_init")),
        tau_end_(p.get<double>("tau_end")),
        seed_(p.get<std::uint64_t>("seed")),
        noise_(p.get<bool>("noise")) {
    if (tau_end_ < tau_init_)
      throw kvlab::Error(kvlab::Errc::config, "got tau_end " + std::to_string(tau_end_) +
                                                  ", wanted at least tau_init " + std::to_string(tau_init_) +
                                                  ": the temperature grows");
  }

  kvlab::Needs needs() const override { return kvlab::Needs{}.token_state("score").scratch_numbers(4); }
  kvlab::Pins pins(int tokens) const override {
    return {.last = static_cast<int>(std::int64_t{tokens} * recent_ / 100)};
  }
  const char* column() const override { return "score"; }
  int every() const override { return every_; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::read_state(kv.state("score"), out, s);
  }

  // Adds the noisy attention of the step's queries, or of a prompt's part, to the scores: the mean over each group.
  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    kvlab::View<const float, 4> queries;
    if (kv.queries) {
      const kvlab::View<const float, 3> q = kv.queries.f32();
      queries = {q.data, {q.extent[0], q.extent[1], 1, q.extent[2]}, {q.stride[0], q.stride[1], 0, q.stride[2]}};
    } else {
      queries = kv.chunk_queries.f32();
    }
    std::vector<float> temperatures;
    for (int row = 0; row < kv.rows(); ++row) temperatures.push_back(temperature(kv, row));
    kvlab::QueryShares how;
    how.seen = kv.upload("seen", kv.position);
    how.temperature = kvlab::upload(*kv.workspace, "temperatures", temperatures.data(), {kv.rows()}).data;
    if (noise_) {
      const std::vector<std::uint64_t> keys = noise_keys(kv, static_cast<int>(queries.extent[2]));
      how.noise = kvlab::upload(*kv.workspace, "noise", keys.data(), {static_cast<std::int64_t>(keys.size())}).data;
    }
    const kvlab::Scores sum = kv.kv_head_scores("sum");
    kvlab::ops::query_shares(queries, kv.pages, how, sum, s);
    kvlab::ops::blend_state(kv.state("score"), 1, sum, 1 / static_cast<float>(kv.shape->group()), s);
  }

 private:
  float temperature(const kvlab::LayerKv& kv, int row) const {
    const double part = kv.queries ? static_cast<double>(std::min(kv.step[row] + 1, steps_)) / steps_ : 0;
    return static_cast<float>(tau_init_ + (tau_end_ - tau_init_) * part);
  }

  // A draw of the noise is what the sequence, the layer, the query's head and position, and the token's position
  // decide: neither places nor slots. Its key has all but the KV head and the token's position.
  std::vector<std::uint64_t> noise_keys(const kvlab::LayerKv& kv, int queries) const {
    std::vector<std::uint64_t> keys;
    for (int row = 0; row < kv.rows(); ++row) {
      const std::uint64_t sequence = kvlab::Random(seed_, kv.sequence[row] + std::uint64_t{1}).next();
      for (int g = 0; g < kv.shape->group(); ++g)
        for (int position = kv.position[row] - queries; position < kv.position[row]; ++position)
          keys.push_back(
              kvlab::Random(sequence + static_cast<std::uint64_t>(g),
                            static_cast<std::uint64_t>(position) << 32 | static_cast<std::uint32_t>(kv.layer))
                  .next());
    }
    return keys;
  }

  int recent_, every_, steps_;
  double tau_init_, tau_end_;
  std::uint64_t seed_;
  bool noise_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::scorer<Keyformer>("keyformer",
                             "keeps what attention with noise and a growing temperature adds up to (Adnan et al. 2024)")
        .param("recent", 30, 0, 100, "newest tokens that are always kept, in percent of the budget")
        .param("tau_init", 1., 1e-3, 1e3, "temperature of the prompt's attention, as scores see it")
        .param("tau_end", 2., 1e-3, 1e3,
               "temperature after `steps` decode steps, and from then on; as tau_init = it stays")
        .param("steps", 100, 1, kvlab::any,
               "decode steps in which the temperature grows, so the answer's planned length")
        .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
        .param("seed", std::uint64_t{1}, 0, kvlab::any, "of the noise")
        .component("noise", "Gumbel noise on each logit; off = attention itself, as H2O adds it up"))
