#include "run/cell.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <tuple>

#include "run/answer.hpp"
#include "support/cell_fixture.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

namespace {

// Conversations in texts of the tiny model, under one policy.
struct Fixture : test::CellFixture {
  explicit Fixture(const PolicySpec& policy = test::full_spec(),
                   std::shared_ptr<const Model> of = test::tiny_model("llama-gqa3"))
      : CellFixture(std::move(of), policy, {Metric::score, Metric::fidelity, Metric::memory, Metric::trace}) {
    experiment.fidelity_tokens = 100;
  }
  // Lengths differ, so the rows of a batch end at different steps.
  void conversations() {
    for (int i = 0; i < 3; ++i) {
      const unsigned seed = 10u * static_cast<unsigned>(i);
      add(text(20 + 9 * i, seed + 1), text(i, seed + 2), 3 + 2 * i);
      add({}, text(4, seed + 3), 4, true);
      if (i != 1) add({}, text(2, seed + 4), 3, true);
    }
  }
  std::vector<int> text(int tokens, unsigned seed) const { return test::test_text(tokens, model->config.vocab, seed); }
};

// The tiny model. Every third token ends an answer.
std::shared_ptr<const Model> terse_model() {
  namespace fs = std::filesystem;
  const test::TempDir dir;
  fs::copy(test::golden("tiny/llama-gqa3"), dir / "m", fs::copy_options::recursive);
  std::ifstream in(dir / "m/config.json");
  auto config = nlohmann::json::parse(in);
  config["eos_token_id"] = nlohmann::json::array();
  for (int id = 1; id < config["vocab_size"]; id += 3) config["eos_token_id"].push_back(id);
  std::ofstream(dir / "m/config.json") << config;
  return load_model(*open_checkpoint(dir / "m"), DType::f32, "terse");
}

// The full cache's answers. Each question's prompt repeats the whole conversation before it; seen = these prompts.
std::vector<std::vector<int>> answers_from_scratch(const Fixture& f, std::vector<std::vector<int>>& seen) {
  EngineOptions options;
  options.max_tokens = 128;
  Engine engine(f.model, test::subjects().policy(test::full_spec()), options);
  Sequence sequence(engine);
  std::vector<std::vector<int>> out;
  std::vector<int> so_far;
  for (const Item& item : f.items.items) {
    if (!item.follows) so_far = item.prompt;
    so_far.insert(so_far.end(), item.fed.begin(), item.fed.end());
    seen.push_back(so_far);
    Item whole = item;
    whole.prompt = so_far;
    whole.fed.clear();
    REQUIRE(sequence.begin(whole) == Fit::ok);
    Answer answer(whole);
    while (!answer.ended()) {
      const int token = answer.take(sequence.logits(), *f.model->tokenizer);
      if (!answer.ended()) REQUIRE(sequence.feed(token) == Fit::ok);
    }
    sequence.close();
    out.push_back(answer.tokens());
    if (answer.stop() == Answer::Stop::eos) out.back().pop_back();
    so_far.insert(so_far.end(), out.back().begin(), out.back().end());
  }
  return out;
}

// Checks the trace's tokens of each row: its prompt, all tokens fed to it, and its answer.
void check_tokens(const Fixture& f, const results::CellResult& result, const std::vector<std::vector<int>>& seen,
                  const std::vector<std::vector<int>>& answers) {
  const results::Trace& t = result.trace;
  REQUIRE(t.token_offsets.size() == 4 * seen.size());
  const auto slice = [&](std::int64_t from, std::int64_t to) {
    return std::vector<int>(t.tokens.begin() + from, t.tokens.begin() + to);
  };
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const std::int64_t* at = t.token_offsets.data() + 4 * i;
    CHECK(slice(at[0], at[1]) == f.items.items[i].prompt);
    CHECK(slice(at[0], at[2]) == seen[i]);
    std::vector<int> answer = slice(at[2], at[3]);
    CHECK(static_cast<std::int64_t>(answer.size()) == result.samples[i].output_tokens);
    if (result.samples[i].stop == "eos") {
      CHECK(f.model->tokenizer->is_eos(answer.back()));
      answer.pop_back();
    }
    CHECK(answer == answers[i]);
  }
}

}  // namespace

TEST_CASE("turns go on in the cache that earlier answers left, whatever the batch") {
  Fixture f;
  f.conversations();
  std::vector<std::vector<int>> seen;
  const auto wanted = answers_from_scratch(f, seen);
  for (const int batch : {1, 2, 8}) {
    CAPTURE(batch);
    f.experiment.batch = batch;
    const results::CellResult result = f.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    REQUIRE(result.samples.size() == wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      CAPTURE(i);
      CHECK(result.samples[i].output == f.model->tokenizer->decode(wanted[i]));
      CHECK(result.samples[i].prompt_tokens == static_cast<std::int64_t>(seen[i].size()));
      CHECK(result.samples[i].task_sample == f.items.items[i].sample);
      CHECK(result.samples[i].question == f.items.items[i].question);
      CHECK(result.samples[i].follows == f.items.items[i].follows);
      CHECK(result.samples[i].top1 == 1);
      CHECK(result.samples[i].kl < 1e-6);
      CHECK(result.samples[i].first_divergence == -1);
    }
    CHECK(result.trace.samples == static_cast<std::int64_t>(wanted.size()));
    check_tokens(f, result, seen, wanted);
    CHECK(result.summary.mass == Approx(1));
    CHECK(result.summary.fired == 0);
  }
}

TEST_CASE("a stop text ends an answer; the text before it is scored, and its tokens stay in the conversation") {
  Fixture f;
  f.conversations();
  const results::CellResult plain = f.run();
  REQUIRE(plain.summary.status == "ok");
  std::vector<std::string> stops(f.items.items.size());
  for (std::size_t i = 0; i < stops.size(); ++i) {
    Item& item = f.items.items[i];
    if (item.follows) continue;
    const std::string& text = plain.samples[i].output;
    REQUIRE(text.size() >= 3);
    stops[i] = text.substr(text.size() / 2, 2);
    item.stops = {"never to be found", stops[i]};
    item.references = {stops[i]};
  }
  std::vector<std::vector<int>> seen;
  const auto wanted = answers_from_scratch(f, seen);
  for (const int batch : {1, 8}) {
    CAPTURE(batch);
    f.experiment.batch = batch;
    const results::CellResult result = f.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      CAPTURE(i, stops[i]);
      if (!stops[i].empty()) {
        const std::string& whole = plain.samples[i].output;
        CHECK(result.samples[i].output == whole.substr(0, whole.find(stops[i])));
        CHECK(result.samples[i].stop == "text");
        CHECK(result.samples[i].score == 0);  // by "contains", of what only the stop text has
        CHECK(result.samples[i].output_tokens <= plain.samples[i].output_tokens);
      }
      CHECK(result.samples[i].prompt_tokens == static_cast<std::int64_t>(seen[i].size()));
      CHECK(result.samples[i].first_divergence == -1);
    }
    check_tokens(f, result, seen, wanted);
  }
}

TEST_CASE("an answer's own end is not fed with the next turn, in the plain pass or for fidelity") {
  Fixture f(test::full_spec(), terse_model());
  for (unsigned i = 0; i < 6; ++i) {
    f.add(f.text(20, 7 * i + 1), {}, 8);
    for (unsigned turn = 1; turn < 4; ++turn) f.add({}, f.text(1, 7 * i + turn + 1), 8, true);
  }
  std::vector<std::vector<int>> seen;
  const auto wanted = answers_from_scratch(f, seen);
  const results::CellResult result = f.run();
  CAPTURE(result.summary.error);
  REQUIRE(result.summary.status == "ok");
  int ended = 0;  // answers before a further turn
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CAPTURE(i);
    if (i + 1 < wanted.size() && f.items.items[i + 1].follows) ended += result.samples[i].stop == "eos";
    CHECK(result.samples[i].output == f.model->tokenizer->decode(wanted[i]));
    CHECK(result.samples[i].prompt_tokens == static_cast<std::int64_t>(seen[i].size()));
    // The reference has the plain pass's conversation. With an end token in it the answers would part.
    CHECK(result.samples[i].first_divergence == -1);
    CHECK(result.samples[i].top1 == 1);
  }
  REQUIRE(ended >= 6);
}

TEST_CASE("the trace has each item's kept positions in the items' order") {
  Fixture f;
  f.conversations();
  f.experiment.batch = 3;
  const results::CellResult result = f.run();
  REQUIRE(result.summary.status == "ok");
  const auto& config = f.model->config;
  const std::size_t heads = static_cast<std::size_t>(config.layers * config.kv_heads);
  REQUIRE(result.trace.kept_offsets.size() == 2 * heads * f.items.items.size());
  for (std::size_t i = 0; i < f.items.items.size(); ++i) {
    const Item& item = f.items.items[i];
    // A later turn's cache has all tokens but the question and the answer's last one. It never has an end token.
    std::int64_t there = static_cast<std::int64_t>(item.prompt.size());
    if (item.follows) {
      const bool eos = result.samples[i - 1].stop == "eos";
      there = result.samples[i - 1].prompt_tokens + result.samples[i - 1].output_tokens - 1;
      CHECK(result.samples[i].prompt_tokens == there + (eos ? 0 : 1) + static_cast<std::int64_t>(item.fed.size()));
    }
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t at = 2 * (i * heads + h);
      CHECK(result.trace.kept_offsets[at + 1] - result.trace.kept_offsets[at] == there);
    }
  }
}

TEST_CASE("forced tokens are the answer of the trace") {
  Fixture f;
  f.add(f.text(20, 1), f.text(2, 2), 3);
  f.items.items[0].forced = f.text(5, 3);
  const results::CellResult result = f.run();
  REQUIRE(result.summary.status == "ok");
  CHECK(result.trace.token_offsets == std::vector<std::int64_t>{0, 20, 22, 27});
  CHECK(std::equal(result.trace.tokens.begin() + 22, result.trace.tokens.end(), f.items.items[0].forced.begin()));
}

TEST_CASE("a cell's interval takes turns over one context together") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score});
  for (unsigned i = 0; i < 3; ++i) {
    f.add(test::test_text(8, f.model->config.vocab, i), {}, 2);
    f.add({}, test::test_text(2, f.model->config.vocab, 9 + i), 2, true);
    f.items.items[2 * i].references = f.items.items[2 * i + 1].references = {""};  // every answer contains ""
  }
  const results::SummaryRow s = f.run().summary;
  CHECK(s.score == 1);
  CHECK(s.score_lo == Approx(0.43850).margin(1e-5));  // 3 observations, not 6
  CHECK(s.score_hi == 1);
}

TEST_CASE("the summary names the component that is switched off") {
  Fixture f;
  f.add(f.text(20, 1), {}, 2);
  CHECK(f.run().summary.ablated.empty());
  f.experiment.policies[0].ablated = "window";
  CHECK(f.run().summary.ablated == "window");
}

TEST_CASE("the summary says whether the policy's scorer ranks tokens by their age alone") {
  const std::pair<const char*, int> cases[] = {{"{window: {budget: {tokens: 8}}}", 1},
                                               {"{streaming_llm: {budget: {tokens: 8}}}", 1},
                                               {"{snapkv: {budget: {tokens: 40}}}", 0},
                                               {"{quest: {budget: {tokens: 40}}}", -1}};
  for (const auto& [policy, wanted] : cases) {
    Fixture f(test::policy_of(policy, 4));
    f.add(f.text(60, 1), {}, 2);
    CAPTURE(policy);
    CHECK(f.run().summary.by_age == wanted);
  }
}

TEST_CASE("the ledger tells bytes that hold no token apart, and the summary has their mean and each tier's") {
  const char* const host = "{quest: {budget: {tokens: 16}, min_pages: 1, placement: {tier: host, resident: 8}}}";
  for (const char* policy : {"full", host}) {
    CAPTURE(policy);
    Fixture f(test::policy_of(policy, 8));
    constexpr int prompt = 20, answer = 9;
    f.add(f.text(prompt, 1), {}, answer);
    const results::CellResult result = f.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    std::map<std::int64_t, double> unused, on_host;  // of decode steps
    const auto& config = f.model->config;
    for (const results::LedgerRow& row : result.ledger) {
      REQUIRE(row.unused >= 0);
      REQUIRE(row.unused <= row.held);
      if (policy == std::string("full") && row.tag == "keys")  // all tokens stay on the device
        CHECK(row.held - row.unused ==
              (prompt + row.engine_step) * config.layers * config.kv_heads * config.head_dim * 4);
      if (row.engine_step == 0 || row.tag == "workspace") continue;
      if (row.tier == "device") unused[row.engine_step] += static_cast<double>(row.unused);
      if (row.tier == "host") on_host[row.engine_step] += static_cast<double>(row.held);
    }
    const auto mean = [&](const std::map<std::int64_t, double>& steps) {
      double sum = 0;
      for (const auto& [step, bytes] : steps) sum += bytes;
      return sum / (answer - 1);
    };
    CHECK(result.summary.fragmentation == Approx(mean(unused)));
    CHECK(result.summary.fragmentation > 0);
    CHECK(result.summary.host_bytes_decode == Approx(mean(on_host)));
    CHECK((result.summary.host_bytes_decode > 0) == (policy == host));
    CHECK(result.summary.host_bytes_decode <= static_cast<double>(result.summary.host_bytes_peak));
    CHECK(result.summary.disk_bytes_decode == 0);
  }
}

TEST_CASE("the ledger of a cell has the bytes of each codec") {
  struct Case {
    const char* policy;
    std::set<std::string> codecs, metadata;
  };
  const std::set<std::string> none;
  for (const Case& c :
       {Case{"full", {"f32"}, none}, Case{"{name: a, policy: full, codec: k4v2}", {"k4v2"}, {"k4v2"}},
        Case{"{name: a, policy: full, codec: {kivi4_pages: {group: 8, residual: 8}}}",
             {"f32", "k4c8v4t8"},
             {"k4c8v4t8"}},
        Case{"{leankv: {window: 8, high_from: 3}}", {"k8v4", "k4v2"}, {"k8v4", "k4v2"}},
        Case{"{quest: {budget: {tokens: 16}, min_pages: 1, codec: k8v8, placement: {tier: host, resident: 8, codec: "
             "k4v4}}}",
             {"k8v8", "k4v4"},
             {"k8v8", "k4v4"}}}) {
    CAPTURE(c.policy);
    Fixture f(test::policy_of(c.policy, 8));
    f.add(f.text(61, 1), {}, 5);
    const results::CellResult result = f.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    std::set<std::string> codecs, metadata;
    for (const results::LedgerRow& row : result.ledger) {
      CAPTURE(row.engine_step, row.tier, row.tag, row.codec);
      const bool of_pages = row.tag == "keys" || row.tag == "values" || row.tag == "codec_metadata";
      if (of_pages) codecs.insert(row.codec);
      if (row.tag == "codec_metadata") metadata.insert(row.codec);
      if (row.tag == "summaries" || row.tag == "tables" || row.tag == "workspace") CHECK(row.codec.empty());
      if (row.codec == "k4v4" || row.tier == "host") CHECK((row.codec == "k4v4") == (row.tier == "host"));
    }
    CHECK(codecs == c.codecs);
    CHECK(metadata == c.metadata);
  }
}

TEST_CASE(
    "a codec that codes neither keys nor values is refused before the run, of either tier; ablations may have it") {
  const PluginCatalog& catalog = test::built_catalog();
  const std::string none = "{keys: false, values: false}", host = "placement: {tier: host, codec: ";
  for (const std::string& text :
       {"{policy: full, codec: {int8: " + none + "}}", std::string("{policy: full, codec: {k16v8: {values: false}}}"),
        "{policy: twilight, codec: {k8v8: " + none + "}}", "{policy: full, codec: {kivi2_pages: " + none + "}}",
        "{selector: quest, " + host + "{k8v8: " + none + "}}}",
        "{selector: quest, codec: int8, " + host + "{k8v8: " + none + "}}}",
        "{policy: freekv, " + host + "{k8v8: " + none + "}}}"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH(build_policy(test::policy_of(text, 8), catalog),
                      Catch::Contains("with neither keys nor values in codes, wanted one of them at least"));
  }
  for (const std::string& text :
       {std::string("{policy: full, codec: {int8: {keys: false}}}"),
        std::string("{policy: full, codec: {atom_clip: {keys: false}}}"),
        "{selector: quest, " + host + "{k8v8: {values: false}}}}", "{selector: quest, " + host + "lossless}}"})
    CHECK_NOTHROW(build_policy(test::policy_of(text, 8), catalog));
  for (const std::string& text :
       {std::string("{policy: full, codec: k16v8}"), "{selector: quest, " + host + "k16v8}}"}) {
    const auto ablated = without(test::policy_of(text, 8), "values", catalog);
    REQUIRE(ablated);
    CHECK_NOTHROW(build_policy(*ablated, catalog));
  }
}

TEST_CASE("a pruner beside a policy that takes none is refused before the run") {
  const PluginCatalog& catalog = test::built_catalog();
  const auto with_pruner = [&](const std::string& text) {
    CAPTURE(text);
    return build_policy(test::policy_of("{" + text + ", pruner: twilight}", 8), catalog);
  };
  for (const auto& [text, why] : std::vector<std::pair<const char*, const char*>>{
           {"policy: leankv", "moves tokens to pages of another codec"},
           {"policy: raas, budget: {tokens: 64}", "evicts tokens"},
           {"policy: raas, budget: {tokens: 64}, codec: int8", "evicts tokens"},
           {"policy: subgen", "evicts tokens"},
           {"policy: fastgen", "evicts tokens"},
           {"policy: magicpig", "changes what attention computes"},
           {"policy: infllm, budget: {tokens: 64}", "changes what attention computes"},
           {"policy: arkvale, budget: {tokens: 64}", "reads all pages on the device, whatever it lists"}})
    CHECK_THROWS_WITH(with_pruner(text), Catch::Contains(std::string("got a pruner beside a method that ") + why));
  for (const char* text :
       {"policy: full", "policy: full, codec: kivi2_pages", "policy: twilight, codec: kivi2_pages", "selector: quest",
        "policy: magicpig, bits: 0", "policy: arkvale, resident: false", "policy: infllm, positions: original"})
    CHECK_NOTHROW(with_pruner(text));
}

TEST_CASE("a cell that does not fit says what it held of its limit, and keeps no half of its results") {
  Fixture f;
  f.conversations();
  f.leave_for_pages(16 * 1024, 1);
  const results::CellResult result = f.run();
  CHECK(result.summary.status == "oom");
  CHECK(result.samples.empty());
  CHECK(result.ledger.empty());
  std::smatch numbers;
  REQUIRE(std::regex_match(result.summary.error, numbers,
                           std::regex("got a device with room for ([0-9]+) bytes of pages, wanted room for more "
                                      "pages than the ([0-9]+) bytes held")));
  const std::int64_t room = std::stoll(numbers[1]), held = std::stoll(numbers[2]);
  const auto& config = f.model->config;
  // A layer takes all pages of its prompt at once: K, V and positions. The longest prompt has five pages per head.
  const std::int64_t page = 8 * config.head_dim * 2 * 4 + 128;
  CHECK(room == 16384 / page * page);
  CHECK(held <= room);
  CHECK(held + 5 * config.kv_heads * page > room);
}

namespace {

SamplingSpec warm(int draws, double temperature = 1.5) {
  SamplingSpec out;
  out.temperature = temperature, out.top_p = .95, out.draws = draws, out.seed = 7;
  return out;
}

using DrawKey = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

// The texts of a cell by sample, question and draw.
std::map<DrawKey, std::string> texts_of(const results::CellResult& result) {
  std::map<DrawKey, std::string> out;
  for (const results::SampleRow& s : result.samples)
    REQUIRE(out.try_emplace({s.task_sample, s.question, s.draw}, s.output).second);
  return out;
}

}  // namespace

TEST_CASE("drawn answers are the same in any batch, in any company and from a restored prompt") {
  for (const char* policy :
       {"full", "{snapkv: {budget: {tokens: 12}, window: 4}}", "{quest: {budget: {tokens: 16}}}"}) {
    CAPTURE(policy);
    const PolicySpec spec = test::policy_of(policy, 4);
    Fixture f(spec);
    f.experiment.metrics = {Metric::score, Metric::memory};
    f.conversations();
    const TaskItems questions = f.items;
    f.experiment.sampling = warm(3);
    f.items = drawn(questions, 3, "");
    const results::CellResult result = f.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    REQUIRE(result.samples.size() == 3 * questions.items.size());
    const auto wanted = texts_of(result);
    for (const int batch : {2, 5, 16}) {
      CAPTURE(batch);
      f.experiment.batch = batch;
      const results::CellResult again = f.run();
      REQUIRE(again.summary.status == "ok");
      CHECK(texts_of(again) == wanted);
    }
    // One draw: every prompt runs, none is restored. The first conversation alone, too.
    f.experiment.sampling.draws = 1;
    f.items = drawn(questions, 1, "");
    for (const auto& [key, text] : texts_of(f.run())) CHECK(text == wanted.at(key));
    f.items.items.erase(f.items.items.begin() + 3, f.items.items.end());
    for (const auto& [key, text] : texts_of(f.run())) CHECK(text == wanted.at(key));
    std::set<std::string> first;
    for (int draw = 0; draw < 3; ++draw) first.insert(wanted.at({2, 0, draw}));
    CHECK(first.size() > 1);
  }
}

TEST_CASE("drawn answers whose prompt is restored leave pages on the device while memory suffices") {
  for (const char* policy : {"{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}",
                             "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 4}}"}) {
    CAPTURE(policy);
    Fixture f(test::policy_of(policy, 8));
    f.experiment.metrics = {Metric::score, Metric::memory};
    for (int i = 0; i < 2; ++i) f.add(f.text(120 + 9 * i, static_cast<unsigned>(i) + 1), {}, 24);
    const TaskItems questions = f.items;
    const auto run = [&](int draws, int batch) {
      f.experiment.sampling = warm(draws);
      f.experiment.batch = batch;
      f.items = drawn(questions, draws, "");
      const results::CellResult result = f.run();
      CHECK(result.summary.error == "");
      return result;
    };
    const results::CellResult once = run(1, 1), roomy = run(3, 1);
    CHECK(once.summary.host_bytes_peak == 0);
    CHECK(roomy.summary.host_bytes_peak == 0);
    CHECK(roomy.summary.device_bytes_peak >= once.summary.device_bytes_peak);
    // Room for two prompts and a half: the third draw comes back where the others' pages were.
    const std::int64_t prompt = Engine(f.model, cell_policy(f.input()), engine_options(f.input(), 1)).full_bytes(129);
    f.leave_for_pages(prompt * 5 / 2, 3);
    const results::CellResult pressed = run(3, 3);
    CHECK(pressed.summary.host_bytes_peak > 0);
    CHECK(texts_of(pressed) == texts_of(roomy));
  }
}

TEST_CASE("temperature 0 gives the most likely answers") {
  Fixture f;
  f.experiment.metrics = {Metric::score};
  f.conversations();
  const results::CellResult greedy = f.run();
  f.experiment.sampling = warm(1, 0);
  const results::CellResult cold = f.run();
  // So do a temperature near 0, the likeliest token alone, and a share that one token has.
  std::vector<results::CellResult> like{cold};
  for (int i = 0; i < 3; ++i) {
    f.experiment.sampling = warm(1);
    if (i == 0) f.experiment.sampling.temperature = 1e-6;
    if (i == 1) f.experiment.sampling.top_k = 1;
    if (i == 2) f.experiment.sampling.top_p = 1e-9;
    f.items = drawn(f.items, 1, "");
    like.push_back(f.run());
  }
  for (const results::CellResult& other : like) {
    REQUIRE(other.samples.size() == greedy.samples.size());
    for (std::size_t i = 0; i < other.samples.size(); ++i) CHECK(other.samples[i].output == greedy.samples[i].output);
  }
  CHECK(cold.summary.sampling.empty());
  CHECK(cold.summary.draws == -1);
  CHECK(std::isnan(cold.summary.pass));
  CHECK(cold.samples[0].draw == -1);
}

TEST_CASE("a cell with draws says so: avg, pass, draws of each sample, fidelity once a question") {
  Fixture f;
  f.conversations();
  f.experiment.sampling = warm(4);
  f.items = drawn(f.items, 4, "");
  const results::CellResult first = f.run();
  REQUIRE(first.summary.status == "ok");
  // An answer is right if it contains what the first draw of all said.
  const std::string wanted = first.samples[0].output;
  for (Item& item : f.items.items) item.references = {wanted};
  const results::CellResult result = f.run();
  std::map<std::pair<std::int64_t, std::int64_t>, double> best_of;
  double sum = 0;
  for (const results::SampleRow& s : result.samples) {
    sum += s.score;
    double& best = best_of[{s.task_sample, s.question}];
    best = std::max(best, s.score);
    CHECK(s.first_divergence == -1);
    CHECK(std::isnan(s.kl) == (s.draw > 0));
  }
  double passed = 0;
  for (const auto& [question, best] : best_of) passed += best;
  CHECK(result.summary.score == Approx(sum / static_cast<double>(result.samples.size())));
  CHECK(result.summary.pass == Approx(passed / static_cast<double>(best_of.size())));
  CHECK(result.summary.pass > result.summary.score);
  CHECK(result.summary.pass_lo <= result.summary.pass);
  CHECK(result.summary.pass_hi >= result.summary.pass);
  CHECK(result.summary.draws == 4);
  CHECK(result.summary.sampling == "temperature 1.5, top_p 0.95, 4 draws, seed 7");
  CHECK(result.summary.labels.find("sampled") != std::string::npos);
  CHECK(result.fidelity.offsets.size() == result.samples.size() + 1);
}

TEST_CASE("what draws cannot have is refused") {
  Fixture f(test::policy_of("{oracle_evict: {budget: {tokens: 8}}}", 4));
  f.conversations();
  f.experiment.sampling = warm(2);
  CHECK_THROWS_WITH(f.run(), Catch::Contains("got sampling for 'oracle_evict'"));
}

TEST_CASE("a host_memory that holds no page is refused before the run, one that runs full is the cell's result") {
  for (const char* policy :
       {"{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}",
        "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 4}}",
        "{quest: {dense_layers: 0, min_pages: 1, budget: {tokens: 16}, placement: {tier: host, resident: 16}}}"}) {
    CAPTURE(policy);
    Fixture f(test::policy_of(policy, 8));
    f.experiment.spill = "always";
    f.add(f.text(90, 1), {}, 4);
    REQUIRE(f.run().summary.error == "");
    f.experiment.host_memory = 100;
    CHECK_THROWS_WITH(check_cell(f.input()),
                      Catch::Contains("got host_memory of 100 bytes for pages on the host, wanted at least ") &&
                          Catch::Contains("a page of 8 tokens of one KV head"));
    f.experiment.host_memory = 20'000;
    const results::CellResult result = f.run();
    CHECK(result.summary.status == "oom");
    CHECK_THAT(result.summary.error, Catch::Contains("where host_memory allows 20000"));
    CHECK(result.samples.empty());
  }
}

TEST_CASE("a budget that the roles of heads leave nothing of is refused before the run, for the longest prompt") {
  constexpr int longest = 90;
  const auto refusal = [](const std::string& budget) {
    Fixture f(test::policy_of("{heterocache: {profile: roles.h5, budget: {" + budget + "}}}", 8));
    f.add(f.text(20, 1), {}, 30);
    f.add(f.text(longest, 2), {}, 4);
    const std::int64_t layers = f.model->config.layers, heads = f.model->config.kv_heads;
    auto roles = std::make_shared<Profile>();
    for (const char* name : {"role", "pivot_of", "stable"}) (*roles)[name].extent = {layers, heads};
    for (int i = 0; i < layers * heads; ++i) {
      (*roles)["role"].values.push_back(i % heads == 0 ? 2 : 0);  // a pivot in each layer, and anchors
      (*roles)["pivot_of"].values.push_back(-1);
      (*roles)["stable"].values.push_back(.5f);
    }
    CellInput in = f.input();
    in.profile = roles;
    return test::message_of([&] { check_cell(in); });
  };
  const int heads = Fixture(test::policy_of("full", 8)).model->config.kv_heads, all = longest / heads;
  REQUIRE(longest % heads == 0);
  CHECK_THAT(
      refusal("tokens: " + std::to_string(all)),
      Catch::Contains(fmt::format("got a prompt of 90 tokens with a budget of {}, wanted more than {}: pivots and "
                                  "volatile heads keep all tokens",
                                  all, all)));
  CHECK(refusal("tokens: " + std::to_string(all + 1)) == "no error");
  CHECK_THAT(refusal("bytes: 1KB"), Catch::Contains("the budget gives the longest sequence") &&
                                        Catch::Contains("got a prompt of 90 tokens with a budget of"));
  CHECK(refusal("bytes: 1MB") == "no error");
}

TEST_CASE("a prompt with fewer tokens than clusters is refused before the run, wherever it stands") {
  const auto check = [](const char* clusters) {
    Fixture f(test::policy_of(
        std::string("{clusterkv: {sinks: 4, clusters: ") + clusters + ", dense_layers: 0, budget: {tokens: 8}}}", 8));
    f.add(f.text(90, 1), {}, 10);
    f.add(f.text(20, 2), {}, 4);
    check_cell(f.input());
  };
  CHECK_NOTHROW(check("16"));
  CHECK_THROWS_WITH(check("17"),
                    Catch::Contains("got 17 clusters for a prompt of 20 tokens, wanted at most 16, those behind"));
}

TEST_CASE("a share or bytes below sinks, window and a page are refused before the run, for the longest sequence") {
  const auto check = [](const std::string& policy) {
    Fixture f(test::policy_of(policy, 8));
    f.add(f.text(90, 1), {}, 10);
    f.add(f.text(20, 2), {}, 4);  // it would have less, and reads sinks and window in any case
    check_cell(f.input());
  };
  const std::string freekv = "{freekv: {sinks: 8, window: 8, budget: {",
                    flexicache = "{flexicache: {unstable_heads: false, budget: {",
                    arkvale = "{arkvale: {sinks: 8, window: 8, dense_layers: 0, budget: {";
  CHECK_THROWS_WITH(
      check(freekv + "ratio: 0.23}}}"),
      Catch::Contains("the budget gives the longest sequence, of 100 tokens, 23: got a budget of 23 tokens, "
                      "wanted at least 24: sinks, window and a page"));
  CHECK_NOTHROW(check(freekv + "ratio: 0.24}}}"));
  CHECK_THROWS_WITH(check(flexicache + "ratio: 0.23}}}"),
                    Catch::Contains("wanted at least 24: the newest ones and a page"));
  CHECK_NOTHROW(check(flexicache + "ratio: 0.24}}}"));
  CHECK_THROWS_WITH(check(arkvale + "ratio: 0.1}}}"),
                    Catch::Contains("wanted at least") && Catch::Contains("sinks and window"));
  for (const std::string& policy : {freekv, flexicache, arkvale}) {
    CHECK_THROWS_WITH(check(policy + "bytes: 1KB}}}"), Catch::Contains("wanted at least "));
    CHECK_NOTHROW(check(policy + "bytes: 1MB}}}"));
  }
}
