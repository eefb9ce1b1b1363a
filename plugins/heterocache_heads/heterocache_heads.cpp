// The offline calibration of HeteroCache: a role for each KV head, and a share of the budget for each compressed one.
// Overlaps follow its section 3, roles section 4.1, shares section 4.2.
#include <kvlab/plugin.hpp>

#include "taxonomy.hpp"

namespace {

using heterocache::Tokens;

// How the decode steps of an overlap become one number; `one` takes the step `step`, and 0 is the prompt's end.
enum class Over : std::uint8_t { median, mean, one };

}  // namespace

template <>
struct kvlab::Choices<Over> {
  static constexpr std::pair<Over, const char*> all[] = {
      {Over::median, "median"}, {Over::mean, "mean"}, {Over::one, "one"}};
};

namespace {

// A prompt in one KV head: its tokens, and K_prefill.
struct Prompt {
  std::size_t tokens = 0;
  Tokens best;
};

class HeterocacheHeads final : public kvlab::Profiler {
 public:
  explicit HeterocacheHeads(const kvlab::Params& p)
      : k_(p.get<std::size_t>("k")),
        kernel_(p.get<std::size_t>("kernel")),
        steps_(p.get<int>("steps")),
        step_(p.get<int>("step")),
        group_(p.get<kvlab::GroupRule>("group")),
        stability_(p.get<Over>("stability")),
        similarity_(p.get<Over>("similarity")),
        graph_(p.get<Over>("graph")),
        unique_first_(p.get<bool>("unique_first")),
        tau_stable_(p.get<float>("tau_stable")),
        tau_sim_(p.get<float>("tau_sim")),
        ratio_(p.get<double>("ratio")),
        least_stability_(p.get<double>("least_stability")) {
    if (kernel_ % 2 == 0)
      throw kvlab::Error(kvlab::Errc::config, "got a kernel of " + std::to_string(kernel_) + ", wanted an odd one");
    if (step_ > steps_)
      throw kvlab::Error(kvlab::Errc::config, "got step " + std::to_string(step_) + ", wanted at most " +
                                                  std::to_string(steps_) + ", the number of steps");
  }

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(1).mass(kvlab::Mass::decode); }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    prompts_.resize(shape.max_slots, shape.layers, shape.kv_heads);
    stable_.resize({shape.layers, shape.kv_heads, steps_ + 1});
    similar_.resize({shape.layers, shape.kv_heads, steps_ + 1});
    pairs_.resize({shape.layers, shape.kv_heads, shape.kv_heads, steps_ + 1});
  }

  void prefill(const kvlab::LayerPrefill& layer, kvlab::Stream s) override {
    if (!layer.last[0]) return;
    const kvlab::Scores mass = layer.query_head_scores("attention of the last query");
    kvlab::ops::window_votes(layer.window_queries, layer.upload("seen", layer.position), layer.pages, mass, s);
    for (int head = 0; head < layer.kv_heads(); ++head)
      prompts_.at(layer.slots[0], layer.layer, head).tokens = static_cast<std::size_t>(layer.pages.tokens(0, head));
    add(layer, mass, nullptr, s);
  }
  void observe(const kvlab::LayerStep& step, kvlab::Stream s) override { add(step, step.mass, step.step, s); }
  void release(int slot) override { prompts_.clear(slot); }

  void finish(kvlab::Profile& out) override {
    const auto stable = over(stable_, stability_), similar = over(similar_, similarity_), pairs = over(pairs_, graph_);
    const heterocache::Roles roles = heterocache::roles_of(static_cast<std::size_t>(shape_.kv_heads), stable, similar,
                                                           pairs, tau_stable_, tau_sim_, unique_first_);
    const std::vector<float> share = heterocache::shares(roles.role, stable, least_stability_, ratio_);
    std::vector<float> satellite;
    for (const float role : roles.role) satellite.push_back(std::isnan(role) ? role : role == heterocache::satellite);
    out["stable"] = of_heads(stable, "S_stable: overlap with the prompt's top tokens");
    out["similar"] = of_heads(similar, "S_sim: overlap with the most similar head of the layer");
    out["role"] = of_heads(roles.role, "role of a KV head, one of anchor, volatile, pivot, satellite");
    out["pivot_of"] = of_heads(roles.pivot_of, "KV head that is the satellite's pivot, -1 for the other roles");
    out["satellite"] = of_heads(satellite, "1 = a satellite");
    out["share"] = of_heads(
        share, "share of the prompt's tokens on the device; none where ratio pays no more than the full heads");
    const double row = 2. * shape_.head_dim * static_cast<double>(kvlab::size_of(shape_.dtype));
    const auto bytes = [&](const char* name, double of, const char* unit) {
      out[name] = {{1}, {static_cast<float>(of * row)}, unit};
    };
    bytes("full_bytes", static_cast<double>(stable.size()), "bytes of a prompt's token in the full cache");
    bytes("device_bytes", std::accumulate(share.begin(), share.end(), 0.),
          "bytes of a prompt's token on the device, the mean");
    bytes("host_bytes", std::accumulate(satellite.begin(), satellite.end(), 0.),
          "bytes of a prompt's token on the host: the satellites'");
  }

 private:
  // Takes the attention of a prompt's last query, or of a decode step. mass: [row, query head, token].
  void add(const kvlab::LayerKv& kv, kvlab::View<const float, 3> mass, const std::int32_t* step, kvlab::Stream s) {
    const kvlab::Scores row_of = kv.kv_head_scores("attention of a group");
    kvlab::ops::group_reduce(kv.pages, mass, group_, row_of, s);
    for (int row = 0; row < kv.rows(); ++row) {
      const int t = step ? step[row] + 1 : 0;
      if (t > steps_) continue;
      std::vector<Tokens> best;
      std::vector<double> nearest(static_cast<std::size_t>(kv.kv_heads()));
      for (int head = 0; head < kv.kv_heads(); ++head) {
        Prompt& prompt = prompts_.at(kv.slots[row], kv.layer, head);
        best.push_back(heterocache::top(heterocache::pooled({&row_of(row, head, 0), prompt.tokens}, kernel_), k_));
        if (t == 0) prompt.best = best.back();
        stable_.add({kv.layer, head, t}, heterocache::overlap(best.back(), prompt.best));
        pairs_.add({kv.layer, head, head, t}, 1);
        for (int other = 0; other < head; ++other) {
          const auto a = static_cast<std::size_t>(head), b = static_cast<std::size_t>(other);
          const double alike = heterocache::overlap(best[a], best[b]);
          pairs_.add({kv.layer, head, other, t}, alike);
          pairs_.add({kv.layer, other, head, t}, alike);
          nearest[a] = std::max(nearest[a], alike), nearest[b] = std::max(nearest[b], alike);
        }
      }
      for (int head = 0; head < kv.kv_heads(); ++head)
        similar_.add({kv.layer, head, t}, nearest[static_cast<std::size_t>(head)]);
    }
  }

  // The steps of each head, or of each pair of heads, as one number.
  template <int Rank>
  std::vector<float> over(const kvlab::Means<Rank>& means, Over rule) const {
    const std::vector<float> steps = means.array({}).values;
    std::vector<float> out;
    for (auto at = steps.begin(); at != steps.end(); at += steps_ + 1)
      out.push_back(rule == Over::one ? at[step_] : heterocache::joined({at + 1, at + steps_ + 1}, rule == Over::mean));
    return out;
  }

  kvlab::ProfileArray of_heads(const std::vector<float>& values, const char* unit) const {
    return {{shape_.layers, shape_.kv_heads}, values, unit};
  }

  std::size_t k_, kernel_;
  int steps_, step_;
  kvlab::GroupRule group_;
  Over stability_, similarity_, graph_;
  bool unique_first_;
  float tau_stable_, tau_sim_;
  double ratio_, least_stability_;
  kvlab::Shape shape_;
  kvlab::PerSequence<Prompt> prompts_;
  kvlab::Means<3> stable_, similar_;  // [layer, KV head, step], means over prompts; step 0 is the prompt's last query
  kvlab::Means<4> pairs_;             // [layer, KV head, KV head, step]
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<HeterocacheHeads>("heterocache_heads",
                                               "the roles of HeteroCache's KV heads, and their shares of a budget")
                 .param("k", 1024, 1, kvlab::any, "tokens of a top set; all of a shorter prompt")
                 .param("kernel", 5, 1, 1023, "tokens of which attention takes the average; odd, as in the policy")
                 .param("steps", 100, 1, 65536, "decode steps of each prompt that count")
                 .param("tau_stable", 0.5, 1e-6, 1, "least stability of an anchor")
                 .param("tau_sim", 0.5, 1e-6, 1, "least overlap of similar heads")
                 .param("stability", Over::median, "a head's overlaps with its prompt become one number by this rule")
                 .param("similarity", Over::median, "the same for a head's greatest overlap with another")
                 .param("graph", Over::mean,
                        "the same for the overlap of two heads, which are neighbours from tau_sim on")
                 .param("step", 0, 0, 65536, "the decode step of rule `one`; 0 = the prompt's last query")
                 .param("unique_first", true,
                        "anchors and volatile heads are those below tau_sim; off = those that no cluster took")
                 .param("group", kvlab::GroupRule::mean, "how the attention of a group's query heads becomes one")
                 .param("ratio", 0.5, 1e-6, 1, "share of the prompt's K and V on the device, of all heads")
                 .param("least_stability", 0.05, 1e-6, 1, "lower stabilities count as this in the division"))
