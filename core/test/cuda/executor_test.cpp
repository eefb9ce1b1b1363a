// Models on CUDA against the CPU: logits agree within bf16's rounding, with or without chunks, alone or in a batch.
#include "exec/executor.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <kvlab/error.hpp>

#include "cases/quick.hpp"
#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "support/golden.hpp"
#include "support/null_hooks.hpp"

using namespace kvlab;

namespace {

struct Tiny {
  std::shared_ptr<const Model> model;
  std::vector<std::int32_t> ids;
  std::vector<float> logits;  // f32, of transformers
  std::size_t vocab = 0;

  // Random weights, with heads that the fast kernels take.
  explicit Tiny(int tokens)
      : model(load_model(*open_model("synthetic/tiny-wide", "", "."), DType::bf16, "tiny-wide", Device::cuda)),
        vocab(static_cast<std::size_t>(model->config.vocab)) {
    for (int i = 0; i < tokens; ++i) ids.push_back((i * 37 + i * i) % model->config.vocab);
  }
  Tiny(const std::string& variant, Device device, DType dtype = DType::bf16) {
    const auto folder = test::golden("tiny/" + variant);
    model = load_model(*open_checkpoint(folder), dtype, variant, device);
    test::GoldenFile file(folder / "logits.bin", "KVTINY01");
    REQUIRE(file.get<std::uint32_t>() == 1);
    const auto n = file.get<std::uint32_t>();
    vocab = file.get<std::uint32_t>();
    ids = file.many<std::int32_t>(n);
    logits = file.many<float>(n * vocab);
  }
};

EngineOptions options(Device device, int slots, int chunk) {
  EngineOptions o;
  o.device = device;
  o.slots = slots;
  o.max_tokens = 160;
  o.page_size = 16;
  o.prefill_chunk = chunk;
  return o;
}

View<float, 2> rows(std::vector<float>& data, std::size_t first, std::size_t count, std::size_t vocab) {
  return View<float, 2>::dense(data.data() + first * vocab,
                               {static_cast<std::int64_t>(count), static_cast<std::int64_t>(vocab)});
}

struct Everything final : Policy {
  explicit Everything(RopeRegime regime = RopeRegime::original) : rope(regime) {}
  Needs needs() const override { return Needs{}.mass(Mass::decode).rope(rope); }
  RopeRegime rope;
};

// Logits after each of the last tokens: `prompt` tokens in chunks, the others one by one.
std::vector<float> run(const Tiny& t, Device device, std::size_t prompt, int chunk,
                       RopeRegime rope = RopeRegime::original) {
  EngineOptions o = options(device, 1, chunk);
  o.max_tokens = std::max(o.max_tokens, static_cast<int>(t.ids.size()));
  Engine engine(t.model, std::make_shared<Everything>(rope), o);
  const int slot = engine.open();
  std::vector<float> out((t.ids.size() - prompt + 1) * t.vocab);
  REQUIRE(engine.prefill(slot, {t.ids.data(), prompt}, true, rows(out, 0, 1, t.vocab)) == Fit::ok);
  for (std::size_t at = prompt; at < t.ids.size(); ++at)
    REQUIRE(engine.step({slot}, {t.ids.data() + at, 1}, rows(out, at - prompt + 1, 1, t.vocab)) == Fit::ok);
  engine.store().check_invariants();
  return out;
}

// Largest error over the largest logit of its row.
double worst(const std::vector<float>& a, const float* b, std::size_t vocab) {
  double all = 0;
  for (std::size_t row = 0; row < a.size() / vocab; ++row) {
    double error = 0, scale = 0;
    for (std::size_t i = row * vocab; i < (row + 1) * vocab; ++i) {
      error = std::max(error, std::abs(double(a[i]) - b[i]));
      scale = std::max(scale, std::abs(double(b[i])));
    }
    all = std::max(all, std::isfinite(error) ? error / scale : INFINITY);
  }
  return all;
}

void check_variant(const std::string& variant, int chunk) {
  CAPTURE(variant, chunk);
  const Tiny cpu(variant, Device::cpu), cuda(variant, Device::cuda);
  const std::size_t prompt = cpu.ids.size() - 6;
  const float* wanted = cpu.logits.data() + (prompt - 1) * cpu.vocab;
  const auto there = run(cuda, Device::cuda, prompt, chunk);
  const double on_cpu = worst(run(cpu, Device::cpu, prompt, chunk), wanted, cpu.vocab),
               on_cuda = worst(there, wanted, cpu.vocab);
  CAPTURE(on_cpu, on_cuda);
  CHECK(on_cuda < 0.04);                // random weights, a dozen products of 8-bit mantissas
  CHECK(on_cuda < 2 * on_cpu + 0.004);  // no worse than the CPU's bf16
}

std::vector<const char*> variants() {
  if (cases::quick()) return {"llama-gqa3", "qwen3", "mistral-window32"};
  return {"llama-mha", "llama-gqa3", "llama-gqa4-rope3", "llama-mqa7", "qwen2", "qwen3", "mistral-window32"};
}

}  // namespace

TEST_CASE("cuda executor: tiny models of every family give transformers' logits") {
  for (const char* variant : variants()) check_variant(variant, 13);
}

TEST_CASE("cuda executor: whole prompts give transformers' logits") {
  for (const char* variant : variants()) check_variant(variant, 0);
}

TEST_CASE("cuda executor: f16 is closer to transformers' logits than bf16 can be") {
  for (const char* variant : variants()) {
    CAPTURE(variant);
    const Tiny t(variant, Device::cuda, DType::f16);
    const std::size_t prompt = t.ids.size() - 6;
    CHECK(worst(run(t, Device::cuda, prompt, 13), t.logits.data() + (prompt - 1) * t.vocab, t.vocab) < 0.005);
  }
}

TEST_CASE("cuda executor: keys by their place give transformers' logits while nothing leaves") {
  for (const char* variant : {"llama-gqa3", "qwen3"})
    for (const DType dtype : {DType::bf16, DType::f16}) {
      if (cases::quick() && variant != std::string("qwen3")) continue;
      const Tiny t(variant, Device::cuda, dtype);
      const std::size_t prompt = t.ids.size() - 6;
      for (const RopeRegime rope : {RopeRegime::cache_relative, RopeRegime::re_rotate})
        for (const int chunk : {0, 13}) {
          if (cases::quick() && dtype == DType::f16 && chunk == 0) continue;
          CAPTURE(variant, name_of(dtype), static_cast<int>(rope), chunk);
          CHECK(worst(run(t, Device::cuda, prompt, chunk, rope), t.logits.data() + (prompt - 1) * t.vocab, t.vocab) <
                (dtype == DType::f16 ? 0.005 : 0.04));
        }
    }
}

TEST_CASE("cuda executor: keys by their place give what text positions give, with heads of 64") {
  const Tiny t(cases::quick() ? 90 : 700);
  const std::size_t prompt = t.ids.size() - 3;
  const auto wanted = run(t, Device::cuda, prompt, 0);
  for (const RopeRegime rope : {RopeRegime::cache_relative, RopeRegime::re_rotate})
    for (const int chunk : {0, 50})
      CHECK(worst(run(t, Device::cuda, prompt, chunk, rope), wanted.data(), t.vocab) < 0.03);
}

TEST_CASE("cuda executor: a prompt's attention mass is the CPU's") {
  struct Keeper final : LayerHooks {
    explicit Keeper(Stream s) : stream(s) {}
    bool wants_prompt_mass() const override { return true; }
    Fit prompt(const PromptLayer& l) override {
      std::vector<float> copy(static_cast<std::size_t>(l.mass.extent[0] * l.mass.extent[1]));
      copy_memory(copy.data(), l.mass.data, copy.size() * sizeof(float), stream);
      synchronize(stream);
      mass.push_back(std::move(copy));
      return Fit::ok;
    }
    Stream stream;
    std::vector<std::vector<float>> mass;  // [chunk, layer]
  };
  std::vector<std::vector<float>> mass[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const Tiny t("llama-gqa4-rope3", device);
    const OwnedStream stream(device);
    StoreOptions o;
    const ModelConfig& c = t.model->config;
    o.shape = {c.layers, c.heads, c.kv_heads, c.head_dim, 16, 2, 96, DType::bf16};
    o.rope_table = t.model->rope();
    const auto store = make_store(o, stream.get());
    const auto executor = make_executor(t.model, *store);
    Keeper hooks(stream.get());
    store->open();
    const int slot = store->open();
    for (std::size_t at = 0; at < 39; at += 13)
      REQUIRE(executor->prefill(slot, {t.ids.data() + at, 13}, at == 26, hooks, {}) == Fit::ok);
    mass[static_cast<std::size_t>(device)] = hooks.mass;
  }
  REQUIRE(mass[1].size() == mass[0].size());
  for (std::size_t i = 0; i < mass[0].size(); ++i) {
    REQUIRE(mass[1][i].size() == mass[0][i].size());
    for (std::size_t j = 0; j < mass[0][i].size(); ++j) REQUIRE(mass[1][i][j] == Approx(mass[0][i][j]).margin(0.05));
  }
}

// If no hook reads the outputs, attention is 16-bit, and cuDNN takes the 16-bit queries that the rotation rounded. Else
// outputs and queries are f32 and are rounded later. The bits must be equal; the second layer's queries show it.
TEST_CASE("cuda executor: a long prompt's queries are the same whether hooks read the outputs or not") {
  struct Reader final : LayerHooks {
    Reader(bool reads, Stream s) : outputs(reads), stream(s) {}
    bool wants_prompt_output() const override { return outputs; }
    Fit prompt(const PromptLayer& l) override {
      const auto& q = l.queries;
      const std::size_t width = static_cast<std::size_t>(q.extent[1] * q.extent[2]);
      for (std::int64_t r = 0; r < q.extent[0]; r += 7) {
        queries.resize(queries.size() + width);
        copy_memory(&queries[queries.size() - width], q.data + r * q.stride[0], width * sizeof(float), stream);
        synchronize(stream);
      }
      return l.layer == 1 ? Fit::out_of_memory : Fit::ok;  // stops after two layers
    }
    bool outputs;
    Stream stream;
    std::vector<float> queries;
  };
  const auto model = load_model(*open_model("bundled/recall", "", ""), DType::bf16, "bundled/recall", Device::cuda);
  const ModelConfig& c = model->config;
  REQUIRE(c.head_dim == 64);  // a head size of cuDNN
  std::vector<std::int32_t> tokens(520);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>((7 * i + i * i) % 251);
  std::vector<float> queries[2];
  for (const bool reads : {false, true}) {
    const OwnedStream stream(Device::cuda);
    StoreOptions o;
    o.shape = {c.layers, c.heads, c.kv_heads, c.head_dim, 16, 1, 540, DType::bf16};
    o.rope_table = model->rope();
    const auto store = make_store(o, stream.get());
    const auto executor = make_executor(model, *store);
    Reader hooks(reads, stream.get());
    REQUIRE(executor->prefill(store->open(), tokens, true, hooks, {}) == Fit::out_of_memory);
    queries[reads] = hooks.queries;
  }
  CHECK(queries[0].size() == static_cast<std::size_t>(2 * 75 * c.heads * c.head_dim));
  CHECK(std::all_of(queries[0].begin(), queries[0].end(), [](float x) { return std::isfinite(x); }));
  const bool same = queries[0] == queries[1];  // Catch need not print them
  CHECK(same);
}

TEST_CASE("cuda engine: a ragged batch equals the sequences alone; a saved one goes on") {
  const Tiny t("llama-gqa3", Device::cuda);
  const std::vector<std::size_t> prompts = {12, 3, 7};
  constexpr std::size_t steps = 20;
  std::vector<std::vector<float>> alone;
  for (const std::size_t prompt : prompts) {
    Engine engine(t.model, std::make_shared<Everything>(), options(Device::cuda, 1, 13));
    const int slot = engine.open();
    std::vector<float> out(steps * t.vocab);
    REQUIRE(engine.prefill(slot, {t.ids.data(), prompt}, true, {}) == Fit::ok);
    for (std::size_t i = 0; i < steps; ++i)
      REQUIRE(engine.step({slot}, {t.ids.data() + prompt + i, 1}, rows(out, i, 1, t.vocab)) == Fit::ok);
    alone.push_back(std::move(out));
  }
  Engine engine(t.model, std::make_shared<Everything>(), options(Device::cuda, 4, 13));
  std::vector<std::int32_t> slots;
  for (const std::size_t prompt : prompts) {
    slots.push_back(engine.open());
    REQUIRE(engine.prefill(slots.back(), {t.ids.data(), prompt}, true, {}) == Fit::ok);
  }
  std::vector<float> out(3 * t.vocab);
  for (std::size_t i = 0; i < steps; ++i) {
    std::vector<int> tokens;
    for (const std::size_t prompt : prompts) tokens.push_back(t.ids[prompt + i]);
    REQUIRE(engine.step(slots, tokens, rows(out, 0, 3, t.vocab)) == Fit::ok);
    for (std::size_t r = 0; r < 3; ++r) {
      const std::vector<float> row(out.begin() + static_cast<std::ptrdiff_t>(r * t.vocab),
                                   out.begin() + static_cast<std::ptrdiff_t>((r + 1) * t.vocab));
      CHECK(worst(row, alone[r].data() + i * t.vocab, t.vocab) < 0.01);
    }
  }
  const int token = t.ids[40], other = engine.open();
  REQUIRE(engine.restore(other, engine.save(slots[0])) == Fit::ok);
  std::vector<float> first(t.vocab), again(t.vocab);
  REQUIRE(engine.step({slots[0]}, {&token, 1}, rows(first, 0, 1, t.vocab)) == Fit::ok);
  REQUIRE(engine.step({other}, {&token, 1}, rows(again, 0, 1, t.vocab)) == Fit::ok);
  CHECK(first == again);
  engine.store().check_invariants();
}

TEST_CASE("cuda engine: what cannot run is refused by name") {
  const auto refused = [](auto work, const std::string& text) {
    try {
      work();
      FAIL("not refused");
    } catch (const Error& error) {
      CHECK(error.code() == Errc::unsupported);
      CHECK_THAT(error.what(), Catch::Contains(text));
    }
  };
  const Tiny cpu("llama-gqa3", Device::cpu);
  refused([&] { Engine(cpu.model, std::make_shared<Everything>(), options(Device::cuda, 1, 0)); },
          "got model llama-gqa3 loaded for the CPU, wanted one loaded for CUDA");
  refused([&] { load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny", Device::cuda); },
          "f32, wanted bf16 or f16 on CUDA");
}
