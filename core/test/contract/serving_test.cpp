// Requests served together, under a cap that preempts some of them, must have the same texts as alone. This holds for
// every policy, also with its pages on the host.
#include <algorithm>
#include <catch2/catch.hpp>

#include "engine/scheduler.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int tokens_kept = 48;

std::vector<Request> requests(int vocab) {
  std::vector<Request> out;
  for (int i = 0; i < (quick() ? 5 : 6); ++i) {
    Request r;
    r.prompt = test_text(9 + 17 * (i % 5), vocab, static_cast<unsigned>(i) + 1);
    if (i % 3 == 0) r.fed = test_text(2, vocab, static_cast<unsigned>(i) + 50);
    r.max_new = 20 + 8 * (i % 3);
    out.push_back(std::move(r));
  }
  return out;
}

struct Outcome {
  bool fits = true;
  std::vector<std::vector<int>> texts;
  int preemptions = 0;
};

EngineOptions options_of(const PolicySpec& spec, int slots, std::int64_t limit) {
  EngineOptions o;
  o.device = contract_device();
  o.slots = slots;
  o.max_tokens = 128;
  o.page_size = spec.page_size;
  o.budget = spec.budget;
  o.recorded = made_up_future();
  o.device_limit = limit;
  o.batch_invariant = true;
  return o;
}

Outcome serve(const PolicySpec& spec, const std::vector<Request>& all, int slots, std::int64_t limit,
              Preemption preemption = Preemption::swap) {
  const auto model = tiny_model("llama-gqa3");
  Engine engine(model, subjects().policy(spec, *model), options_of(spec, slots, limit));
  SchedulerOptions how;
  how.preemption = preemption;
  Scheduler scheduler(engine, all, how);
  Outcome out;
  for (int left = 5000; !scheduler.done(); --left) {
    out.fits = scheduler.iterate() == Fit::ok;
    if (!out.fits) return out;
    REQUIRE(left > 0);
    if (limit >= 0) REQUIRE(engine.store().page_bytes(Tier::device) <= limit);
  }
  CHECK(engine.store().page_bytes(Tier::device) == 0);
  engine.store().check_invariants();
  for (const Served& s : scheduler.served()) {
    out.texts.push_back(s.tokens);
    out.preemptions += s.preemptions;
  }
  return out;
}

std::int64_t page_of_heads(const PolicySpec& spec) {
  const auto model = tiny_model("llama-gqa3");
  return Engine(model, subjects().policy(spec, *model), options_of(spec, 1, -1)).full_bytes(1);
}

// Bytes of all pages of one sequence and one more page per KV head.
std::int64_t whole(const PolicySpec& spec) { return (128 / spec.page_size + 1) * page_of_heads(spec); }

// The least limit under which each request runs alone, also if its whole text is computed anew as one prompt, and one
// more page per KV head.
std::int64_t least(const PolicySpec& spec, const std::vector<Request>& all, Preemption preemption) {
  const std::int64_t page = page_of_heads(spec);
  const auto longest = [&](auto tokens) {
    return *std::max_element(all.begin(), all.end(),
                             [&](const Request& a, const Request& b) { return tokens(a) < tokens(b); });
  };
  std::vector<Request> hardest{longest([](const Request& r) { return r.prompt.size(); }), longest([](const Request& r) {
                                 return r.prompt.size() + r.fed.size() + static_cast<std::size_t>(r.max_new);
                               })};
  if (preemption == Preemption::recompute) {
    const Request& r = hardest[1];
    const int text = static_cast<int>(r.prompt.size() + r.fed.size()) + r.max_new;
    hardest.emplace_back().prompt = test_text(text - 1, tiny_model("llama-gqa3")->config.vocab, 99);
  }
  std::int64_t low = 0, high = whole(spec) / page;  // does not fit, fits
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (serve(spec, hardest, 1, middle * page).fits ? high : low) = middle;
  }
  return (high + 1) * page;
}

void check_together(const PolicySpec& spec, bool host) {
  CAPTURE(spec.name, host);
  const auto all = requests(tiny_model("llama-gqa3")->config.vocab);
  const bool keeps_tokens = subjects().keeps_tokens(spec);
  if (host && (!subjects().on_either_tier(spec) || (on_cuda() && spec.codec))) return;
  PolicySpec placed = spec;
  if (host) placed.placement.tier = Tier::host;
  const Outcome alone = serve(placed, all, 1, -1);
  const std::int64_t cap = host ? whole(spec) : least(spec, all, Preemption::swap);
  Outcome together = serve(placed, all, 6, cap);
  INFO(
      "usual cause: the policy mixes requests that share a batch, or does not forget a preempted one. Index state by "
      "kv.slots[row], reset it in release(slot), draw from kv.sequence.");
  REQUIRE(together.fits);
  CHECK(together.texts == alone.texts);
  // Admission keeps room for pages that place edits may bring, so such requests may first meet under another cap.
  for (int more = 1; !host && together.preemptions == 0 && more <= 12; ++more) {
    together = serve(placed, all, 6, cap + more * page_of_heads(spec));
    CHECK(together.texts == alone.texts);
  }
  // A prompt takes more than its cache after it, when pages become codes. So the others find room.
  if (!host && !keeps_tokens) CHECK(together.preemptions > 0);
  INFO("the caches of preempted requests were lost, and computed anew");
  together = serve(placed, all, 6, cap, Preemption::recompute);
  // Preempted late, a request is one long prompt, which may need more than its prompt and its cache did.
  if (!host && !together.fits)
    together = serve(placed, all, 6, least(spec, all, Preemption::recompute), Preemption::recompute);
  REQUIRE(together.fits);
  CHECK(together.texts == alone.texts);
}

// On an emulated GPU all of them take minutes. Lists that change in each step ask most of the host's counts.
bool too_slow(const PolicySpec& spec, bool host) { return host && on_cuda() && quick() && !spec.selector; }

void check_all_together(bool host) {
  const auto asked = about_all();
  if (asked.empty()) return;
  if (!too_slow(full_spec(), host)) check_together(full_spec(), host);
  for (const Subject& s : asked)
    if (!too_slow(s.spec, host)) check_together(with_budget(s.spec, BudgetAmount::tokens, tokens_kept), host);
}

}  // namespace

TEST_CASE("served together under a cap, every request has the text that it has alone") { check_all_together(false); }

TEST_CASE("served with pages on the host under a cap, every request has the text that it has alone") {
  check_all_together(true);
}
