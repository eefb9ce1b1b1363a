// Prompts under a policy whose heads fetch when a leader drifts, with injected drift: which heads fetch in which steps.
#pragma once
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "support/cell_fixture.hpp"
#include "support/places.hpp"

namespace kvlab::test {

// In every layer KV head 0 is the pivot of the others. Every second step has a check, and the model's own attention
// never counts as drift.
struct Drifting : CellFixture {
  static constexpr int page = 4, samples = 4, steps = 40, checks = steps / 2;

  explicit Drifting(std::shared_ptr<const Model> m)
      : CellFixture(std::move(m),
                    policy_of("{heterocache: {threshold: 0, window: 1, check_every: 2, stagger: false, "
                              "asynchrony: false, budget: {ratio: 0.6}}}",
                              page),
                    {Metric::memory}) {
    // Its hash is recorded; the roles are those below.
    experiment.policies.front().profile = (source_root() / "experiments/quality/heads.h5").string();
    for (unsigned i = 0; i < samples; ++i) add(test_text(120, model->config.vocab, i), {}, steps + 1);
    const int layers = model->config.layers, heads = model->config.kv_heads;
    REQUIRE(heads > 1);
    Profile p;
    for (const char* name : {"role", "pivot_of", "stable"}) p[name].extent = {layers, heads};
    for (int i = 0; i < layers * heads; ++i) {
      const bool pivot = i % heads == 0;
      p["role"].values.push_back(pivot ? 2 : 3);
      p["pivot_of"].values.push_back(pivot ? -1 : 0);
      p["stable"].values.push_back(1);
    }
    roles = std::make_shared<const Profile>(std::move(p));
  }

  // [sample, layer, KV head] the steps after which the head holds other tokens of its prompt. batch: samples at once.
  std::map<std::array<int, 3>, std::vector<int>> fetches(int batch) {
    CellInput in = input();
    in.profile = roles;
    Engine engine(model, cell_policy(in), engine_options(in, batch));
    std::map<std::array<int, 3>, std::vector<int>> all;
    for (int first = 0; first < samples; first += batch) follow(engine, first, batch, all);
    return all;
  }

  std::shared_ptr<const Profile> roles;

 private:
  using Held = std::map<std::array<int, 3>, std::vector<std::int32_t>>;

  Held held(const Engine& engine, const std::vector<std::int32_t>& slots, int first) const {
    Held out;
    for (std::size_t i = 0; i < slots.size(); ++i)
      for (int layer = 0; layer < model->config.layers; ++layer)
        for (int head = 0; head < model->config.kv_heads; ++head) {
          const int sample = first + static_cast<int>(i);
          auto& of = out[{sample, layer, head}] = engine.store().positions(layer, slots[i], head);
          const auto prompt = static_cast<std::int32_t>(items.items[static_cast<std::size_t>(sample)].prompt.size());
          std::erase_if(of, [&](std::int32_t position) { return position >= prompt; });
          std::sort(of.begin(), of.end());
        }
    return out;
  }

  void follow(Engine& engine, int first, int batch, std::map<std::array<int, 3>, std::vector<int>>& all) const {
    const std::int64_t vocab = model->config.vocab;
    std::vector<float> logits(static_cast<std::size_t>(batch * vocab));
    const auto rows = [&](std::int64_t count) { return View<float, 2>::dense(logits.data(), {count, vocab}); };
    std::vector<std::int32_t> slots;
    for (int i = 0; i < batch; ++i) {
      slots.push_back(engine.open(static_cast<std::uint32_t>(first + i)));
      const auto& prompt = items.items[static_cast<std::size_t>(first + i)].prompt;
      REQUIRE(engine.prefill(slots.back(), prompt, true, rows(1)) == Fit::ok);
    }
    Held before = held(engine, slots, first);
    for (int step = 0; step < steps; ++step) {
      std::vector<int> tokens(slots.size());
      std::iota(tokens.begin(), tokens.end(), first + 3 * step);
      REQUIRE(engine.step(slots, tokens, rows(batch)) == Fit::ok);
      Held now = held(engine, slots, first);
      for (const auto& [place, of] : now)
        if (of != before.at(place)) all[place].push_back(step);
      before = std::move(now);
    }
    for (const std::int32_t slot : slots) engine.close(slot);
  }
};

}  // namespace kvlab::test
