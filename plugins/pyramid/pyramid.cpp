// PyramidKV: layer budgets shrink linearly from the first layer to the last. Cai et al. 2024. The shares divide the
// budget without its pins, and each layer keeps the pins on top of its share.
#include <kvlab/plugin.hpp>

namespace {

class Pyramid final : public kvlab::Budget {
 public:
  explicit Pyramid(const kvlab::Params& p) : beta_(p.get<int>("beta")), exact_total_(p.get<bool>("exact_total")) {}

  bool uniform_heads() const override { return true; }
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(a.length.extent[0]));
    for (std::size_t row = 0; row < tokens.size(); ++row)
      tokens[row] = layer_tokens(a.layer, a.layers, a.kv->position[row], a.host_total[row],
                                 a.host_pins[row].first + a.host_pins[row].last);
    kvlab::ops::allot_tokens(a, a.kv->upload("layer tokens", tokens.data()), s);
  }

 private:
  // Tokens of one layer. cap: mean per layer, pins included. n: tokens in the cache.
  int layer_tokens(int layer, int layers, int n, int cap, int pinned) const {
    if (n < cap) return n;
    const int base = cap - pinned;
    if (n < 2 * base || layers < 2) return cap;
    int low = base / beta_, high = 2 * base - low;
    if (high >= n - pinned) {
      high = n - pinned;
      low = 2 * base - high;
    }
    const std::int64_t slope = high - low, steps = layers - 1, mirror = steps - layer;
    if (!exact_total_) return high - layer * static_cast<int>(slope / steps) + pinned;
    // A layer and its mirror in the pyramid share 2 * base, so all layers add up to the budget.
    return pinned + static_cast<int>(layer <= mirror ? high - layer * slope / steps : low + mirror * slope / steps);
  }

  int beta_;
  bool exact_total_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<Pyramid>("pyramid",
                                    "budgets shrink from the first layer to the last (PyramidKV, Cai et al. 2024)")
                 .param("beta", 20, 1, 1000, "steepness: the last layer's share is 1 / beta of the mean")
                 .param("exact_total", true,
                        "the layers' budgets add up; the authors' code rounds the step down and keeps more"))
