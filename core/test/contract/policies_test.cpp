// Promises of every policy, whatever its method.
#include <kvlab/error.hpp>

#include <catch2/catch.hpp>

#include "compose/forwarding.hpp"
#include "ops/page/paged.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// More than half of the prompt: a method may keep all tokens of half the heads, and its budget pays for those.
constexpr int prompt_tokens = 112, answer_tokens = 8, limit = 64, larger = 80;
// CUDA kernels round differently in other batches and with mass, and activations are bf16.
const double tolerance = on_cuda() ? 0.03 : 1e-4;

struct Text {
  std::vector<int> prompt, answer;
  explicit Text(const Model& m, unsigned seed = 1, int tokens = prompt_tokens) {
    prompt = test_text(tokens, m.config.vocab, seed);
    answer = test_text(answer_tokens, m.config.vocab, seed + 100);
  }
};

// Compares two runs in which a GPU may add in different orders.
bool same(const Logits& got, const Logits& expected) {
  return on_cuda() ? worst(got, expected) < tolerance : got == expected;
}

// Whether a side of some codec of the policy has codes.
bool quantized(const Play& p) {
  const auto codecs = p.policy->codecs();
  return std::any_of(codecs.begin(), codecs.end(), [](const CodecSpec& c) { return c.k.bits != 0 || c.v.bits != 0; });
}
// Whether the policy and full differ in the order of the arithmetic only.
bool exact(const Play& p) { return p.policy->needs().rope() == RopeRegime::original && !quantized(p); }
// How far the logits of a codec alone, or of a policy that brings its own, may be from those of exact tokens.
double limit_of(const Play& p) {
  double most = tolerance;
  for (const CodecSpec& codec : p.policy->codecs())
    for (const CodecSide side : {codec.k, codec.v})
      if (side.bits) most = std::max(most, side.bits == 8 ? 0.1 : side.bits == 4 ? 0.4 : 1.);
  return most;
}

// Checks a run that dropped nothing. A codec beside a method must give what it gives alone, with keys of the method's
// regime: how far codes are from exact tokens is not the method's concern.
void check_like_full(const Subject& s, const Play& p, const std::vector<int>& prompt, const std::vector<int>& answer,
                     const Logits& got, const Logits& full, DType dtype) {
  if (p.policy->needs().functional() ||
      p.policy->needs().rebuilds_keys()) {  // what a prompt leaves changes, its own attention does not
    CHECK(finite(got));
    if (exact(p)) CHECK(same({got[0]}, {full[0]}));
    return;
  }
  if (s.spec.codec && (s.spec.scorer || s.spec.selector)) {
    PolicySpec alone = full_spec();
    alone.codec = s.spec.codec;
    Play codec(p.model, alone);
    codec.replace(std::make_shared<KeepsAll>(codec.policy, p.policy->needs().rope()));
    CHECK(same(got, codec.run(prompt, answer)));
  } else if (exact(p)) {
    CHECK(same(got, full));
  } else {
    CHECK(worst(got, full) < (dtype == DType::bf16 ? std::max(0.1, limit_of(p)) : limit_of(p)));
  }
}

// Most tokens that heads may keep under a budget of `tokens`. A policy that places pages on the host may keep all
// tokens of a head there.
std::size_t allowed(const Play& p, int tokens) {
  std::size_t sum = 0;
  for (const auto& head : p.kept)
    sum +=
        p.policy->needs().host_pages() && head.size() == prompt_tokens ? head.size() : static_cast<std::size_t>(tokens);
  return sum;
}

PolicySpec limited(const Subject& s, int tokens = limit) { return with_budget(s.spec, BudgetAmount::tokens, tokens); }

}  // namespace

TEST_CASE("there is something to test") {
  Registry registry(library_under_test());
  const auto plugins = registry.list();
  for (const Diagnostic& d : registry.diagnostics()) UNSCOPED_INFO(d.path.string() << ": " << d.message);
  CHECK_CAUSE("the library does not load (the reason stands above), or KVLAB_PLUGIN is missing at its end",
              std::any_of(plugins.begin(), plugins.end(), [](const PluginInfo* p) { return under_test(*p); }));
}

TEST_CASE("what is not tested is named") {
  for (const std::string& what : subjects().skipped()) WARN("not tested: " << what);
}

TEST_CASE("an unlimited budget gives the logits of full") {
  for (const std::string& name : group_models())
    for (DType dtype : {DType::f32, DType::bf16}) {
      if (on_cuda() && dtype == DType::f32) continue;
      const auto model = tiny_model(name, dtype);
      const Text text(*model);
      Play full(model, full_spec());
      const Logits expected = full.run(text.prompt, text.answer);
      REQUIRE(finite(expected));
      for (const Subject& s : about("policies that take a budget", [](const Subject& s) { return !s.own_amount; }))
        for (bool ratio : {false, true}) {
          if (!on_cuda() && dtype == DType::bf16 && ratio) continue;
          if (!s.runs_with(dtype)) continue;
          if (s.composed() && (name != "llama-gqa3" || (!on_cuda() && dtype != DType::f32))) continue;
          CAPTURE(name, s.label, ratio, name_of(dtype));
          Play p(model, subjects().as_full(ratio ? with_budget(s.spec, BudgetAmount::ratio, 1) : s.spec));
          const Logits got = p.run(text.prompt, text.answer);
          CHECK_CAUSE(
              "tokens go by an amount of the policy's own, where attach() or pins() must take the budget for the limit",
              p.kept == full.kept);
          INFO(
              "usual cause: attention does not read everything. Look at the lists of select(): pages left out, or "
              "pages on the host that recall() did not name before attend().");
          if (!s.keeps_tokens) CHECK(p.engine->fired() == 0);  // pages become codes, whatever the budget
          check_like_full(s, p, text.prompt, text.answer, got, expected, dtype);
        }
    }
}

TEST_CASE("with a budget a policy acts, obeys it, moves with it, repeats itself and stays finite") {
  for (const std::string& name : group_models()) {
    const auto model = tiny_model(name);
    const Text text(*model);
    const std::size_t heads = static_cast<std::size_t>(model->config.kv_heads);
    for (const Subject& s : about("policies, scorers and selectors",
                                  [](const Subject& s) { return s.spec.scorer || s.spec.selector || s.spec.policy; })) {
      if (s.composed() && name != "llama-gqa3") continue;
      CAPTURE(name, s.label);
      Play p(model, limited(s));
      const Logits got = p.run(text.prompt, text.answer);
      CHECK_CAUSE("scratch memory is read before it is written, or a score divides by zero", finite(got));
      CHECK_CAUSE("the budget is accepted and not used: attach() drops it, or prefill() and select() hand over no edit",
                  p.engine->fired() > 0);
      Play again(model, limited(s));
      const Logits repeated = again.run(text.prompt, text.answer);
      {
        INFO(
            "usual cause: two runs differ because the policy draws from a generator of its own, reads scratch memory "
            "that nobody wrote, or keeps static state. Draw from kv.sequence and a seed.");
        CHECK(again.kept == p.kept);
        CHECK(repeated == got);
      }
      const bool evicted = count_of(p.kept) < prompt_tokens * heads * static_cast<std::size_t>(model->config.layers);
      CHECK_CAUSE("the scorer's pins() keep everything, whatever number of tokens they are given",
                  (!s.evicts() || evicted));
      if (!evicted || s.own_amount) continue;
      const std::size_t layers =
          static_cast<std::size_t>(std::max(0, model->config.layers - p.policy->needs().dense_layers()));
      const std::size_t dense = heads * prompt_tokens * (static_cast<std::size_t>(model->config.layers) - layers);
      Play more(model, limited(s, larger));
      more.run(text.prompt, text.answer);
      INFO(
          "usual cause: the number of kept tokens is not the budget's. It is a constant, or pins (sinks, a window) "
          "come on top of it. Look at attach() and pins(tokens).");
      const bool places = p.policy->needs().host_pages();
      CHECK(count_of(p.kept) <= (places ? allowed(p, limit) : dense + layers * heads * limit));
      if (s.evicts() && !s.spec.split) CHECK(count_of(p.kept) == dense + layers * heads * limit);
      CHECK(count_of(more.kept) <= (places ? allowed(more, larger) : dense + layers * heads * larger));
      CHECK(count_of(more.kept) > count_of(p.kept));
    }
  }
}

namespace {

// Most pages that a head's attention read in one step.
struct MostPages final : EngineObserver {
  int most = 0;
  void attended(const DecodeLayer& l, const Store& store) override {
    for (int head = 0; l.read.pages && head < store.shape().kv_heads; ++head)
      most = std::max(most, l.read.pages->count(0, head));
  }
};

}  // namespace

TEST_CASE("the budget holds while decoding: tokens where the schedule evicts, pages where a selector reads") {
  const auto model = tiny_model("llama-gqa3");
  const Text text(*model);
  const std::size_t heads = static_cast<std::size_t>(model->config.kv_heads * model->config.layers);
  for (const Subject& s : about_all())
    for (int tokens : {limit, larger}) {
      CAPTURE(s.label, tokens);
      PolicySpec spec = limited(s, tokens);
      const bool evicts = s.evicts() && !s.keeps_tokens && subjects().policy(spec)->needs().window_queries() == 0;
      if (evicts) spec.schedule.every = 1;
      Play p(model, spec);
      MostPages pages;
      p.engine->observe(&pages);
      p.run(text.prompt, text.answer);
      if (evicts)
        CHECK_CAUSE("decode steps append and nothing goes: the policy evicts at the prompt's end only, or pins() grow",
                    count_of(kept_of(p.engine->store(), p.slot)) <= heads * static_cast<std::size_t>(tokens));
      if (pages.most == 0) {
        CHECK_CAUSE("select() leaves its list empty; count(row, head) says how many pages it has",
                    (!s.spec.selector || s.spec.pruner));
        continue;
      }
      if (s.own_amount) continue;
      INFO(
          "usual cause: the number of selected pages is not the budget's. It is a constant in place of "
          "step.page_budgets.");
      const int pinned = 1;  // the newest page may come on top of a choice that left it out
      CHECK(pages.most <= std::max(p.policy->needs().min_pages(), tokens / spec.page_size) + pinned);
      CHECK(pages.most >= tokens / spec.page_size);
    }
}

// Core does the arithmetic of a scorer's or selector's budget; a Policy does its own.
TEST_CASE("a policy of its own obeys a budget as a ratio and in bytes, or refuses it before any work") {
  const auto model = tiny_model("llama-gqa3");
  const Text text(*model);
  Play full(model, full_spec());
  full.run(text.prompt, {});
  const auto everything = static_cast<double>(full.engine->store().page_bytes(Tier::device));
  for (const Subject& s :
       about("policies of the role `policy`", [](const Subject& s) { return s.spec.policy.has_value(); })) {
    if (s.own_amount) continue;
    Play tokens(model, limited(s));
    tokens.run(text.prompt, {});
    if (count_of(tokens.kept) == count_of(full.kept)) continue;  // it evicts nothing
    for (const bool bytes : {false, true}) {
      CAPTURE(s.label, bytes);
      try {
        Play p(model, bytes ? with_budget(s.spec, BudgetAmount::bytes, everything / 2)
                            : with_budget(s.spec, BudgetAmount::ratio, 0.5));
        p.run(text.prompt, {});
        INFO(
            "usual cause: attach() looks at a budget in tokens only, and takes a ratio or bytes for no budget. It has "
            "to compute tokens from them, or to throw Errc::config.");
        if (bytes)
          CHECK(static_cast<double>(p.engine->store().page_bytes(Tier::device)) <= everything / 2);
        else
          CHECK(count_of(p.kept) <= allowed(p, prompt_tokens / 2));
      } catch (const Error& e) {
        CHECK_CAUSE("a budget of a kind that the policy cannot obey is refused with another code than Errc::config",
                    e.code() == Errc::config);
      }
    }
  }
}

TEST_CASE("a policy that decides by itself how much it keeps takes no budget") {
  const auto model = tiny_model("llama-gqa3");
  for (const Subject& s : about("policies without a budget", [](const Subject& s) { return s.own_amount; }))
    for (const auto kind : {BudgetAmount::tokens, BudgetAmount::ratio, BudgetAmount::bytes}) {
      CAPTURE(s.label, kind);
      PolicySpec spec = s.spec;
      spec.budget = {kind, kind == BudgetAmount::ratio ? .5 : 1e6};
      try {
        Play p(model, spec);
        FAIL("no error");
      } catch (const Error& e) {
        CHECK(e.code() == Errc::config);
      }
    }
}

TEST_CASE("a byte budget holds, metadata and summaries included") {
  const auto model = tiny_model("llama-gqa3");
  const Text text(*model);
  Play full(model, full_spec());
  full.run(text.prompt, {});
  const auto kv_bytes = [](const Play& p) {
    std::int64_t sum = 0;
    for (Tag t : {Tag::keys, Tag::values, Tag::codec_metadata, Tag::positions, Tag::scores, Tag::summaries})
      sum += p.engine->store().ledger().held(Tier::device)[static_cast<std::size_t>(t)];
    return sum;
  };
  const std::int64_t bytes = kv_bytes(full) / 2 + 100;
  for (const Subject& s : about("scorers", [](const Subject& s) { return s.evicts(); })) {
    CAPTURE(s.label);
    Play p(model, with_budget(s.spec, BudgetAmount::bytes, static_cast<double>(bytes)));
    p.run(text.prompt, {});
    INFO(
        "usual cause: a split or pins(tokens) keep another number of tokens than they are given. Core turns bytes into "
        "tokens, metadata included.");
    CHECK(kv_bytes(p) <= bytes);
    CHECK(kv_bytes(p) > bytes / 3);
  }
}

TEST_CASE("a byte budget that cannot hold what is always kept is refused") {
  const auto model = tiny_model("llama-gqa3");
  for (const Subject& s : about("scorers", [](const Subject& s) { return s.evicts(); })) {
    CAPTURE(s.label);
    try {
      Play p(model, with_budget(s.spec, BudgetAmount::bytes, 1000));
      FAIL("no error. usual cause: pins(tokens) shrink to nothing under a small number of tokens");
    } catch (const Error& e) {
      CHECK(e.code() == Errc::config);
      CHECK_THAT(e.message(), Catch::Contains("got a budget of 1000 bytes"));
    }
  }
}

TEST_CASE("a policy runs with a pruner, or it is refused before the run") {
  const auto pruner = subjects().any_pruner();
  if (!pruner && skip("about policies beside a pruner: there is none")) return;
  const auto model = tiny_model("llama-gqa3", contract_dtype());
  const Text text(*model);
  for (const Subject& s : about("policies", [](const Subject& s) { return s.role == Role::policy; })) {
    CAPTURE(s.label);
    PolicySpec spec = limited(s);
    spec.pruner = pruner;
    std::optional<Play> p;
    try {
      p.emplace(model, spec);
    } catch (const Error& e) {
      CHECK_THAT(e.what(), Catch::Contains("got a pruner beside a method that"));
      continue;
    }
    std::string refused;
    try {
      p->run(text.prompt, text.answer);
    } catch (const Error& e) {
      refused = e.what();
    }
    CHECK_CAUSE(
        "the policy evicts or moves tokens, or changes what attention computes: say so by kvlab/takes_no_pruner.hpp",
        refused.empty());
  }
}

TEST_CASE("a released slot leaves no trace, and rows of a ragged batch equal the sequences alone") {
  const auto model = tiny_model("llama-gqa3");
  const Text a(*model, 1), b(*model, 2, 67), c(*model, 3, 91);
  for (const Subject& s : about_all()) {
    CAPTURE(s.label);
    EngineOptions options;
    options.slots = 3;
    Play used(model, limited(s), options);
    used.run(a.prompt, a.answer);
    used.engine->close(used.slot);
    const Logits second = used.run(b.prompt, b.answer);
    Play fresh(model, limited(s), options);
    const Logits first = fresh.run(b.prompt, b.answer);
    {
      INFO(
          "usual cause: a member variable outlives a sequence: a flag, a length or a sum is not reset in "
          "release(slot), "
          "so that a second sequence starts where the first one ended.");
      CHECK(fresh.kept == used.kept);
      CHECK(first == second);
    }

    Play batch(model, limited(s), options);
    const std::vector<const Text*> texts{&a, &b, &c};
    std::vector<std::int32_t> slots;
    std::vector<Logits> logits(3);
    std::vector<Kept> kept;
    for (std::size_t i = 0; i < 3; ++i) {
      slots.push_back(batch.engine->open());
      logits[i].push_back(batch.prompt(slots[i], texts[i]->prompt));
    }
    for (std::size_t t = 0; t < answer_tokens; ++t) {
      const Logits rows = batch.step(slots, {a.answer[t], b.answer[t], c.answer[t]});
      for (std::size_t i = 0; i < 3; ++i) logits[i].push_back(rows[i]);
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Play alone(model, limited(s));
      const Logits expected = alone.run(texts[i]->prompt, texts[i]->answer);
      CAPTURE(i);
      INFO(
          "usual cause: a sequence differs in a ragged batch because the policy assumes one row or one length, or "
          "indexes its own state by row. Loop to kv.rows(), take each row's length, index state by kv.slots[row].");
      CHECK(worst(logits[i], expected) < tolerance);
      CHECK(kept_of(batch.engine->store(), slots[i]) == kept_of(alone.engine->store(), alone.slot));
    }
  }
}

namespace {

// The policy under test, over a cache whose tokens change places after every step.
class Shuffled final : public ForwardingPolicy {
 public:
  Shuffled(std::shared_ptr<Policy> inner, int layers) : ForwardingPolicy(std::move(inner)), layers_(layers) {}
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    inner().observe(step, edits, s);
    lengths_.resize(static_cast<std::size_t>(layers_));
    auto& lengths = lengths_[static_cast<std::size_t>(step.layer)];
    lengths.clear();
    for (int head = 0; head < step.kv_heads(); ++head) lengths.push_back(step.pages.tokens(0, head));
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    inner().finish_step(step, edits, s);
    for (int layer = 0; layer < layers_; ++layer) {
      const auto& lengths = lengths_[static_cast<std::size_t>(layer)];
      const auto heads = static_cast<std::int64_t>(lengths.size());
      TokenList pairs;
      pairs.index = take_scratch<std::int32_t>(*step.workspace, "pairs", {1, heads, 2 * exchanges});
      pairs.count = take_scratch<std::int32_t>(*step.workspace, "pair count", {1, heads});
      for (int head = 0; head < heads; ++head) {
        // The step may have evicted after observe() saw the length. Places below `limit` exist in any case.
        const int places = std::min(lengths[static_cast<std::size_t>(head)], limit) - 1;
        pairs.count(0, head) = places > 1 ? 2 * exchanges : 0;
        for (int i = 0; i < 2 * exchanges; ++i)
          pairs.index(0, head, i) = static_cast<int>((state_ = state_ * 1664525u + 1013904223u) >> 8) % places;
      }
      edits.for_layer(layer);
      edits.move(pairs);
    }
  }

 private:
  static constexpr int exchanges = 24;
  int layers_;
  unsigned state_ = 7;
  std::vector<std::vector<int>> lengths_;
};

}  // namespace

// No token comes twice: equal keys and values would have equal scores, and places break ties. Selectors are left out,
// because other tokens in a page may change its choice.
TEST_CASE("the order of tokens in the cache means nothing", "[cpu]") {
  if (skip_on_cuda()) return;
  const auto model = tiny_model("llama-gqa3");
  Text text(*model);
  int next = 0;
  for (std::vector<int>* part : {&text.prompt, &text.answer})
    for (int& token : *part) token = (7 + 131 * next++) % model->config.vocab;
  REQUIRE(model->config.vocab % 131 != 0);
  for (const Subject& s :
       about("scorers", [](const Subject& s) { return s.evicts() && !s.spec.split && !s.keeps_tokens; })) {
    CAPTURE(s.label);
    const bool window = subjects().policy(s.spec)->needs().window_queries() > 0;
    PolicySpec spec = limited(s);
    if (!window) spec.schedule.every = 1;
    Play plain(model, spec), shuffled(model, spec);
    shuffled.replace(std::make_shared<Shuffled>(shuffled.policy, model->config.layers));
    const Logits expected = plain.run(text.prompt, text.answer), got = shuffled.run(text.prompt, text.answer);
    INFO(
        "usual cause: a token's place in the cache is taken for its position in the text. Places change when pages are "
        "compacted: read positions with ops (ops::recency), not the index t.");
    CHECK(worst(got, expected) < limit_of(plain));
    CHECK(kept_of(shuffled.engine->store(), shuffled.slot) == kept_of(plain.engine->store(), plain.slot));
  }
}

namespace {

// The lists that heads read in decode steps.
struct ReadLists final : EngineObserver {
  std::vector<std::vector<std::int32_t>> lists;
  void attended(const DecodeLayer& l, const Store& store) override {
    const IndexList* list = l.read.tokens;
    if (l.read.pages) list = l.read.pages;
    for (int head = 0; list && head < store.shape().kv_heads; ++head) {
      lists.emplace_back();
      for (int i = 0; i < list->count(0, head); ++i) lists.back().push_back(list->index(0, head, i));
    }
  }
};

}  // namespace

TEST_CASE("a chunked prompt equals the whole prompt") {
  const auto model = tiny_model("llama-gqa4-rope3");
  const Text text(*model);
  for (const Subject& s : about("policies that take chunked prompts", [](const Subject& s) {
         return subjects().policy(s.spec)->needs().chunked_prompts();
       })) {
    CAPTURE(s.label);
    Play whole(model, limited(s));
    EngineOptions options;
    options.prefill_chunk = 7;
    Play chunked(model, limited(s), options);
    ReadLists read, read_chunked;
    whole.engine->observe(&read), chunked.engine->observe(&read_chunked);
    const Logits expected = whole.run(text.prompt, text.answer), got = chunked.run(text.prompt, text.answer);
    INFO(
        "usual cause: prefill() acts on every chunk as if it were the prompt. Look at last[row], and add up over "
        "chunks "
        "in token state; a method that cannot says chunked_prompts(false) in needs().");
    if (quantized(whole)) {  // later chunks read the codes of earlier ones
      CHECK(finite(got));
      CHECK(count_of(chunked.kept) == count_of(whole.kept));
      continue;
    }
    const auto in_the_end = [](const Play& p) { return kept_of(p.engine->store(), p.slot); };
    if (on_cuda()) {  // chunks round differently, and scores may be close
      CHECK(overlap(chunked.kept, whole.kept) > 0.9);
      CHECK(overlap(in_the_end(chunked), in_the_end(whole)) > 0.8);
    }
    if (on_cuda() &&
        (in_the_end(chunked) != in_the_end(whole) || chunked.kept != whole.kept || read_chunked.lists != read.lists))
      continue;
    CHECK(worst(got, expected) < tolerance);
    CHECK(chunked.kept == whole.kept);
  }
}

TEST_CASE("saved, restored in another slot and continued equals uninterrupted") {
  const auto model = tiny_model("llama-gqa3");
  const Text text(*model), noise(*model, 9, 60);
  for (const Subject& s : about_all())
    for (bool host : {false, true}) {
      CAPTURE(s.label, host);
      PolicySpec spec = limited(s);
      if (host) spec.placement.tier = Tier::host;
      if (host && !subjects().on_either_tier(spec)) continue;
      Play whole(model, spec);
      const Logits expected = whole.run(text.prompt, text.answer);
      EngineOptions options;
      options.slots = 2;
      Play p(model, spec, options);
      const std::vector<int> begin(text.answer.begin(), text.answer.begin() + 4);
      p.run(text.prompt, begin);
      const auto saved = p.engine->save(p.slot);
      const int other = p.engine->open();
      p.prompt(other, noise.prompt);
      REQUIRE(p.engine->restore(other, saved) == Fit::ok);
      p.engine->close(p.slot);
      Logits got, rest(expected.begin() + 5, expected.end());
      for (std::size_t t = 4; t < text.answer.size(); ++t) got.push_back(p.step({other}, {text.answer[t]})[0]);
      INFO(
          "usual cause: what the policy knows of a sequence is in a member variable, which a snapshot does not hold. "
          "Keep it in token state, or derive it from kv.position and kv.step.");
      CHECK(got == rest);
      CHECK(kept_of(p.engine->store(), other) == kept_of(whole.engine->store(), whole.slot));
    }
}

TEST_CASE("short prompts: one token, fewer than any window, and none") {
  const auto model = tiny_model("llama-mqa7");
  for (int tokens : {1, 5, 31}) {
    const Text text(*model, 4, tokens);
    const std::vector<int> answer(text.answer.begin(), text.answer.begin() + 3);
    Play full(model, full_spec());
    const Logits expected = full.run(text.prompt, answer);
    for (const Subject& s : about_all()) {
      CAPTURE(s.label, tokens);
      Play p(model, subjects().as_full(limited(s)));
      const Logits got = p.run(text.prompt, answer);
      INFO(
          "usual cause: a window or a pool reaches in front of the prompt's first token, or a prompt below the budget "
          "is compressed. Clamp both to the row's length.");
      CHECK(p.kept == full.kept);
      check_like_full(s, p, text.prompt, answer, got, expected, contract_dtype());
      CHECK_THROWS_AS(p.engine->prefill(p.engine->open(), {}, true, {}), Error);
    }
  }
}

TEST_CASE("a codec's bytes in the ledger are its layout's") {
  const auto model = tiny_model("llama-gqa3");
  const Text text(*model);
  for (const Subject& s : about("codecs", [](const Subject& s) { return s.role == Role::codec; })) {
    CAPTURE(s.label);
    Play p(model, limited(s));
    const Logits got = p.run(text.prompt, text.answer);
    CHECK_CAUSE("a scale of zero: a row without any spread divides by it", finite(got));
    const Store& store = p.engine->store();
    const Shape& shape = store.shape();
    const auto codecs = p.policy->codecs();
    if (codecs.size() > 1 && on_cuda()) continue;  // only the host's views say which pages are codes
    std::int64_t keys = 0, values = 0, metadata = 0;
    const auto count = [&](const CodecSpec& codec, std::int64_t pages) {
      const PageLayout l = ops::make_layout(shape.dtype, codec, shape.page_size, shape.head_dim,
                                            static_cast<int>(p.policy->needs().token_state().size()));
      keys += pages * (l.v - l.k), values += pages * (l.k_meta - l.v), metadata += pages * (l.positions - l.k_meta);
    };
    for (int layer = 0; layer < shape.layers; ++layer)
      for (int head = 0; head < shape.kv_heads; ++head) {
        const int pages = (store.length(layer, p.slot, head) + shape.page_size - 1) / shape.page_size;
        const int lower = codecs.size() > 1 ? store.view(layer, {p.slot}).lower_pages(p.slot, head) : 0;
        if (lower > 0) count(codecs[1], lower);
        count(codecs[0], pages - lower);
      }
    const auto& held = store.ledger().held(Tier::device);
    INFO("usual cause: spec() changes between two calls. It may depend on the codec's parameters alone.");
    CHECK(held[static_cast<std::size_t>(Tag::keys)] == keys);
    CHECK(held[static_cast<std::size_t>(Tag::values)] == values);
    CHECK(held[static_cast<std::size_t>(Tag::codec_metadata)] == metadata);
    if (p.policy->needs().functional())  // rows became what its own codes give back
      CHECK_CAUSE("no row became codes: coded() is 0", p.engine->fired() > 0);
    else if (s.keeps_tokens)
      CHECK_CAUSE("no page became codes: residual() or the groups are larger than the cache", metadata > 0);
  }
}
