// Numbers that are not finite end a cell. They are counted, and the error names their first place.
#include "run/nonfinite.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <limits>

#include "compose/compose.hpp"
#include "result/results.hpp"
#include "run/runner.hpp"
#include "run/shadow.hpp"
#include "support/altered_checkpoint.hpp"
#include "support/cell_fixture.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using Catch::Contains;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

// The tiny model with every element of one tensor equal to `value`.
std::shared_ptr<const Model> tiny_with(const std::string& tensor, float value) {
  test::AlteredCheckpoint altered(open_checkpoint(test::golden("tiny/llama-gqa3")));
  altered.alter(tensor, [=](std::int64_t, std::int64_t, float) { return value; });
  return load_model(altered, DType::f32, "tiny");
}

struct TinyCell : test::CellFixture {
  explicit TinyCell(std::shared_ptr<const Model> of, const PolicySpec& policy = test::full_spec())
      : CellFixture(std::move(of), policy, {Metric::score, Metric::fidelity, Metric::memory}) {
    experiment.fidelity_tokens = 4;
    experiment.batch = 2;
    for (unsigned seed : {1u, 2u, 3u}) add(test::test_text(20, 320, seed), test::test_text(2, 320, seed + 7), 4);
  }
};

// Makes an element of a slot's cache NaN, in one layer after one decode step.
class Spoiler final : public Policy {
 public:
  Spoiler(int slot, int layer, int step, KvSide side) : slot_(slot), layer_(layer), step_(step), side_(side) {}
  Needs needs() const override { return {}; }
  void observe(const LayerStep& step, Edits&, Stream) override {
    for (int row = 0; row < step.rows(); ++row) {
      if (step.layer != layer_ || step.slots[row] != slot_ || step.step[row] != step_) continue;
      const PagedKv& kv = step.pages;
      const PageEntry& page = kv.entry(row, 1, 0);
      const PageLayout& l = kv.layout(page);
      *reinterpret_cast<float*>(kv.frame(page) + (side_ == KvSide::key ? l.k : l.v)) = nan_value;
    }
  }

 private:
  int slot_, layer_, step_;
  KvSide side_;
};

EngineOptions small_engine(int slots) {
  EngineOptions o;
  o.slots = slots;
  o.max_tokens = 64;
  o.page_size = 8;
  return o;
}

}  // namespace

TEST_CASE("a cell whose logits are not finite fails and says in which layer that began") {
  struct Case {
    std::string tensor;
    float value;
    std::string says;
  };
  const std::string layer = "model.layers.1.";
  // Weights are finite, but products overflow: keys or values of layer 1, the residual stream behind layer 1 and so the
  // whole next layer, or the final norm and so the logits alone.
  for (const Case& c : {Case{layer + "self_attn.k_proj.weight", 3e38f, "of the keys"},
                        Case{layer + "self_attn.v_proj.weight", 3e38f, "of the values"},
                        Case{layer + "mlp.down_proj.weight", 3e38f, "of the queries"},
                        Case{"model.norm.weight", 3e38f, "logits behind layer 2"}}) {
    CAPTURE(c.tensor);
    TinyCell cell(tiny_with(c.tensor, c.value));
    const auto result = cell.run();
    CAPTURE(result.summary.error);
    CHECK(result.summary.status == "failed");
    CHECK(result.summary.nonfinite > 0);
    CHECK(result.samples.empty());
    CHECK(std::isnan(result.summary.kl));
    CHECK(std::isnan(result.summary.top1));
    CHECK_THAT(result.summary.error,
               Contains(c.says) && Contains("sample 0, token ") && Contains("(of the prompt)") &&
                   Contains("got " + std::to_string(result.summary.nonfinite) + " numbers that are not finite"));
    if (c.says == "of the keys") CHECK_THAT(result.summary.error, Contains("in layer 1") && !Contains("values"));
    if (c.says == "of the queries") CHECK_THAT(result.summary.error, Contains("in layer 2") && Contains("of the keys"));
  }
  TinyCell good(test::tiny_model("llama-gqa3"));
  const auto result = good.run();
  CHECK(result.summary.status == "ok");
  CHECK(result.summary.nonfinite == 0);
}

TEST_CASE("a model's numbers that are not finite are the model's, whatever scores them") {
  for (const char* policy : {"knorm: {budget: {tokens: 8}}", "h2o: {budget: {tokens: 8}}",
                             "{name: split, scorer: knorm, budget: {tokens: 8, split: adakv}}"}) {
    CAPTURE(policy);
    TinyCell cell(tiny_with("model.layers.1.self_attn.k_proj.weight", 3e38f), test::policy_of(policy, 8));
    const auto result = cell.run();
    CAPTURE(result.summary.error);
    CHECK(result.summary.status == "failed");
    CHECK(result.summary.nonfinite > 0);
    CHECK_THAT(result.summary.error, Contains("of the keys") && Contains("in layer 1") && !Contains("plugin"));
  }
}

TEST_CASE("a cache entry that is not finite is found where no logits are asked for") {
  Engine engine(tiny_with("model.layers.2.self_attn.k_proj.weight", -3e38f), compose({}), small_engine(1));
  const int slot = engine.open();
  CHECK_THROWS_AS(engine.prefill(slot, test::test_text(9, 320), true, {}), NonFiniteStep);
}

TEST_CASE("a step that is not finite names its row, and a replay the layer, step and kind") {
  const auto model = test::tiny_model("llama-gqa3");
  for (const auto side : {KvSide::key, KvSide::value})
    for (const int layer : {0, 1, 2}) {
      CAPTURE(static_cast<int>(side), layer);
      const auto spoiler = [&](int slot) { return std::make_shared<Spoiler>(slot, layer, 2, side); };
      Engine engine(model, spoiler(1), small_engine(3));
      std::vector<std::int32_t> slots;
      for (unsigned i = 0; i < 3; ++i) {
        slots.push_back(engine.open(i));
        engine.ask(slots.back(), 10 + i);
        REQUIRE(engine.prefill(slots.back(), test::test_text(12, 320, i + 1), true, {}) == Fit::ok);
      }
      std::vector<std::int32_t> likeliest(3);
      const std::vector<int> tokens{5, 6, 7};
      for (int step = 0; step < 3; ++step) REQUIRE(engine.step(slots, tokens, StepResult(likeliest)) == Fit::ok);
      CHECK(std::count(likeliest.begin(), likeliest.end(), -1) == 0);
      std::optional<NonFiniteStep> seen;
      try {
        engine.step(slots, tokens, StepResult(likeliest));
      } catch (const NonFiniteStep& e) {
        seen = e;
      }
      REQUIRE(seen);
      CHECK(likeliest[0] >= 0);
      CHECK(likeliest[1] == -1);
      CHECK(likeliest[2] >= 0);
      REQUIRE(seen->rows().size() == 1);
      CHECK(seen->rows()[0].question == 11);
      CHECK(seen->rows()[0].sequence == 1);
      // The value is spoilt after step 2. The attention of step 3 sees it, at token 15.
      const NonFinite found = located(
          model, [&] { return spoiler(0); }, small_engine(3), *seen);
      CHECK_THAT(found.what(), Contains("sample 11, token 15 (of decode step 3)") &&
                                   Contains("of the attention output in layer " + std::to_string(layer)) &&
                                   !Contains("queries"));
      CHECK(found.count() > 1);
      // Nothing is spoilt in the replay, so the first error stays.
      CHECK_THAT(located(
                     model, [] { return compose({}); }, small_engine(3), *seen)
                     .what(),
                 Contains("in 1 sequence"));
    }
}

TEST_CASE("what a sequence was given is replayed with its prompt's parts, also after a restore") {
  const auto model = test::tiny_model("llama-gqa3");
  const auto spoiler = [] { return std::make_shared<Spoiler>(0, 1, 1, KvSide::value); };
  EngineOptions options = small_engine(2);
  options.prefill_chunk = 5;
  Engine engine(model, spoiler(), options);
  const int first = engine.open(), second = engine.open();
  const auto text = test::test_text(13, 320);
  REQUIRE(engine.prefill(second, {text.data(), 10}, false, {}) == Fit::ok);
  REQUIRE(engine.prefill(second, {text.data() + 10, 3}, true, {}) == Fit::ok);
  const int token = 4;
  REQUIRE(engine.step({second}, {&token, 1}, {}) == Fit::ok);
  REQUIRE(engine.restore(first, engine.save(second)) == Fit::ok);
  REQUIRE(engine.step({first}, {&token, 1}, {}) == Fit::ok);
  try {
    engine.step({first}, {&token, 1}, {});
    FAIL("the spoilt value was not seen");
  } catch (const NonFiniteStep& e) {
    REQUIRE(e.rows().size() == 1);
    CHECK(e.rows()[0].given.size() == 3);
    CHECK_THAT(located(model, spoiler, options, e).what(),
               Contains("token 15 (of decode step 2)") && Contains("layer 1"));
  }
}

TEST_CASE("the full cache's own run is looked at too") {
  ReferenceCache references;
  Item item;
  item.prompt = test::test_text(12, 320);
  item.max_new = 3;
  item.sha256 = "x";
  try {
    references.get(tiny_with("model.norm.weight", 3e38f), item, 8, 3);
    FAIL("logits that are not finite became a reference");
  } catch (const NonFinite& e) {
    CHECK_THAT(e.what(), Contains("the full cache's run") && Contains("logits behind layer 2"));
    CHECK(e.count() > 0);
  }
}

TEST_CASE("the shadow's figures of numbers that are not finite are no good ones, and counted") {
  // Changes one element of the policy's output: first, middle or last.
  struct Changed final : EngineObserver {
    explicit Changed(const Model& m) : shadow(m, 8, 64) {}
    void prompt(const PromptLayer& l, const Store& s) override { shadow.prompt(l, s); }
    void attended(const DecodeLayer& l, const Store& s) override {
      if (l.layer != 1) return shadow.attended(l, s);
      const std::size_t n = static_cast<std::size_t>(l.output.extent[1] * l.output.extent[2]);
      std::vector<float> out(l.output.data, l.output.data + n), values(l.values.data, l.values.data + 32);
      DecodeLayer changed = l;
      (in_value ? values[0] : out[std::min(at, n - 1)]) = value;
      changed.output = View<const float, 3>::dense(out.data(), l.output.extent);
      changed.values = View<const float, 3>::dense(values.data(), l.values.extent);
      shadow.attended(changed, s);
    }
    Shadow shadow;
    bool in_value = false;
    std::size_t at = 0;
    float value = 0;
  };
  const auto model = test::tiny_model("llama-gqa3");
  for (const float value : {nan_value, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
    for (const std::size_t at : {0u, 40u, 1000u, 2000u}) {
      CAPTURE(value, at);
      Changed changed(*model);
      changed.value = value;
      changed.at = at;
      changed.in_value = at == 2000;  // a value of the new token, so full attention's own output changes
      Engine engine(model, compose({}), small_engine(1));
      engine.observe(&changed);
      const int slot = engine.open(), token = 3;
      REQUIRE(engine.prefill(slot, test::test_text(12, 320), true, {}) == Fit::ok);
      REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
      const Shadow::Rows rows = changed.shadow.take();
      REQUIRE(rows.mass.size() == 3);
      CHECK(rows.nonfinite > 0);
      CHECK(rows.layer == 1);
      CHECK(std::isnan(rows.mass[1]));
      CHECK(std::isnan(rows.page_recall[1]));
      CHECK(std::isnan(rows.output_error[1]));
      CHECK(rows.mass[0] == Approx(1));
      CHECK(rows.output_error[2] < 1e-5f);
    }
}

TEST_CASE("a measured number that is not finite ends the cell by name") {
  CHECK_NOTHROW(want_finite(0, "a score", 1));
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    try {
      want_finite(value, "a score by 'f1'", 7);
      FAIL("no error");
    } catch (const NonFinite& e) {
      CHECK(e.count() == 1);
      CHECK_THAT(e.what(), Contains("sample 7: got a score by 'f1' of ") && Contains("wanted a finite number"));
    }
  }
}

TEST_CASE("weights that are not finite fail their model's cells; those of other models run") {
  const test::TempDir dir;
  namespace fs = std::filesystem;
  const auto model = [&](const std::string& name, std::optional<float> bad) {
    fs::copy(test::golden("tiny/llama-gqa3"), dir / name, fs::copy_options::recursive);
    if (!bad) return;
    std::fstream file(dir / name / "model.safetensors", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-static_cast<std::streamoff>(sizeof *bad), std::ios::end);
    file.write(reinterpret_cast<const char*>(&*bad), sizeof *bad);
  };
  model("good", {});
  model("nan", nan_value);
  model("inf", std::numeric_limits<float>::infinity());
  std::ofstream yaml(dir / "e.yaml");
  yaml << "model:\n";
  for (const char* name : {"nan", "good", "inf"}) yaml << "  - {path: " << (dir / name).string() << ", dtype: f32}\n";
  yaml << "tasks: [text: {prefix: 50, forced: 10, samples: 1}]\npolicies: [full]\nmetrics: [score, memory]\n"
       << "output: " << (dir / "out.h5").string() << "\n";
  yaml.close();
  const auto& catalog = test::built_catalog();
  CHECK(run_experiment(load_experiment(dir / "e.yaml", {}, catalog), catalog, {"test", false, true}) == 1);
  const auto rows = results::read_summary((dir / "out.h5").string()).rows;
  REQUIRE(rows.size() == 3);
  for (const auto& row : rows) {
    CAPTURE(row.model, row.error);
    const bool good = row.model.ends_with("good");
    CHECK(row.status == (good ? "ok" : "failed"));
    CHECK(row.nonfinite == (good ? 0 : 1));
    if (!good) CHECK_THAT(row.error, Contains("tensor model.") && Contains("got 1 of ") && Contains("NaN or infinite"));
  }
}
