// PyramidKV: layer budgets shrink linearly from the first layer to the last. Cai et al. 2024. The shares divide the
// budget without its pins, and each layer keeps the pins on top of its share. Or they divide all of it.
#include <kvlab/plugin.hpp>
#include <kvlab/steady_budget.hpp>

#include <cmath>

namespace {

class Pyramid final : public kvlab::CountedBudget {
 public:
  explicit Pyramid(const kvlab::Params& p)
      : beta_(p.get<int>("beta")),
        exact_total_(p.get<bool>("exact_total")),
        window_inside_(p.get<bool>("window_inside")) {}

  int tokens(const Counters& c) const override {
    const int n = c.position;  // tokens in the cache
    if (n < c.total) return n;
    if (window_inside_) return c.layers < 2 ? c.total : with_window(c);
    const int base = c.total - c.pinned;
    if (n < 2 * base || c.layers < 2) return c.total;
    int low = base / beta_, high = 2 * base - low;
    if (high >= n - c.pinned) {
      high = n - c.pinned;
      low = 2 * base - high;
    }
    const std::int64_t slope = high - low, steps = c.layers - 1, mirror = steps - c.layer;
    if (!exact_total_) return high - c.layer * static_cast<int>(slope / steps) + c.pinned;
    // A layer and its mirror in the pyramid share 2 * base, so all layers add up to the budget.
    return c.pinned +
           static_cast<int>(c.layer <= mirror ? high - c.layer * slope / steps : low + mirror * slope / steps);
  }

 private:
  // As kvpress divides: shares are fractions that hold the pins. A last layer that could not hold them divides nothing.
  int with_window(const Counters& c) const {
    const double n = c.position, room = n - c.pinned;
    double low = static_cast<double>(c.total) / beta_, high = 2. * c.total - low;
    if (high >= room) high = room, low = 2. * c.total - high;
    if (!(n >= high && high >= low && low >= c.pinned)) return c.total;
    return static_cast<int>(std::nearbyint(high - c.layer * ((high - low) / (c.layers - 1))));
  }

  int beta_;
  bool exact_total_, window_inside_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::budget<Pyramid>("pyramid", "budgets shrink from the first layer to the last (PyramidKV, Cai et al. 2024)")
        .param("beta", 20, 1, 1000, "steepness: the last layer's share is 1 / beta of the mean")
        .param("exact_total", true, "the layers' budgets add up; the authors' code rounds the step down and keeps more")
        .param("window_inside", false,
               "a layer's share holds the tokens that are always kept, and is rounded to the nearest, as in "
               "kvpress; where the last layer could not hold them all layers keep the same. off = they come on "
               "top, as in the authors' code"))
