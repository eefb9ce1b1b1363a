#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 200, steps = 12, page = 16, pages_read = 4;

// [page] of a KV head: the attention of the step's queries to the page's tokens, mean over the group.
std::vector<double> page_mass(const OnText& run, int layer, std::size_t position, int head) {
  const OnText::Layer& l = run.layer(layer);
  std::vector<double> pages((position + page) / page);
  for (int g = 0; g < run.group(); ++g) {
    const auto& q = l.queries.at[position][static_cast<std::size_t>(head * run.group() + g)];
    std::vector<double> logits;
    for (std::size_t t = 0; t <= position; ++t)
      logits.push_back(dot(q, l.keys.at[t][static_cast<std::size_t>(head)]) / std::sqrt(run.config().head_dim));
    const std::vector<double> mass = softmax(logits);
    for (std::size_t t = 0; t < mass.size(); ++t) pages[t / page] += mass[t] / run.group();
  }
  return pages;
}

double sum_of(const std::vector<double>& mass, const std::vector<int>& pages) {
  double sum = 0;
  for (const int p : pages) sum += mass[static_cast<std::size_t>(p)];
  return sum;
}

void answer(OnText& run) {
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
}

}  // namespace

TEST_CASE("oracle reads on real text the pages that hold most of a plain attention") {
  OnText run(Role::selector, "oracle", {{"dense_layers", std::int64_t{0}}}, pages_read * page, prompt + steps, page);
  answer(run);
  int compared = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int step = 0; step < steps; ++step)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(layer, step, head);
        const std::vector<double> mass = page_mass(run, layer, static_cast<std::size_t>(prompt + step), head);
        std::vector<double> sorted = mass;
        std::sort(sorted.rbegin(), sorted.rend());
        // Where two pages are as good, rounding decides.
        if (sorted[pages_read - 1] - sorted[pages_read] < 1e-5) continue;
        ++compared;
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        CHECK(read == best(mass, positions_to(static_cast<int>(mass.size())), pages_read));
      }
  CHECK(compared > run.config().layers * steps * run.config().kv_heads / 2);
}

TEST_CASE("oracle: no selector keeps more mass of the same pages") {
  for (const char* name : {"quest", "oracle"}) {
    OnText run(Role::selector, name, {}, pages_read * page, prompt + steps, page);
    answer(run);
    double mine = 0, most = 0;
    for (int layer = 2; layer < run.config().layers; ++layer)  // the first two are dense
      for (int step = 0; step < steps; ++step)
        for (int head = 0; head < run.config().kv_heads; ++head) {
          const std::vector<double> mass = page_mass(run, layer, static_cast<std::size_t>(prompt + step), head);
          const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
          REQUIRE(read.size() == pages_read);
          mine += sum_of(mass, read);
          most += sum_of(mass, best(mass, positions_to(static_cast<int>(mass.size())), pages_read));
        }
    CAPTURE(name, mine, most);
    if (name == std::string("oracle"))
      CHECK(mine == Approx(most).epsilon(1e-5));
    else
      CHECK(mine < most - 1e-3);
  }
}

TEST_CASE("oracle: placement on the host is refused") {
  Registry registry;
  PolicySpec spec;
  spec.name = "oracle";
  spec.selector = PluginUse{Role::selector, "oracle", resolve(registry.require(Role::selector, "oracle"), {})};
  const RegistryCatalog catalog(registry);
  CHECK_NOTHROW(build_policy(spec, catalog));
  spec.placement.tier = Tier::host;
  CHECK_THROWS_WITH(build_policy(spec, catalog), Catch::Matchers::Contains("wanted pages on the device"));
}
