// Keyformer: attention accumulates as in H2O, with Gumbel noise on the logits. The temperature grows from step to step,
// because tokens that left took their share of attention with them. Adnan et al., MLSys 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/query_shares.hpp>
#include <kvlab/random.hpp>
#include <kvlab/step_numbers.hpp>

#include <algorithm>

namespace {

class Keyformer final : public kvlab::Scorer, public kvlab::PreparesSteps {
 public:
  explicit Keyformer(const kvlab::Params& p)
      : recent_(p.get<int>("recent")),
        every_(p.get<int>("every")),
        steps_(p.get<int>("steps")),
        tau_init_(p.get<double>("tau_init")),
        tau_end_(p.get<double>("tau_end")),
        seed_(p.get<std::uint64_t>("seed")),
        fresh_(p.get<bool>("fresh_noise")),
        noise_(p.get<bool>("noise")) {
    if (tau_end_ < tau_init_)
      throw kvlab::Error(kvlab::Errc::config, "got tau_end " + std::to_string(tau_end_) +
                                                  ", wanted at least tau_init " + std::to_string(tau_init_) +
                                                  ": the temperature grows");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.token_state("score").scratch_numbers(4).capturable(true);
  }
  kvlab::Pins pins(int tokens) const override {
    return {.last = static_cast<int>(std::int64_t{tokens} * recent_ / 100)};
  }
  const char* column() const override { return "score"; }
  int every() const override { return every_; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::read_state(kv.state("score"), out, s);
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    layers_ = shape.layers, group_ = shape.group();
    of_layer_ = std::int64_t{shape.max_slots} * group_;
    seen_ = {"seen", shape.max_slots, w};
    temperatures_ = {"temperatures", shape.max_slots, w};
    if (noise_) keys_ = {"noise", layers_ * of_layer_, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    seen_.put(c, c.position, c.rows);
    std::vector<float>& temperatures = temperatures_.fresh();
    for (int row = 0; row < c.rows; ++row) temperatures.push_back(temperature(c.step[row] + 1));
    temperatures_.put(c);
    if (!noise_) return;
    std::vector<std::uint64_t>& keys = keys_.fresh();
    keys.resize(static_cast<std::size_t>(layers_ * of_layer_));
    for (int layer = 0; layer < layers_; ++layer) {
      std::uint64_t* to = &keys[static_cast<std::size_t>(layer * of_layer_)];
      for (int row = 0; row < c.rows; ++row) to = noise_keys(c.sequence[row], layer, c.position[row], 1, to);
    }
    keys_.put(c);
  }

  // Adds the noisy attention of the step's queries, or of a prompt's part, to the scores: the mean over each group.
  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    kvlab::View<const float, 4> queries;
    kvlab::QueryShares how;
    if (kv.queries) {
      const kvlab::View<const float, 3> q = kv.queries.f32();
      queries = {q.data, {q.extent[0], q.extent[1], 1, q.extent[2]}, {q.stride[0], q.stride[1], 0, q.stride[2]}};
      how.seen = seen_.data(), how.temperature = temperatures_.data();
      if (noise_) how.noise = keys_.data() + kv.layer * of_layer_;
    } else {
      queries = kv.chunk_queries.f32();
      const int count = static_cast<int>(queries.extent[2]);
      const std::vector<float> temperatures(static_cast<std::size_t>(kv.rows()), temperature(0));
      how.seen = kv.upload("seen", kv.position), how.temperature = kv.upload("temperatures", temperatures.data());
      if (noise_) {
        std::vector<std::uint64_t> keys(static_cast<std::size_t>(std::int64_t{kv.rows()} * group_ * count));
        std::uint64_t* to = keys.data();
        for (int row = 0; row < kv.rows(); ++row)
          to = noise_keys(kv.sequence[row], kv.layer, kv.position[row], count, to);
        how.noise = kvlab::upload(*kv.workspace, "noise", keys.data(), {std::ssize(keys)}).data;
      }
    }
    const kvlab::Scores sum = kv.kv_head_scores("sum");
    kvlab::ops::query_shares(queries, kv.pages, how, sum, s);
    kvlab::ops::blend_state(kv.state("score"), 1, sum, 1 / static_cast<float>(group_), s);
  }

 private:
  // After so many decode steps.
  float temperature(int steps) const {
    const double part = static_cast<double>(std::min(steps, steps_)) / steps_;
    return static_cast<float>(tau_init_ + (tau_end_ - tau_init_) * part);
  }

  // A draw of the noise is what the sequence, the layer, the query's head and position, and the token's position
  // decide: neither places nor slots. Its key has all but the KV head and the token's position. Writes the keys of a
  // sequence's newest queries, and returns the place behind them. Without fresh_ all have the key of the first query.
  std::uint64_t* noise_keys(std::uint32_t number, int layer, int seen, int queries, std::uint64_t* to) const {
    const std::uint64_t sequence = kvlab::Random(seed_, number + std::uint64_t{1}).next();
    for (int g = 0; g < group_; ++g)
      for (int position = seen - queries; position < seen; ++position)
        *to++ =
            kvlab::Random(sequence + static_cast<std::uint64_t>(g),
                          static_cast<std::uint64_t>(fresh_ ? position : 0) << 32 | static_cast<std::uint32_t>(layer))
                .next();
    return to;
  }

  int recent_, every_, steps_;
  double tau_init_, tau_end_;
  std::uint64_t seed_;
  bool fresh_, noise_;
  int layers_ = 0, group_ = 1;
  std::int64_t of_layer_ = 0;  // keys of a layer that there is room for
  kvlab::StepNumbers<std::int32_t> seen_;
  kvlab::StepNumbers<float> temperatures_;  // [row]
  kvlab::StepNumbers<std::uint64_t> keys_;  // [layer][row, query head of the group]
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
        .param("fresh_noise", true, "each query draws noise anew; off = a token has the same noise for all queries")
        .component("noise", "Gumbel noise on each logit; off = attention itself, as H2O adds it up"))
