// Every built policy, unchanged, on CUDA: against itself on the CPU.
#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <tuple>

#include "cases/place.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

namespace {

const int prompt_tokens = quick() ? 60 : 90, answer_tokens = quick() ? 3 : 5;
// More than half of the prompt: heterocache's pivots keep all tokens of half of the heads in the subjects' profile.
const int limit = quick() ? 32 : 48;

std::shared_ptr<const Model> model_on(Device device, const std::string& name) {
  static std::map<std::pair<Device, std::string>, std::shared_ptr<const Model>> known;
  auto& m = known[{device, name}];
  if (!m) m = load_model(*open_checkpoint(golden("tiny/" + name)), DType::bf16, name, device);
  return m;
}

struct Run {
  Logits logits;
  Kept kept, left;  // after the prompt, at the end
  std::int64_t fired = 0;
  std::array<std::int64_t, 2> moved{};  // to the device, to the host
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
  r.left = kept_of(play.engine->store(), play.slot);
  r.fired = play.engine->fired();
  const Ledger& ledger = play.engine->ledger();
  r.moved = {ledger.moved_total(Tier::device), ledger.moved_total(Tier::host)};
  r.held = static_cast<double>(play.engine->ledger().total(Tier::device));
  return r;
}

// run() of a subject under the budget that most cases here give it, once for all of them.
PolicySpec limited(const Subject& s) { return with_budget(s.spec, BudgetAmount::tokens, limit); }
const Run& limited_run(Device device, const Subject& s, const std::string& name) {
  static std::map<std::tuple<Device, std::string, std::string>, Run> known;
  const std::tuple key{device, s.label, name};
  const auto at = known.find(key);
  return at != known.end() ? at->second : known.emplace(key, run(device, limited(s), name)).first->second;
}

// The quick set has one composition of each role.
bool left_out(const Subject& s) {
  return quick() && s.composed() && s.label != "snapkv+adakv" && s.label != "full+int8" && s.label != "full+k8v4" &&
         s.label != "h2o+int8" && s.label != "quest+twilight" && s.label != "snapkv+criticalkv";
}

// Numbers that bf16 rounds otherwise make these read other tokens. They choose a share of the weights, clusters above a
// threshold, tokens that are drawn by the size of their values, keys whose hashes collide, or guessed scores.
bool reads_by_rounded_numbers(const Subject& s) {
  return s.label.starts_with("twilight") || s.label == "squeezed_attention" || s.label == "subgen" ||
         s.label == "magicpig" || s.label == "infinigen" || s.spec.pruner;
}

// How far apart the devices' logits may be. What they round differently may be another code, of a coarser step where
// codes have fewer bits.
double limit_of(const Subject& s) {
  double most = 0.05;
  for (const CodecSpec& codec : subjects().policy(s.spec)->codecs())
    for (const CodecSide side : {codec.k, codec.v})
      if (side.bits) most = std::max(most, side.bits == 8 ? 0.1 : side.bits == 4 ? 0.2 : 0.6);
  // Their pages have no codec of core's. kvquant's numbers are entries of 3 bits.
  if (s.label.starts_with("kvquant")) most = 0.4;
  if (s.label.ends_with("+kivi4") || s.label.ends_with("+atom_clip")) most = 0.2;
  if (s.label.ends_with("+kivi2")) most = 0.6;
  return most;
}

}  // namespace

TEST_CASE("cuda policies: without a limit they give the CPU's logits and keep everything") {
  for (const Subject& s : subjects().list()) {
    if (left_out(s)) continue;
    CAPTURE(s.label);
    const PolicySpec spec = s.spec;
    const Run cpu = run(Device::cpu, spec, "llama-gqa3"), cuda = run(Device::cuda, spec, "llama-gqa3");
    CHECK(finite(cuda.logits));
    if (!reads_by_rounded_numbers(s)) CHECK(worst(cuda.logits, cpu.logits) < limit_of(s));
    if (s.own_amount) continue;
    CHECK(cuda.kept == cpu.kept);
    if (s.spec.pruner) continue;  // it leaves tokens out, whatever the budget
    CHECK(cuda.fired == cpu.fired);
    if (!s.keeps_tokens) CHECK(cuda.fired == 0);  // pages become codes, whatever the budget
  }
}

TEST_CASE("cuda policies: with a budget they keep what they keep on the CPU") {
  for (const std::string& name : quick() ? std::vector<std::string>{"llama-gqa3"} : group_models())
    for (const Subject& s : subjects().list()) {
      if (left_out(s) || (!s.spec.scorer && !s.spec.selector && !s.spec.policy)) continue;
      CAPTURE(name, s.label);
      const Run &cpu = limited_run(Device::cpu, s, name), &cuda = limited_run(Device::cuda, s, name);
      CHECK(finite(cuda.logits));
      CHECK((cuda.fired > 0) == (cpu.fired > 0));
      if (!s.own_amount) CHECK(cuda.fired > 0);
      REQUIRE(cuda.kept.size() == cpu.kept.size());
      CHECK(count_of(cuda.kept) == Approx(count_of(cpu.kept)).epsilon(0.02));
      CHECK(overlap(cuda.kept, cpu.kept) > 0.9);
      CHECK(cuda.held == Approx(cpu.held).epsilon(0.1));
      if (cuda.kept == cpu.kept) CHECK(worst({cuda.logits[0]}, {cpu.logits[0]}) < limit_of(s));
      if (!quick()) CHECK(run(Device::cuda, limited(s), name).logits == cuda.logits);
    }
}

TEST_CASE("cuda policies: evictions while decoding and moves between tiers are the CPU's") {
  constexpr int every = 2;
  int alike = 0;
  const auto whole = count_of(run(Device::cpu, full_spec(), "llama-gqa3").left);
  for (const Subject& s : subjects().list())
    for (const bool host : {false, true}) {
      if (left_out(s) || (host && (s.composed() || !subjects().on_either_tier(s.spec)))) continue;
      if (quick() && host && s.label != "h2o" && s.label != "quest") continue;
      CAPTURE(s.label, host);
      PolicySpec spec = limited(s);
      if (host) spec.placement.tier = Tier::host, spec.placement.resident = 16;
      const Needs needs = subjects().policy(spec)->needs();
      const bool while_decoding = s.evicts() && !s.keeps_tokens && needs.window_queries() == 0;
      if (while_decoding) spec.schedule.every = every;
      const auto on = [&](Device device) {
        return host || while_decoding ? run(device, spec, "llama-gqa3") : limited_run(device, s, "llama-gqa3");
      };
      const Run cpu = on(Device::cpu), cuda = on(Device::cuda);
      // bf16 may not tell scores apart. Then another token stays, or attention reads others.
      CHECK(overlap(cuda.left, cpu.left) > 0.9);
      const bool reads_pages = spec.selector || needs.page_summary() != Summary::none;
      if (reads_pages || cuda.kept != cpu.kept || cuda.left != cpu.left) continue;
      const double tolerance = limit_of(s);
      const auto first = [](const Logits& l) { return Logits(l.begin(), l.begin() + 1 + every); };
      // A policy from which nothing left chooses what attention reads.
      const bool chooses = spec.policy && count_of(cpu.left) == whole;
      if (!chooses) CHECK(worst(first(cuda.logits), first(cpu.logits)) < tolerance);
      if (!(worst(cuda.logits, cpu.logits) < tolerance)) continue;  // an eviction in between chose other tokens
      ++alike;
      CHECK(cuda.fired == cpu.fired);
      CHECK(cuda.moved == cpu.moved);
    }
  CHECK(alike > 0);
}

TEST_CASE("cuda policies: pages on the host and recalled equal resident ones, bit for bit") {
  for (const Subject& s : subjects().list()) {
    if (s.composed() || subjects().policy(s.spec)->needs().oracle()) continue;
    CAPTURE(s.label);
    PolicySpec below = limited(s);
    below.placement.tier = Tier::host;
    below.placement.resident = 16;
    CHECK(run(Device::cuda, below, "llama-gqa3").logits == limited_run(Device::cuda, s, "llama-gqa3").logits);
  }
}

TEST_CASE("cuda policies: keys by their place in the cache, whole prompts and chunks") {
  for (const Subject& s : subjects().list())
    for (const char* rope : {"cache_relative", "re_rotate"}) {
      const auto by_place = subjects().with(s.spec, "rope", rope);
      if (s.composed() || !by_place) continue;
      const auto original = subjects().with(s.spec, "rope", "original");
      for (const char* name : {"llama-gqa3", "qwen3"}) {
        if (quick() && name != std::string("qwen3")) continue;
        CAPTURE(s.label, name, rope);
        const PolicySpec spec = with_budget(*by_place, BudgetAmount::tokens, limit);
        const Run cpu = run(Device::cpu, spec, name), cuda = run(Device::cuda, spec, name);
        CHECK(cuda.kept == cpu.kept);
        CHECK(worst(cuda.logits, cpu.logits) < limit_of(s));
        CHECK(worst(run(Device::cuda, spec, name, 13).logits, run(Device::cpu, spec, name, 13).logits) < 0.05);
        const Run other = run(Device::cuda, with_budget(*original, BudgetAmount::tokens, limit), name);
        CHECK(cuda.logits.back() != other.logits.back());  // places are not text positions
      }
    }
}
