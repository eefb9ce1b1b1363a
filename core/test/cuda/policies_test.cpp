// Every built policy, unchanged, on CUDA: against itself on the CPU.
#include <catch2/catch.hpp>

#include "support/contract.hpp"
#include "support/device_cache.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

const int prompt_tokens = quick() ? 60 : 90, answer_tokens = quick() ? 3 : 5;
constexpr int limit = 32;

std::shared_ptr<const Model> model_on(Device device, const std::string& name) {
  static std::map<std::pair<Device, std::string>, std::shared_ptr<const Model>> known;
  auto& m = known[{device, name}];
  if (!m) m = load_model(*open_checkpoint(golden("tiny/" + name)), DType::bf16, name, device);
  return m;
}

struct Run {
  Logits logits;
  Kept kept;
  std::int64_t fired = 0;
  double held = 0;
};
Run run(Device device, const PolicySpec& spec, const std::string& name, int chunk = 0) {
  const auto model = model_on(device, name);
  EngineOptions o;
  o.device = device;
  o.max_tokens = 128;
  o.prefill_chunk = chunk;
  Play play(model, spec, o);
  Run r;
  r.logits =
      play.run(test_text(prompt_tokens, model->config.vocab), test_text(answer_tokens, model->config.vocab, 101));
  r.kept = play.kept;
  r.fired = play.engine->fired();
  r.held = static_cast<double>(play.engine->ledger().total(Tier::device));
  return r;
}

// Share of the first's kept tokens that the second keeps too.
double overlap(const Kept& a, const Kept& b) {
  std::size_t both = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::vector<std::int32_t> common;
    std::set_intersection(a[i].begin(), a[i].end(), b[i].begin(), b[i].end(), std::back_inserter(common));
    both += common.size();
  }
  return static_cast<double>(both) / static_cast<double>(std::max<std::size_t>(1, count_of(a)));
}

// The quick set has one of each role's compositions.
bool left_out(const Subject& s) {
  return quick() && s.composed() && s.label != "snapkv+adakv" && s.label != "full+int8" && s.label != "h2o+int8";
}

}  // namespace

TEST_CASE("cuda policies: without a limit they give the CPU's logits and keep everything") {
  for (const Subject& s : subjects().list()) {
    if (left_out(s)) continue;
    CAPTURE(s.label);
    const PolicySpec spec = s.spec;
    const Run cpu = run(Device::cpu, spec, "llama-gqa3"), cuda = run(Device::cuda, spec, "llama-gqa3");
    CHECK(finite(cuda.logits));
    CHECK(worst(cuda.logits, cpu.logits) < 0.05);
    CHECK(cuda.kept == cpu.kept);
    CHECK(cuda.fired == 0);
  }
}

TEST_CASE("cuda policies: with a budget they keep what they keep on the CPU") {
  for (const std::string& name : quick() ? std::vector<std::string>{"llama-gqa3"} : group_models())
    for (const Subject& s : subjects().list()) {
      if (left_out(s) || (!s.spec.scorer && !s.spec.selector && !s.spec.policy)) continue;
      CAPTURE(name, s.label);
      const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, limit);
      const Run cpu = run(Device::cpu, spec, name), cuda = run(Device::cuda, spec, name);
      CHECK(finite(cuda.logits));
      CHECK(cuda.fired > 0);
      REQUIRE(cuda.kept.size() == cpu.kept.size());
      CHECK(count_of(cuda.kept) == Approx(count_of(cpu.kept)).epsilon(0.02));
      CHECK(overlap(cuda.kept, cpu.kept) > 0.9);
      CHECK(cuda.held == Approx(cpu.held).epsilon(0.1));
      if (cuda.kept == cpu.kept) CHECK(worst({cuda.logits[0]}, {cpu.logits[0]}) < 0.05);
      if (!quick()) CHECK(run(Device::cuda, spec, name).logits == cuda.logits);
    }
}

TEST_CASE("cuda policies: pages on the host and recalled equal resident ones, bit for bit") {
  for (const Subject& s : subjects().list()) {
    if (s.composed()) continue;
    CAPTURE(s.label);
    const PolicySpec resident = with_budget(s.spec, BudgetAmount::tokens, limit);
    PolicySpec below = resident;
    below.placement.tier = Tier::host;
    below.placement.resident = 16;
    CHECK(run(Device::cuda, below, "llama-gqa3").logits == run(Device::cuda, resident, "llama-gqa3").logits);
  }
}

TEST_CASE("cuda policies: keys by their place in the cache, whole prompts and chunks") {
  for (const Subject& s : subjects().list()) {
    const auto relative = subjects().with(s.spec, "rope", "cache_relative");
    if (s.composed() || !relative) continue;
    const auto original = subjects().with(s.spec, "rope", "original");
    for (const char* name : {"llama-gqa3", "qwen3"}) {
      CAPTURE(s.label, name);
      const PolicySpec spec = with_budget(*relative, BudgetAmount::tokens, limit);
      const Run cpu = run(Device::cpu, spec, name), cuda = run(Device::cuda, spec, name);
      CHECK(cuda.kept == cpu.kept);
      CHECK(worst(cuda.logits, cpu.logits) < 0.05);
      CHECK(worst(run(Device::cuda, spec, name, 13).logits, run(Device::cpu, spec, name, 13).logits) < 0.05);
      const Run other = run(Device::cuda, with_budget(*original, BudgetAmount::tokens, limit), name);
      CHECK(cuda.logits.back() != other.logits.back());  // places are not text positions
    }
  }
}
