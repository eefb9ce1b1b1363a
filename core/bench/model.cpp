// Whole-model cases: a real or a synthetic model in bf16 with the full cache. Weight values do not change the speed.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <kvlab/error.hpp>
#include <numeric>

#include "bench/cuda_timing.hpp"
#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "model/random_weights.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::bench {
namespace {

constexpr int decode_steps = 24;

std::shared_ptr<const Model> load(const ModelSetup& s, Device device) {
  return load_model(*open_model(s.model, "", "."), DType::bf16, s.model, device);
}

std::vector<int> text(int tokens, int vocab) {
  std::vector<int> out(static_cast<std::size_t>(tokens));
  for (int i = 0; i < tokens; ++i) out[static_cast<std::size_t>(i)] = static_cast<int>(i * 7919LL % vocab);
  return out;
}

void check_context(const Model& model, int tokens) {
  if (tokens > model.config.context)
    throw Error(
        Errc::config,
        fmt::format("got {} tokens, wanted at most {}, the context of {}", tokens, model.config.context, model.name),
        "kvlab bench");
}

Times times_of(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  return {t[t.size() / 2], t.front()};
}

// An untied model reads only a row per token of its embedding.
double weights_read(const Model& m) {
  const double embedding = 2. * m.config.vocab * m.config.hidden;
  return static_cast<double>(m.weight_bytes) - (m.config.tied_embeddings ? 0 : embedding);
}

double cache_bytes(const ModelConfig& c, int rows, int context) {
  return 2. * 2 * rows * static_cast<double>(context) * c.layers * c.kv_heads * c.head_dim;
}

Line decode_line(const ModelSetup& s, const Model& m, const ModelShape& shape, const std::string& kernel, Times t) {
  Line l;
  l.op = "decode";
  l.shape = fmt::format("{}, batch {} at {}", s.model, shape.batch, shape.context);
  l.kernel = kernel;
  l.seconds = t.median;
  l.best = t.best;
  l.bytes = weights_read(m) + cache_bytes(m.config, shape.batch, shape.context);
  l.reads = true;
  return l;
}

Line prefill_line(const ModelSetup& s, const Model& m, int tokens, const std::string& kernel, Times t) {
  const ModelConfig& c = m.config;
  const double head = 2. * c.vocab * c.hidden;
  const double linear = (weights_read(m) - head) * tokens + head;                   // 2 flops per 2-byte weight
  const double attention = 2. * tokens * tokens * c.heads * c.head_dim * c.layers;  // causal half of Q K and P V
  Line l;
  l.op = "prefill";
  l.shape = fmt::format("{}, {} tokens", s.model, tokens);
  l.kernel = kernel;
  l.seconds = t.median;
  l.best = t.best;
  l.flops = linear + attention;
  return l;
}

// Hooks of the full cache.
struct FullCache final : LayerHooks {
  explicit FullCache(bool as_graph) : graph(as_graph) {}
  bool replayable() const override { return graph; }
  bool graph;
};

// A store on the GPU whose slots hold random keys and values, laid out as after prompts of that length.
class FilledStore {
 public:
  FilledStore(const Model& m, const ModelShape& shape, Stream s) : store_(options(m, shape), s) {
    const ModelConfig& c = m.config;
    constexpr int block = 4096;
    const std::int64_t row = std::int64_t{c.kv_heads} * c.head_dim;
    const DeviceBuffer values(static_cast<std::size_t>(block * row * 2));
    random_weights(values.as<void>(), DType::bf16, 0, block * row, 1, 1, s);
    for (int i = 0; i < shape.batch; ++i) {
      const int slot = store_.open();
      slots.push_back(slot);
      for (int at = 0; at < shape.context; at += block) {
        const int count = std::min(block, shape.context - at);
        for (int layer = 0; layer < c.layers; ++layer)
          if (store_.append(layer, slot, values.as<void>(), values.as<void>(), DType::bf16, row, count, at) != Fit::ok)
            throw NoRoom(fmt::format("got no room for {} x {} tokens, wanted a smaller batch or context", shape.batch,
                                     shape.context));
        store_.advance(slot, count, false);
      }
    }
    synchronize(s);
  }
  CudaStore& store() { return store_; }
  std::vector<std::int32_t> slots;

 private:
  static StoreOptions options(const Model& m, const ModelShape& shape) {
    const ModelConfig& c = m.config;
    StoreOptions o;
    o.shape.layers = c.layers;
    o.shape.query_heads = c.heads;
    o.shape.kv_heads = c.kv_heads;
    o.shape.head_dim = c.head_dim;
    o.shape.page_size = 16;
    o.shape.max_slots = shape.batch;
    o.shape.max_tokens = shape.context + 4 * decode_steps;
    o.shape.dtype = m.dtype;
    o.rope_table = m.rope();
    return o;
  }
  CudaStore store_;
};

// Decode steps of a filled store.
class Decoding {
 public:
  Decoding(const std::shared_ptr<const Model>& model, const ModelShape& shape, Stream s)
      : filled_(*model, shape, s),
        executor_(make_executor(model, filled_.store())),
        tokens_(filled_.slots.size(), 1),
        likeliest_(filled_.slots.size()) {}

  // Seconds of steps by the host's clock. A few steps before them are not counted.
  std::vector<double> run(bool graph, double* kernels = nullptr) {
    FullCache hooks(graph);
    std::vector<double> t;
    for (int i = -3; i < decode_steps; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      executor_->decode(filled_.slots, tokens_, hooks, {likeliest_});
      if (i < 0) continue;
      t.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      if (kernels) *kernels += 1e-3 * executor_->device_ms();
    }
    return t;
  }

 private:
  FilledStore filled_;
  std::unique_ptr<Executor> executor_;
  std::vector<int> tokens_;
  std::vector<std::int32_t> likeliest_;
};

template <class Work>
double seconds_on(Stream s, Work work) {
  return 1e-3 * static_cast<double>(cuda_backend()->runtime.time(
                    s.handle(), [](void* f) { (*static_cast<Work*>(f))(); }, &work));
}

}  // namespace

std::vector<Line> prefill_cases(const ModelSetup& s) {
  const auto model = load(s, Device::cpu);
  std::vector<Line> lines;
  for (const ModelShape& shape : s.shapes) {
    check_context(*model, shape.context);
    EngineOptions o;
    o.max_tokens = shape.context;
    Engine engine(model, compose({}), o);
    const auto prompt = text(shape.context, model->config.vocab);
    std::vector<float> logits(static_cast<std::size_t>(model->config.vocab));
    const Times t = time_runs(3, [&] {
      const int slot = engine.open();
      engine.prefill(slot, prompt, true, View<float, 2>::dense(logits.data(), {1, model->config.vocab}));
      engine.close(slot);
    });
    lines.push_back(prefill_line(s, *model, shape.context, model->head.kernel(), t));
  }
  return lines;
}

// Runs decode steps one after another. The cache grows by a token with each.
std::vector<Line> decode_cases(const ModelSetup& s) {
  const auto model = load(s, Device::cpu);
  std::vector<Line> lines;
  for (const ModelShape& shape : s.shapes) {
    check_context(*model, shape.context + decode_steps + 1);
    EngineOptions o;
    o.slots = shape.batch;
    o.max_tokens = shape.context + decode_steps + 1;
    Engine engine(model, compose({}), o);
    const auto prompt = text(shape.context, model->config.vocab);
    std::vector<float> logits(static_cast<std::size_t>(shape.batch) * static_cast<std::size_t>(model->config.vocab));
    const auto view = View<float, 2>::dense(logits.data(), {shape.batch, model->config.vocab});
    std::vector<std::int32_t> slots;
    for (int i = 0; i < shape.batch; ++i) {
      slots.push_back(engine.open());
      engine.prefill(slots.back(), prompt, true, {});
    }
    const std::vector<int> tokens(slots.size(), prompt[0]);
    std::vector<double> t;
    for (int i = -1; i < decode_steps; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      engine.step(slots, tokens, view);
      if (i >= 0) t.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    lines.push_back(decode_line(s, *model, shape, model->head.kernel(), times_of(std::move(t))));
  }
  return lines;
}

// Times whole steps by the host's clock: inputs, layers, tokens to the host. Overhead is the share of that time before
// a step's first kernel and after its last one.
std::vector<Line> cuda_decode_cases(const ModelSetup& s) {
  const auto model = load(s, Device::cuda);
  const CudaTimer timer;
  std::vector<Line> lines;
  for (const ModelShape& shape : s.shapes) {
    check_context(*model, shape.context + 4 * decode_steps);
    Decoding decoding(model, shape, timer.stream());
    for (const bool graph : {false, true}) {
      double kernels = 0;
      std::vector<double> t = decoding.run(graph, &kernels);
      const double all = std::accumulate(t.begin(), t.end(), 0.);
      lines.push_back(decode_line(s, *model, shape, graph ? "graph" : "eager", times_of(std::move(t))));
      lines.back().overhead = 1 - kernels / all;
    }
  }
  return lines;
}

void cuda_steps(const ModelSetup& s, int times,
                const std::function<void(int i, const std::function<double()>& steps)>& use) {
  const auto model = load(s, Device::cuda);
  const CudaTimer timer;
  check_context(*model, s.shapes[0].context + 4 * decode_steps);
  for (int i = 0; i < times; ++i) {
    Decoding decoding(model, s.shapes[0], timer.stream());
    use(i, [&] { return times_of(decoding.run(true)).median; });
  }
}

std::vector<Line> cuda_prefill_cases(const ModelSetup& s) {
  const auto model = load(s, Device::cuda);
  std::vector<Line> lines;
  for (const ModelShape& shape : s.shapes) {
    check_context(*model, shape.context);
    EngineOptions o;
    o.device = Device::cuda;
    o.max_tokens = shape.context;
    Engine engine(model, compose({}), o);
    const auto prompt = text(shape.context, model->config.vocab);
    std::vector<float> logits(static_cast<std::size_t>(model->config.vocab));
    std::vector<double> t;
    const std::int64_t by_cudnn = ops::cudnn_chunks();
    for (int i = -1; i < 3; ++i) {
      const int slot = engine.open();
      const double seconds = seconds_on(engine.store().stream(), [&] {
        engine.prefill(slot, prompt, true, View<float, 2>::dense(logits.data(), {1, model->config.vocab}));
      });
      if (i >= 0) t.push_back(seconds);
      engine.close(slot);
    }
    const char* attention = ops::cudnn_chunks() > by_cudnn ? "cudnn" : "own";
    lines.push_back(
        prefill_line(s, *model, shape.context, fmt::format("cublaslt, {}", attention), times_of(std::move(t))));
  }
  return lines;
}

}  // namespace kvlab::bench
