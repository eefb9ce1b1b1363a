// Budgets of heads from a profile: what is left beyond a floor goes to each KV head by a weight that was measured
// before, over all layers together. HeadKV (Fu et al., ICLR 2025) divides so.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

using Counts = std::vector<std::int32_t>;

// Divides `each` tokens per head: a floor, and the rest by weight. No head gets more than `most`, and the others take
// what it has no room for. Rounds down; the largest remainders get the tokens that this loses, the first of equal ones.
Counts divided(const std::vector<float>& weights, double floor, int each, int most) {
  const std::size_t heads = weights.size();
  each = std::min(each, most);
  floor *= each;
  std::vector<double> exact(heads, most);
  std::vector<std::size_t> open(heads);
  std::iota(open.begin(), open.end(), std::size_t{0});
  double rest = (each - floor) * static_cast<double>(heads);
  for (std::size_t before = 0; before != open.size();) {
    before = open.size();
    double sum = 0;
    for (const std::size_t h : open) sum += weights[h];
    for (const std::size_t h : open)
      exact[h] = floor + rest * (sum > 0 ? weights[h] / sum : 1 / static_cast<double>(before));
    std::erase_if(open, [&](std::size_t h) {
      if (exact[h] < most) return false;
      exact[h] = most;
      return true;
    });
    rest = (each - floor) * static_cast<double>(heads) - (most - floor) * static_cast<double>(heads - open.size());
  }
  Counts counts;
  for (const double x : exact) counts.push_back(static_cast<std::int32_t>(std::trunc(x)));
  const std::int64_t missing = std::int64_t{each} * static_cast<std::int64_t>(heads) -
                               std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  std::stable_sort(open.begin(), open.end(),
                   [&](auto a, auto b) { return exact[a] - std::trunc(exact[a]) > exact[b] - std::trunc(exact[b]); });
  for (std::size_t i = 0; i < open.size() && static_cast<std::int64_t>(i) < missing; ++i) ++counts[open[i]];
  return counts;
}

class HeadProfile final : public kvlab::Budget {
 public:
  explicit HeadProfile(const kvlab::Params& p)
      : array_(p.get<std::string>("weights")), floor_(p.get<double>("floor")) {}

  bool reads_profile() const override { return true; }

  void load_profile(const kvlab::Profile& profile) override {
    const auto found = profile.find(array_);
    if (found == profile.end()) {
      std::string names;
      for (const auto& [name, array] : profile) names += (names.empty() ? "" : ", ") + name;
      throw kvlab::Error(kvlab::Errc::config, "got a profile without the array '" + array_ +
                                                  "', wanted weights: one of " + (names.empty() ? "none" : names));
    }
    given_ = found->second;
  }

  void attach(const kvlab::Shape& shape) override {
    if (given_.extent != std::vector<std::int64_t>{shape.layers, shape.kv_heads}) {
      std::string extent;
      for (const std::int64_t e : given_.extent) extent += (extent.empty() ? "" : " x ") + std::to_string(e);
      throw kvlab::Error(kvlab::Errc::config, "got the array '" + array_ + "' of " + extent +
                                                  " numbers, wanted one of each of " + std::to_string(shape.layers) +
                                                  " layers' " + std::to_string(shape.kv_heads) + " KV heads");
    }
    for (std::size_t i = 0; i < given_.values.size(); ++i)
      if (const float w = given_.values[i]; !(w >= 0 && std::isfinite(w)))
        throw kvlab::Error(kvlab::Errc::config, "got the weight " + std::to_string(w) + " of layer " +
                                                    std::to_string(i / static_cast<std::size_t>(shape.kv_heads)) +
                                                    ", KV head " +
                                                    std::to_string(i % static_cast<std::size_t>(shape.kv_heads)) +
                                                    " in the array '" + array_ + "', wanted numbers of 0 or more");
  }

  // Each head keeps the pins on top of its share.
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    const auto rows = static_cast<std::size_t>(a.keep.extent[0]), heads = static_cast<std::size_t>(a.keep.extent[1]);
    rows_.resize(std::max(rows_.size(), rows));
    Counts tokens(heads * rows);  // [kv_head, row]
    for (std::size_t r = 0; r < rows; ++r) {
      const int pinned = a.host_pins[r].first + a.host_pins[r].last;
      const int each = std::max(0, a.host_total[r] - pinned), most = std::max(0, a.kv->position[r] - pinned);
      const Counts& of_all = divided_of(rows_[r], each, most, a.layers * static_cast<int>(heads));
      for (std::size_t h = 0; h < heads; ++h)
        tokens[h * rows + r] = pinned + of_all[static_cast<std::size_t>(a.layer) * heads + h];
    }
    const auto of_heads =
        kvlab::upload(*a.kv->workspace, "tokens of heads", tokens.data(), {a.keep.extent[1], a.keep.extent[0]});
    kvlab::Allotment one = a;
    one.keep.extent[1] = one.length.extent[1] = 1;
    for (std::int64_t h = 0; h < a.keep.extent[1]; ++h) {
      one.keep.data = a.keep.data + h * a.keep.stride[1];
      one.length.data = a.length.data + h * a.length.stride[1];
      kvlab::ops::allot_tokens(one, of_heads[h].data, s);
    }
  }

 private:
  struct Row {
    int each = -1, most = -1, heads = 0;
    Counts tokens;
  };

  // Layers of a callback ask the same again.
  const Counts& divided_of(Row& row, int each, int most, int heads) const {
    if (row.each != each || row.most != most || row.heads != heads) {
      const std::vector<float> weights(given_.values.end() - heads, given_.values.end());  // without the dense layers
      row = {each, most, heads, divided(weights, floor_, each, most)};
    }
    return row.tokens;
  }

  std::string array_;
  double floor_;
  kvlab::ProfileArray given_;  // [layer, kv_head]
  std::vector<Row> rows_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<HeadProfile>("head_profile",
                                        "KV heads get tokens by weights of a profile (HeadKV, Fu et al. 2025)")
                 .param("weights", std::string("gate"), "the profile's array of a number for each layer and KV head")
                 .param("floor", 0.2, 0, 1, "share of the mean budget that every head keeps; 1 = uniform"))
