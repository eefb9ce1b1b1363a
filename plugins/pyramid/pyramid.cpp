// PyramidKV: layer budgets shrink linearly from the first layer to the last. Cai et al. 2024. Divisions round down as
// in the authors' code, and pinned tokens are added to each layer's share.
#include <kvlab/plugin.hpp>

namespace {

// Tokens of one layer. cap: mean per layer, pins included. n: tokens in the cache.
int layer_tokens(int layer, int layers, int n, int cap, int pinned, int beta) {
  if (n < cap) return n;
  const int base = cap - pinned;
  if (n < 2 * base || layers < 2) return cap;
  int low = base / beta, high = 2 * base - low;
  if (high >= n - pinned) {
    high = n - pinned;
    low = 2 * base - high;
  }
  return high - layer * ((high - low) / (layers - 1)) + pinned;
}

class Pyramid final : public kvlab::Budget {
 public:
  explicit Pyramid(const kvlab::Params& p) : beta_(p.get<int>("beta")) {}

  bool uniform_heads() const override { return true; }
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(a.length.extent[0]));
    for (std::size_t row = 0; row < tokens.size(); ++row)
      tokens[row] = layer_tokens(a.layer, a.layers, a.kv->position[row], a.host_total[row],
                                 a.host_pins[row].first + a.host_pins[row].last, beta_);
    kvlab::ops::allot_tokens(a, a.kv->upload("layer tokens", tokens.data()), s);
  }

 private:
  int beta_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<Pyramid>("pyramid",
                                    "budgets shrink from the first layer to the last (PyramidKV, Cai et al. 2024)")
                 .param("beta", 20, 1, 1000, "steepness: the last layer's share is 1 / beta of the mean"))
