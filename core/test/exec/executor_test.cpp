// The executor against logits that transformers computed.
#include "exec/cpu_executor.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/sha256.hpp"
#include "cases/quick.hpp"
#include "model/bundled.hpp"
#include "model/mapped_file.hpp"
#include "support/golden.hpp"
#include "support/null_hooks.hpp"

using namespace kvlab;

namespace {

std::shared_ptr<const Model> model_at(const std::filesystem::path& path, DType dtype) {
  return load_model(*open_checkpoint(path), dtype, path.filename().string());
}

CpuStore store_for(const Model& m, int tokens, RopeRegime rope = RopeRegime::original) {
  StoreOptions o;
  o.shape.layers = m.config.layers;
  o.shape.query_heads = m.config.heads;
  o.shape.kv_heads = m.config.kv_heads;
  o.shape.head_dim = m.config.head_dim;
  o.shape.page_size = 16;
  o.shape.max_slots = 1;
  o.shape.max_tokens = tokens;
  o.shape.dtype = m.dtype;
  o.rope = rope;
  o.rope_table = m.rope();
  return CpuStore(o);
}

// Logits after every token: `prompt` tokens in chunks of `chunk`, the rest one by one.
std::vector<float> run(std::shared_ptr<const Model> m, const std::vector<std::int32_t>& ids, std::size_t prompt,
                       std::size_t chunk, RopeRegime rope = RopeRegime::original) {
  CpuStore store = store_for(*m, static_cast<int>(ids.size()), rope);
  CpuExecutor executor(m, store);
  test::NullHooks hooks;
  const std::size_t vocab = static_cast<std::size_t>(m->config.vocab);
  std::vector<float> logits(ids.size() * vocab);
  const auto rows = [&](std::size_t first, std::size_t count) {
    return View<float, 2>::dense(logits.data() + first * vocab,
                                 {static_cast<std::int64_t>(count), static_cast<std::int64_t>(vocab)});
  };
  const int slot = store.open();
  for (std::size_t at = 0; at < prompt; at += chunk) {
    const std::size_t n = std::min(chunk, prompt - at);
    REQUIRE(executor.prefill(slot, {ids.data() + at, n}, at + n == prompt, hooks, rows(at, n)) == Fit::ok);
  }
  for (std::size_t at = prompt; at < ids.size(); ++at)
    REQUIRE(executor.decode({slot}, {ids.data() + at, 1}, hooks, rows(at, 1)) == Fit::ok);
  store.check_invariants();
  return logits;
}

double worst(const std::vector<float>& a, const std::vector<float>& b, std::size_t vocab) {
  double all = 0;
  for (std::size_t row = 0; row < a.size() / vocab; ++row) {
    double error = 0, scale = 0;
    for (std::size_t i = 0; i < vocab; ++i) {
      error = std::max(error, std::abs(double(a[row * vocab + i]) - b[row * vocab + i]));
      scale = std::max(scale, std::abs(double(b[row * vocab + i])));
    }
    all = std::max(all, error / scale);
  }
  return all;
}

}  // namespace

TEST_CASE("tiny models of every family give transformers' logits in f32") {
  const std::string variant = GENERATE(as<std::string>{}, "llama-mha", "llama-gqa3", "llama-gqa4-rope3", "llama-mqa7",
                                       "qwen2", "qwen3", "mistral-window32");
  CAPTURE(variant);
  const auto m = model_at(test::golden("tiny/" + variant), DType::f32);
  test::GoldenFile file(test::golden("tiny/" + variant) / "logits.bin", "KVTINY01");
  REQUIRE(file.get<std::uint32_t>() == 1);
  const auto n = file.get<std::uint32_t>(), vocab = file.get<std::uint32_t>();
  const auto ids = file.many<std::int32_t>(n);
  const auto expected = file.many<float>(std::size_t{n} * vocab);
  CHECK(worst(run(m, ids, n, n), expected, vocab) < 2e-5);
  CHECK(worst(run(m, ids, n, 17), expected, vocab) < 2e-5);   // chunked prompt
  CHECK(worst(run(m, ids, 40, 40), expected, vocab) < 2e-5);  // then decode
  CHECK(worst(run(m, ids, 1, 1), expected, vocab) < 2e-5);    // one-token prompt
  // With nothing evicted, ranks are positions: the other RoPE regimes must agree.
  CHECK(worst(run(m, ids, 40, 23, RopeRegime::cache_relative), expected, vocab) < 2e-5);
  CHECK(worst(run(m, ids, 40, 23, RopeRegime::re_rotate), expected, vocab) < 2e-5);
}

TEST_CASE("a merged adapter gives transformers' and peft's logits in f32") {
  const std::filesystem::path folder = test::golden("tiny/llama-gqa3");
  const auto m = load_model(*open_model(folder, folder / "adapter", ""), DType::f32, "tiny");
  test::GoldenFile file(folder / "adapter/logits.bin", "KVTINY01");
  REQUIRE(file.get<std::uint32_t>() == 1);
  const auto n = file.get<std::uint32_t>(), vocab = file.get<std::uint32_t>();
  const auto ids = file.many<std::int32_t>(n);
  const auto expected = file.many<float>(std::size_t{n} * vocab);
  CHECK(worst(run(m, ids, n, n), expected, vocab) < 2e-5);
}

namespace {

std::string text_at(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
nlohmann::json golden_json(const std::string& name) {
  return nlohmann::json::parse(text_at(test::golden(name + "_logits.json")));
}

// Checks the token ids of the texts and the worst error of the logits over each position's largest logit.
void compare_with_golden(const std::string& name, const std::shared_ptr<const Model>& m) {
  test::GoldenFile file(test::golden(name + "_logits.bin"), "KVGOLD01");
  REQUIRE(file.get<std::uint32_t>() == 1);
  file.get<std::uint32_t>();
  const auto vocab = file.get<std::uint32_t>(), sampled = file.get<std::uint32_t>(), top = file.get<std::uint32_t>(),
             sequences = file.get<std::uint32_t>();
  REQUIRE(m->config.vocab == static_cast<int>(vocab));
  const auto sampled_ids = file.many<std::int32_t>(sampled);
  const auto about = golden_json(name).at("sequences");
  for (std::uint32_t s = 0; s < sequences; ++s) {
    const auto n = file.get<std::uint32_t>();
    const auto ids = file.many<std::int32_t>(n);
    auto encoded = m->tokenizer->encode(text_at(test::golden(about.at(s).at("text"))), false, false);
    REQUIRE(encoded.size() >= n);
    encoded.resize(n);
    CHECK(encoded == ids);
    const auto scale = file.many<float>(n), at_sampled = file.many<float>(std::size_t{n} * sampled);
    const auto top_ids = file.many<std::int32_t>(std::size_t{n} * top);
    const auto at_top = file.many<float>(std::size_t{n} * top);
    const auto logits = run(m, ids, n - 4, n - 4);
    double all = 0;
    for (std::uint32_t t = 0; t < n; ++t) {
      const float* row = logits.data() + std::size_t{t} * vocab;
      for (std::uint32_t i = 0; i < sampled; ++i)
        all = std::max<double>(all, std::abs(row[sampled_ids[i]] - at_sampled[t * sampled + i]) / scale[t]);
      for (std::uint32_t i = 0; i < top; ++i)
        all = std::max<double>(all, std::abs(row[top_ids[t * top + i]] - at_top[t * top + i]) / scale[t]);
    }
    CAPTURE(name, s);
    CHECK(all < 1e-3);
    WARN(name << ", sequence " << s << ": worst error " << all);
  }
}

// The golden file belongs to these weights. Another training run needs another export.
void check_exported_from(const std::string& name, const std::filesystem::path& weights) {
  const std::string of = golden_json(name).at("files").at(weights.filename().string());
  INFO(weights << " has changed: run tools/goldens/export_logits.py as its README says");
  REQUIRE(sha256_hex(MappedFile(weights).text()) == of);
}

std::optional<std::filesystem::path> smollm2() {
  try {
    return resolve_model_path("bundled/smollm2", "");
  } catch (const Error& e) {
    WARN("not checked, the model is not here: " << e.what());
    return {};
  }
}

}  // namespace

TEST_CASE("the bundled recall model gives transformers' logits on real text in f32") {
  const std::filesystem::path folder = resolve_model_path("bundled/recall", "");
  check_exported_from("recall", folder / "model.safetensors");
  compare_with_golden("recall", model_at(folder, DType::f32));
}

// Under sanitizers the two take minutes, and run no code that the tiny models do not.
TEST_CASE("SmolLM2 gives transformers' logits on real text in f32") {
  if (cases::quick()) return;
  if (const auto path = smollm2()) compare_with_golden("smollm2", model_at(*path, DType::f32));
}

TEST_CASE("SmolLM2 with the bundled adapter gives transformers' and peft's logits on real text in f32") {
  const std::string adapter = "bundled/smollm2-recall";
  check_exported_from("smollm2-recall", resolve_model_path(adapter, "") / "adapter_model.safetensors");
  if (!cases::quick() && smollm2())
    compare_with_golden("smollm2-recall",
                        load_model(*open_model("bundled/smollm2", adapter, ""), DType::f32, "smollm2-recall"));
}
