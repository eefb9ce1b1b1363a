// Whole-model cases: random weights in SmolLM2-135M's shape (speed does not depend on their values), bf16, the full
// cache.
#include <cmath>
#include <cstdint>

#include "bench/cases.hpp"
#include "engine/engine.hpp"
#include "host/compose.hpp"

namespace kvlab::bench {
namespace {

constexpr int depth = 2048, decode_steps = 24;

// Weights out of a counter: uniform, scaled so that activations neither vanish nor grow.
class RandomCheckpoint final : public Checkpoint {
 public:
  RandomCheckpoint() {
    config_.layers = 30;
    config_.hidden = 576;
    config_.heads = 9;
    config_.kv_heads = 3;
    config_.head_dim = 64;
    config_.ffn = 1536;
    config_.vocab = 49152;
    config_.context = 8192;
    config_.rope_theta = 1e5f;
    config_.tied_embeddings = true;
    fingerprint_ = "random";
  }
  bool has(std::string_view) const override { return true; }
  std::vector<std::int64_t> shape(std::string_view name) const override {
    const auto is = [&](std::string_view part) { return name.find(part) != name.npos; };
    const std::int64_t hidden = config_.hidden, kv = std::int64_t{config_.kv_heads} * config_.head_dim;
    if (is("norm")) return {hidden};
    if (is("embed")) return {config_.vocab, hidden};
    if (is("k_proj") || is("v_proj")) return {kv, hidden};
    if (is("gate") || is("up")) return {config_.ffn, hidden};
    if (is("down")) return {hidden, config_.ffn};
    return {hidden, hidden};
  }
  std::vector<std::string> names() const override { return {}; }
  std::string stored_type(std::string_view) const override { return "random"; }
  void read_rows(std::string_view name, std::int64_t first, std::int64_t rows, float* out) const override {
    const auto s = shape(name);
    const std::int64_t columns = s.back();
    const float scale = s.size() == 1 ? 0.f : std::sqrt(3.f / static_cast<float>(columns));
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      std::uint64_t x = static_cast<std::uint64_t>(first * columns + i) * 0x9e3779b97f4a7c15u + name.size();
      x ^= x >> 31;
      x *= 0xbf58476d1ce4e5b9u;
      out[i] = s.size() == 1 ? 1.f : scale * (static_cast<float>(x >> 40) * 0x1p-23f - 1.f);
    }
  }
};

struct Bench {
  std::shared_ptr<const Model> model = load_model(RandomCheckpoint(), DType::bf16, "random SmolLM2-135M");
  EngineOptions options() const {
    EngineOptions o;
    o.max_tokens = depth + decode_steps + 8;
    return o;
  }
  std::vector<int> prompt() const {
    std::vector<int> tokens(depth);
    for (int i = 0; i < depth; ++i)
      tokens[static_cast<std::size_t>(i)] = static_cast<int>(i * 7919LL % model->config.vocab);
    return tokens;
  }
};

// Decode steps one after another; the cache grows by `decode_steps` tokens, about 1% of the depth.
Times time_steps(Engine& engine, int slot, int token, View<float, 2> logits) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> t;
  engine.step({slot}, {&token, 1}, logits);
  for (int i = 0; i < decode_steps; ++i) {
    const auto begin = Clock::now();
    engine.step({slot}, {&token, 1}, logits);
    t.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::sort(t.begin(), t.end());
  return {t[t.size() / 2], t.front()};
}

}  // namespace

std::vector<Line> prefill_cases() {
  const Bench b;
  Engine engine(b.model, compose({}), b.options());
  const auto prompt = b.prompt();
  std::vector<float> logits(static_cast<std::size_t>(b.model->config.vocab));
  const Times t = time_runs(3, [&] {
    const int slot = engine.open();
    engine.prefill(slot, prompt, true, View<float, 2>::dense(logits.data(), {1, b.model->config.vocab}));
    engine.close(slot);
  });
  const ModelConfig& c = b.model->config;
  const double head = 2. * c.vocab * c.hidden;
  const double linear =
      (static_cast<double>(b.model->weight_bytes) - head) * depth + head;         // 2 flops per 2-byte weight
  const double attention = 2. * depth * depth * c.heads * c.head_dim * c.layers;  // causal half of Q K and P V
  Line l;
  l.op = "prefill";
  l.shape = "SmolLM2-135M shape, 2048 tokens";
  l.kernel = b.model->head.kernel();
  l.seconds = t.median;
  l.best = t.best;
  l.flops = linear + attention;
  return {l};
}

std::vector<Line> decode_cases() {
  const Bench b;
  Engine engine(b.model, compose({}), b.options());
  const auto prompt = b.prompt();
  std::vector<float> logits(static_cast<std::size_t>(b.model->config.vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, b.model->config.vocab});
  const int slot = engine.open();
  engine.prefill(slot, prompt, true, view);
  const Times t = time_steps(engine, slot, prompt[0], view);
  const Ledger& ledger = engine.ledger();
  Line l;
  l.op = "decode";
  l.shape = "SmolLM2-135M shape, depth 2048, batch 1";
  l.kernel = b.model->head.kernel();
  l.seconds = t.median;
  l.best = t.best;
  l.bytes = static_cast<double>(b.model->weight_bytes) +
            static_cast<double>(ledger.held(Tier::device)[static_cast<int>(Tag::keys)] +
                                ledger.held(Tier::device)[static_cast<int>(Tag::values)]);
  l.reads = true;
  return {l};
}

}  // namespace kvlab::bench
